"""Functions whose equations are easily split wrongly: their splits are compiled and compared by `rules_compiled`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Hostile = tuple[str, Callable[..., Any], tuple[Any, ...]]

_RNG = np.random.default_rng(0)
INT = np.iinfo(np.int32)


def _f(*shape: int) -> np.ndarray:
    """Numbers with ties, infinities, zeros of both signs and NaN."""
    odd = _RNG.choice(np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, 1.0, 2.0], np.float32), shape)
    return np.where(_RNG.random(shape) < 0.4, odd, _RNG.normal(size=shape)).astype(np.float32)


def _negative_nan(*shape: int) -> np.ndarray:
    """Numbers, a third of them NaN with a sign, as nought by nought is on some processors."""
    return np.where(_RNG.random(shape) < 0.3, np.uint32(0xFFC00000).view(np.float32), _f(*shape)).astype(np.float32)


def _reduced(op: str, dtype: str) -> Callable[..., Any]:
    return lambda x: getattr(jnp, op)(x.astype(dtype), 0)


def _n(*shape: int) -> np.ndarray:
    """Finite numbers, with ties."""
    return (_RNG.integers(-6, 7, shape) / 2).astype(np.float32)


def _i(*shape: int) -> np.ndarray:
    """Integers with ties, and the type's ends."""
    return _RNG.choice(np.array([INT.min, INT.min + 1, -7, -1, 0, 1, 3, 3, 8, 31, 32, INT.max], np.int32), shape)


def _windows(op: Callable[..., Any], start: float, **options: Any) -> Callable[..., Any]:
    defaults: dict[str, Any] = {"window_dimensions": (2, 3), "window_strides": (1, 2), "padding": ((0, 1), (2, 1))}
    return lambda x: lax.reduce_window(x, np.float32(start), op, **{**defaults, **options})


def _pool(x: Any) -> Any:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3), (1, 2), "SAME")


def _first_largest(x: Any, i: Any) -> Any:
    def larger(a: Any, b: Any) -> Any:
        (x, i), (y, j) = a, b
        takes = (x > y) | ((x == y) & (i < j))
        return jnp.where(takes, x, y), jnp.where(takes, i, j)

    return lax.reduce((x, i), (np.float32(-np.inf), np.int32(99)), larger, (1,))


def _cumulative(name: str, axis: int) -> Hostile:
    data = _f(4, 8) if name in ("cummax", "cummin") else _n(4, 8)
    return f"{name} reversed {axis}", lambda x: getattr(lax, name)(x, axis=axis, reverse=True), (data,)


def _pairs(name: str) -> Hostile:
    op = getattr(lax, name)
    data = (_i(4, 8), _i(4, 8))
    return f"{name} of extremes", op, data


def _at(name: str, mode: str) -> Hostile:
    def fn(x: Any, i: Any, u: Any) -> Any:
        return getattr(x.at[i, 1], name)(u, mode=mode)

    return f"at.{name} {mode}", fn, (_n(8, 4), np.array([-9, 7, 8, 3], np.int32), _n(4))


HOSTILE: tuple[Hostile, ...] = (
    ("sort by two keys", lambda x, y, z: lax.sort((x, y, z), dimension=1, num_keys=2), (_f(4, 8), _i(4, 8), _n(4, 8))),
    ("sort, stable, major", lambda x, y: lax.sort((x, y), dimension=0, is_stable=True), (_f(8, 4), _i(8, 4))),
    ("argsort", lambda x: jnp.argsort(x, axis=0, descending=True), (_f(8, 4),)),
    *(_cumulative(name, axis) for name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp") for axis in (0, 1)),
    ("window sums, padded", _windows(lax.add, 0.0), (_n(8, 16),)),
    ("window maxima, padded", _windows(lax.max, -np.inf), (_n(8, 16),)),
    ("window minima, dilated", _windows(lax.min, np.inf, window_dilation=(1, 3)), (_n(8, 16),)),
    ("window maxima of a dilated base", _windows(lax.max, -np.inf, base_dilation=(2, 1)), (_n(8, 16),)),
    ("window products", _windows(lax.mul, 1.0), (_n(8, 16),)),
    (
        "windows larger than a part",
        _windows(lax.add, 0.0, window_dimensions=(1, 7), window_strides=(1, 1)),
        (_n(4, 8),),
    ),
    (
        "windows with gaps",
        _windows(lax.add, 0.0, window_dimensions=(1, 2), window_strides=(1, 4), padding="VALID"),
        (_n(4, 16),),
    ),
    ("gradient of pooling", lambda x, g: jax.vjp(_pool, x)[1](g), (_n(4, 16), _n(4, 8))),
    ("pad, cut on both sides", lambda x: lax.pad(x, np.float32(7), ((-1, -2, 0), (-3, 1, 0))), (_f(8, 16),)),
    ("pad between", lambda x: lax.pad(x, np.float32(7), ((0, 0, 1), (2, -1, 2))), (_f(8, 8),)),
    ("pad to the same size", lambda x: lax.pad(x, np.float32(7), ((3, -3, 0), (-2, 2, 0))), (_f(8, 8),)),
    ("rev", lambda x: lax.rev(x, (0, 2)), (_f(4, 1, 8),)),
    ("concatenate one row", lambda x, y: lax.concatenate([x, y, x], 0), (_f(1, 8), _f(6, 8))),
    ("concatenate nothing", lambda x, y: lax.concatenate([x, y], 0), (_f(0, 8), _f(8, 8))),
    ("top_k", lambda x: lax.top_k(x, 3), (_n(4, 8),)),
    ("argmax", lambda x: lax.argmax(x, 1, jnp.int32), (_f(4, 8),)),
    ("argmin, major", lambda x: lax.argmin(x, 0, jnp.int32), (_f(8, 4),)),
    ("argmax of integers", lambda x: lax.argmax(x, 1, jnp.int32), (_i(4, 8),)),
    ("argmax of one", lambda x: lax.argmax(x, 1, jnp.int32), (_f(8, 1),)),
    ("argmax of nothing but NaN", lambda x: lax.argmax(x, 1, jnp.int32), (np.full((4, 8), np.nan, np.float32),)),
    ("reduce by a function", _first_largest, (_n(4, 8), np.tile(np.arange(8, dtype=np.int32), (4, 1)))),
    ("reduce from three", lambda x: lax.reduce(x, np.int32(3), lambda a, b: a + b, (1,)), (_i(8, 16),)),
    ("segment_sum", lambda x, i: jax.ops.segment_sum(x, i, 8), (_n(16, 4), _RNG.integers(-3, 12, 16, np.int32))),
    ("segment_max", lambda x, i: jax.ops.segment_max(x, i, 8), (_f(16, 4), _RNG.integers(-3, 12, 16, np.int32))),
    ("segment_min", lambda x, i: jax.ops.segment_min(x, i, 8), (_f(16, 4), _RNG.integers(-3, 12, 16, np.int32))),
    ("one row of maxima", lambda x, u: x.at[5].max(u), (_f(8, 4), _f(4))),
    ("one_hot", lambda i: jax.nn.one_hot(i, 8), (np.array([-1, 0, 7, 8], np.int32),)),
    *(_at(name, mode) for name in ("set", "add", "mul", "min", "max") for mode in ("clip", "drop")),
    ("at.apply", lambda x, i: x.at[i].apply(lambda y: y * 2 + 1), (_n(8, 4), np.array([-20, 0, 8, 5], np.int32))),
    ("at.get", lambda x, i: x.at[i].get(mode="fill", fill_value=3.0), (_f(8, 4), np.array([-20, 0, 8, 5], np.int32))),
    ("at.get of NaN", lambda x, i: x.at[:, i].get(mode="fill"), (_f(4, 8), np.array([-20, 0, 8, 5], np.int32))),
    ("at.get of integers", lambda x, i: x.at[i].get(mode="fill"), (_i(8, 4), np.array([-20, 0, 8, 5], np.int32))),
    (
        "take_along_axis",
        lambda x, i: jnp.take_along_axis(x, i, 0, mode="fill"),
        (_f(8, 4), _RNG.integers(-20, 20, (8, 4))),
    ),
    *(_pairs(n) for n in ("add", "mul", "div", "rem", "max", "min", "shift_left", "shift_right_arithmetic")),
    ("shift_right_logical", lax.shift_right_logical, (_i(4, 8), _i(4, 8))),
    ("population_count", lax.population_count, (_i(4, 8),)),
    ("clz", lax.clz, (_i(4, 8),)),
    ("reduce_prod of integers", lambda x: lax.reduce_prod_p.bind(x, axes=(1,), out_sharding=None), (_i(4, 8),)),
    ("sum of integers that overflow", lambda x: x.sum(1), (_i(4, 8),)),
    ("maximum of integers", lambda x: x.max(0), (_i(8, 4),)),
    *(
        (f"{op} of {t}", _reduced(op, t), (_f(8, 4),))
        for op in ("max", "min")
        for t in ("float32", "bfloat16", "float16")
    ),
    ("maximum of negative NaN", lambda x: x.max(0), (_negative_nan(8, 4),)),
    ("minimum of negative NaN", lambda x: x.min(), (_negative_nan(8, 4),)),
    ("maximum of complex numbers", lambda x, y: lax.reduce_max(lax.complex(x, y), (0,)), (_n(8, 4), _n(8, 4))),
    ("bits of any", lambda x: lax.reduce_or(x, (0,)), (_i(8, 4),)),
    ("bits of all", lambda x: lax.reduce_and(x, (1,)), (_i(8, 4),)),
    ("any and all", lambda x: (x.any(0), x.all(1)), (_i(8, 4) > 0,)),
    ("to int", lambda x: x.astype(jnp.int8), (_i(4, 8),)),
    ("to bfloat16", lambda x: x.astype(jnp.bfloat16), (_f(4, 8),)),
    ("complex", lambda x, y: lax.conj(lax.complex(x, y)), (_n(4, 8), _n(4, 8))),
    (
        "select of three",
        lambda p, x, y, z: lax.select_n(p, x, y, z),
        (_RNG.integers(0, 3, (4, 8), np.int32), _f(4, 8), _f(4, 8), _f(4, 8)),
    ),
    (
        "products of int8",
        lambda x, y: lax.dot_general(x, y, (((0, 2), (2, 0)), ((1,), (1,))), preferred_element_type=jnp.int32),
        (_i(4, 2, 6).astype(np.int8), _i(6, 2, 4, 8).astype(np.int8)),
    ),
    ("outer product", lambda x, y: lax.dot_general(x, y, (((), ()), ((), ()))), (_n(4), _n(8))),
    ("tile", lambda x: jnp.tile(x, (2, 3)), (_f(4, 8),)),
    ("split", lambda x: lax.split(x, (1, 3, 4), 1), (_f(4, 8),)),
    ("strided slice", lambda x: lax.slice(x, (1, 0), (8, 7), (3, 2)), (_f(8, 8),)),
    ("iota", lambda: lax.broadcasted_iota(jnp.int8, (4, 8), 1), ()),
    ("triangular", lambda x: jnp.tril(x, -1), (_f(8, 8),)),
    ("bits to bytes", lambda x: lax.bitcast_convert_type(x, jnp.int8), (_i(4, 8),)),
    ("bytes to bits", lambda x: lax.bitcast_convert_type(x, jnp.int32), (_i(8, 8, 4).astype(np.int8),)),
)
