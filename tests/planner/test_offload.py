"""What loops keep for backward passes in the host's memory: when it is chosen, what it costs, and how it is said."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
import cost_models
from autoshard.errors import InfeasibleError, PlanMismatchError, SpecError
from autoshard.ir.recomputed import recomputed
from autoshard.verification.predicted_timeline import schedule

F32 = jnp.float32
TRIPS = 8
HOST_BYTES_PER_S = cost_models.hardware("h100:1x4").chip.numbers["host_bytes_per_s"].value


def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
    """Layers of little compute, whose carries are most of what is in memory."""
    return jnp.mean(jax.lax.scan(lambda x, w: (jnp.sin(x @ w) + x, None), x, weights)[0] ** 2)


def program(width: int, rows: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    shapes = ((TRIPS, width, width), (rows, width))
    return jax.value_and_grad(loss), tuple(jax.ShapeDtypeStruct(shape, F32) for shape in shapes)


OPTIONS: dict[str, Any] = {
    "mesh": {"data": 4},
    "hardware": "h100:1x4",
    "in_shardings": (P(), P("data")),
    "rel_gap": 1e-2,
    "constraints": "all",
    "cache": False,
}
WIDTH, ROWS = 256, 1 << 18
CARRY = ROWS // 4 * WIDTH * 4  # bytes on one device


@cache
def peaks() -> tuple[int, int]:
    """The peaks of the program as it is written, and if one carry of all trips is kept."""
    fn, args = program(WIDTH, ROWS)
    written = autoshard.plan(fn, *args, **OPTIONS, remat="written").record.memory.peak_bytes
    return written, TRIPS * CARRY


@cache
def offloading() -> autoshard.SolvedPlan:
    """A plan within less memory than all carries take."""
    fn, args = program(WIDTH, ROWS)
    return autoshard.plan(fn, *args, **OPTIONS, memory=TRIPS * CARRY * 3 // 4, offload="auto")


def test_carries_that_do_not_fit_lie_in_the_host_s_memory() -> None:
    plan = offloading()
    chosen = plan.record.recomputation
    assert chosen is not None
    assert chosen.offloaded
    assert set(chosen.offloaded) <= set(chosen.kept)
    assert plan.record.memory.peak_bytes <= TRIPS * CARRY * 3 // 4
    assert "host's memory" in plan.record.certificate.space
    said = plan.summary()
    assert re.search(r"\d+ of them .*in the host's memory", " ".join(said.split()))
    assert not [note for note in plan.record.notes if note.startswith("not priced")]


def test_the_link_takes_its_time() -> None:
    """Every carry goes there and back; a trip computes for much less than that takes, so most of it is waited for."""
    record = offloading().record
    copies_s = 2 * TRIPS * CARRY / HOST_BYTES_PER_S
    collectives_s = sum(row.seconds * row.trips for row in record.collectives)
    assert record.cost.communication_s == pytest.approx(copies_s + collectives_s, rel=1e-3)
    assert record.cost.step_s > copies_s > 5 * record.cost.compute_s


def test_what_is_drawn_of_it_ends_with_the_step() -> None:
    plan = offloading()
    drawn = schedule(plan.planned.assignment)
    assert drawn.step_s == pytest.approx(plan.record.cost.step_s, rel=1e-6)
    copies = [event for event in drawn.events if event.name.endswith("the host's memory")]
    assert [(event.name.split()[1], event.trips) for event in copies] == [("to", TRIPS), ("from", TRIPS)]


def test_it_is_not_offloaded_where_it_fits() -> None:
    fn, args = program(WIDTH, ROWS)
    plan = autoshard.plan(fn, *args, **OPTIONS, offload="auto")
    kept = autoshard.plan(fn, *args, **OPTIONS)
    assert plan.record.recomputation is None or not plan.record.recomputation.offloaded
    assert plan.record.cost == kept.record.cost


def test_a_plan_file_says_what_is_offloaded(tmp_path: Path) -> None:
    plan = offloading()
    plan.save(tmp_path / "plan.json")
    loaded = autoshard.load(tmp_path / "plan.json")
    assert loaded.record == plan.record
    fn, args = program(WIDTH, ROWS)
    options: dict[str, Any] = {**OPTIONS, "memory": plan.record.memory.limit_bytes, "lock": tmp_path / "plan.json"}
    assert autoshard.plan(fn, *args, **options, offload="auto").record == plan.record
    with pytest.raises(PlanMismatchError, match="offloading"):
        _in_ci(lambda: autoshard.plan(fn, *args, **options))


def _in_ci(ask: Callable[[], Any]) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CI", "true")
        return ask()


def test_only_what_a_loop_stacks_may_be_offloaded() -> None:
    plan = offloading()
    chosen = plan.record.recomputation
    assert chosen is not None
    traced = autoshard.plan(*_program(), **OPTIONS, remat="written").traced
    with pytest.raises(SpecError, match="keeps no stack of 99:0"):
        recomputed(traced, replace(chosen, offloaded=("99:0",)))


def _program() -> tuple[Any, ...]:
    fn, args = program(WIDTH, ROWS)
    return fn, *args


def test_where_nothing_can_be_offloaded_it_is_refused_with_the_reason() -> None:
    fn, args = program(64, 64)
    there: dict[str, Any] = {"mesh": {"data": 4}, "hardware": "h100:1x4"}
    with pytest.raises(SpecError, match="one memory"):
        autoshard.plan(fn, *args, mesh={"data": 4}, hardware="cpu:4", offload="auto")
    with pytest.raises(SpecError, match="leaves that to the program"):
        autoshard.plan(fn, *args, **there, remat="written", offload="auto")
    with pytest.raises(SpecError, match="plan the step that takes the gradient"):
        autoshard.plan(loss, *args, **there, for_grad=True, offload="auto")
    asked: Any = "always"
    with pytest.raises(SpecError, match="offload='always'"):
        autoshard.plan(fn, *args, **there, offload=asked)


def test_an_error_says_that_offloading_may_help() -> None:
    fn, args = program(WIDTH, ROWS)
    with pytest.raises(InfeasibleError, match='offload="auto"'):
        autoshard.plan(fn, *args, **OPTIONS, memory=CARRY * 3 // 2)
