"""Decorated functions where JAX's users put them: under tracing, in loops, in one another, on any mesh."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

import autoshard
from autoshard import SpecError
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


# --- What closes over what is being traced ---------------------------------------------

Around = Callable[[Callable[..., Any]], Any]


def in_scan(j: Any) -> Any:
    return jax.lax.scan(lambda c, x: (c, j(lambda a: a @ c)(x)), jnp.asarray(W), jnp.asarray(X))


CLOSURES: dict[str, Around] = {
    "jit": lambda j: jax.jit(lambda w, x: j(lambda a: a @ w)(x))(W, X),
    "concrete arguments": lambda j: jax.jit(lambda w: j(lambda a: a @ w)(X))(W),
    "no arguments": lambda j: jax.jit(lambda w: j(lambda: w * 2)())(W),
    "grad": lambda j: jax.grad(lambda w: jnp.sum(j(lambda a: jnp.sin(a @ w))(X)))(W),
    "jit of grad": lambda j: jax.jit(jax.grad(lambda w: j(lambda a: jnp.sum(a @ w))(X)))(W),
    "vmap": lambda j: jax.vmap(lambda w, x: j(lambda a: a @ w)(x), (None, 0))(W, X),
    "vmap of closures": lambda j: jax.vmap(lambda w: j(lambda a: a @ w)(X))(jnp.stack([W, 2 * W])),
    "jvp": lambda j: jax.jvp(lambda w: j(lambda a: jnp.sin(a @ w))(X), (W,), (W,)),
    "scan": in_scan,
    "cond": lambda j: jax.jit(lambda w: jax.lax.cond(w[0, 0] > 9, lambda: X, lambda: j(lambda a: a @ w)(X)))(W),
    "remat": lambda j: jax.grad(lambda w: jnp.sum(jax.checkpoint(lambda w: j(lambda a: jnp.sin(a @ w))(X))(w)))(W),
    "nested": lambda j: jax.jit(lambda w, x: j(lambda a: j(lambda b: b @ w + a)(a))(x))(W, X),
    "key": lambda j: jax.jit(lambda k: j(lambda a: a + jax.random.normal(k, a.shape))(X))(jax.random.key(0)),
}


@pytest.mark.parametrize("name", CLOSURES)
def test_what_closes_over_tracers_takes_them_as_inputs(name: str) -> None:
    small = partial(autoshard.jit, mesh={"a": 2}, hardware="cpu:2")
    same(CLOSURES[name](small), CLOSURES[name](jax.jit))


def test_a_closed_over_tracer_does_not_outlive_its_trace() -> None:
    held: dict[str, Any] = {}
    f = jit(lambda a: a @ held["w"])

    def outer(w: Any, x: Any) -> Any:
        held["w"] = w
        return f(x)

    for around in (jax.jit(outer), jax.jit(lambda w, x: outer(w, x) + 1), jax.jit(outer)):
        same(around(W, X), X @ W + (1 if around is not jax.jit and "lambda" in str(around) else 0))
    held["w"] = W
    same(f(X), X @ W)
    assert not any(entry.captures for entry in f._entries.values())


# --- Methods -----------------------------------------------------------------------------


class Scaler:
    def __init__(self, by: float) -> None:
        self.by = by

    @partial(jit, static_argnums=0)
    def scaled(self, x: Any, *, plus: Any = 0.0) -> Any:
        return x * self.by + plus

    @jit
    def bare(self, x: Any) -> Any:
        return x


def test_methods_are_bound() -> None:
    two, three = Scaler(2.0), Scaler(3.0)
    for scaler in (two, three, two):
        same(scaler.scaled(X), scaler.by * X)
        same(scaler.scaled(X, plus=X), (scaler.by + 1) * X)
        same(Scaler.scaled(scaler, X), scaler.by * X)
        same(Scaler.scaled.lower(scaler, X).compile()(X), scaler.by * X)
    with pytest.raises(
        autoshard.AutoshardError, match=r"bare: the argument self is no array: .*static_argnames='self'"
    ):
        two.bare(X)


# --- Where every device runs its own, and arrays that lie elsewhere ----------------------


def test_inside_shard_map_there_is_nothing_to_split() -> None:
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))

    def total(j: Any) -> Any:
        inner = j(lambda x: x * 2 + jax.lax.psum(x, "d"))
        return jax.jit(jax.shard_map(inner, mesh=mesh, in_specs=P("d"), out_specs=P("d")))(X)

    same(total(jit), total(jax.jit))
    with jax.set_mesh(jax.make_mesh((8,), ("e",))):
        inner = autoshard.jit(lambda x: x * 2)
        same(jax.shard_map(inner, in_specs=P("e"), out_specs=P("e"))(jax.device_put(X, P("e"))), 2 * X)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pmap goes
        same(jax.pmap(jit(lambda x: x * 2))(X), 2 * X)


@pytest.mark.parametrize("devices", [4, 8])
def test_a_shard_map_says_which_mesh_where_none_is_given(devices: int) -> None:
    own = Mesh(np.asarray(jax.devices()[8 - devices :]), ("d",))
    summed = jax.shard_map(lambda x: jax.lax.psum(x, "d"), mesh=own, in_specs=P("d"), out_specs=P())

    def f(x: Any) -> Any:
        return summed(x) * 2

    planned = autoshard.jit(f, for_grad=False)
    same(planned(X), jax.jit(f)(X))
    assert planned.plan(X).mesh().devices.ravel().tolist() == jax.devices()[8 - devices :]
    with pytest.raises(
        SpecError, match=rf"f: a `shard_map` in it is over the mesh d={devices}, the plan over a=2: plan"
    ):
        autoshard.plan(f, X, mesh={"a": 2}, hardware="cpu:2")


def test_arguments_on_one_device_are_differentiated_on_the_mesh() -> None:
    x = jax.device_put(X, jax.devices()[3])
    f = jit(lambda x: jnp.sum(jnp.sin(x)))
    gradient = jax.grad(f)(x)
    same(gradient, np.cos(X))
    assert gradient.sharding == x.sharding  # as under jax.jit: where the argument lies
    same(jax.vmap(jit(jnp.sin))(x), np.sin(X))
    same(jax.grad(lambda x: jnp.sum(jax.vmap(jit(lambda v: jnp.sum(v**2)))(x)))(x), 2 * X)


def test_under_grad_alone_the_program_is_compiled_as_one(caplog: pytest.LogCaptureFixture) -> None:
    def twice(w: Any) -> Any:
        return jnp.sum(jnp.tanh(jnp.tanh(w) @ w))

    f = jit(twice)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        gradient = jax.grad(f)(jnp.asarray(W))
        compiled = " ".join(r.getMessage() for r in caplog.records if r.getMessage().startswith("Compiling"))
        assert "twice" in compiled
        assert "tanh" not in compiled
        assert "dot_general" not in compiled
        caplog.clear()
        again = jax.grad(f)(jnp.asarray(W))
        assert not [r for r in caplog.records if r.getMessage().startswith("Compiling")]
    same(again, gradient)
    same(gradient, jax.grad(twice)(jnp.asarray(W)))


def test_closing_over_an_array_with_explicit_axes_says_the_way_out() -> None:
    explicit = jax.make_mesh((8,), ("e",))
    with jax.set_mesh(explicit):
        w = jax.device_put(jnp.ones((16, 16)), NamedSharding(explicit, P("e")))
        with pytest.raises(
            SpecError, match=r"<lambda> closes over float32\[16@e,16\] on a mesh with Explicit axes \('e': 8\)"
        ):
            autoshard.jit(lambda x: x @ w)(X)


@pytest.mark.parametrize("how", ["argument", "closure"])
def test_mutable_references_are_refused(how: str) -> None:
    ref = jax.new_ref(jnp.asarray(X))
    f, args = ((lambda r: r[...] * 2), (ref,)) if how == "argument" else ((lambda x: ref[...] + x), (X,))
    with pytest.raises(SpecError, match=r"mutable \(jax.new_ref\).*pass the array, ref"):
        jit(f)(*args)


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
