"""Hostile operations, element by element and by moving elements: arithmetic of every kind, casts, shapes."""

from collections.abc import Callable
from math import prod

import jax
import jax.numpy as jnp
from jax import lax

from tests.hostile_draw import ANY, INTEGERS, MAX_SIZE, Draw, UnfitError, Value, kind_of, to_int

Unary = Callable[[Value], Value]

EXACT: tuple[Unary, ...] = (
    lax.neg,
    lax.abs,
    lax.sign,
    lax.square,
    lambda x: lax.floor(x / 2),
    lambda x: lax.ceil(x / 2),
    lambda x: lax.round(x / 2, lax.RoundingMethod.TO_NEAREST_EVEN),
    lambda x: lax.clamp(jnp.asarray(-2, x.dtype), x, jnp.asarray(3, x.dtype)),
    lambda x: lax.integer_pow(x, 3),
    lambda x: lax.reduce_precision(x, 8, 7),
    lambda x: lax.stop_gradient(x) + x,
    lambda x: lax.is_finite(x).astype(x.dtype),
    lambda x: (lax.nextafter(x.astype(jnp.float32), jnp.float32(3)) > x).astype(x.dtype),
    jax.nn.relu,
    jnp.copy,
)


def bounded(x: Value) -> Value:
    return lax.tanh(x / 4)


SMOOTH: tuple[Unary, ...] = (
    *(lax.tanh, lax.sin, lax.cos, lax.logistic, lax.erf, lax.erfc, lax.asinh, lax.atan, jax.nn.softplus, jax.nn.gelu),
    lambda x: lax.exp(bounded(x)),
    lambda x: lax.exp2(bounded(x)),
    lambda x: lax.expm1(bounded(x)),
    lambda x: lax.log(2 + bounded(x)),
    lambda x: lax.log1p(lax.square(x)),
    lambda x: lax.sqrt(1 + lax.square(x)),
    lambda x: lax.rsqrt(1 + lax.square(x)),
    lambda x: lax.cbrt(2 + bounded(x)),
    lambda x: lax.lgamma(2.5 + bounded(x)),
    lambda x: lax.digamma(2.5 + bounded(x)),
    lambda x: lax.erf_inv(bounded(x) / 2),
    lambda x: lax.asin(bounded(x) / 2),
    lambda x: lax.acos(bounded(x) / 2),
    lambda x: lax.atanh(bounded(x) / 2),
    lambda x: lax.acosh(2 + lax.square(x)),
    lambda x: lax.sinh(bounded(x)),
    lambda x: lax.cosh(bounded(x)),
    lambda x: lax.tan(bounded(x)),
    lambda x: lax.integer_pow(2 + bounded(x), -2),
    lambda x: lax.bessel_i0e(x),
    lambda x: lax.bessel_i1e(x),
)


def unary(d: Draw) -> Value:
    return d.small(d.choice(EXACT)(d.pick("fh", exact=True)))


def smooth(d: Draw) -> Value:
    x = d.pick("f")
    d.inexact()
    return d.choice(SMOOTH)(x)


def binary(d: Draw) -> Value:
    x = d.pick("fh", exact=True)
    y = d.like(x, exact=True)
    ops: tuple[Callable[[Value, Value], Value], ...] = (
        *(lax.add, lax.sub, lax.mul, lax.max, lax.min),
        lambda x, y: jnp.where(x > y, x, -y),
        lambda x, y: x * (x != y).astype(x.dtype),
        lambda x, y: lax.rem(x, y * y + 1),
        lambda x, y: lax.clamp(-lax.abs(y), x, lax.abs(y)),
    )
    return d.small(d.choice(ops)(x, y))


def smooth_binary(d: Draw) -> Value:
    x = d.pick("f")
    y = d.like(x)
    d.inexact()
    ops: tuple[Callable[[Value, Value], Value], ...] = (
        lambda x, y: lax.mul(x, y) / 8,
        lambda x, y: lax.add(x, y) / 2,
        lambda x, y: lax.div(x, 1 + lax.square(y)),
        lambda x, y: lax.atan2(x, 2 + lax.square(y)),
        lambda x, y: lax.pow(2 + bounded(x), bounded(y)),
        lambda x, y: lax.igamma(2 + bounded(x), 2 + bounded(y)),
        lambda x, y: jnp.hypot(x, 1 + y * y),
        lambda x, y: jnp.logaddexp(x, y),
    )
    return d.choice(ops)(x, y)


def special(d: Draw) -> Value:
    """Functions that the compiler expands into loops."""
    x = d.pick("f", where=lambda v: v.size <= 64)
    y = d.like(x)
    d.inexact()
    ops: tuple[Callable[[Value, Value], Value], ...] = (
        lambda x, y: lax.igammac(2 + bounded(x), 2 + bounded(y)),
        lambda x, y: lax.betainc(2 + bounded(x), 2 + bounded(y), jnp.full_like(x, 0.3)),
        lambda x, y: lax.zeta(3 + bounded(x), 2 + bounded(y)),
        lambda x, y: lax.polygamma(jnp.full_like(x, 1.0), 2 + bounded(y)),
        lambda x, y: lax.igamma_grad_a(2 + bounded(x), 2 + bounded(y)),
    )
    return d.choice(ops)(x, y)


def integers(d: Draw) -> Value:
    x = d.pick("i")
    y = d.like(x)
    one = jnp.asarray(1, x.dtype)
    ops: list[Callable[[Value, Value], Value]] = [
        *(lax.add, lax.sub, lax.mul, lax.max, lax.min, lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor),
        lambda x, y: lax.bitwise_not(x),
        lambda x, y: lax.population_count(x),
        lambda x, y: lax.clz(x),
        lambda x, y: lax.shift_left(x, y & 3),
        lambda x, y: lax.shift_right_arithmetic(x, y & 3),
        lambda x, y: lax.shift_right_logical(x, y & 3),
        lambda x, y: lax.div(x, y | one),
        lambda x, y: lax.rem(x, y | one),
        lambda x, y: lax.select(x > y, x, y + one),
        lambda x, y: lax.integer_pow(x, 2),
        lambda x, y: lax.clamp(one, x, y | one),
    ]
    if str(x.dtype) in ("int32", "uint32"):
        ops.append(lax.mulhi)
    if str(x.dtype).startswith("int"):
        ops += [lambda x, y: lax.abs(x), lambda x, y: lax.sign(x), lambda x, y: lax.neg(x)]
    return d.choice(ops)(x, y)


def booleans(d: Draw) -> Value:
    x = d.pick("b")
    y = d.like(x)
    ops = (lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor, lax.eq, lambda x, y: lax.bitwise_not(x), lax.max)
    return d.choice(ops)(x, y)


def compared(d: Draw) -> Value:
    x = d.pick("fi", exact=True)
    y = d.like(x, exact=True)
    return d.choice((lax.eq, lax.ne, lax.lt, lax.le, lax.gt, lax.ge))(x, y)


def selected(d: Draw) -> Value:
    x = d.pick(ANY)
    y = d.like(x)
    if kind_of(x) == "i" and d.coin(0.4) and str(x.dtype) == "int32":
        return lax.select_n(jnp.abs(x % 3), x, y, -x)
    which = d.operand(x.shape if d.coin(0.8) else (), "b")
    return lax.select(which, x, y)


def cast(d: Draw) -> Value:
    x = d.pick(ANY, exact=True)
    kind = d.choice("fhibc" if kind_of(x) != "c" else "fc")
    if kind_of(x) == "c":
        return x.astype(jnp.complex64) if kind == "c" else d.choice((lax.real, lax.imag))(x)
    if kind_of(x) in "fh" and kind == "i":
        return to_int(x).astype(d.choice(INTEGERS))
    if kind_of(x) == "i" and kind in "fhc":
        x = x & jnp.asarray(3, x.dtype)
    return x.astype(d.dtype(kind))


def bits(d: Draw) -> Value:
    x = d.pick("fi", exact=True, where=lambda v: str(v.dtype) in ("float32", "int32", "uint32", "uint8", "int16"))
    if x.dtype == jnp.float32:
        return lax.bitcast_convert_type(x, jnp.uint32)
    if str(x.dtype) == "int32":
        return lax.bitcast_convert_type(x, d.choice((jnp.uint32, jnp.uint8, jnp.int16)))
    if x.ndim and x.shape[-1] * x.dtype.itemsize == 4:
        return lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(x, {1: jnp.int8, 2: jnp.uint16, 4: jnp.uint16}[x.dtype.itemsize])


def complexes(d: Draw) -> Value:
    if d.coin(0.4):
        x = d.pick("f", exact=True)
        return lax.complex(x, d.like(x, exact=True))
    x = d.pick("c")
    y = d.like(x)
    if d.coin(0.2):
        d.inexact()
        return lax.abs(x)
    ops: tuple[Callable[[Value, Value], Value], ...] = (
        *(lax.add, lax.sub, lax.mul),
        lambda x, y: lax.conj(x) * y,
        lambda x, y: lax.neg(x),
        lambda x, y: lax.complex(lax.imag(x), lax.real(y)),
    )
    return d.small(d.choice(ops)(x, y), 8)


def barrier(d: Draw) -> Value:
    x = d.pick(ANY)
    return lax.optimization_barrier((x, d.like(x)))[d.whole(0, 1)]


# Shapes.


def broadcast(d: Draw) -> Value:
    x = d.pick(ANY, most=3)
    rank = d.whole(x.ndim, min(x.ndim + 2, 4))
    at = sorted(d.order(rank)[: x.ndim])
    shape = [d.size() for _ in range(rank)]
    for position, size in zip(at, x.shape, strict=True):
        shape[position] = size if size != 1 or d.coin() else shape[position]
    if prod(shape) > MAX_SIZE:
        raise UnfitError
    return lax.broadcast_in_dim(x, shape, at)


def factors(d: Draw, total: int) -> list[int]:
    """Some sizes with a product of `total`."""
    if not total:
        return [0, *(d.size() for _ in range(d.whole(0, 1)))]
    found: list[int] = []
    while total > 1 and len(found) < 3:
        found.append(d.choice([i for i in range(2, total + 1) if total % i == 0]))
        total //= found[-1]
    found += [total] if total > 1 else []
    return found + [1] * d.coin(0.2)


def reshape(d: Draw) -> Value:
    x = d.pick(ANY)
    for _ in range(d.whole(1, 2)):
        shape = factors(d, x.size)
        if d.coin(0.2):
            shape = [shape[i] for i in d.order(len(shape))]
        x = x.reshape(shape)
        if d.coin(0.4) and x.ndim > 1:
            x = lax.transpose(x, d.order(x.ndim))
    return x


def transpose(d: Draw) -> Value:
    x = d.pick(ANY, 2)
    return lax.transpose(x, d.order(x.ndim))


def ones(d: Draw) -> Value:
    """Dimensions of size 1 come and go."""
    x = d.pick(ANY)
    flat = [i for i, size in enumerate(x.shape) if size == 1]
    if flat and d.coin():
        return lax.squeeze(x, [flat[i] for i in d.some(len(flat), 1)])
    return lax.expand_dims(x, [d.whole(0, x.ndim)])


def concatenate(d: Draw) -> Value:
    x = d.pick(ANY, 1)
    axis = d.axis(x)
    parts = [x, d.like(x)]
    if d.coin() and x.shape[axis] > 1:
        parts.append(lax.slice_in_dim(parts[1], 1, x.shape[axis], axis=axis))
    if d.coin(0.2):
        parts.insert(0, lax.slice_in_dim(x, 0, 0, axis=axis))
    return lax.concatenate([parts[i] for i in d.order(len(parts))], axis)


def pad(d: Draw) -> Value:
    x = d.pick(ANY, 1)
    config: list[tuple[int, int, int]] = []
    for size in x.shape:
        if d.coin(0.3):
            config.append((0, 0, 0))
            continue
        inner = d.whole(0, 2) if size else 0
        low, high = d.whole(-2, 3), d.whole(-2, 3)
        total = max(size - 1, 0) * inner + size
        config.append(
            (low, high, inner) if total + low + high >= 0 and total + min(low, 0) + min(high, 0) >= 0 else (1, 2, 0)
        )
    filler = jnp.asarray(1, x.dtype) if d.coin() else d.fresh((), str(x.dtype), d)
    return lax.pad(x, filler, config)


def cut(d: Draw) -> Value:
    x = d.pick(ANY, 1)
    starts = [d.whole(0, size) if d.coin() else 0 for size in x.shape]
    limits = [d.whole(start, size) if d.coin() else size for start, size in zip(starts, x.shape, strict=True)]
    return lax.slice(x, starts, limits, [d.whole(1, 3) for _ in x.shape] if d.coin() else None)


def reverse(d: Draw) -> Value:
    x = d.pick(ANY, 1)
    return lax.rev(x, d.some(x.ndim, 1))


def divided(d: Draw) -> Value:
    x = d.pick(ANY, 1)
    axis = d.axis(x)
    at = d.whole(0, x.shape[axis])
    parts = lax.split(x, (at, x.shape[axis] - at), axis) if d.coin(0.6) else jnp.array_split(x, d.whole(1, 3), axis)
    return d.choice(parts)


def repeated(d: Draw) -> Value:
    x = d.pick(ANY, 1)
    if x.size * 4 > MAX_SIZE:
        raise UnfitError
    axis = d.axis(x)
    ops: tuple[Unary, ...] = (
        lambda x: jnp.tile(x, [d.whole(1, 2) for _ in x.shape]),
        lambda x: jnp.repeat(x, 2, axis=axis),
        lambda x: jnp.stack([x, d.like(x)], axis=d.whole(0, x.ndim)),
        lambda x: jnp.roll(x, d.whole(-3, 3), axis=axis),
    )
    return d.choice(ops)(x)


def triangles(d: Draw) -> Value:
    x = d.pick("fi", 2)
    ops: tuple[Unary, ...] = (
        lambda x: jnp.tril(x, d.whole(-1, 1)),
        lambda x: jnp.triu(x),
        lambda x: jnp.diagonal(x),
        lambda x: jnp.fliplr(x),
        lambda x: x + lax.broadcasted_iota(x.dtype, x.shape, d.axis(x)) % 5,
    )
    made = d.choice(ops)(x)
    return d.small(made, 4)


CHEAP = (
    *(
        unary,
        unary,
        smooth,
        binary,
        binary,
        smooth_binary,
        integers,
        booleans,
        compared,
        selected,
        cast,
        bits,
        complexes,
    ),
    *(barrier, broadcast, reshape, reshape, transpose, ones, concatenate, pad, pad, cut, reverse, divided, repeated),
    *(triangles,),
)
DEAR = (special,)
