"""What keeping costs a plan: where it is nothing, a search of what could be repeated finds nothing."""

from dataclasses import replace
from math import inf
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.api.solved_plan import SolvedPlan
from autoshard.ir.recomputation import Recomputation
from autoshard.ir.recompute import rewritten
from autoshard.ir.saved_values import saved_values
from autoshard.ir.trace import trace
from autoshard.planner import pipeline
from autoshard.planner.budget import WORTH, Budget
from autoshard.planner.cost_of_keeping import is_held_back, most_saved_s, moving_kept_s
from autoshard.planner.decided_program import decided_by
from autoshard.planner.planning_result import PlanningResult
from autoshard.planner.recomputation_space import RecomputationSpace
from autoshard.planner.record import PlanRecord
from autoshard.planner.search_space import SearchSpace, build_search_space
from tests.programs import QUICKLY, train_step

BUDGET = Budget(rel_gap=0.1)


def planned(plan: SolvedPlan) -> PlanningResult:
    assert plan.planned is not None
    return plan.planned


def is_back(planned: PlanningResult) -> bool:
    return is_held_back(planned.formulation, planned.solution, BUDGET, WORTH)


def saved_s(planned: PlanningResult) -> float:
    return most_saved_s(planned.formulation, planned.solution, planned.assignment, BUDGET, WORTH)


def for_nothing(planned: PlanningResult) -> bool:
    return saved_s(planned) <= WORTH * planned.record.cost.step_s


def without_proof(record: PlanRecord) -> PlanRecord:
    certificate = record.certificate
    return replace(record, certificate=replace(certificate, space="", bound_s=0.0, gap=0.0))


@pytest.mark.parametrize("name", ["mlp-1k", pytest.param("tiny-llama", marks=pytest.mark.slow)])
def test_where_keeping_costs_nothing_a_search_finds_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fn, *args = train_step(name, layers=2)
    skipped = autoshard.plan(fn, *args, **QUICKLY)
    assert for_nothing(planned(skipped))
    assert "nothing is repeated" in skipped.record.certificate.space
    monkeypatch.setattr(pipeline, "most_saved_s", lambda *_: inf)
    searched = autoshard.plan(fn, *args, **QUICKLY)
    assert "of which none saves more than" in searched.record.certificate.space
    assert without_proof(searched.record) == without_proof(skipped.record)


def test_memory_holds_a_plan_back_where_a_larger_limit_makes_it_faster() -> None:
    fn, *args = train_step("mlp-1k", layers=2)
    ample = autoshard.plan(fn, *args, **QUICKLY, remat="written")
    assert not is_back(planned(ample))
    tight = autoshard.plan(fn, *args, **QUICKLY, remat="written", memory=ample.record.memory.peak_bytes * 3 // 4)
    assert tight.record.cost.step_s > ample.record.cost.step_s * 1.01
    assert is_back(planned(tight))
    assert not for_nothing(planned(tight))
    assert saved_s(planned(tight)) == inf


def test_loops_are_searched() -> None:
    """What a loop keeps is stacked, which takes time."""

    def loss(w: Any, x: Any) -> Any:
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0].sum()

    shapes = [jax.ShapeDtypeStruct((*layers, 256, 256), jnp.float32) for layers in ((4,), ())]
    options: dict[str, Any] = {**QUICKLY, "donate_argnums": ()}
    plan = planned(autoshard.plan(jax.grad(loss), *shapes, **options, remat="written"))
    assert not is_back(plan)
    assert not for_nothing(plan)


@jax.custom_vjp
def kept_by_rows_read_by_columns(x: Any) -> Any:
    return jnp.sin(x)


def forward(x: Any) -> tuple[Any, Any]:
    y = jax.lax.with_sharding_constraint(jnp.sin(x), P("x", None))
    return y, y


def backward(y: Any, cotangent: Any) -> tuple[Any]:
    return (cotangent * jax.lax.with_sharding_constraint(y, P(None, "x")),)


kept_by_rows_read_by_columns.defvjp(forward, backward)


def test_what_is_moved_for_the_backward_pass_alone_counts() -> None:
    shape = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    options: dict[str, Any] = {"mesh": {"x": 8}, "hardware": "h100:1x8"}
    for fn, moves in ((jnp.sin, False), (kept_by_rows_read_by_columns, True)):
        plan = planned(autoshard.plan(jax.grad(lambda x, fn=fn: jnp.mean(fn(x))), shape, **options))
        assert (moving_kept_s(plan.assignment) > 0) == moves
        assert for_nothing(plan) != moves


def test_what_a_record_decided_is_not_decided_again() -> None:
    """A plan from a file that repeats nothing is the program as it is written; no search is made to find it again."""
    fn, *args = train_step("mlp-1k", layers=2)
    plan = autoshard.plan(fn, *args, **QUICKLY)
    request = replace(planned(plan).space.request, remat="add")
    assert plan.record.recomputation is None
    assert decided_by(plan.record, request).remat == "written"


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_what_fits_by_repeating_all_is_found_without_the_solver(*, scan: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the choice is too large to be solved in time, a plan that repeats all it can is one that fits."""
    fn, *args = train_step("tiny-llama", layers=3, batch=64, sequence=256, context=256, vocab=512, scan=scan)
    written = autoshard.plan(fn, *args, **QUICKLY, remat="written")
    limit = int(0.75 * written.record.memory.peak_bytes)
    monkeypatch.setattr(pipeline, "_repeating", lambda *_: pipeline._Repeating(None, None, None, ""))
    plan = autoshard.plan(fn, *args, **QUICKLY, memory=limit)
    assert plan.record.memory.peak_bytes <= limit
    assert plan.record.recomputation is not None


def test_what_does_not_fit_is_not_planned_again_and_others_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may need more memory than the graph says: the next choice keeps less, whatever the graph repeats."""
    fn, *args = train_step("mlp-1k", layers=3)
    written = planned(autoshard.plan(fn, *args, **QUICKLY, remat="written"))
    limit = int(0.75 * written.record.memory.peak_bytes)
    request = replace(written.space.request, remat="add", memory_bytes=limit)
    choices = RecomputationSpace.of(build_search_space(request))
    assert choices is not None
    seen: list[Recomputation | None] = []

    def refuse(space: SearchSpace, *_: Any) -> PlanningResult:
        seen.append(space.request.recomputation)
        raise autoshard.InfeasibleError("too large", peak_bytes=limit + 1, limit_bytes=limit)

    monkeypatch.setattr(pipeline, "_best_sums", refuse)
    found = pipeline._repeating(choices, BUDGET, (), inf, [])
    assert found.best is None
    assert len(set(seen)) == len(seen) > 1


def test_time_that_ends_at_another_choice_leaves_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    fn, *args = train_step("mlp-1k", layers=3)
    written = planned(autoshard.plan(fn, *args, **QUICKLY, remat="written"))
    limit = int(0.75 * written.record.memory.peak_bytes)
    choices = RecomputationSpace.of(build_search_space(replace(written.space.request, remat="add", memory_bytes=limit)))
    assert choices is not None
    best_sums, made, late = pipeline._best_sums, list[PlanningResult](), list[SearchSpace]()

    def once(space: SearchSpace, *asked: Any) -> PlanningResult:
        """The program that is planned first costs more than the graph with the choices said."""
        if made:
            late.append(space)
            raise autoshard.TimeLimitError("solving", 1.0)
        found = best_sums(space, *asked)
        made.append(replace(found, solution=replace(found.solution, objective=2 * found.solution.objective)))
        return made[0]

    monkeypatch.setattr(pipeline, "_best_sums", once)
    assert pipeline._repeating(choices, BUDGET, (), inf, []).best is made[0]
    assert late


@pytest.mark.parametrize("layers", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_unrolled_layers_that_are_repeated_are_planned_in_the_memory_of_jax_checkpoint(layers: int) -> None:
    """Compiled they need as much: `tests/compilers/test_recompute.py`."""
    fields = {"width": 512, "hidden": 2048, "heads": 8, "kv_heads": 8, "head_dim": 64, "vocab": 2048}
    fn, *args = train_step("tiny-llama", layers=layers, batch=64, sequence=1024, context=1024, remat="full", **fields)
    checkpointed = trace(fn, tuple(args), ("state", "batch"))
    kept = saved_values(checkpointed.jaxpr, remat="add").saved
    repeated = rewritten(saved_values(checkpointed.jaxpr, remat="free"), kept)
    flat = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in checkpointed.in_avals]

    def peak(program: Any) -> int:
        options: dict[str, Any] = {"mesh": {"data": 4}, "hardware": "h100:1x4", "remat": "written", "rel_gap": 1e-2}
        plan = autoshard.plan(jaxpr_as_fun(program), *flat, constraints="all", **options)
        return plan.record.memory.peak_bytes

    assert peak(repeated) == pytest.approx(peak(checkpointed.jaxpr), rel=0.02)
