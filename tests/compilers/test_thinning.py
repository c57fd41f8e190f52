"""Fewer constraints, the same compiled program."""

import pytest

import autoshard
import models
from autoshard.api import compiler_minimal_constraints
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
