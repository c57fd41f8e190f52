"""Fewer constraints, the same compiled program."""

import pytest

import autoshard
import models
from autoshard.api import compiler_minimal_constraints
from benchmarks.zoo.subjects import SUBJECTS
from benchmarks.zoo_steps import planned
from tests.api.test_thinning import OPTIONS
from tests.installed import needs_gpu_compiler


@pytest.mark.slow
@needs_gpu_compiler
def test_the_gpu_compiler_emits_the_same_with_fewer_constraints() -> None:
    step, args = models.build("mlp-1k", layers=2)
    plan, few = (
        autoshard.plan(step, *args, hardware="h100:1x8", constraints=each, **OPTIONS) for each in ("needed", "compiled")
    )
    assert few.record.pins.count < plan.record.pins.count
    before, after = plan.verify(), few.verify()
    assert after.ok == before.ok
    total = sum(row.emitted_bytes for row in before.rows)
    emitted = {(row.kind, row.axes): row.emitted_bytes for row in before.rows}
    for row in after.rows:
        assert (
            abs(row.emitted_bytes - emitted.get((row.kind, row.axes), 0))
            <= compiler_minimal_constraints.SAME_BYTES * total
        )


@needs_gpu_compiler
def test_what_moves_in_front_of_a_second_loop_moves_there() -> None:
    """What an LSTM keeps of every trip is gathered once for its backward pass, and not part by part in each trip."""
    plan = planned(next(s for s in SUBJECTS if s.name == "lstm-scan"), "h100:4x8")
    verified = plan.verify("gpu")
    assert verified.ok
    assert verified.timeline is not None
    assert verified.timeline.step_s == pytest.approx(plan.cost, rel=0.1)
