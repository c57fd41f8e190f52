"""A pipeline's layers are searched with one stage per shard; nothing that they leave out is cheaper."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard import in_stages
from autoshard.costs.strategies import decode
from autoshard.problem.decision_builders import facts

S = jax.ShapeDtypeStruct
LAYERS, WIDTH = 4, 64
FREE = P.UNCONSTRAINED


def loss(p: Any, x: Any) -> Any:
    def layer(x: Any, own: Any) -> tuple[Any, None]:
        return x + jnp.tanh(x @ own["up"]) @ own["down"], None

    x, _ = jax.lax.scan(layer, x @ p["head"], p["layers"])
    return jnp.mean(jnp.square(x @ p["head"].T))


def arguments() -> tuple[Any, Any]:
    layers = {"up": S((LAYERS, WIDTH, 2 * WIDTH), "float32"), "down": S((LAYERS, 2 * WIDTH, WIDTH), "float32")}
    return {"layers": layers, "head": S((WIDTH, WIDTH), "float32")}, S((64, WIDTH), "float32")


def planned(mesh: dict[str, int], hardware: str, **options: Any) -> autoshard.SolvedPlan:
    step = in_stages(loss, stages="stage", steps=8, parts=1, **options)
    return autoshard.plan(step, *arguments(), mesh=mesh, hardware=hardware, rel_gap=0.0, time_limit_s=60.0)


CASES = [
    ({"stage": 2, "data": 2}, "cpu:4", 1),
    pytest.param({"stage": 2, "data": 4}, "h100:1x8", 2, marks=pytest.mark.slow),
    ({"stage": 4, "data": 2}, "h100:4x2", 1),
]


@pytest.mark.parametrize(("mesh", "hardware", "repeats"), CASES)
def test_no_layout_that_is_left_out_is_cheaper(
    mesh: dict[str, int], hardware: str, repeats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = planned(mesh, hardware, repeats=repeats)
    monkeypatch.setattr(facts, "stage_dimensions", lambda *_: {})
    every = planned(mesh, hardware, repeats=repeats)
    assert staged.cost == pytest.approx(every.cost, rel=1e-9)
    assert "in a pipeline's layers with one stage per shard of stage, of" in staged.record.certificate.space
    assert "stage" not in every.record.certificate.space
    fewer, all_ = (len(_choices(plan)) for plan in (staged, every))
    assert fewer < 0.8 * all_


def _choices(plan: autoshard.SolvedPlan) -> Any:
    return np.concatenate([node.cost_ps for node in plan.planned.space.decisions.nodes])


def test_contractions_of_the_layers_have_one_stage_per_shard() -> None:
    decisions = planned({"stage": 2, "data": 2}, "cpu:4").planned.space.decisions
    graph, axis = decisions.graph, decisions.mesh.names.index("stage")
    inner = [e for e, eqn in enumerate(graph.eqns) if eqn.traits.contraction and graph.trips[graph.results[e][0]] > 9]
    assert len(inner) >= 6  # two matrix products a layer, forward, and twice as many backward
    for e in inner:
        (v,) = graph.results[e]
        rows = decode(decisions.made[v].codes, graph.avals[v].ndim, decisions.mesh.ndim)
        assert set(rows[:, axis]) == {graph.avals[v].shape.index(2)}


def test_a_constraint_of_a_loop_that_shifts_nothing_says_nothing_of_other_values() -> None:
    def fn(x: Any, w: Any) -> Any:
        def trip(x: Any, _: None) -> tuple[Any, None]:
            return jax.lax.with_sharding_constraint(jnp.tanh(x @ w), P("data", FREE)), None

        return jax.lax.scan(trip, x, None, length=4)[0]

    mesh = {"data": 2, "model": 2}
    plan = autoshard.plan(fn, S((2, 64), "float32"), S((64, 64), "float32"), mesh=mesh, hardware="cpu:4")
    assert not plan.planned.space.decisions.staged
    assert "stage" not in plan.record.certificate.space
