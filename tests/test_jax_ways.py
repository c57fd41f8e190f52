"""Decorated functions where JAX's users put them: under tracing, in loops, in one another, on any mesh."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

import autoshard
from tests.programs import GPUS, MESH, relative_error

P = PartitionSpec
W = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)
X = np.random.default_rng(1).normal(size=(8, 16)).astype(np.float32)
S = jax.ShapeDtypeStruct

jit = partial(autoshard.jit, mesh=MESH, hardware=GPUS)


def loss(params: Any, x: Any) -> Any:
    y = jnp.tanh(x @ params["w"])
    return jnp.mean(y**2 if params["bias"] is None else y + params["bias"])


def layer(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w) + x


def params() -> dict[str, Any]:
    return {"w": jnp.asarray(W), "bias": None}


def same(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert relative_error(a, b) <= 2e-5


# --- Shapes alone ----------------------------------------------------------------------

SEEN: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "itself": lambda f: f,
    "grad": jax.grad,
    "value and grad": lambda f: jax.value_and_grad(f, argnums=(0, 1)),
    "jit": jax.jit,
    "remat": jax.checkpoint,
}


@pytest.mark.parametrize("around", SEEN)
@pytest.mark.parametrize("mesh", [MESH, AbstractMesh((4, 8), ("data", "model"))], ids=["here", "elsewhere"])
def test_shapes_are_evaluated_with_and_without_devices(around: str, mesh: Any) -> None:
    planned = autoshard.jit(loss, mesh=mesh, hardware="h100:4x8" if mesh is not MESH else GPUS)
    avals = ({"w": S((32, 32), jnp.float32), "bias": None}, S((64, 32), jnp.float32))
    got, want = (jax.eval_shape(SEEN[around](f), *avals) for f in (planned, loss))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)


def test_shapes_of_a_donated_state_consume_nothing() -> None:
    def step(state: Any, x: Any) -> Any:
        return jax.tree.map(lambda p, d: p - 0.1 * d, state, jax.grad(loss)(state, x))

    planned, state = jit(step, donate_argnums=0), params()
    assert jax.eval_shape(planned, state, X)["w"].shape == W.shape
    assert not state["w"].is_deleted()
    same(planned(state, X), step(params(), X))


# --- In loops, branches and one another -------------------------------------------------


def scanned(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda w, x: jax.lax.scan(lambda carry, _: (f(w, carry), jnp.sum(carry)), x, length=3)


def looped(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda w, x: jax.lax.fori_loop(0, 3, lambda _, y: f(w, y), x)


def branched(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda w, x: jax.lax.cond(x[0, 0] > 0, lambda: f(w, x), lambda: x)


def rematerialized(f: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(lambda w, x: jnp.sum(jax.checkpoint(f)(w, x)))


def curved(f: Callable[..., Any]) -> Callable[..., Any]:
    """A Hessian-vector product: forward over reverse."""
    return lambda w, x: jax.jvp(jax.grad(lambda w: jnp.sum(f(w, x) ** 2)), (w,), (w,))[1]


@pytest.mark.parametrize("around", [scanned, looped, branched, rematerialized, curved, jax.linearize])
def test_a_decorated_function_inside_others(around: Callable[..., Any]) -> None:
    w, x = jnp.asarray(W), jnp.asarray(X)
    if around is jax.linearize:
        got, want = (jax.linearize(partial(f, w), x)[1](x) for f in (jit(layer), layer))
    else:
        got, want = (jax.jit(around(f))(w, x) for f in (jit(layer), layer))
    same(got, want)


def test_a_decorated_function_inside_a_decorated_one() -> None:
    inner = jit(layer, pins={"w": P("data", "model")})
    outer = jit(lambda w, x: inner(w, inner(w, x)))
    same(outer(jnp.asarray(W), X), layer(W, layer(W, X)))


# --- Meshes ----------------------------------------------------------------------------

MESHES = {
    "one device": ((1,), ("data",)),
    "a size of 1": ((1, 4), ("data", "model")),
    "three axes": ((2, 2, 2), ("replica", "data", "model")),
}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", MESHES)
def test_the_mesh_that_is_set(name: str, kind: AxisType) -> None:
    sizes, names = MESHES[name]
    devices = np.asarray(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    mesh = Mesh(devices, names, axis_types=(kind,) * len(names))
    want = jax.value_and_grad(loss)(params(), X)
    with jax.set_mesh(mesh):
        f = autoshard.jit(jax.value_and_grad(loss))
        value, gradient = f(params(), X)
        within = jax.jit(jax.value_and_grad(autoshard.jit(loss)))(params(), X)
    same(jax.tree.map(np.asarray, (value, gradient)), jax.tree.map(np.asarray, want))
    same(jax.tree.map(np.asarray, within), jax.tree.map(np.asarray, want))
    assert isinstance(gradient["w"].sharding, NamedSharding)
    assert gradient["w"].sharding.mesh == mesh
