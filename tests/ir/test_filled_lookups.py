"""Lookups that fill: the same numbers in two parts."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard import _jax
from autoshard.ir import filled_lookups

ROWS, WIDTH = 32, 8
INDICES = np.array([[0, 31, 5, 32], [-1, -32, -33, 1000], [7, 7, 8, 9], [2**31 - 1, -(2**31), 30, 1]], np.int32)


def table(dtype: Any) -> Any:
    return jnp.arange(ROWS * WIDTH).reshape(ROWS, WIDTH).astype(dtype) + (0 if dtype == "bool" else 1)


def lookups(closed: Any) -> list[Any]:
    return [eqn for eqn in _jax.equations(closed) if eqn.primitive.name == "gather"]


def in_parts(of: Callable[..., Any], *args: Any) -> Any:
    """The result of a program that is one lookup, made in its parts."""
    (eqn,) = lookups(jax.make_jaxpr(of)(*args))
    assert filled_lookups.fills(eqn)
    one = filled_lookups.clipped(eqn)
    return jax.jit(lambda *xs: filled_lookups.filled(eqn, xs[1], _jax.bind(one, one.params, xs)[0]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "bool", "complex64"])
@pytest.mark.parametrize("indices", ["int8", "uint8", "int32", "uint32"])
def test_both_parts_give_what_the_whole_gives(dtype: str, indices: str) -> None:
    x, i = table(dtype), jnp.asarray(INDICES.astype(indices))[..., None]
    numbers = jax.lax.GatherDimensionNumbers(offset_dims=(2,), collapsed_slice_dims=(0,), start_index_map=(0,))

    def look_up(x: Any, i: Any) -> Any:
        return jax.lax.gather(x, i, numbers, (1, WIDTH), mode="fill")

    got, want = in_parts(look_up, x, i)(x, i), look_up(x, i)
    assert got.dtype == want.dtype
    wide = "float32" if dtype == "bfloat16" else dtype  # numpy knows its NaN
    np.testing.assert_array_equal(got.astype(wide), want.astype(wide))


def test_windows_batches_and_values_of_ones_own() -> None:
    x = jnp.arange(4 * 6 * 5.0).reshape(4, 6, 5)
    i = jnp.array([[[0, 0], [3, 3]], [[4, 3], [1, -1]], [[3, 4], [2, 2]], [[0, 1], [9, 9]]])
    numbers = jax.lax.GatherDimensionNumbers(
        offset_dims=(1, 3),
        collapsed_slice_dims=(),
        start_index_map=(1, 2),
        operand_batching_dims=(0,),
        start_indices_batching_dims=(0,),
    )

    def windows(x: Any, i: Any) -> Any:
        return jax.lax.gather(x, i, numbers, (1, 3, 2), mode="fill", fill_value=-7.0)

    want = windows(x, i)
    assert (want == -7).any()
    assert (want != -7).any()
    np.testing.assert_array_equal(in_parts(windows, x, i)(x, i), want)


@pytest.mark.parametrize("mode", ["clip", "promise_in_bounds"])
def test_what_fills_nothing_is_none(mode: str) -> None:
    (eqn,) = lookups(jax.make_jaxpr(lambda x, i: x.at[i].get(mode=mode))(table("float32"), INDICES))
    assert not filled_lookups.fills(eqn)


def test_keys_are_looked_up_as_they_were() -> None:
    keys = jax.random.split(jax.random.key(0), 8)
    (eqn,) = lookups(jax.make_jaxpr(lambda x, i: jnp.take(x, i, axis=0))(keys, INDICES))
    assert not filled_lookups.fills(eqn)


@pytest.mark.parametrize("rows", [P("b"), P(("a", "b")), P(None, "b"), P()], ids=str)
def test_split_tables_give_an_unsplit_ones_numbers_and_gradients(rows: P) -> None:
    def value(x: Any, i: Any, w: Any) -> Any:
        found = jnp.take(x, i, axis=0)
        return jnp.tanh(jnp.where(jnp.isnan(found), 3.0, found) * w).sum(-1), found

    def gradients(x: Any, i: Any, w: Any) -> Any:
        return jax.grad(lambda x, w: value(x, i, w)[0].sum(), (0, 1))(x, w)

    args = (table("float32") / 100, jnp.asarray(INDICES), jnp.arange(1.0, WIDTH + 1))
    for of in (value, gradients):
        step = autoshard.jit(of, mesh={"a": 2, "b": 4}, in_shardings=(rows, P("a"), None))
        for got, want in zip(step(*args), of(*args), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5)


def test_a_planned_function_is_differentiated_as_an_unplanned_one() -> None:
    def value(x: Any, i: Any) -> Any:
        return jnp.tanh(jnp.nan_to_num(jnp.take(x, i, axis=0)))

    x, i = table("float32") / 100, jnp.asarray(INDICES)
    planned = autoshard.jit(value, mesh={"a": 8}, in_shardings=(P("a"), P()))
    got, want = (jax.grad(lambda x, of=of: of(x, i).sum())(x) for of in (planned, value))
    np.testing.assert_allclose(got, want, rtol=1e-5)
