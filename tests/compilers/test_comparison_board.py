"""The board of comparisons: a cell, compiled again."""

import json

import pytest

from benchmarks import comparison_board, comparison_report
from benchmarks.comparison_board import CHECKED, RESULTS
from benchmarks.comparison_report import read, steps
from tests.installed import needs_gpu_compiler


@pytest.mark.slow
@needs_gpu_compiler
def test_one_cell_comes_out_as_it_is_stored() -> None:
    """By the compiler: the stored ratio still holds, in a cell that ours loses (docs/comparing.md says why)."""
    told = comparison_board.line(CHECKED)
    ours_s, _, hand_s = steps(told)
    assert ours_s is not None
    assert hand_s is not None
    (stored,) = (x for x in read(RESULTS) if x["key"] == CHECKED.key)
    before_s, _, by_hand_s = steps(stored)
    assert before_s is not None
    assert by_hand_s is not None
    assert ours_s / hand_s == pytest.approx(before_s / by_hand_s, rel=0.05)
    assert json.loads(json.dumps(told)).keys() == stored.keys()
    assert comparison_report.said(told).startswith(f"{ours_s / hand_s:.3f}, refined ")
