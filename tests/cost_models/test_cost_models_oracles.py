"""What textbooks and papers print, computed through the public functions of `cost_models`."""

import pytest

from benchmarks.cost_oracles import COMPUTED, ROWS, SKIPPED


def test_every_row_is_computed_or_skipped_for_a_reason():
    assert set(COMPUTED) | set(SKIPPED) == set(ROWS)
    assert not set(COMPUTED) & set(SKIPPED)


@pytest.mark.parametrize("row", sorted(COMPUTED))
def test_published_answer(row):
    expected, tolerance = ROWS[row]["expected"], ROWS[row]["tol"]
    assert float(COMPUTED[row]()) == pytest.approx(expected, rel=max(tolerance, 1e-9)), ROWS[row]["inputs"]
