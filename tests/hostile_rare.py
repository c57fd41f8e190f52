"""Hostile operations that are rarer: sets, orders, solvers, attention, small types, gradients of windows."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.hostile_draw import Draw, Value, without_nan

Op = Callable[[Draw], Value]


def distinct(d: Draw) -> Value:
    """The distinct numbers, their places, or their counts; so many of them."""
    x = without_nan(d.pick("fi", 1, exact=True, where=lambda v: v.size > 0)).ravel()
    size = d.whole(1, 8)
    if d.coin():
        return jnp.unique(x, size=size, fill_value=0)
    _, inverse, counts = jnp.unique(x, size=size, fill_value=0, return_inverse=True, return_counts=True)
    return d.choice((inverse.astype(jnp.int32), counts.astype(jnp.int32)))


def places(d: Draw) -> Value:
    """Where numbers are that are not nought, so many of them."""
    x = without_nan(d.pick("fib", 1, exact=True, where=lambda v: v.size > 0))
    found = jnp.nonzero(x, size=d.whole(1, 8), fill_value=d.choice((-1, 0, 99)))
    return found[d.whole(0, x.ndim - 1)].astype(jnp.int32)


def ordered_by_keys(d: Draw) -> Value:
    x = without_nan(d.pick("fi", 1, exact=True))
    return jnp.lexsort((x, without_nan(d.like(x, exact=True))), axis=d.axis(x)).astype(jnp.int32)


def put_along(d: Draw) -> Value:
    """One update of each row, at a place in range or not."""
    x = d.pick("f", 1, where=lambda v: v.size > 0)
    axis = d.axis(x)
    shape = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
    at = d.indices(shape, x.shape[axis])
    return jnp.put_along_axis(x, at, d.operand(shape), axis, inplace=False, mode=d.choice((None, "clip", "fill")))


def crossed(d: Draw) -> Value:
    shape = (*d.shape(d.whole(0, 2), 64), 3)
    return d.small(jnp.cross(d.operand(shape, dtype="float32"), d.operand(shape, dtype="float32")), 32)


def powers(d: Draw) -> Value:
    x = d.operand((d.size(),), dtype="float32")
    return d.small(jnp.vander(x, d.whole(1, 4), increasing=d.coin()), 64)


def outer_grid(d: Draw) -> Value:
    x, y = d.operand((d.size(),), dtype="float32"), d.operand((d.size(),), dtype="float32")
    a, b = jnp.meshgrid(x, y, indexing=d.choice(("ij", "xy")))
    return d.small(a * b - a, 32)


def attention(d: Draw) -> Value:
    """Grouped heads, with a mask, causal or not."""
    batch, length, heads, width = (max(d.size(), 1) for _ in range(4))
    batch, length, heads, width = min(batch, 4), min(length, 8), min(heads, 4), min(width, 4)
    groups = d.choice([g for g in (1, 2, 4) if heads % g == 0])
    d.inexact()
    query = d.operand((batch, length, heads, width), dtype="float32")
    key, value = (d.operand((batch, length, groups, width), dtype="float32") for _ in range(2))
    return jax.nn.dot_product_attention(query, key, value, is_causal=d.coin())


def solved(d: Draw) -> Value:
    """A linear system by its matrix's action, with its own transpose."""
    size = max(min(d.size(), 6), 1)
    matrix = 8 * jnp.eye(size) + d.operand((size, size), dtype="float32") / 8
    d.inexact()

    def by_inverse(_: Any, b: Value) -> Value:
        return jnp.linalg.solve(matrix, b)

    def by_transpose(_: Any, b: Value) -> Value:
        return jnp.linalg.solve(matrix.T, b)

    b = d.operand((size,), dtype="float32")
    return lax.custom_linear_solve(lambda x: matrix @ x, b, by_inverse, transpose_solve=by_transpose)


def root(d: Draw) -> Value:
    """The cube root of numbers above one, with the derivative of an implicit function."""
    x = 1 + jnp.abs(d.pick("f", 0))
    d.inexact()

    def newton(fn: Any, start: Value) -> Value:
        return lax.fori_loop(0, 20, lambda _, y: y - fn(y) / (3 * y * y), start)

    return lax.custom_root(lambda y: y**3 - x, jnp.ones_like(x), newton, lambda g, y: y / g(jnp.ones_like(y)))


def narrowed(d: Draw) -> Value:
    """Through eight or four bits and back: moved, summed or taken the largest of there."""
    x = jnp.clip(without_nan(d.pick("f", 1, exact=True)), -4, 4)
    kind = d.choice(("float8_e4m3fn", "float8_e5m2", "int8", "int4"))
    narrow = x.astype(kind)
    axis = d.axis(x)
    if kind.startswith("float8") and d.coin() and all(x.shape):
        return jnp.max(narrow, axis).astype(jnp.float32)
    moves: tuple[Callable[[Value], Value], ...] = (
        lambda v: jnp.roll(v, 1, axis),
        lambda v: jnp.flip(v, axis),
        lambda v: v,
    )
    return d.choice(moves)(narrow).astype(jnp.float32)


def pooled_gradient(d: Draw) -> Value:
    """What a pool of largest or of sums hands back."""
    x = without_nan(d.operand((d.choice((1, 2, 4)), d.choice((8, 16)), d.choice((1, 2, 3))), dtype="float32"))
    window, stride = d.choice(((2, 2), (3, 1), (3, 2), (4, 4)))

    def pool(x: Value) -> Value:
        start, op = combining
        return lax.reduce_window(x, start, op, (1, window, 1), (1, stride, 1), padding)

    combining = d.choice(((-jnp.inf, lax.max), (jnp.inf, lax.min), (0.0, lax.add)))
    padding = d.choice(("SAME", "VALID"))
    made, backward = jax.vjp(pool, x)
    (back,) = backward(lax.rev(made, (1,)))
    return d.small(back, 64)


def drawn_of(d: Draw) -> Value:
    """Random draws with a loop inside."""
    shape, key = d.shape(d.whole(1, 2), 64), jax.random.key(d.whole(0, 99))
    d.inexact()
    rate = 1 + jnp.abs(d.operand(shape, dtype="float32"))
    draws: tuple[Callable[[], Value], ...] = (
        lambda: jax.random.gamma(key, rate, shape),
        lambda: jax.random.poisson(key, 2.0, shape).astype(jnp.float32),
        lambda: jax.random.categorical(key, rate, axis=-1).astype(jnp.float32) if shape[-1] else rate,
        lambda: jax.random.laplace(key, shape) * rate,
    )
    return draws[d.whole(0, 1) + 2 if d.derived or 0 in shape else d.whole(0, 3)]()


CHEAP: tuple[Op, ...] = (distinct, places, ordered_by_keys, put_along, crossed, powers, outer_grid, narrowed)
DEAR: tuple[Op, ...] = (attention, solved, root, pooled_gradient, drawn_of)
