"""Test helpers for users: compiled schedules."""

from tests.end_to_end.test_testing import DP, ON, arguments, failure, step
from tests.installed import needs_gpu_compiler


@needs_gpu_compiler
def test_compiled_schedules_are_compared() -> None:
    told = failure(0.01, step, *arguments(), of=DP, compiler="gpu", **ON)
    assert "compiled by gpu, priced by the model of h100:1x8" in told
