"""A plan's prices as a timeline: they add up to the plan, and lie beside the compiled schedule."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
import models
from autoshard import SolvedPlan
from autoshard.problem.repeated import repeated_work
from autoshard.verification.predicted_timeline import schedule
from autoshard.verification.result import Match
from tests.programs import GPUS, MESH

OPTIONS: dict[str, Any] = {
    "mesh": {"data": 2, "model": 4},
    "hardware": "h100:1x8",
    "donate_argnums": 0,
    "rel_gap": 5e-2,
    "constraints": "all",
}


def planned(**fields: Any) -> SolvedPlan:
    step, args = models.build("mlp-1k", **fields)
    return autoshard.plan(step, *args, **OPTIONS)


def scanned() -> SolvedPlan:
    """Weights gathered and gradients scattered in a loop's body."""

    def loss(params: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.square(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params)[0]).mean()

    def step(params: jax.Array, x: jax.Array) -> jax.Array:
        return params - 0.1 * jax.grad(loss)(params, x)

    avals = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((6, 2048, 2048), (65536, 2048)))
    return autoshard.plan(step, *avals, **OPTIONS)


@pytest.mark.parametrize("make", [planned, partial(planned, batch=65536), scanned], ids=["small", "large", "scan"])
def test_the_schedule_ends_when_the_plan_says(make: Callable[[], SolvedPlan]) -> None:
    plan = make()
    found, cost = schedule(plan.planned.assignment), plan.record.cost
    assert found.step_s == pytest.approx(cost.step_s, rel=1e-6)
    assert found.compute_s == pytest.approx(cost.compute_s, rel=1e-6)
    assert found.exposed_s == pytest.approx(cost.exposed_s, rel=1e-3)
    assert found.hidden_s == pytest.approx(cost.hidden_s, rel=1e-3)
    by_stream = {
        s: sum(e.duration_s * e.trips for e in found.events if e.stream == s) for s in ("compute", "communication")
    }
    assert by_stream["compute"] == pytest.approx(found.compute_s)
    assert by_stream["communication"] == pytest.approx(found.communication_s)
    assert all(e.start_s + e.duration_s <= found.step_s * (1 + 1e-9) for e in found.events if e.stream == "compute")


def test_both_timelines_are_one_trace() -> None:
    found = planned().verify("cpu")
    rows = found.trace()["traceEvents"]
    names = {row["pid"]: row["args"]["name"] for row in rows if row["name"] == "process_name"}
    assert names == {0: "predicted by the plan", 1: "compiled by cpu"}
    assert found.predicted is not None
    assert found.timeline is not None
    ends = [max(r["ts"] + r["dur"] for r in rows if r["ph"] == "X" and r["pid"] == pid) for pid in (0, 1)]
    assert ends[0] == pytest.approx(found.predicted.step_s * 1e6, rel=0.2)
    assert ends[1] == pytest.approx(found.timeline.step_s * 1e6, rel=0.2)


def layers(ws: Any, x: jax.Array, layer: Callable[..., Any]) -> jax.Array:
    return jnp.square(jax.lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0]).mean()


def mlp(x: jax.Array, w: Any) -> jax.Array:
    return x + jnp.tanh(x @ w[0]) @ w[1]


WEIGHTS = (jax.ShapeDtypeStruct((4, 256, 1024), jnp.float32), jax.ShapeDtypeStruct((4, 1024, 256), jnp.float32))
ROWS = jax.ShapeDtypeStruct((8192, 256), jnp.float32)


@pytest.mark.parametrize("said", ["by the program", "by the plan"])
def test_matmuls_that_run_once_more_are_compared(said: str) -> None:
    """The first product of each layer: 1/7 of its FLOPs, in the plan and in the program that XLA:CPU compiles."""
    layer = jax.checkpoint(mlp) if said == "by the program" else mlp
    options: dict[str, Any] = {"mesh": {"data": 4}, "hardware": "cpu:4", "in_shardings": (None, P("data"))}
    step = jax.grad(partial(layers, layer=layer))
    plan = autoshard.plan(step, WEIGHTS, ROWS, **options, remat="written")
    if said == "by the plan":
        limit = int(0.4 * plan.record.memory.peak_bytes)
        plan = autoshard.plan(step, WEIGHTS, ROWS, **options, remat="add", memory=limit)
    work = repeated_work(plan.planned.assignment)
    assert work is not None
    assert work.flops == pytest.approx(4 * 2 * 2048 * 256 * 1024)
    assert work.share == pytest.approx(1 / 7)
    assert 0 < work.seconds < plan.cost / 3
    found = plan.verify("cpu")
    assert found.repeated is not None
    assert found.predicted is not None
    assert found.repeated.predicted_flops == work.flops == found.predicted.repeated_flops
    assert found.repeated.status is Match.MATCH
    (line,) = found.repeated_lines
    assert (line.where, line.status) == (work.lines[0].where, Match.MATCH)
    assert line.where.endswith("(mlp)")
    rows = found.trace()["traceEvents"]
    assert {row["pid"] for row in rows if row.get("cat") == "repeated"} == {0, 1}


def test_a_maximum_s_own_reduction_counts_once() -> None:
    """A split maximum is finished by its equation: communication, and no part of the compute beside it."""
    rows = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    plan = autoshard.plan(
        lambda x: jnp.max(x, axis=1), rows, mesh=MESH, hardware=GPUS, for_grad=False, in_shardings=P(None, "model")
    )
    (row,) = plan.record.collectives
    assert row.kind == "all-reduce"
    found = schedule(plan.planned.assignment)
    assert found.step_s == pytest.approx(plan.cost, rel=1e-9)
    assert plan.cost - plan.record.cost.compute_s == pytest.approx(row.seconds)
