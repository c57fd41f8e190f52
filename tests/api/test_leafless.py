"""Arguments without leaves, and programs without arrays, are planned, placed and run as `jax.jit` runs them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.errors import PlanMismatchError, SpecError

MESH = {"a": 8}
X = jnp.ones((8, 8))


def double(x: Any, y: Any = None, z: Any = None) -> Any:
    return x * 2


@pytest.mark.parametrize("empty", [None, {}, (), {"a": ()}], ids=str)
def test_an_argument_without_leaves_is_placed(empty: Any) -> None:
    plan = autoshard.plan(double, X, empty, mesh=MESH)
    assert plan.put(empty, "y") == empty
    assert plan.put_local(empty, "y") == empty
    assert plan.init(lambda: empty, arg="y") == empty
    assert plan.jit(double)(plan.put(X, "x"), plan.put(empty, "y")).shape == X.shape
    with pytest.raises(PlanMismatchError, match=r"y\.b was given, which it does not have"):
        plan.put({"b": X}, "y")
    with pytest.raises(SpecError, match="no argument named 'w'; there are: x, y"):
        plan.put(X, "w")


NOTHING: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "a number": (lambda: 1.0, ()),
    "an array": (lambda: jnp.ones((8, 8)), ()),
    "arguments without leaves": (lambda x, y: jnp.arange(8.0), ({}, (None,))),
    "nothing at all": (lambda x: None, ((),)),
    "a number of an array": (lambda x: 3, (X,)),
}


@pytest.mark.parametrize("what", NOTHING)
def test_a_program_without_arrays_to_place(what: str) -> None:
    fn, args = NOTHING[what]
    want = jax.jit(fn)(*args)
    plan = autoshard.plan(fn, *args, mesh=MESH)
    for got in (plan.jit(fn)(*args), autoshard.jit(fn, mesh=MESH)(*args)):
        assert jax.tree.structure(got) == jax.tree.structure(want)
        assert all((a == b).all() for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))
    assert autoshard.evaluate(fn, *args, mesh=MESH).record.cost.step_s >= 0


def test_a_gradient_for_an_argument_without_leaves() -> None:
    def loss(x: Any, y: Any) -> Any:
        return (x**2).sum()

    assert "gradient" in autoshard.plan(loss, X, {}, mesh=MESH, for_grad=(0, 1)).summary()
    with pytest.raises(SpecError, match="these arguments hold no floats"):
        autoshard.plan(loss, X, {}, mesh=MESH, for_grad=1)
    assert jax.grad(autoshard.jit(loss, mesh=MESH), argnums=(0, 1))(X, {})[1] == {}
