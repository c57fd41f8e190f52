"""What a user says of layouts is kept or refused: meshes and memories of NamedShardings, inner calls, keywords."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.errors import SpecError

AXES = ("data", "model")
Space = jax.memory.Space
SHAPE, GPUS = {"data": 2, "model": 4}, "h100:1x8"
X = np.linspace(-1.0, 1.0, 64, dtype=np.float32).reshape(8, 8)


def mesh(*shape: int, devices: Any = None, kind: AxisType = AxisType.Auto) -> Mesh:
    found = np.array(jax.devices() if devices is None else devices)[: int(np.prod(shape))]
    return Mesh(found.reshape(shape), AXES, axis_types=(kind, kind))


def backwards() -> Mesh:
    return mesh(2, 4, devices=jax.devices()[::-1])


def product(x: Any) -> Any:
    return jnp.tanh(x @ x)


def planned(fn: Callable[..., Any] = product, *args: Any, **options: Any) -> autoshard.SolvedPlan:
    return autoshard.plan(fn, *(args or (X,)), hardware=GPUS, for_grad=False, **options)


# --- The mesh of a sharding ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("given", [{}, {"mesh": SHAPE}, {"mesh": AbstractMesh((2, 4), AXES)}])
def test_a_shardings_own_mesh_is_the_plans(given: Any, kind: AxisType) -> None:
    """Its devices in their order; results lie where `jax.jit` would put them."""
    own = mesh(2, 4, devices=jax.devices()[::-1], kind=kind)
    wish = NamedSharding(own, P("data"))
    plan = planned(out_shardings=wish, **given)
    want = jax.jit(product, out_shardings=NamedSharding(backwards(), P("data")))(X)
    got = plan.jit()(X)
    assert got.sharding.is_equivalent_to(want.sharding, 2)
    assert {s.device: s.index for s in got.addressable_shards} == {s.device: s.index for s in want.addressable_shards}


@pytest.mark.parametrize("options", [{"in_shardings": 0}, {"out_shardings": 0}, {"in_shardings": (0,)}])
@pytest.mark.parametrize(
    ("given", "own"),
    [
        (SHAPE, lambda: mesh(4, 2)),
        (SHAPE, lambda: mesh(2, 2, devices=jax.devices()[4:])),
        (lambda: mesh(2, 4), backwards),
        (SHAPE, lambda: AbstractMesh((4, 2), AXES)),
    ],
)
def test_another_mesh_than_the_plans_is_refused(given: Any, own: Any, options: dict[str, Any]) -> None:
    wish = NamedSharding(own(), P("data"))
    shardings: dict[str, Any] = {k: (wish,) if isinstance(v, tuple) else wish for k, v in options.items()}
    with pytest.raises(SpecError, match="over the mesh data="):
        planned(mesh=given() if callable(given) else given, **shardings)


def test_two_meshes_are_refused() -> None:
    with pytest.raises(SpecError, match="over several meshes"):
        planned(in_shardings=NamedSharding(mesh(2, 4), P("data")), out_shardings=NamedSharding(mesh(4, 2), P("data")))


def constrained(own: Mesh) -> Callable[[Any], Any]:
    return lambda x: product(lax.with_sharding_constraint(x * 2, NamedSharding(own, P("data"))))


def put(own: Mesh) -> Callable[[Any], Any]:
    return lambda x: product(jax.device_put(x * 2, NamedSharding(own, P("data"))))


def inner(own: Mesh) -> Callable[[Any], Any]:
    return lambda x: jax.jit(product, in_shardings=NamedSharding(own, P("data")))(x * 2)


@pytest.mark.parametrize("within", [constrained, put, inner])
def test_inside_of_the_program_another_mesh_is_refused_at_its_line(within: Any) -> None:
    for own in (mesh(4, 2), backwards()):
        with pytest.raises(SpecError, match=r"test_wishes\.py:\d+ .*over the mesh data="):
            planned(within(own), mesh=SHAPE)
    assert planned(within(mesh(4, 2))).record.mesh.shape == {"data": 4, "model": 2}  # where none is given, it is that
    plan = planned(within(backwards()), mesh=backwards())
    np.testing.assert_allclose(plan.jit()(X), product(2 * X), rtol=1e-5, atol=1e-6)


# --- Memories -------------------------------------------------------------------------------------


def test_memory_of_the_host_is_refused() -> None:
    pinned = NamedSharding(mesh(2, 4), P("data"), memory_kind="pinned_host")
    refused: dict[str, Callable[[], Any]] = {
        "in_shardings": lambda: planned(in_shardings=pinned),
        "out_shardings": lambda: planned(out_shardings=pinned),
        "x lies in memory": lambda: planned(product, jax.device_put(X, pinned), mesh=SHAPE),
        "the result": lambda: planned(lambda x: jax.device_put(product(x), Space.Host), mesh=SHAPE),
        "with_sharding_constraint": lambda: planned(lambda x: lax.with_sharding_constraint(x * 2, pinned), mesh=SHAPE),
        "device_put": lambda: planned(lambda x: jax.device_put(x * 2, pinned) * 2, mesh=SHAPE),
        "device_put at": lambda: planned(lambda x: jax.device_put(x * 2, jax.devices()[1]), mesh=SHAPE),
    }
    for words, plan in refused.items():
        with pytest.raises(SpecError, match=words):
            plan()


def test_the_devices_own_memory_is_no_wish() -> None:
    own = NamedSharding(mesh(2, 4), P("data"), memory_kind="device")
    assert planned(out_shardings=own).out_specs == P("data")


def test_what_comes_back_from_the_host_is_planned() -> None:
    def program(x: Any) -> Any:
        return jax.device_put(jax.device_put(product(x), Space.Host), Space.Device) * 2

    assert planned(program, mesh=SHAPE).record.cost.step_s > 0


# --- Inner calls -----------------------------------------------------------------------------------


def nested(own: Mesh) -> Callable[[Any], Any]:
    given = NamedSharding(own, P(None, "model")), NamedSharding(own, P("model"))
    called = jax.jit(product, in_shardings=given[0], out_shardings=given[1])

    def program(x: Any) -> Any:
        return lax.scan(lambda c, _: (called(called(c) * 2) + 1, None), x * 2, length=2)[0]

    return program


@pytest.mark.parametrize("constraints", ["needed", "all"])
def test_shardings_of_inner_calls_are_kept(constraints: Any) -> None:
    def program(x: Any) -> Any:
        return jax.jit(product, in_shardings=given[0], out_shardings=given[1])(x)

    given = NamedSharding(mesh(2, 4), P(None, "data")), NamedSharding(mesh(2, 4), P("model"))
    plan = planned(program, mesh=SHAPE, constraints=constraints)
    assert plan.specs == (P(None, "data"),)
    assert plan.out_specs == P("model")
    assert plan.jit()(X).sharding.is_equivalent_to(given[1], 2)


def test_shardings_of_calls_within_loops_are_constraints_of_the_plan() -> None:
    own = mesh(2, 4)
    plan = planned(nested(own), mesh=own, constraints="all")
    free = planned(nested_freely, mesh=own, constraints="all")
    np.testing.assert_allclose(plan.jit()(X), jax.jit(nested(own))(X), rtol=1e-4, atol=1e-6)
    assert plan.cost > free.cost
    gradient = autoshard.plan(lambda x: nested(own)(x).sum(), X, mesh=own, hardware=GPUS, for_grad=True)
    assert gradient.cost > plan.cost


def nested_freely(x: Any) -> Any:
    return lax.scan(lambda c, _: (product(product(c) * 2) + 1, None), x * 2, length=2)[0]


# --- Keywords --------------------------------------------------------------------------------------


def test_in_shardings_go_by_position_alone() -> None:
    def both(x: Any, y: Any) -> Any:
        return x @ y

    shardings = P("data"), P(None, "data")
    options: dict[str, Any] = {"mesh": SHAPE, "hardware": GPUS, "for_grad": False}
    for given in ({"y": X, "x": X}, {"x": X, "y": X}):
        with pytest.raises(SpecError, match="in_shardings go by position"):
            autoshard.plan(both, **given, in_shardings=shardings, **options)
    assert autoshard.plan(both, X, X, in_shardings=shardings, **options).specs == shardings
    pinned = autoshard.plan(both, y=X, x=X, pins={"x": P("data"), "y": P(None, "data")}, **options)
    assert {leaf.path: leaf.spec for leaf in pinned.record.inputs} == {"x": shardings[0], "y": shardings[1]}
    assert autoshard.plan(both, X, y=X, in_shardings=P("data"), **options).specs == (P("data"), P("data"))


@pytest.mark.parametrize(
    ("spec", "reason"),
    [(P("missing"), "missing"), (P("data", "data"), "duplicate"), (P("data", None, None), "rank at least 3")],
)
def test_a_layout_that_does_not_exist_is_refused_where_it_is_asked_for(spec: P, reason: str) -> None:
    def inner(x: Any) -> Any:
        return lax.with_sharding_constraint(x, spec)

    inside: dict[str, Callable[..., Any]] = {
        "call": inner,
        "jit": jax.jit(inner),
        "scan": lambda x: lax.scan(lambda c, _: (inner(c), None), x, None, length=2)[0],
        "grad": jax.grad(lambda x: jax.jit(inner)(x).sum()),
    }
    for fn in inside.values():
        with pytest.raises(
            SpecError, match=rf"(?s)test_wishes.py:{inner.__code__.co_firstlineno + 1} .*{reason}.*mesh="
        ):
            planned(fn, mesh=SHAPE)
