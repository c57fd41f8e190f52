"""`autoshard.jit` and `autoshard.plan` behave as `jax.jit` does, with the layouts of the plan."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

import autoshard
from autoshard import InfeasibleError, PlanMismatchError, SpecError
from autoshard.backends import devices as meshes
from tests.programs import GPUS, MESH

P = PartitionSpec
W = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)
X = np.random.default_rng(1).normal(size=(32, 16)).astype(np.float32)

jit = partial(autoshard.jit, mesh=MESH, hardware=GPUS)


def same(got: Any, want: Any) -> None:
    """The same pytree, dtypes and values, to the rounding of another order of sums."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert jnp.result_type(a) == jnp.result_type(b)
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=1e-6)


def loss(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def step(state: Any, x: Any) -> Any:
    value, gradient = jax.value_and_grad(loss)(state["w"], x)
    return {"w": state["w"] - 0.1 * gradient, "n": state["n"] + 1}, value


def new_state() -> dict[str, Any]:
    return {"w": jnp.asarray(W), "n": jnp.zeros((), jnp.int32)}


# --- The decorator, static and donated arguments -------------------------------------


def test_the_decorator_is_bare_or_takes_arguments() -> None:
    with jax.set_mesh(jax.make_mesh((2, 4), ("data", "model"))):

        @autoshard.jit
        def bare(w: Any, x: Any) -> Any:
            """Twice the product."""
            return 2 * (x @ w)

        same(bare(W, X), jnp.asarray(2 * (X @ W)))
    assert bare.__name__ == "bare"
    assert bare.__doc__ == "Twice the product."

    @autoshard.jit(mesh=MESH, hardware=GPUS)
    def given(w: Any, x: Any) -> Any:
        return 2 * (x @ w)

    same(given(W, x=X), jnp.asarray(2 * (X @ W)))


def test_static_arguments_select_another_plan() -> None:
    def power(x: Any, n: int, *, shift: bool) -> Any:
        return x**n + (1 if shift else 0)

    by_number = jit(power, static_argnums=1, static_argnames="shift")
    same(by_number(X, 2, shift=True), jnp.asarray(X**2 + 1))
    same(by_number(X, 3, shift=False), jnp.asarray(X**3))
    by_name = jit(power, static_argnames=("n", "shift"))
    same(by_name(X, n=2, shift=False), jnp.asarray(X**2))


@pytest.mark.parametrize("donate", [{"donate_argnums": 0}, {"donate_argnames": "state"}])
def test_a_donated_argument_is_consumed(donate: dict[str, Any]) -> None:
    stepping = jit(step, **donate)
    state, _ = stepping(new_state(), X)
    stepping(state, X)
    assert state["w"].is_deleted()


def test_state_goes_round_without_a_move(caplog: pytest.LogCaptureFixture) -> None:
    stepping = jit(step, donate_argnums=0, strict=True)
    state = new_state()
    with caplog.at_level(logging.INFO, "autoshard"):
        for _ in range(3):
            state, _ = stepping(state, X)
    assert [record.message.split(":")[0] for record in caplog.records] == ["planned step"]
    plan = stepping.plan(state, X)
    assert plan.out_specs[0] == plan.specs[0]


@pytest.mark.parametrize("spec", [P("data", "model"), P("model"), P(None, ("data", "model"))])
def test_state_goes_round_in_the_layout_that_is_asked_for(spec: PartitionSpec) -> None:
    stepping = jit(step, donate_argnums=0, strict=True, pins={"state.w": spec})
    state = stepping.plan(new_state(), X).put(new_state(), "state")
    for _ in range(2):
        state, _ = stepping(state, X)
        assert state["w"].sharding.spec == spec
    want = new_state()
    for _ in range(2):
        want, _ = step(want, X)
    same(state, want)


def test_a_donated_leaf_may_be_dropped() -> None:
    dropping = jit(lambda s, x: (s["w"] * 2, jnp.sum(x @ s["w"])), donate_argnums=0)
    state = {"w": jnp.asarray(W), "unused": jnp.ones((8, 8))}
    same(dropping(state, X), (jnp.asarray(2 * W), jnp.sum(X @ W)))
    assert (state["w"].is_deleted(), state["unused"].is_deleted()) == (True, False)  # as jax.jit


# --- Caching -------------------------------------------------------------------------


def test_new_shapes_are_planned_and_old_ones_are_not(caplog: pytest.LogCaptureFixture) -> None:
    traces: list[tuple[int, ...]] = []

    def product(w: Any, x: Any) -> Any:
        traces.append(x.shape)
        return x @ w

    f = jit(product)
    with caplog.at_level(logging.INFO, "autoshard"):
        for rows in (32, 16, 32, 16):
            f(W, X[:rows])
    assert sum("planned" in record.message for record in caplog.records) == 2
    count = len(traces)
    f(W, X)
    assert len(traces) == count


def test_plan_of_a_jitted_function_is_the_plan_that_runs() -> None:
    f = jit(loss)
    abstract = jax.ShapeDtypeStruct(W.shape, W.dtype), jax.ShapeDtypeStruct(X.shape, X.dtype)
    plan = f.plan(*abstract)
    assert f.plan(W, X) is plan
    assert "sdy.sharding" in f.lower(*abstract).as_text()


# --- Pytrees, dtypes and odd leaves ----------------------------------------------------


@partial(jax.tree_util.register_dataclass, data_fields=["w", "bias"], meta_fields=["name"])
@dataclass
class Model:
    w: Any
    bias: Any
    name: str


class Pair(NamedTuple):
    left: Any
    right: Any


@jax.tree_util.register_pytree_node_class
class Box:
    """A registered type without key paths."""

    def __init__(self, inside: Any) -> None:
        self.inside = inside

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        return (self.inside,), None

    @classmethod
    def tree_unflatten(cls, aux: None, children: tuple[Any]) -> "Box":
        return cls(*children)


def same_value_twice(w: Any, x: Any) -> Any:
    y = x @ w
    return y, y, {"again": y}


def split_keys(key: Any, x: Any) -> Any:
    first, second = jax.random.split(key)
    return x * jax.random.bernoulli(first, 0.5, x.shape), jax.random.key_data(second)


ODD: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "dataclass": (lambda m, x: Model(m.w * 2, x @ m.w + m.bias, m.name), (Model(W, np.float32(1), "m"), X)),
    "named tuple": (lambda p: Pair(p.right @ p.left, p.right), (Pair(W, X),)),
    "custom node": (lambda b, x: Box(x @ b.inside), (Box(W), X)),
    "None leaf": (lambda s, x: {"w": x @ s["w"], "n": s["n"]}, ({"w": W, "n": None}, X)),
    "no output": (lambda w: None, (W,)),
    "no input": (lambda: jnp.ones((8, 8)), ()),
    "input returned": (lambda w, x: (w, x, w @ x, w), (W, X)),
    "same value twice": (same_value_twice, (W, X)),
    "unused input": (lambda w, x, unused: x @ w, (W, X, W)),
    "Python scalars": (lambda a, b: a * b + 1, (2.0, 3)),
    "weak type": (lambda w, s: w.astype(jnp.bfloat16) * s, (W, 2.0)),
    "scalar output": (lambda w, x: jnp.sum(x @ w), (W, X)),
    "empty array": (lambda w, z: (jnp.concatenate([z, w]), z * 2, z.sum()), (W, np.zeros((0, 32), np.float32))),
    "integers": (lambda w, i: (w[i] * 2, i + 1), (W, np.arange(16, dtype=np.int32))),
    "booleans": (lambda w, m: (jnp.where(m, w, 0).sum(), ~m), (W, W > 0)),
    "typed key": (split_keys, (jax.random.key(3), X)),
    "array of typed keys": (jax.vmap(lambda k: jax.random.uniform(k, (4,))), (jax.random.split(jax.random.key(0), 8),)),
    "raw key": (lambda key, x: jax.random.normal(key, x.shape) + x, (jax.random.PRNGKey(3), X)),
    "closed-over array": (lambda x: jnp.tanh(x @ W) @ jnp.asarray(W).T, (X,)),
    "constant output": (lambda x: (x * 2, jnp.arange(8.0), 3), (X,)),
    "prime sizes": (lambda a, b: a @ b, (W[:13, :7], W[:7, :11])),
    "complex": (lambda x: jnp.fft.fft(x.astype(jnp.complex64)), (X,)),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_programs_run_as_under_jax_jit(name: str) -> None:
    fn, args = ODD[name]
    got, want = jit(fn)(*args), jax.jit(fn)(*args)
    same(got, want)
    assert [x.weak_type for x in jax.tree.leaves(got)] == [x.weak_type for x in jax.tree.leaves(want)]


def test_a_typed_key_is_state_like_any_other() -> None:
    def drop(state: Any, x: Any) -> Any:
        key, sub = jax.random.split(state["key"])
        return {"key": key}, jax.random.bernoulli(sub, 0.5, x.shape) * x

    f = jit(drop, donate_argnums=0, strict=True)
    state, want = {"key": jax.random.key(0)}, {"key": jax.random.key(0)}
    for _ in range(2):
        state, out = f(state, X)
        want, out_want = drop(want, X)
        same(out, out_want)


# --- Other transformations around it ---------------------------------------------------


def remat(w: Any, x: Any) -> Any:
    h = jax.checkpoint(lambda w, x: jax.nn.relu(x @ w) @ w.T)(w, x)
    return jnp.mean(jax.nn.silu(h) ** 2)


@jax.custom_vjp
def gram(x: Any) -> Any:
    return jnp.sin(x @ x.T)


gram.defvjp(lambda x: (gram(x), x), lambda x, g: (2 * (g * jnp.cos(x @ x.T)) @ x,))

LOSSES: dict[str, Callable[..., Any]] = {
    "plain": loss,
    "remat and custom_jvp": remat,
    "custom_vjp": lambda w, x: jnp.mean(gram(0.1 * x @ w)),
    "inner jit": jax.jit(loss),
    "pins inside": lambda w, x: jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w.T) ** 2),
}
TRANSFORMED: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "jit": jax.jit,
    "grad": jax.grad,
    "jit of value_and_grad": lambda f: jax.jit(jax.value_and_grad(f, argnums=(0, 1))),
    "vmap": lambda f: jax.vmap(lambda w, x: f(w, jnp.stack([x, 2 * x])[1]), (None, 0)),
    "jvp": lambda f: lambda w, x: jax.jvp(lambda w: f(w, X), (w,), (w,)),
}


PAIRS = [(p, a) for p in LOSSES for a in TRANSFORMED if (p, a) != ("custom_vjp", "jvp")]  # JAX has no such derivative


@pytest.mark.parametrize(("program", "around"), PAIRS)
def test_transformations_see_through(program: str, around: str) -> None:
    fn, transform = LOSSES[program], TRANSFORMED[around]
    x = np.stack([X, X + 1]) if around == "vmap" else X
    pins = {"w": P("data", "model")}
    same(transform(jit(fn, pins=pins))(jnp.asarray(W), jnp.asarray(x)), transform(fn)(jnp.asarray(W), jnp.asarray(x)))


def test_gradients_of_a_planned_loss_come_out_in_the_layout_of_its_parameters() -> None:
    f = jit(loss, pins={"w": P("data", "model")})
    plan = f.plan(W, X)
    gradient = jax.jit(jax.grad(f))(plan.put(jnp.asarray(W), "w"), X)
    assert gradient.sharding.spec == P("data", "model")


# --- Meshes ----------------------------------------------------------------------------


@pytest.mark.parametrize("data", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize("model", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize("how", ["argument", "context"])
def test_outputs_come_back_on_the_callers_mesh(data: AxisType, model: AxisType, how: str) -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(data, model))
    options: dict[str, Any] = {"hardware": GPUS, "donate_argnums": 0, "pins": {"state.w": P("data", "model")}}
    want, want_loss = step(step(new_state(), X)[0], X)
    if how == "argument":
        stepping = autoshard.jit(step, mesh=mesh, **options)
        state, value = stepping(*stepping(new_state(), X)[:1], X)
    else:
        with jax.set_mesh(mesh):
            stepping = autoshard.jit(step, **options)
            state, value = stepping(*stepping(new_state(), X)[:1], X)
    assert state["w"].sharding == NamedSharding(mesh, P("data", "model"))
    said = (axis if kind is AxisType.Explicit else None for axis, kind in (("data", data), ("model", model)))
    assert jax.typeof(state["w"]).sharding.spec == P(*said)
    same((state, value), (want, want_loss))


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, lambda f: jax.jit(jax.grad(f))])
def test_explicit_meshes_inside_transformations(transform: Callable[..., Any]) -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    with jax.set_mesh(mesh):
        f = autoshard.jit(loss, hardware=GPUS)
        for x in (jnp.asarray(X), jax.device_put(X, NamedSharding(mesh, P("data", "model")))):
            same(np.asarray(transform(f)(W, x)), np.asarray(transform(loss)(W, X)))


@pytest.mark.parametrize("sizes", [(1, 1), (1, 8), (8, 1), (2, 2, 2), (1, 2, 1, 4)])
def test_meshes_of_every_rank(sizes: tuple[int, ...]) -> None:
    mesh = jax.make_mesh(sizes, tuple("abcd")[: len(sizes)], axis_types=(AxisType.Auto,) * len(sizes))
    f = autoshard.jit(jax.value_and_grad(loss), mesh=mesh, rel_gap=1e-2)
    same(f(W, X), jax.value_and_grad(loss)(W, X))


def test_a_mesh_over_other_devices_than_the_first() -> None:
    devices = np.asarray(jax.devices()[4:])[::-1].reshape(2, 2)
    f = autoshard.jit(loss, mesh=Mesh(devices, ("a", "b")))
    out = f(W, X)
    assert out.sharding.device_set == set(devices.ravel())
    same(out, loss(W, X))


def test_without_a_mesh_the_best_of_all_meshes_is_taken() -> None:
    plan = autoshard.plan(loss, W, X)
    assert plan.record.mesh.size == 8
    assert plan.record.hardware == "cpu:8"
    by_hand = [autoshard.plan(loss, W, X, mesh=shape) for shape in ({"data": 8}, {"data": 2, "model": 4})]
    assert plan.record.cost.step_s <= min(p.record.cost.step_s for p in by_hand)


def test_of_several_meshes_the_best_that_fits_is_taken() -> None:
    """Four rows do not go into eight devices: there the operands are whole, and do not fit."""
    small: dict[str, Any] = {"hardware": GPUS, "memory": 600}
    rows = jax.ShapeDtypeStruct((4, 36), jnp.float32)
    shapes = [{"data": 8}, {"data": 4, "model": 2}]
    with pytest.raises(InfeasibleError):
        autoshard.plan(jnp.sin, rows, mesh=shapes[0], **small)
    assert autoshard.plan(jnp.sin, rows, mesh=shapes, **small).record.mesh.shape == shapes[1]
    with pytest.raises(InfeasibleError, match="600"):
        autoshard.plan(jnp.sin, rows, mesh=shapes[:1] * 2, **small)
    found = autoshard.plan(step, new_state(), X, hardware="h100:1x4")
    assert "other meshes" in found.summary()
    assert sum(found.seconds.values()) > 0
    by_hand = [autoshard.plan(step, new_state(), X, mesh=shape, hardware="h100:1x4") for shape in meshes.candidates(4)]
    assert not any("other meshes" in plan.summary() for plan in by_hand)
    assert found.cost <= meshes.ALIKE * min(one.cost for one in by_hand)


def test_of_meshes_as_good_as_each_other_one_with_fewer_axes_is_taken() -> None:
    steps = {("a", 2): 1.0, ("b", 1): 1.0005, ("c", 1): 1.0004, ("d", 2): 1.5, ("e", 1): 2.0}
    order = sorted(steps, key=lambda name: meshes.order(steps[name], name[1], min(steps.values())))
    assert [name for name, _ in order] == ["c", "b", "a", "d", "e"]
    shapes = [{"data": 2, "model": 4}, {"data": 8}]  # nothing to gain by either
    assert autoshard.plan(jnp.sin, X, mesh=shapes, hardware=GPUS).record.mesh.shape == shapes[1]


def test_planning_needs_no_devices() -> None:
    mesh = AbstractMesh((4, 8), ("data", "model"))
    plan = autoshard.plan(loss, W, X, mesh=mesh, hardware="h100:4x8")
    assert plan.record.mesh.size == 32
    with pytest.raises(autoshard.MeshError, match="needs 32 devices; this process sees 8"):
        plan.mesh()


# --- Arguments in other shardings ------------------------------------------------------


def test_arguments_in_another_sharding_are_placed_with_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    f = jit(loss, pins={"w": P("data"), "x": P()})
    mesh = f.plan(W, X).mesh()
    w = jax.device_put(W, NamedSharding(mesh, P(None, "model")))
    with caplog.at_level(logging.INFO, "autoshard"):
        same(f(w, X), loss(W, X))
    (record,) = [r for r in caplog.records if "another sharding" in r.message]
    assert "w: P" in record.message.replace("PartitionSpec", "P")
    with pytest.raises(PlanMismatchError, match=r"1 arguments .* arrive in another sharding: w: .*plan.put"):
        jit(loss, pins={"w": P("data"), "x": P()}, strict=True)(w, X)


def test_init_and_put_give_what_the_plan_wants() -> None:
    stepping = jit(step, donate_argnums=0, strict=True, pins={"**.w": P("data", "model")})
    plan = stepping.plan(jax.eval_shape(new_state), X)
    born, put = plan.init(new_state, arg="state"), plan.put(new_state(), "state")
    assert born["w"].sharding == put["w"].sharding == plan.in_shardings()[0]["w"]
    assert born["w"].addressable_shards[0].data.shape == (8, 8)
    stepping(born, X)
    with pytest.raises(SpecError, match="no argument named 'params'; there are: state, x"):
        plan.put(new_state(), "params")
    with pytest.raises(PlanMismatchError, match="1 leaves given; the plan's 'state' has 2"):
        plan.put({"w": W}, "state")


def test_shardings_may_be_asked_for_as_in_jax_jit() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    plan = autoshard.plan(
        loss,
        W,
        X,
        mesh=mesh,
        hardware=GPUS,
        in_shardings=(NamedSharding(mesh, P("model")), autoshard.AUTO),
        out_shardings=P(),
        for_grad=False,
    )
    assert plan.specs[0] == P("model")
    free = autoshard.plan(
        loss, W, X, mesh=mesh, hardware=GPUS, in_shardings=(P(P.UNCONSTRAINED, "data"), P()), for_grad=False
    )
    assert free.specs[0][1] == "data"
    assert free.specs[1] == P()


def test_a_users_constraint_is_kept() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def constrained(w: Any, x: Any) -> Any:
        y = jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P("model", "data")))
        total = jax.lax.with_sharding_constraint(jnp.sum(y), NamedSharding(mesh, P()))
        return y * 2, total

    f = autoshard.jit(constrained, mesh=mesh, hardware=GPUS)
    large = jax.ShapeDtypeStruct((2048, 2048), jnp.float32)  # whose layout matters more than one collective
    assert f.plan(large, large).out_specs[0] == P("model", "data")
    same(f(W, X), constrained(W, X))


# --- Plans for gradients ---------------------------------------------------------------


def test_a_forward_function_is_planned_for_the_gradient_that_is_asked_for() -> None:
    def wide(w: Any, x: Any) -> Any:
        return jnp.mean((x @ w) ** 2)

    w, x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32), jax.ShapeDtypeStruct((65536, 1024), jnp.float32)
    price = partial(autoshard.plan, wide, w, x, mesh=MESH, hardware=GPUS)
    forward, both = price().record, price(for_grad=True).record
    assert price(for_grad=False).record == forward
    assert both.cost.compute_s > 1.5 * forward.cost.compute_s
    assert price(for_grad=0).record.digest == both.digest
    assert price(for_grad=(0, 1)).record.cost.compute_s > both.cost.compute_s
    with pytest.raises(SpecError, match="for_grad=5"):
        price(for_grad=5)
