"""Random programs out of the rules' primitives, exact in float32 whatever the order of sums.

Every value is a float32 that holds a small whole number (or an index): sums and products
are exact, so that a sharded program must give the very same numbers, and comparisons,
sorts and rounding cannot tip over. A program is its seed: tracing it again draws the
same operations.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Rng = np.random.Generator
Value = jax.Array
Op = Callable[[Rng, list[Value]], Value | None]

SIZES = (1, 2, 3, 4, 8, 16)
MAX_SIZE = 512  # elements of a value
OPS_PER_PROGRAM = 3


def shape(rng: Rng) -> tuple[int, ...]:
    return tuple(int(rng.choice(SIZES)) for _ in range(rng.integers(1, 4)))


def inputs(seed: int) -> list[np.ndarray]:
    """The two arguments of a program."""
    rng = np.random.default_rng((seed, 1))
    return [rng.integers(-4, 5, shape(rng)).astype(np.float32) for _ in range(2)]


def program(seed: int, arguments: Sequence[Value]) -> list[Value]:
    """Runs program `seed`: its last value, and one on the way."""
    rng = np.random.default_rng((seed, 2))
    values = list(arguments)
    while len(values) < OPS_PER_PROGRAM + 2:
        made = OPS[rng.integers(len(OPS))](rng, values)
        if made is not None and 0 < made.size <= MAX_SIZE:
            values.append(made)
    return [values[-1], values[int(rng.integers(2, len(values) - 1))]]


def pick(rng: Rng, values: list[Value], rank: int = 0) -> Value | None:
    """One of the values of at least a rank, later ones more often."""
    fitting = [v for v in values if v.ndim >= rank]
    if not fitting:
        return None
    return fitting[-min(int(rng.geometric(0.4)), len(fitting))]


def like(rng: Rng, values: list[Value], x: Value) -> Value:
    """Another value of the same shape: one that is there, or `x` changed."""
    same = [v for v in values if v.shape == x.shape and v is not x]
    if same:
        return same[rng.integers(len(same))]
    return lax.rev(x, (0,)) if x.ndim else x + 1


def small(x: Value) -> Value:
    """Back to whole numbers between −6 and 6."""
    return lax.rem(x, jnp.float32(7))


def axis_of(rng: Rng, x: Value) -> int:
    return int(rng.integers(x.ndim))


def unary(rng: Rng, values: list[Value]) -> Value | None:
    x = pick(rng, values)
    if x is None:
        return None
    ops: list[Callable[[Value], Value]] = [
        lax.neg,
        lax.abs,
        lax.sign,
        lambda x: lax.floor(x / 2),
        lambda x: lax.clamp(-2.0, x, 3.0),
        lambda x: lax.integer_pow(x, 2),
        lambda x: x.astype(jnp.int32).astype(jnp.float32),
        lambda x: small(x).astype(jnp.bfloat16).astype(jnp.float32),
        lambda x: lax.population_count(lax.abs(x).astype(jnp.int32)).astype(jnp.float32),
        lambda x: jax.nn.relu(x),
    ]
    return small(ops[rng.integers(len(ops))](x))


def binary(rng: Rng, values: list[Value]) -> Value | None:
    x = pick(rng, values)
    if x is None:
        return None
    y = like(rng, values, x)
    ops = (lax.add, lax.sub, lax.mul, lax.max, lax.min, lambda x, y: jnp.where(x > y, x, -y), lambda x, y: x * (x != y))
    return small(ops[rng.integers(len(ops))](x, y))


def broadcast(rng: Rng, values: list[Value]) -> Value | None:
    x = pick(rng, values)
    if x is None or x.ndim > 2:
        return None
    at = int(rng.integers(x.ndim + 1))
    size = int(rng.choice(SIZES))
    return jnp.broadcast_to(jnp.expand_dims(x, at), (*x.shape[:at], size, *x.shape[at:]))


def reshape(rng: Rng, values: list[Value]) -> Value | None:
    x = pick(rng, values)
    if x is None:
        return None
    total, dims = x.size, []
    while total > 1 and len(dims) < 3:
        divisors = [d for d in range(2, total + 1) if total % d == 0]
        dims.append(int(rng.choice(divisors)))
        total //= dims[-1]
    return x.reshape((*dims, total) if total > 1 or not dims else tuple(dims))


def transpose(rng: Rng, values: list[Value]) -> Value | None:
    x = pick(rng, values, 2)
    return None if x is None else lax.transpose(x, tuple(int(i) for i in rng.permutation(x.ndim)))


def concatenate(rng: Rng, values: list[Value]) -> Value | None:
    x = pick(rng, values, 1)
    return None if x is None else lax.concatenate([x, like(rng, values, x)], axis_of(rng, x))


def pad(rng: Rng, values: list[Value]) -> Value | None:
    x = pick(rng, values, 1)
    if x is None:
        return None
    config = [(0, 0, 0)] * x.ndim
    config[axis_of(rng, x)] = (int(rng.integers(-1, 4)), int(rng.integers(0, 4)), int(rng.integers(0, 2)))
    return lax.pad(x, jnp.float32(1), config)


def cut(rng: Rng, values: list[Value]) -> Value | None:
    x = pick(rng, values, 1)
    if x is None:
        return None
    axis, size = (a := axis_of(rng, x)), x.shape[a]
    start = int(rng.integers(size))
    return lax.slice_in_dim(x, start, int(rng.integers(start, size)) + 1, int(rng.integers(1, 3)), axis)


def reverse(rng: Rng, values: list[Value]) -> Value | None:
    x = pick(rng, values, 1)
    return None if x is None else lax.rev(x, (axis_of(rng, x),))


def reduce(rng: Rng, values: list[Value]) -> Value | None:
    x = pick(rng, values, 1)
    if x is None:
        return None
    axes = tuple(sorted(int(a) for a in rng.permutation(x.ndim)[: rng.integers(1, x.ndim + 1)]))
    ops: list[Callable[..., Value]] = [jnp.sum, jnp.max, jnp.min]
    if rng.random() < 0.3:
        found = (jnp.any if rng.random() < 0.5 else jnp.all)(x > 0, axis=axes)
        return found.astype(jnp.float32)
    return small(ops[rng.integers(len(ops))](x, axis=axes))


def argument(rng: Rng, values: list[Value]) -> Value | None:
    x = pick(rng, values, 1)
    if x is None:
        return None
    op = (lax.argmax, lax.argmin)[rng.integers(2)]
    return op(x, axis_of(rng, x), jnp.int32).astype(jnp.float32)


def cumulative(rng: Rng, values: list[Value]) -> Value | None:
    x = pick(rng, values, 1)
    if x is None:
        return None
    op = (lax.cumsum, lax.cummax, lax.cummin)[rng.integers(3)]
    return small(op(x, axis=axis_of(rng, x), reverse=bool(rng.integers(2))))


def window(rng: Rng, values: list[Value]) -> Value | None:
    x = pick(rng, values, 1)
    if x is None:
        return None
    axis = axis_of(rng, x)
    dims, strides = [1] * x.ndim, [1] * x.ndim
    dims[axis] = int(rng.integers(1, 4))
    strides[axis] = int(rng.integers(1, 3))
    if rng.random() < 0.5:
        return lax.reduce_window(x, -jnp.inf, lax.max, dims, strides, "SAME")
    return small(lax.reduce_window(x, 0.0, lax.add, dims, strides, "SAME"))


def sort(rng: Rng, values: list[Value]) -> Value | None:
    x = pick(rng, values, 1)
    return None if x is None else lax.sort(x, dimension=axis_of(rng, x))


def top_k(rng: Rng, values: list[Value]) -> Value | None:
    x = pick(rng, values, 1)
    return None if x is None else lax.top_k(x, int(rng.integers(1, x.shape[-1] + 1)))[rng.integers(2)] * jnp.float32(1)


def dot(rng: Rng, values: list[Value]) -> Value | None:
    x = pick(rng, values, 1)
    if x is None:
        return None
    y = like(rng, values, x)
    axes = [int(a) for a in rng.permutation(x.ndim)]
    contracted = axes[: rng.integers(0, x.ndim + 1)]
    batch = axes[len(contracted) :][: rng.integers(0, x.ndim + 1)]
    if 2 * x.ndim - len(batch) - 2 * len(contracted) > 4:
        return None
    return small(lax.dot_general(x, y, ((contracted, contracted), (batch, batch))))


def matmul(rng: Rng, values: list[Value]) -> Value | None:
    x = pick(rng, values, 2)
    if x is None:
        return None
    weight = lax.iota(jnp.float32, x.shape[-1] * 8).reshape(x.shape[-1], 8)
    return small(x @ small(weight))


def convolution(rng: Rng, values: list[Value]) -> Value | None:
    x = pick(rng, values, 3)
    if x is None or x.ndim != 3:
        return None
    kernel = small(lax.iota(jnp.float32, 3 * x.shape[1] * 4).reshape(4, x.shape[1], 3))
    return small(lax.conv_general_dilated(x, kernel, (int(rng.integers(1, 3)),), "SAME"))


def indices(rng: Rng, values: list[Value], count: int, limit: int) -> Value:
    """`count` positions around the range below `limit`, computed from a value."""
    x = values[rng.integers(len(values))].ravel()
    reach = 2 * limit + 3
    return (lax.iota(jnp.int32, count) * 3 + jnp.abs(x[:1]).astype(jnp.int32)) % reach - rng.integers(0, limit + 2)


def take(rng: Rng, values: list[Value]) -> Value | None:
    x = pick(rng, values, 1)
    if x is None:
        return None
    axis = axis_of(rng, x)
    at = indices(rng, values, int(rng.choice(SIZES)), x.shape[axis])
    if rng.random() < 0.5:
        return jnp.take(x, at, axis=axis, mode="clip")
    return jnp.take(x, at, axis=axis, mode="fill", fill_value=(0, 3, jnp.nan)[rng.integers(3)])


def take_along(rng: Rng, values: list[Value]) -> Value | None:
    x = pick(rng, values, 1)
    if x is None:
        return None
    order = jnp.abs(like(rng, values, x)).astype(jnp.int32)
    if rng.random() < 0.5:
        return jnp.take_along_axis(x, order % x.shape[-1], axis=-1)
    return jnp.take_along_axis(x, order - 2, axis=-1, mode=("clip", "fill")[rng.integers(2)])


def scatter(rng: Rng, values: list[Value]) -> Value | None:
    """Rows added, or the largest kept, or one replaced, at computed positions."""
    x = pick(rng, values, 1)
    if x is None:
        return None
    y = like(rng, values, x)
    mode = ("clip", "drop")[rng.integers(2)]
    if rng.random() < 0.3:
        return x.at[indices(rng, values, 1, x.shape[0])[0]].set(y[0], mode=mode)
    at = indices(rng, values, x.shape[0], x.shape[0])
    return small((x.at[at].add, x.at[at].max, x.at[at].min)[rng.integers(3)](y, mode=mode))


def dynamic(rng: Rng, values: list[Value]) -> Value | None:
    x = pick(rng, values, 1)
    if x is None:
        return None
    axis = axis_of(rng, x)
    size = int(rng.integers(1, x.shape[axis] + 1))
    start, other = indices(rng, values, 2, x.shape[axis])
    part = lax.dynamic_slice_in_dim(x, start, size, axis)
    return part if rng.random() < 0.5 else lax.dynamic_update_slice_in_dim(x, -part, other, axis)


def scanned(rng: Rng, values: list[Value]) -> Value | None:
    x = pick(rng, values, 2)
    if x is None:
        return None

    def body(carry: Value, row: Value) -> tuple[Value, Value]:
        carry = small(carry * 2 + row)
        return carry, lax.rev(carry, (0,))

    last, rows = lax.scan(body, jnp.zeros(x.shape[1:]), x, reverse=bool(rng.integers(2)))
    return last if rng.random() < 0.3 else rows


def looped(rng: Rng, values: list[Value]) -> Value | None:
    x = pick(rng, values, 1)
    if x is None:
        return None
    trips = int(rng.integers(1, 4))

    def body(state: tuple[Value, Value]) -> tuple[Value, Value]:
        i, x = state
        return i + 1, small(x + lax.cumsum(x, axis=0))

    return lax.while_loop(lambda state: state[0] < trips, body, (jnp.int32(0), x))[1]


def branched(rng: Rng, values: list[Value]) -> Value | None:
    x = pick(rng, values, 1)
    if x is None:
        return None
    return lax.cond(x.ravel()[0] > 0, lambda x: small(x * 3), lambda x: lax.rev(x, (0,)), x)


def drawn(rng: Rng, values: list[Value]) -> Value | None:
    x = pick(rng, values, 1)
    if x is None:
        return None
    return x + jax.random.randint(jax.random.key(int(rng.integers(99))), x.shape, -2, 3).astype(jnp.float32)


CHEAP: tuple[Op, ...] = (
    *(unary, binary, broadcast, reshape, transpose, concatenate, pad, cut, reverse, reduce, argument),
    *(cumulative, window, dot, matmul, take, take_along, scatter, dynamic),
)
DEAR: tuple[Op, ...] = (sort, top_k, convolution, scanned, looped, branched, drawn)  # seconds to compile, in a batch
OPS = CHEAP * 3 + DEAR
