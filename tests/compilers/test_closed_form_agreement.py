"""The board of closed forms: its memory is what XLA:GPU needs."""

import pytest

from benchmarks.closed_form_agreement import CASES, compare, compiled_peak
from tests.boards.test_closed_form_agreement import WITHIN
from tests.installed import needs_gpu_compiler


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize("recipe", ["dp", "zero1", "megatron"])
def test_memory_is_what_the_compiler_needs(recipe: str):
    """Where no gradient is scattered before the update; see docs/cost_models.md for the others."""
    one = next(one for one in CASES if one.model.startswith("llama") and one.recipe == recipe)
    found = compare(one)
    assert found.closed.peak_bytes == pytest.approx(compiled_peak(found.evaluation), rel=WITHIN)
