"""Random loops that sum: several carries, shared weights, masks, casts, loops in loops; some must stay as they are.

Every number is a small whole one in float32, so sums are exact in any order: what a rewritten loop computes must be
the very same. A program is its seed.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Rng = np.random.Generator
Value = jax.Array
# (carried, rows, others, weight, mask) → what is added to the carried value, or the new one.
Step = Callable[[Value, Value, Value, Value, Value], Value]

TRIPS, ROWS, WIDTH, OTHER = 4, 16, 4, 2


def inputs(seed: int) -> list[np.ndarray]:
    """Slices of two kinds, a weight, and a mask of trips."""
    rng = np.random.default_rng((seed, 1))
    shapes = ((TRIPS, ROWS, WIDTH), (TRIPS, ROWS, OTHER), (WIDTH, OTHER))
    return [*(rng.integers(-2, 3, s).astype(np.float32) for s in shapes), rng.integers(0, 2, TRIPS) > 0]


def _gradient(x: Value, y: Value) -> Value:
    return lax.dot_general(x, y, (((0,), (0,)), ((), ())))


def _stacked_gradient(x: Value, y: Value) -> Value:
    """As of layers: what an inner loop stacks, over the same rows."""
    return lax.scan(lambda _, z: (None, _gradient(z, y)), None, jnp.stack([x, x + 1]))[1].sum(0)


def _inner_sum(x: Value, y: Value) -> Value:
    """As of steps of time: what an inner loop sums itself, over slices of features."""
    begin = jnp.zeros((OTHER,))
    total = lax.scan(lambda c, column: (c + jnp.einsum("b,bo->o", column, y), None), begin, x.T)[0]
    return jnp.broadcast_to(total, (WIDTH, OTHER))


def _looked_up(x: Value, y: Value) -> Value:
    """As of an embedding: every row lands somewhere."""
    return jnp.zeros((WIDTH, OTHER)).at[jnp.abs(x[:, 0]).astype(jnp.int32)].add(y)


# Shape (WIDTH, OTHER) of rows.
TERMS: Sequence[Callable[[Value, Value], Value]] = (
    _gradient,
    lambda x, y: _gradient(y, x).T,
    lambda x, y: jnp.sum(x[:, :, None] * y[:, None, :], axis=0),
    lambda x, y: jnp.broadcast_to(jnp.sum(y, axis=0), (WIDTH, OTHER)),
    lambda x, y: _gradient(x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)).astype(jnp.float32),
    lambda x, y: _gradient(x[:, ::-1], y)[::-1].reshape(OTHER, WIDTH).reshape(WIDTH, OTHER),
    lambda x, y: jax.checkpoint(_gradient)(x, y),
    _stacked_gradient,
    _inner_sum,
    _looked_up,
)

ADDED: Sequence[Step] = (
    lambda c, x, y, w, m: c + TERMS[0](x, y),
    lambda c, x, y, w, m: TERMS[1](x, y) + c,
    lambda c, x, y, w, m: jnp.where(m, c + TERMS[0](x, y), c),
    lambda c, x, y, w, m: c + jnp.where(m, TERMS[2](x, y), 0.0),
    lambda c, x, y, w, m: c + TERMS[0](x, y) + w,
    lambda c, x, y, w, m: c - 2 * TERMS[0](x, y) * w,
)

NONLINEAR: Sequence[Step] = (
    lambda c, x, y, w, m: jnp.maximum(c + TERMS[0](x, y), -3.0),
    lambda c, x, y, w, m: jnp.clip(c, -8, 8) + TERMS[0](x, y),
    lambda c, x, y, w, m: c + jnp.maximum(TERMS[0](x, y), 0.0),
    lambda c, x, y, w, m: (c + TERMS[0](x, y)).astype(jnp.bfloat16).astype(jnp.float32),
    lambda c, x, y, w, m: c + TERMS[0](x, y) * (c > 0),
    lambda c, x, y, w, m: c + TERMS[0](x, y) ** 2,
    lambda c, x, y, w, m: c + _gradient(x, y @ c.T @ w),
    lambda c, x, y, w, m: jnp.where(c > 1, c + TERMS[0](x, y), c),
)


def program(seed: int) -> Callable[..., object]:
    """Program `seed`: (rows, others, weight, mask) → the carried values after the loop, and what it stacks."""
    rng = np.random.default_rng((seed, 2))
    drawn: list[Step] = []
    for _ in range(rng.integers(1, 4)):
        kind = rng.random()
        if kind < 0.5:
            term = TERMS[int(rng.integers(len(TERMS)))]
            drawn.append(lambda c, x, y, w, m, term=term: c + term(x, y))
        else:
            among = ADDED if kind < 0.8 else NONLINEAR
            drawn.append(among[int(rng.integers(len(among)))])
    begins = [bool(rng.integers(2)) for _ in drawn]
    shows = rng.random() < 0.2  # the first carried value leaves every trip
    outer = rng.random() < 0.3

    def run(x: Value, y: Value, w: Value, mask: Value) -> object:
        def trip(carried: list[Value], one: tuple[Value, Value, Value]) -> tuple[list[Value], Value]:
            rows, others, m = one
            new = [step(c, rows, others, w, m) for step, c in zip(drawn, carried, strict=True)]
            return new, new[0][0, 0] if shows else jnp.sum(rows)

        begin = [w if own else jnp.zeros_like(w) for own in begins]

        def loop(carried: list[Value]) -> tuple[list[Value], Value]:
            return lax.scan(trip, carried, (x, y, mask))

        if not outer:
            return loop(begin)
        return lax.scan(lambda carried, _: loop(carried), begin, None, length=2)

    return run
