"""Programs that say the same in other words cost the same and get the same layouts.

The objective must agree to 1e-9. Layouts may differ where plans tie, so the layouts of
one way of writing are pinned onto the other and must cost no more there.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

import autoshard
from autoshard.planner import pipeline
from autoshard.solver.tuning import EngineTuning, SolverTuning
from tests.programs import GPUS, TPUS

P = PartitionSpec
S = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
D, F, B = 4096, 8192, 8192  # wide enough that plans are not replication

HARDWARE = (GPUS, TPUS)
MESH = {"data": 2, "model": 4}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proofs to the end, however busy the machine."""
    patient = SolverTuning(engines=EngineTuning(patience_s=120.0))
    monkeypatch.setattr(pipeline, "solve", partial(pipeline.solve, tuning=patient))


def plan(
    fn: Callable[..., Any], *args: Any, mesh: dict[str, int] | None = None, hardware: str, **options: Any
) -> autoshard.SolvedPlan:
    on = MESH if mesh is None else mesh
    made = autoshard.plan(fn, *args, mesh=on, hardware=hardware, rel_gap=0.0, time_limit_s=120.0, **options)
    assert made.record.certificate.status == "optimal"
    return made


@cache
def base(hardware: str, layers: int) -> autoshard.SolvedPlan:
    """The plan of a stack of perceptrons, as it stands."""
    return plan(sgd(mlp_loss), ONE[0] * layers, ONE[1], hardware=hardware, donate_argnums=0)


def cost(made: autoshard.SolvedPlan) -> float:
    return made.record.certificate.objective_s


def specs_by_path(made: autoshard.SolvedPlan) -> dict[str, PartitionSpec]:
    return {leaf.path: leaf.spec for leaf in made.record.inputs}


def check_equivariant(
    one: autoshard.SolvedPlan,
    other: autoshard.SolvedPlan,
    mapped: dict[str, PartitionSpec],
    replan: Callable[..., autoshard.SolvedPlan],
) -> None:
    """`mapped`: the layouts of `one`, in the words of `other`."""
    assert cost(other) == pytest.approx(cost(one), rel=1e-9)
    if specs_by_path(other) != mapped:
        pinned = replan(pins=mapped)
        assert cost(pinned) == pytest.approx(cost(one), rel=1e-9)
    assert any(spec != P() for spec in mapped.values())


def sgd(loss: Callable[..., Any]) -> Callable[..., Any]:
    def step(params: Any, x: Any) -> Any:
        gradients = jax.grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - (1e-3 * g).astype(p.dtype), params, gradients)

    return step


def mlp_loss(params: Any, x: Any) -> Any:
    for layer in params:
        x = x + jax.nn.relu(x @ layer["up"]) @ layer["down"]
    return jnp.mean(jnp.square(x.astype(jnp.float32)))


ONE = ([{"up": S((D, F)), "down": S((F, D))}], S((B, D)))
MLP = (ONE[0] * 2, ONE[1])


@pytest.mark.parametrize("hardware", [x for x in HARDWARE if x.startswith("tpu")])  # XLA:GPU transposes what it moves
def test_transposing_stored_weights(hardware: str) -> None:
    def transposed_loss(params: Any, x: Any) -> Any:
        for layer in params:
            hidden = jax.nn.relu(jax.lax.dot_general(x, layer["up"], (((1,), (1,)), ((), ()))))
            x = x + jax.lax.dot_general(hidden, layer["down"], (((1,), (1,)), ((), ())))
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    args = ([{"up": S((F, D)), "down": S((D, F))}], ONE[1])
    price = partial(plan, sgd(transposed_loss), *args, hardware=hardware, donate_argnums=0)
    one = base(hardware, 1)
    mapped = {
        path: P(*reversed((*spec, None, None)[:2])) if path.startswith("params") else spec
        for path, spec in specs_by_path(one).items()
    }
    mapped = {path: P(*_trimmed(tuple(spec))) for path, spec in mapped.items()}
    check_equivariant(one, price(), mapped, price)


def _trimmed(spec: Sequence[Any]) -> tuple[Any, ...]:
    entries = list(spec)
    while entries and entries[-1] is None:
        entries.pop()
    return tuple(entries)


@pytest.mark.parametrize("hardware", HARDWARE)
def test_renaming_and_permuting_leaves(hardware: str) -> None:
    def renamed_loss(x: Any, weights: Any) -> Any:
        return mlp_loss([{"up": weights[f"z{i}"], "down": weights[f"a{i}"]} for i in (0, 1)], x)

    def renamed_step(x: Any, weights: Any) -> Any:
        gradients = jax.grad(renamed_loss, argnums=1)(x, weights)
        return jax.tree.map(lambda p, g: p - (1e-3 * g).astype(p.dtype), weights, gradients)

    weights = {"a0": S((F, D)), "a1": S((F, D)), "z0": S((D, F)), "z1": S((D, F))}
    price = partial(plan, renamed_step, MLP[1], weights, hardware=hardware, donate_argnums=1)
    one = base(hardware, 2)
    names = {"up": "z", "down": "a"}
    mapped = {"x": specs_by_path(one)["x"]} | {
        f"weights['{new}{i}']": specs_by_path(one)[f"params[{i}]['{old}']"]
        for old, new in names.items()
        for i in (0, 1)
    }
    check_equivariant(one, price(), mapped, price)


def branches(params: Any, x: Any, order: Sequence[str]) -> Any:
    """Three branches that do not depend on each other, written in any order."""
    out = {name: jnp.tanh(x @ params[name]["up"]) @ params[name]["down"] for name in order}
    return jnp.mean(jnp.square((out["p"] + (out["q"] + out["r"])).astype(jnp.float32)))


@pytest.mark.parametrize("hardware", HARDWARE)
def test_shuffling_independent_equations(hardware: str) -> None:
    params = {name: {"up": S((D, width)), "down": S((width, D))} for name, width in (("p", F), ("q", 2 * F), ("r", D))}
    made = [
        plan(sgd(partial(branches, order=order)), params, MLP[1], hardware=hardware, donate_argnums=0)
        for order in ("pqr", "rqp", "qrp")
    ]
    assert len({p.record.digest for p in made}) == 3
    for other in made[1:]:
        price = partial(plan, sgd(partial(branches, order="rqp")), params, MLP[1], hardware=hardware, donate_argnums=0)
        check_equivariant(made[0], other, specs_by_path(made[0]), price)


@pytest.mark.parametrize("hardware", HARDWARE)
def test_renaming_mesh_axes(hardware: str) -> None:
    """Names that sort the other way round."""
    price = partial(plan, sgd(mlp_loss), *ONE, hardware=hardware, donate_argnums=0)
    one, other = base(hardware, 1), price(mesh={"z": 2, "a": 4})
    to = {"data": "z", "model": "a"}

    def renamed(entry: Any) -> Any:
        return tuple(to[axis] for axis in entry) if isinstance(entry, tuple) else to.get(entry)

    mapped = {path: P(*map(renamed, spec)) for path, spec in specs_by_path(one).items()}
    assert cost(other) == pytest.approx(cost(one), rel=1e-9)
    assert specs_by_path(other) == mapped


@pytest.mark.parametrize("hardware", HARDWARE)
def test_an_axis_of_size_one_changes_nothing(hardware: str) -> None:
    price = partial(plan, sgd(mlp_loss), *ONE, hardware=hardware, donate_argnums=0)
    one, other = base(hardware, 1), price(mesh={"data": 2, "idle": 1, "model": 4})
    assert cost(other) == pytest.approx(cost(one), rel=1e-9)
    assert specs_by_path(other) == specs_by_path(one)


@pytest.mark.parametrize("hardware", HARDWARE)
def test_calls_and_names_change_nothing(hardware: str) -> None:
    def wrapped_loss(params: Any, x: Any) -> Any:
        for layer in params:
            h = checkpoint_name(jax.nn.relu(x @ layer["up"]), "hidden")
            x = x + jax.jit(jnp.matmul)(h, layer["down"])
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    one, other = base(hardware, 2), plan(sgd(jax.jit(wrapped_loss)), *MLP, hardware=hardware, donate_argnums=0)
    assert cost(other) == pytest.approx(cost(one), rel=1e-9)
    assert specs_by_path(other) == specs_by_path(one)


@pytest.mark.parametrize("hardware", HARDWARE)
def test_pinning_the_optimum_costs_nothing_and_pinning_else_costs_no_less(hardware: str) -> None:
    price = partial(plan, sgd(mlp_loss), *ONE, hardware=hardware, donate_argnums=0)
    one = base(hardware, 1)
    assert cost(price(pins=specs_by_path(one))) == pytest.approx(cost(one), rel=1e-9)
    for spec in (P(), P("model"), P(None, "data"), P(("data", "model"))):
        assert cost(price(pins={"params.0.up": spec})) >= cost(one) * (1 - 1e-9)


def test_more_memory_never_costs_more() -> None:
    price = partial(plan, sgd(mlp_loss), *ONE, hardware=GPUS, donate_argnums=0)
    free = base(GPUS, 1)
    tight = price(memory=int(free.record.memory.peak_bytes * 0.9))
    assert tight.record.memory.peak_bytes <= free.record.memory.peak_bytes * 0.9
    assert cost(tight) >= cost(free) * (1 - 1e-9)
