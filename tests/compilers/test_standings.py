"""Comparisons by compiled schedules."""

import pytest

from autoshard.api.compare import OURS
from tests.api.test_standings import LAYOUTS, compared
from tests.installed import needs_gpu_compiler


@needs_gpu_compiler
def test_with_a_compiler_its_schedules_count() -> None:
    found = compared(layouts={"dp": LAYOUTS["dp"]}, mesh={"data": 8}, compiler="gpu")
    timelines = {c.name: c.verification.timeline for c in found.contenders if c.verification is not None}
    ours, dp = timelines[OURS], timelines["dp"]
    assert ours is not None
    assert dp is not None
    assert found.ratio == pytest.approx(ours.step_s / dp.step_s)
    text = str(found)
    assert "compiled by gpu" in text
    assert "emitted" in text
