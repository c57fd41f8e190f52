"""What is planned is what is there: a gradient only where one is asked for, or taken."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.errors import GradientError, SpecError

MESH, GPUS = {"data": 2, "model": 4}, "h100:1x8"
ON: dict[str, Any] = {"mesh": MESH, "hardware": GPUS}
X = np.linspace(-1.0, 1.0, 64, dtype=np.float32).reshape(8, 8)
SHAPE = jax.ShapeDtypeStruct(X.shape, jnp.float32)


@jax.custom_vjp
def raising(x: Any) -> Any:
    return jnp.sin(x)


def refuses(x: Any) -> Any:
    raise NotImplementedError("no derivative here")


raising.defvjp(refuses, lambda r, g: (g,))

# --- What JAX cannot differentiate runs ------------------------------------------------------------

FORWARD: dict[str, Callable[[Any], Any]] = {
    "while_loop": lambda x: lax.while_loop(lambda c: (c**2).sum() < 1e4, lambda c: c * 1.5, x).mean(),
    "fori_loop": lambda x: lax.fori_loop(0, jnp.int32(x[0, 0] + 4), lambda _, c: jnp.tanh(c), x).mean(),
    "pure_callback": lambda x: jax.pure_callback(lambda v: np.asarray(v) * 2, SHAPE, x).mean(),
    "io_callback": lambda x: io_callback(lambda v: np.asarray(v) * 2, SHAPE, x).mean(),
    "nextafter": lambda x: jnp.nextafter(x, x + 1).mean(),
    "reduce_window": lambda x: lax.reduce_window(x, 1.0, lax.mul, (2, 2), (1, 1), "VALID").mean(),
    "custom_vjp": lambda x: raising(x).mean(),
}


@pytest.mark.parametrize("name", FORWARD)
def test_forward_functions_run_as_under_jax_jit(name: str) -> None:
    fn = FORWARD[name]
    got = autoshard.jit(fn, **ON)(X)
    np.testing.assert_allclose(got, jax.jit(fn)(X), rtol=1e-5)


@pytest.mark.parametrize("name", [n for n in FORWARD if n not in ("fori_loop", "nextafter")])
def test_what_is_asked_for_and_does_not_exist_is_an_error_of_ours(name: str) -> None:
    with pytest.raises(GradientError, match="for_grad=False") as raised:
        autoshard.plan(FORWARD[name], X, for_grad=True, **ON)
    assert raised.value.where.split(":")[0].endswith("test_for_grad.py")
    assert str(raised.value.__cause__).splitlines()[0] in str(raised.value)
    assert isinstance(raised.value, SpecError)


def test_a_gradient_of_nothing_is_refused() -> None:
    with pytest.raises(SpecError, match="these arguments hold no floats"):
        autoshard.plan(lambda i, x: x[i].sum(), 3, X, for_grad=True, **ON)
    with pytest.raises(SpecError, match="its results hold no floats"):
        autoshard.plan(lambda x: x.argmax(), X, for_grad=True, **ON)


# --- Who is planned for what -----------------------------------------------------------------------


def loss(w: Any, x: Any, scale: Any = 1.0) -> Any:
    return jnp.mean(jnp.tanh(x @ w["up"]) @ w["down"]) * scale


W = {"up": np.ones((64, 64), np.float32), "down": np.ones((64, 64), np.float32)}
BATCH = np.ones((32, 64), np.float32)


def planned_for(jitted: Any) -> list[tuple[int, ...]]:
    """The gradients of a decorated function's plans, in order."""
    return [entry.plan.record.gradient_of for entry in jitted._entries.values()]


def test_a_forward_function_is_planned_as_it_is() -> None:
    plan = autoshard.plan(loss, W, BATCH, **ON)
    assert plan.record.gradient_of == ()
    assert "optimizer" not in plan.record.memory.kinds
    assert "gradient" not in plan.summary()
    asked = autoshard.plan(loss, W, BATCH, for_grad=(0, 1), **ON)
    first = "planned for its gradient with respect to w and x; optimizer state of 8 bytes per parameter assumed"
    assert asked.summary().splitlines()[1].strip() == first
    assert first in asked.record.notes


GRADIENTS: dict[str, tuple[Callable[[Any], Any], tuple[int, ...]]] = {
    "grad": (lambda f: jax.grad(f)(W, BATCH), (0,)),
    "argnums": (lambda f: jax.grad(f, argnums=(0, 1))(W, BATCH), (0, 1)),
    "second": (lambda f: jax.grad(f, argnums=1)(W, BATCH), (1,)),
    "value_and_grad in jit": (lambda f: jax.jit(jax.value_and_grad(f))(W, BATCH), (0,)),
    "vjp": (lambda f: jax.vjp(f, W, BATCH)[1](jnp.float32(1.0)), (0, 1)),
    "linearize": (lambda f: jax.linearize(lambda w: f(w, BATCH), W)[1](W), (0,)),
    "grad of grad": (
        lambda f: jax.grad(lambda w: sum(g.sum() for g in jax.tree.leaves(jax.grad(f)(w, BATCH))))(W),
        (0,),
    ),
    "one leaf": (lambda f: jax.grad(lambda up: f({**W, "up": up}, BATCH))(W["up"]), (0,)),
    "stopped": (lambda f: jax.grad(lambda w: f(w, lax.stop_gradient(BATCH * w["up"][0])))(W), (0,)),
    "jvp": (lambda f: jax.jvp(lambda w: f(w, BATCH), (W,), (W,)), ()),
    "none": (lambda f: f(W, BATCH), ()),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_under_a_gradient_what_is_differentiated_is_planned_for(name: str) -> None:
    take, want = GRADIENTS[name]
    fn = autoshard.jit(loss, **ON)
    for one, other in zip(jax.tree.leaves(take(fn)), jax.tree.leaves(take(loss)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    assert planned_for(fn) == [want]


def test_a_call_and_its_gradient_have_plans_of_their_own() -> None:
    fn = autoshard.jit(loss, **ON)
    fn(W, BATCH)
    jax.grad(fn)(W, BATCH)
    fn(W, BATCH)
    assert planned_for(fn) == [(), (0,)]


def test_for_grad_is_the_users_word() -> None:
    for asked, want in ((False, ()), (1, (1,))):
        fn = autoshard.jit(loss, for_grad=asked, **ON)
        jax.grad(fn)(W, BATCH)
        assert planned_for(fn) == [want]


def test_what_is_not_differentiated_needs_no_derivative() -> None:
    """A leaf beside the differentiated one goes through a callback: JAX never asks for its derivative."""

    def mixed(w: dict[str, Any]) -> Any:
        return (w["a"] * jax.pure_callback(lambda v: np.asarray(v), SHAPE, w["b"])).sum()

    fn = autoshard.jit(mixed, **ON)
    got = jax.grad(lambda a: fn({"a": a, "b": X}))(X)
    np.testing.assert_allclose(got, X, rtol=1e-6)


def test_a_constraint_of_the_user_is_kept_either_way() -> None:
    def constrained(w: Any) -> Any:
        return jnp.tanh(lax.with_sharding_constraint(w * 2, P("model"))).sum()

    for asked in (None, True):
        assert autoshard.plan(constrained, X, **ON, for_grad=asked).specs == (P("model"),)


def test_checkpoints_are_no_hints_where_the_gradient_is_taken_outside() -> None:
    with pytest.raises(SpecError, match="plan the step that takes the gradient"):
        autoshard.plan(loss, W, BATCH, for_grad=True, remat="free", **ON)
    assert autoshard.plan(loss, W, BATCH, for_grad=True, **ON).recomputation is None
