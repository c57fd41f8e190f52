"""The tests that are marked as slow by their measured seconds."""

from pathlib import Path

import pytest

from tests import slow_tests

ROOT = Path(__file__).parents[2]


def test_every_slow_test_is_there() -> None:
    for name in slow_tests.listed():
        path, _, function = name.partition("[")[0].partition("::")
        assert f"def {function}(" in (ROOT / path).read_text("utf-8"), name


@pytest.mark.parametrize(
    ("cases", "slow"),
    [
        ({"f[a]": 1.0, "f[b]": 5.0, "f[c]": 3.0}, {"f[b]"}),
        ({"f[a]": 9.0, "f[b]": 5.0}, {"f[a]"}),  # one is left
        ({"f[a]": 12.0, "f[b]": 15.0}, {"f[a]", "f[b]"}),
        ({"f": 7.0, "g": 9.0}, {"g"}),
    ],
)
def test_of_every_function_with_cases_a_quick_one_is_left(cases: dict[str, float], slow: set[str]) -> None:
    assert set(slow_tests.slow(cases)) == slow


def test_the_seconds_of_a_test_are_added_up() -> None:
    lines = ["1.50s call     tests/a.py::f[x y]", "0.25s setup    tests/a.py::f[x y]", "9 passed in 3.00s"]
    assert slow_tests.seconds(lines) == {"tests/a.py::f[x y]": 1.75}
