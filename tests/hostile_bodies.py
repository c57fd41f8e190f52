"""Hostile operations with bodies, and random numbers: loops, branches, calls, derivatives of other operations."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests import hostile_indexing, hostile_pointwise, hostile_rare, hostile_sums
from tests.hostile_draw import MAX_SIZE, Draw, Shape, UnfitError, Value, kind_of, to_int

Op = Callable[[Draw], Value]

DEEPEST = 2
TRIES = 40


def step(d: Draw, ops: Sequence[Op]) -> None:
    """One more value, by the first of the operations drawn that fits.

    Raises:
      UnfitError: none of many does.
    """
    for _ in range(TRIES):
        d.rounded = False
        op = d.choice(ops)
        try:
            made = op(d)
        except UnfitError:
            continue
        if made.size <= MAX_SIZE and made.ndim <= 5:
            d.hold(made, exact=not d.rounded)
            return
    raise UnfitError


def inside(d: Draw, seed: int, values: Sequence[Value], exact: Sequence[bool], count: int = 2) -> tuple[Value, bool]:
    """What a body computes from its values, and whether that is exact; equal at every tracing."""
    inner = d.inner(seed, values, exact)
    for _ in range(count):
        step(inner, INNER if inner.depth < DEEPEST else SIMPLE)
    return inner.values[-1], inner.exact[-1]


def fitted(x: Value, like: Value) -> Value:
    """A value of the shape and dtype of another, from all of `x`."""
    if kind_of(x) == "c":
        x = lax.real(x) + lax.imag(x)
    if kind_of(like) != "f":
        return jnp.where(jnp.any(x.astype(jnp.bool_)), like, jnp.roll(like, 1))
    x = x.astype(like.dtype)
    if x.shape == like.shape:
        return x
    if x.size == like.size:
        return x.reshape(like.shape)
    return like + jnp.sum(x) / 8


class Body:
    """A function of values, drawn once."""

    def __init__(self, d: Draw, exact: Sequence[bool], count: int = 2) -> None:
        self.d, self.exact, self.count = d, list(exact), count
        self.seed = int(d.rng.integers(2**32))

    def __call__(self, *values: Value) -> Value:
        made, exact = inside(self.d, self.seed, values, self.exact, self.count)
        self.d.rounded |= not exact
        return made

    def onto(self, like: Value, *values: Value) -> Value:
        """What it computes in the shape of `like`, small again."""
        before = self.d.rounded
        made = self(*values)
        self.d.rounded = True if made.size not in (0, like.size) else self.d.rounded
        made = fitted(made, like)
        exact = not self.d.rounded
        self.d.rounded |= before
        return lax.rem(made, jnp.float32(7)) if exact and kind_of(like) == "f" else made


def picked(d: Draw, least: int = 0) -> tuple[Value, bool]:
    """A float value, and whether it is exact."""
    d.rounded = False
    x = d.pick("f", least)
    return x, not d.rounded


def scanned(d: Draw) -> Value:
    x, exact = picked(d, 1)
    carry = d.operand(x.shape[1:], exact=True) if d.coin(0.7) else jnp.zeros(x.shape[1:])
    body = Body(d, [False, exact, exact], count=1)
    outside = d.operand(x.shape[1:], exact=exact)

    def trip(carry: Value, row: Value) -> tuple[Value, Value]:
        made = body.onto(carry, carry, row, outside)
        return made, made * 2 if d.depth else lax.rev(made, range(made.ndim))

    d.inexact()
    last, rows = lax.scan(trip, carry, x, reverse=d.coin(), unroll=d.choice((1, 1, 2)))
    return last if d.coin(0.4) else rows


def exact_scan(d: Draw) -> Value:
    """A scan over whole numbers, of several carried values and stacks of several dtypes."""
    x = d.pick("f", 1, exact=True, most=4)
    count = lax.iota(jnp.int32, x.shape[0])

    def trip(state: tuple[Value, Value], row: tuple[Value, Value]) -> Any:
        (carry, seen), (now, i) = state, row
        carry = lax.rem(carry * 2 + now, jnp.float32(7))
        return (carry, seen + i), (lax.rev(carry, range(carry.ndim)), seen > 3)

    (last, seen), (rows, flags) = lax.scan(trip, (jnp.zeros(x.shape[1:]), jnp.int32(0)), (x, count), reverse=d.coin())
    return d.choice((last, seen, rows, flags, rows))


def repeated(d: Draw) -> Value:
    """A loop whose number of trips is known, or not until it runs."""
    x = d.pick("f", 1, exact=True)
    axis = d.axis(x)
    shift = d.coin()

    def trip(i: Value, x: Value) -> Value:
        moved = jnp.roll(x, 1, axis) if shift else lax.cumsum(x, axis=axis)
        return lax.rem(x + moved + i.astype(jnp.float32), jnp.float32(7))

    trips: Any = d.whole(0, 4)
    if d.coin():
        trips = jnp.abs(to_int(d.pick("f", exact=True, where=lambda v: v.size > 0).ravel()[-1])) % 4
    if d.coin():
        return lax.fori_loop(0, trips, trip, x)
    return lax.while_loop(lambda s: s[0] < trips, lambda s: (s[0] + 1, trip(s[0], s[1])), (jnp.int32(0), x))[1]


def while_true(d: Draw) -> Value:
    """A loop that ends by what it computes."""
    x = d.pick("f", 1, exact=True, where=lambda v: v.size > 0)

    def going(state: tuple[Value, Value]) -> Value:
        return (jnp.sum(jnp.where(jnp.isfinite(state[1]), state[1], 0)) < 40) & (state[0] < 5)

    return d.small(lax.while_loop(going, lambda s: (s[0] + 1, s[1] + jnp.abs(x)), (jnp.int32(0), x))[1])


def branched(d: Draw) -> Value:
    x, exact = picked(d)
    y = d.like(x, exact=exact)
    which = d.pick("fi", exact=True, where=lambda v: v.size > 0).ravel()[0]
    first, second = Body(d, [exact, exact], 1), Body(d, [exact, exact], 1)
    if d.coin():
        return lax.cond(which > 0, lambda: first.onto(x, x, y), lambda: second.onto(x, x, y))
    number = to_int(which.astype(jnp.float32))
    return lax.switch(number, [lambda: first.onto(x, x, y), lambda: x + y, lambda: second.onto(x, y, x)])


def mapped(d: Draw) -> Value:
    """An operation, mapped over a leading dimension, at once or in turn."""
    x, exact = picked(d, 1)
    if not x.shape[0]:
        raise UnfitError
    body = Body(d, [exact], 1)
    return jax.vmap(body)(x) if d.coin(0.7) else lax.map(lambda row: body(row), x)


def called(d: Draw) -> Value:
    """A call of one's own: jitted, computed again for the gradient, named."""
    x, exact = picked(d)
    y = d.like(x, exact=exact)
    body = Body(d, [exact, exact])
    ways: tuple[Callable[[Any], Any], ...] = (
        jax.jit,
        jax.checkpoint,
        lambda f: jax.jit(jax.checkpoint(jax.jit(f))),
        partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
        jax.named_call,
        partial(jax.jit, inline=True),
    )
    return d.choice(ways)(lambda x, y: body(x, y))(x, y)


def custom(d: Draw) -> Value:
    """A function with a derivative of its own, forward or backward."""
    x, exact = picked(d)
    body = Body(d, [exact], 1)
    if d.coin():
        forward = jax.custom_jvp(lambda x: body.onto(x, x))
        forward.defjvp(lambda primals, tangents: (body.onto(*primals, *primals), tangents[0] * 3))
        made = jax.jvp(forward, (x,), (jnp.ones_like(x),)) if d.coin() else (forward(x),)
        return d.choice(made)
    backward = jax.custom_vjp(lambda x: body.onto(x, x))
    backward.defvjp(lambda x: (body.onto(x, x), x), lambda x, g: (g * x,))
    if d.coin():
        return d.small(jax.vjp(backward, x)[1](jnp.ones_like(x) * 2)[0], 32)
    return backward(x)


def differentiated(d: Draw) -> Value:
    """The gradient of another operation, by the value it takes."""
    x, exact = picked(d)
    seed = int(d.rng.integers(2**32))

    def function(x: Value) -> Value:
        inner = d.inner(seed, [x, x[..., :1] if x.ndim else x], [exact, exact])
        inner.derived = True
        step(inner, DIFFERENTIABLE)
        made = inner.values[-1]
        return (lax.real(made) if kind_of(made) == "c" else made).astype(jnp.float32)

    out = jax.eval_shape(function, x)
    given = d.operand(out.shape, exact=exact)
    d.inexact()
    try:
        if d.coin(0.25):
            return jax.jvp(function, (x,), (d.like(x),))[1] / 32
        (made,) = jax.vjp(jax.checkpoint(function) if d.coin(0.3) else function, x)[1](given)
    except (NotImplementedError, ValueError, TypeError) as error:  # it has no derivative
        raise UnfitError from error
    return made / 32


# Random numbers.


def key(d: Draw) -> Any:
    """A key, constant or with data folded in."""
    found = jax.random.key(d.whole(0, 99))
    if d.coin():
        return found
    return jax.random.fold_in(found, to_int(d.pick("f", exact=True, where=lambda v: v.size > 0).ravel()[0]))


def drawn(d: Draw) -> Value:
    """Whole numbers, bits and choices."""
    shape: Shape = d.shape(d.whole(0, 3), 128)
    k = key(d)
    x = d.pick("f", 1, exact=True, where=lambda v: v.shape[0] > 0)
    ops: tuple[Callable[[], Value], ...] = (
        lambda: jax.random.randint(k, shape, -2, 3),
        lambda: jax.random.bits(k, shape, d.choice((jnp.uint8, jnp.uint16, jnp.uint32))),
        lambda: jax.random.bernoulli(k, 0.4, shape),
        lambda: jax.random.permutation(k, x),
        lambda: jax.random.split(k, 4).reshape(2, 2)[d.whole(0, 1), 0] == k,
        lambda: jax.random.key_data(jax.random.split(k, d.size())),
        lambda: jax.vmap(lambda k: jax.random.bits(k, (3,), jnp.uint16))(jax.random.split(k, d.size())),
        lambda: jax.random.choice(k, x, (3,)),
        lambda: lax.rng_bit_generator(jnp.arange(4, dtype=jnp.uint32), shape)[1],
    )
    return d.choice(ops)()


def noise(d: Draw) -> Value:
    shape, k = d.shape(d.whole(0, 3), 128), key(d)
    d.inexact()
    ops = (jax.random.normal, jax.random.uniform, jax.random.gumbel, jax.random.truncated_normal)
    op = d.choice(ops)
    return op(k, -1.0, 1.0, shape) if op is jax.random.truncated_normal else op(k, shape)


SIMPLE: tuple[Op, ...] = (
    *(
        hostile_pointwise.smooth,
        hostile_pointwise.smooth_binary,
        hostile_pointwise.reshape,
        hostile_pointwise.transpose,
    ),
    *(
        hostile_pointwise.reverse,
        hostile_pointwise.pad,
        hostile_pointwise.unary,
        hostile_sums.reduce,
        hostile_sums.cumulative,
    ),
    *(hostile_indexing.sliced, hostile_indexing.updated),
)
# The derivative of what is exact here is exact or smooth.
DIFFERENTIABLE: tuple[Op, ...] = (
    *(hostile_pointwise.smooth, hostile_pointwise.smooth_binary, hostile_pointwise.reshape, hostile_pointwise.pad),
    *(hostile_pointwise.cut, hostile_pointwise.concatenate, hostile_pointwise.broadcast, hostile_sums.reduce),
    *(
        hostile_sums.cumulative,
        hostile_sums.window,
        hostile_sums.dot,
        hostile_sums.convolution,
        hostile_sums.convolution,
    ),
    *(hostile_indexing.gather, hostile_indexing.gather, hostile_indexing.scatter, hostile_indexing.scatter),
    *(hostile_indexing.sliced, hostile_indexing.updated, hostile_indexing.mapped_slices, hostile_indexing.indexed),
    *(hostile_sums.einsum, hostile_sums.ordered, hostile_sums.linear, hostile_pointwise.repeated),
)
WITH_BODIES: tuple[Op, ...] = (
    *(
        scanned,
        exact_scan,
        repeated,
        while_true,
        branched,
        mapped,
        called,
        called,
        custom,
        differentiated,
        differentiated,
    ),
    *(differentiated, drawn, noise),
)
CHEAP = (*hostile_pointwise.CHEAP, *hostile_sums.CHEAP, *hostile_indexing.CHEAP * 2, *hostile_rare.CHEAP)
DEAR = (*hostile_pointwise.DEAR, *hostile_sums.DEAR, *hostile_rare.DEAR, *WITH_BODIES)
INNER: tuple[Op, ...] = (*CHEAP, mapped, called)
ALL: tuple[Op, ...] = (*CHEAP * 2, *DEAR * 2)
