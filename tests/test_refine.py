"""The compiler in the loop: other plans are found, compiled and compared; the shortest schedule wins."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autoshard
import models
from autoshard import Plan
from autoshard.errors import SpecError
from autoshard.refine import Candidate, alternatives, told
from autoshard.verification import Verification

OPTIONS: dict[str, Any] = {
    "mesh": {"data": 2, "model": 4},
    "hardware": "cpu:8",
    "donate_argnums": 0,
    "rel_gap": 1e-2,
    "constraints": "all",
}


SIZES: dict[str, Any] = {"layers": 2, "width": 256, "hidden": 512, "batch": 128, "compute_dtype": "float32"}


def planned(**more: Any) -> Plan:
    step, args = models.build("mlp-1k", **SIZES)
    return autoshard.plan(step, *args, **OPTIONS, **more)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned()


@pytest.fixture(scope="module")
def found(plan: Plan) -> Verification:
    return plan.verify("cpu")


@pytest.fixture(scope="module")
def refined() -> Plan:
    return planned(refine="cpu", candidates=3)


def test_alternatives_are_other_plans_none_better_than_the_optimum(plan: Plan) -> None:
    assert plan.planned is not None
    found = alternatives(plan.planned, 2)
    own = {i: leaf.spec for i, leaf in enumerate(plan.record.inputs)}
    assert len(found) == 2
    assert own not in found
    assert found[0] != found[1]


def test_the_shortest_schedule_wins_and_says_so(plan: Plan, found: Verification, refined: Plan) -> None:
    note = refined.record.notes[-1]
    assert note.startswith("refined by cpu: the schedules of 3 plans take ")
    assert note.count("predicted") >= 3
    first, best = found.timeline, refined.verify("cpu").timeline
    assert first is not None
    assert best is not None
    assert best.step_s <= first.step_s
    assert ("the predicted optimum stays" in note) == (refined.record.inputs == plan.record.inputs)
    assert refined.record.asked == plan.record.asked


def test_a_refined_plan_runs(refined: Plan) -> None:
    step, args = models.build("mlp-1k", **SIZES)
    values = jax.tree.map(lambda a: jnp.full(a.shape, 0.01, a.dtype), args)
    expected = jax.tree.leaves(jax.jit(step)(*values))
    found = jax.tree.leaves(refined.jit()(*jax.tree.map(jnp.copy, values)))
    for a, b in zip(expected, found, strict=True):
        assert jnp.allclose(a, b, rtol=1e-4, atol=1e-6)


def test_a_plan_that_the_compiler_cannot_fit_drops_out(plan: Plan, found: Verification) -> None:
    tight = replace(plan.record, memory=replace(plan.record.memory, limit_bytes=1))
    unfit = Candidate(plan=Plan(tight, place=None, planned=None, traced=None), found=found)
    fits = Candidate(plan=plan, found=found)
    assert not unfit.fits
    assert fits.fits
    assert "does not fit: the compiler needs" in told([unfit, fits], fits)


def test_the_reason_names_what_grew(plan: Plan, found: Verification) -> None:
    assert found.timeline is not None
    slow = replace(found, timeline=replace(found.timeline, step_s=9.0, exposed_s=8.0))
    first, other = Candidate(plan=plan, found=slow), Candidate(plan=plan, found=found)
    assert "the order changed by exposed communication: the predicted optimum has 8 s" in told([first, other], other)


@pytest.mark.parametrize("more", [{"refine": "cpu", "candidates": 1}, {"refine": "xla"}])
def test_what_cannot_be_refined_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="compile two plans or more"):
        planned(**more)
