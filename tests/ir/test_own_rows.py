"""Indices that count: which dimensions of operands and indices go along, and that nothing else is taken for it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.ir import graph

ROWS, PLACES, WIDTH, TAKEN = 8, 16, 4, 5
X = jax.ShapeDtypeStruct((ROWS, PLACES, WIDTH), jnp.float32)
ONE = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
FEW = jax.ShapeDtypeStruct((ROWS, TAKEN), jnp.int32)


def batches(of: Callable[..., Any], *args: Any) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """Of every lookup and scatter: the operand's batching dimensions, the indices', and the coordinates left."""
    found = []
    for eqn in graph.build(jax.make_jaxpr(of)(*args), "cpu").eqns:
        if eqn.primitive == "gather":
            n = eqn.params["dimension_numbers"]
            found.append((n.operand_batching_dims, n.start_indices_batching_dims, n.start_index_map))
        elif eqn.primitive.startswith("scatter"):
            n = eqn.params["dimension_numbers"]
            theirs, left = n.scatter_indices_batching_dims, n.scatter_dims_to_operand_dims
            found.append((n.operand_batching_dims, theirs, left))
    return found


def one(x: Any, at: Any) -> Any:
    return x[jnp.arange(ROWS), at]


def one_of_numpys(x: Any, at: Any) -> Any:
    return x[np.arange(ROWS), at]


def few(x: Any, at: Any) -> Any:
    return x[jnp.arange(ROWS)[:, None], at]


def turned(x: Any, at: Any) -> Any:
    return x.swapaxes(0, 1)[at, jnp.arange(ROWS)[:, None]]


def written(x: Any, at: Any) -> Any:
    return x.at[jnp.arange(ROWS), at].set(1.0)


def added(x: Any, at: Any) -> Any:
    return x.at[np.arange(ROWS)[:, None], at].add(1.0)


@pytest.mark.parametrize(
    ("of", "at", "want"),
    [
        (one, ONE, ((0,), (0,), (1,))),
        (one_of_numpys, ONE, ((0,), (0,), (1,))),
        (few, FEW, ((0,), (0,), (1,))),
        (turned, FEW, ((1,), (0,), (0,))),
        (written, ONE, ((0,), (0,), (1,))),
        (added, FEW, ((0,), (0,), (1,))),
    ],
)
def test_rows_that_are_counted_go_along(of: Callable[..., Any], at: Any, want: Any) -> None:
    assert batches(of, X, at) == [want]


@pytest.mark.parametrize(("dtype", "counts"), [("uint8", True), ("int16", True), ("float32", False)])
def test_rows_are_counted_in_any_type_that_has_them(dtype: str, *, counts: bool) -> None:
    def of(x: Any, at: Any) -> Any:
        return x[jnp.arange(ROWS, dtype=dtype).astype(jnp.int32), at]

    assert batches(of, X, ONE) == [((0,), (0,), (1,)) if counts else ((), (), (0, 1))]


def test_what_begins_again_does_not_count() -> None:
    def of(x: Any, at: Any) -> Any:
        return x[jnp.arange(300, dtype=jnp.int16).astype(jnp.int8).astype(jnp.int32), at]

    x = jax.ShapeDtypeStruct((300, PLACES), jnp.float32)
    assert batches(of, x, jax.ShapeDtypeStruct((300,), jnp.int32)) == [((), (), (0, 1))]


def test_a_gradient_is_added_to_its_own_rows() -> None:
    def gradient(x: Any, at: Any) -> Any:
        return jax.grad(lambda x: jnp.sum(jnp.sin(one(x, at))))(x)

    assert batches(gradient, X, ONE) == [((0,), (0,), (1,))] * 2


@pytest.mark.parametrize(
    "of",
    [
        lambda x, at: x[jnp.arange(ROWS)[::-1], at],
        lambda x, at: x[jnp.arange(ROWS) // 2, at],
        lambda x, at: x[np.arange(ROWS)[::-1].copy(), at],
        lambda x, at: jnp.concatenate([x, x])[jnp.arange(ROWS), at],
        lambda x, at: x[:, :ROWS][jnp.arange(ROWS), jnp.arange(ROWS)] + at[0],
        lambda x, at: x[at, jnp.arange(ROWS)],
        lambda x, at: x.transpose(2, 0, 1)[:, jnp.arange(ROWS)] + at[0],
    ],
    ids=[
        "backwards",
        "in pairs",
        "backwards in numpy",
        "of half the rows",
        "a diagonal",
        "fewer than there are",
        "all rows",
    ],
)
def test_other_rows_do_not(of: Callable[..., Any]) -> None:
    assert {own for own, _, _ in batches(of, X, ONE)} == {()}


def clipped(x: Any, at: Any) -> Any:
    return x.at[jnp.arange(ROWS), at].get(mode="clip")


def filled(x: Any, at: Any) -> Any:
    return x.at[jnp.arange(ROWS), at].get(mode="fill", fill_value=3)


def taken_back(x: Any, at: Any) -> Any:
    """The gradient of an addition to rows: a lookup that fills."""
    return jax.grad(lambda new: jnp.sum(jnp.sin(x.at[jnp.arange(ROWS)[:, None], at].add(new)) * x))(
        jnp.cos(at.astype(jnp.float32))[..., None] * jnp.ones(WIDTH)
    )


@pytest.mark.parametrize(
    ("of", "at"),
    [
        (clipped, ONE),
        (filled, ONE),
        (taken_back, FEW),
        (one, ONE),
        (few, FEW),
        (written, ONE),
        (added, FEW),
        (turned, FEW),
    ],
)
def test_what_is_split_gives_the_same_numbers(of: Callable[..., Any], at: Any) -> None:
    """Also of indices out of range, and negative ones."""
    x = np.random.default_rng(0).normal(size=X.shape).astype(np.float32)
    places = np.random.default_rng(1).integers(-PLACES - 2, PLACES + 2, at.shape, dtype=np.int32)
    planned = autoshard.jit(of, mesh={"data": 8}, hardware="cpu:8", in_shardings=(P("data"), P("data")))
    np.testing.assert_allclose(planned(x, places), jax.jit(of)(x, places), rtol=1e-6)
    assert not planned.plan(x, places).record.collectives


def scaled(x: Any, at: Any) -> Any:
    return x.at[jnp.arange(ROWS)[:, None], at].multiply(1.5)


def raised(x: Any, at: Any) -> Any:
    return x.at[jnp.arange(ROWS)[:, None], at].max(0.25)


@pytest.mark.parametrize("of", [few, added, scaled, raised, taken_back])
@pytest.mark.parametrize("spec", [P("a"), P(("a", "b")), P("a", "b"), P("b", None, "a"), P(None, "a"), P()], ids=str)
def test_what_is_split_along_other_dimensions_too_gives_the_same_numbers(of: Callable[..., Any], spec: P) -> None:
    x = np.random.default_rng(2).normal(size=X.shape).astype(np.float32)
    places = np.random.default_rng(3).integers(-PLACES - 2, PLACES + 2, FEW.shape, dtype=np.int32)
    planned = autoshard.jit(of, mesh={"a": 2, "b": 4}, hardware="cpu:8", in_shardings=(spec, P()))
    np.testing.assert_allclose(planned(x, places), jax.jit(of)(x, places), rtol=1e-5)
