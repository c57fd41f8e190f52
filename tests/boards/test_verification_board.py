"""The board's arithmetic: what counts as agreement, and the rank order of layouts."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.verification import board, scatter
from benchmarks.verification_report import (
    bytes_agree,
    kendall,
    peak_ratio,
    read,
    steps,
    timed,
    unknown_share,
    worst_row,
)


def row(kind: str, predicted: int, emitted: int) -> dict[str, Any]:
    status = "EXTRA" if not predicted else "MATCH"
    return {
        "kind": kind,
        "axes": ["data"],
        "predicted_bytes": predicted,
        "emitted_bytes": emitted,
        "status": status,
    }


def line(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"rows": rows, "predicted_memory": {"peak": 100}, "compiled_memory": {"peak": 90}}


@pytest.mark.parametrize(
    ("rows", "agree", "worst"),
    [
        ([row("all-gather", 1000, 960)], True, ""),
        ([row("all-gather", 1000, 900)], False, "×0.90 all-gather data"),
        ([row("all-gather", 1000, 1000), row("all-reduce", 40, 20)], True, ""),
        ([row("all-gather", 1000, 1000), row("all-reduce", 100, 50)], False, "×0.50 all-reduce data"),
        ([row("all-gather", 1000, 1000), row("all-reduce", 0, 90)], False, "×inf all-reduce data"),
    ],
)
def test_agreement_is_of_the_total_and_of_every_large_row(rows: Any, agree: bool, worst: str) -> None:  # noqa: FBT001
    assert bytes_agree(line(*rows)) is agree
    assert worst_row(line(*rows)) == worst


def test_shares() -> None:
    assert unknown_share(line(row("all-gather", 0, 25), row("all-reduce", 75, 75))) == 0.25
    assert unknown_share(line(row("all-gather", 5, 25))) == 0.0
    assert peak_ratio(line()) == 0.9


@pytest.mark.parametrize(
    ("order", "tau"), [((1, 2, 3, 4), 1.0), ((4, 3, 2, 1), -1.0), ((1, 2, 4, 3), 4 / 6), ((1, 1, 1, 1), 0.0)]
)
def test_kendalls_tau(order: tuple[int, ...], tau: float) -> None:
    assert kendall(list(enumerate(order))) == pytest.approx(tau)


def test_schedules_are_those_with_windowed_einsum_where_there_are() -> None:
    def told(layout: str, *, windowed: bool) -> dict[str, Any]:
        case = {"model": "m", "fields": {"batch": 8}, "hardware": "tpu-v5e:4x4", "mesh": {"data": 16}}
        return {**case, "layout": layout, "windowed": windowed}

    both = [told(layout, windowed=on) for layout in ("fsdp", "dp") for on in (True, False)]
    assert timed(both) == both[::2]
    assert timed(both[1:]) == [both[1], both[3]]  # not some of them with it, and some without


def test_what_does_not_fit_ranks_last() -> None:
    def told(predicted: int, compiled: int, seconds: float) -> dict[str, Any]:
        peaks = {"predicted_memory": {"peak": predicted}, "compiled_memory": {"peak": compiled}, "memory_bytes": 100}
        return {**peaks, "cost": {"step_s": seconds}, "timeline": {"step_s": seconds}}

    slow, fits, by_compiler = steps(told(90, 90, 2.0)), steps(told(100, 100, 1.0)), steps(told(90, 101, 0.5))
    assert fits == (1.0, 1.0)
    assert kendall([slow, fits, by_compiler]) == pytest.approx((1 - 1 - 1) / 3)
    assert kendall([slow, fits, steps(told(101, 101, 0.1))]) == 1.0


def test_the_last_line_of_a_case_counts(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    assert read(path) == []
    path.write_text("".join(json.dumps({"key": k, "n": n}) + "\n" for k, n in (("a", 1), ("b", 2), ("a", 3))))
    assert read(path) == [{"key": "a", "n": 3}, {"key": "b", "n": 2}]


def test_every_case_is_one_key_and_the_board_is_whole() -> None:
    cases = [*board(), *scatter()]
    assert len({case.key for case in cases}) == len(cases) > 200
    plain = [case for case in board() if not case.windowed]
    assert len(plain) == 3 * 5 * 4  # models, layouts, places
