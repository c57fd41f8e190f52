"""Promised against emitted collectives, per kind and axes and one by one."""

from typing import Any

import pytest

from autoshard.backends import hlo
from autoshard.ir.mesh import MeshAxes
from autoshard.problem.collective import Collective
from autoshard.verification.collective_match import (
    CollectiveRow,
    Line,
    Match,
    agrees,
    attribute,
    compare,
    in_order,
    together,
)

MESH = MeshAxes.of({"data": 2, "model": 4})


def promised(kind: str, axes: tuple[str, ...], nbytes: int, *, trips: int = 1, where: str = "m.py:1") -> Collective:
    return Collective(
        kind=kind,
        axes=axes,
        nbytes=nbytes,
        dtype="bfloat16",
        trips=trips,
        seconds=0.0,
        window=None,
        where=where,
        value="",
    )


def emitted(
    kind: Any,
    axes: tuple[str, ...] | None,
    nbytes: int,
    *,
    trips: int = 1,
    where: str = "m.py:1",
    instruction: str = "i",
    combined: int = 1,
) -> hlo.Collective:
    size = 8
    return hlo.Collective(
        kind=kind,
        axes=axes,
        group_size=size,
        nbytes=nbytes,
        dtype="bf16",
        trips=trips,
        where=where,
        op_name="jit(f)/dot_general",
        instruction=instruction,
        done=instruction,
        computation="main",
        asynchronous=False,
        combined=combined,
        conditional=False,
        unknown_loops=(),
        moved_bytes=hlo.wire_bytes(kind, nbytes, size),
        groups=(),
    )


def place(found: hlo.Collective) -> tuple[str, str]:
    return "dot_general", found.where


def rows(ours: list[Collective], theirs: list[hlo.Collective], tolerance: float = 0.05) -> tuple[CollectiveRow, ...]:
    return compare(ours, theirs, MESH, tolerance)


def lines(ours: list[Collective], theirs: list[hlo.Collective]) -> list[tuple[Match, str, int, int, int]]:
    found: tuple[Line, ...] = attribute(ours, theirs, MESH, 0.05, place)
    return [(x.status, x.where, x.count, x.predicted_bytes, x.emitted_bytes) for x in found]


@pytest.mark.parametrize(
    ("predicted", "found", "status"),
    [(1000, 1000, Match.MATCH), (1000, 960, Match.MATCH), (1000, 900, Match.DIFFERS), (0, 900, Match.EXTRA)],
)
def test_statuses(predicted: int, found: int, status: Match) -> None:
    ours = [promised("all-gather", ("data",), predicted)] if predicted else []
    (row,) = rows(ours, [emitted("all-gather", ("data",), found)])
    assert row.status is status


def test_missing_and_small() -> None:
    ours = [promised("all-gather", ("data",), 100_000), promised("all-to-all", ("data",), 50_000)]
    theirs = [emitted("all-gather", ("data",), 100_000), emitted("all-reduce", ("model",), 10)]
    assert [row.status for row in rows(ours, theirs)] == [Match.MATCH, Match.SMALL, Match.MISSING]


def test_trips_and_wire_bytes_are_multiplied_out() -> None:
    (row,) = rows(
        [promised("all-reduce", ("data", "model"), 800, trips=3)],
        [emitted("all-reduce", ("model", "data"), 800, trips=3)],
    )
    assert (row.predicted_bytes, row.emitted_bytes) == (2400, 2400)
    assert row.predicted_wire_bytes == row.emitted_wire_bytes == 3 * 2 * 800 * 7 // 8
    assert (row.predicted_count, row.emitted_count, row.axes) == (3, 3, ("data", "model"))


def test_what_is_launched_together_is_merged() -> None:
    ours = [promised("all-gather", ("data",), 100), promised("all-gather", ("data",), 200)]
    theirs = [emitted("all-gather", ("data",), n, combined=2) for n in (100, 200)]
    (row,) = rows(ours, theirs)
    assert (row.status, row.emitted_count, row.emitted_launches) == (Match.MERGED, 2, 1)
    assert together("all-gather", [row, row], 600, 0.05).emitted_launches == 2


def test_a_large_row_must_agree_and_a_small_one_need_not() -> None:
    large, small = promised("all-gather", ("data",), 10_000), promised("all-gather", ("model",), 300)
    exact = emitted("all-gather", ("data",), 10_000)
    assert agrees(rows([large, small], [exact, emitted("all-gather", ("model",), 400)]), 0.05)
    assert not agrees(rows([large], [emitted("all-gather", ("data",), 9_000)]), 0.05)
    assert not agrees(rows([large, promised("all-reduce", ("model",), 1000)], [exact]), 0.05)


def test_an_unknown_row_above_a_hundredth_does_not_agree() -> None:
    ours, theirs = [promised("all-gather", ("data",), 10_000)], [emitted("all-gather", ("data",), 10_000)]
    assert agrees(rows(ours, [*theirs, emitted("all-to-all", ("data",), 90)]), 0.05)
    assert not agrees(rows(ours, [*theirs, emitted("all-to-all", ("data",), 200)]), 0.05)


def test_bytes_over_the_wrong_axes_do_not_agree() -> None:
    assert not agrees(rows([promised("all-gather", ("data",), 10)], [emitted("all-gather", ("model",), 10)]), 0.05)


def test_each_goes_to_the_one_of_its_line_first() -> None:
    ours = [promised("all-gather", ("data",), 100, where=f"m.py:{n}") for n in (1, 2, 3)]
    theirs = [emitted("all-gather", ("data",), 100, where=f"m.py:{n}") for n in (3, 9, 1)]
    assert {(status, where) for status, where, *_ in lines(ours, theirs)} == {
        (Match.MATCH, "m.py:1"),
        (Match.MATCH, "m.py:3"),
        (Match.MATCH, "m.py:9"),
    }


def test_what_is_left_on_both_sides_is_merged_if_it_sums_up() -> None:
    ours = [promised("all-reduce", ("data",), n, where="m.py:1") for n in (100, 300)]
    assert lines(ours, [emitted("all-reduce", ("data",), 400, where="m.py:7")]) == [
        (Match.MERGED, "m.py:1", 2, 400, 0),
        (Match.MERGED, "m.py:7", 1, 0, 400),
    ]
    assert lines(ours, [emitted("all-reduce", ("data",), 900, where="m.py:7")]) == [
        (Match.EXTRA, "m.py:7", 1, 0, 900),
        (Match.MISSING, "m.py:1", 2, 400, 0),
    ]


def test_equal_ones_of_one_line_are_one_line() -> None:
    ours = [promised("all-gather", ("data",), 100, trips=4) for _ in range(3)]
    theirs = [emitted("all-gather", ("data",), 100, trips=4) for _ in range(3)]
    assert lines(ours, theirs) == [(Match.MATCH, "m.py:1", 3, 1200, 1200)]


def test_axes_in_mesh_order() -> None:
    assert in_order(("model:(1)2", "data"), MESH) == ("data", "model:(1)2")
    assert in_order(None, MESH) == ("?",)


def test_what_lost_its_metadata_stands_where_the_plan_has_it() -> None:
    ours = [promised("all-gather", ("data",), 100, where="m.py:4")]
    assert lines(ours, [emitted("all-gather", ("data",), 100, where="<unknown>")]) == [
        (Match.MATCH, "m.py:4", 1, 100, 100)
    ]
