"""What a verification says, and when it says no."""

from dataclasses import replace

import pytest

from autoshard.backends.timeline import Event, HostMove, Timeline
from autoshard.pipeline_parallel.hand_overs import Pipeline
from autoshard.planner.record import Cost
from autoshard.verification import machine_json
from autoshard.verification.collective_match import CollectiveRow, Line, Match, hand_overs
from autoshard.verification.kept_match import RepeatedMatmuls, both_ways, offloaded_bytes
from autoshard.verification.result import ComputeComparison, MemoryComparison, Parts, Verification


def row(kind: str, axes: tuple[str, ...], predicted: int, emitted: int, status: Match) -> CollectiveRow:
    return CollectiveRow(
        kind=kind,
        axes=axes,
        predicted_bytes=predicted,
        emitted_bytes=emitted,
        predicted_wire_bytes=predicted // 2,
        emitted_wire_bytes=emitted // 2,
        predicted_count=int(predicted > 0),
        emitted_count=int(emitted > 0),
        emitted_launches=int(emitted > 0),
        status=status,
    )


def line(where: str, emitted: int, status: Match) -> Line:
    return Line(
        kind="all-gather",
        axes=("data",),
        primitive="dot_general",
        where=where,
        trips=4,
        count=2,
        predicted_bytes=0 if status is Match.EXTRA else emitted,
        emitted_bytes=emitted,
        status=status,
    )


def parts(peak: int) -> Parts:
    return Parts(arguments=peak // 2, outputs=peak // 4, aliases=peak // 4, temporaries=peak // 2, peak=peak)


def verification(
    *rows: CollectiveRow, lines: tuple[Line, ...] = (), compiled_peak_bytes: int = 1_000_000
) -> Verification:
    return Verification(
        compiler="gpu",
        version="jax-cuda12-pjrt 0.10.2",
        topology="h100:1x8",
        rows=rows,
        lines=lines,
        memory=MemoryComparison(
            predicted=parts(2_000_000),
            compiled=parts(compiled_peak_bytes),
            meaning="XLA's own",
            bound=False,
            tolerance=0.1,
        ),
        compute=ComputeComparison(
            predicted_s=1e-3, predicted_flops=2e12, compiled_s=1.1e-3, compiled_flops=2e12, estimated_s=None
        ),
        cost=Cost(step_s=1.5e-3, compute_s=1e-3, communication_s=1e-3, hidden_s=5e-4),
        predicted=None,
        timeline=Timeline(step_s=1.6e-3, compute_s=1.1e-3, communication_s=1e-3, exposed_s=5e-4, flops=2e12, events=()),
        emitted=(),
        wall_s=2.5,
        tolerance=0.05,
    )


GATHER = row("all-gather", ("data",), 1_000_000, 990_000, Match.MATCH)
EXTRA = row("all-to-all", ("model",), 0, 500_000, Match.EXTRA)


def test_a_narrow_terminal_leaves_columns_out_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    long = row("reduce-scatter", ("data", "model"), 1_000_000, 990_000, Match.DIFFERS)
    told = str(verification(GATHER, long, EXTRA, lines=(line("/home/me/model.py:61 (mlp)", 990_000, Match.MATCH),)))
    assert max(map(len, told.splitlines())) <= 60
    assert "no room for wire, ratio: a wider terminal, or --json, shows" in told
    assert "990 kB" in told
    monkeypatch.setenv("COLUMNS", "80")
    assert "no room" not in str(verification(GATHER, long, EXTRA))


def test_a_verification_prints_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = verification(
        GATHER,
        row("all-gather", ("model",), 1_000_000, 990_000, Match.MERGED),
        EXTRA,
        lines=(line("/home/me/model.py:61 (mlp)", 990_000, Match.MATCH), line("<unknown>", 500_000, Match.EXTRA)),
    )
    assert (
        str(found)
        == """\
  verdict   NO MATCH: collectives (bytes within 5%, in total and in each row of
            5% of them, nothing unknown; memory no more than 10% above the plan)
  step      predicted 1.5 ms (500 µs exposed, 500 µs hidden); compiled schedule,
            priced by the same model: 1.6 ms (500 µs exposed, 500 µs hidden)
  compute   predicted 1 ms (2 TFLOP of matmuls), compiled 1.1 ms (2 TFLOP of
            matmuls)
  compiler  gpu, jax-cuda12-pjrt 0.10.2, for h100:1x8: 2.5 s

collectives per step and device; bytes are logical, wire: what a ring sends

 collective  over   count  predicted  emitted    wire  ratio  status
 ───────────────────────────────────────────────────────────────────
 all-gather  data       1       1 MB   990 kB  495 kB  ×0.99  MATCH
 all-gather  model      1       1 MB   990 kB  495 kB  ×0.99  MERGED
             all        2       2 MB  1.98 MB  990 kB  ×0.99  MATCH
 all-to-all  model  0 → 1        0 B   500 kB  250 kB         EXTRA

memory per device; compiled peak: XLA's own

 memory       predicted  compiled  ratio
 ───────────────────────────────────────
 arguments         1 MB    500 kB  ×0.50
 outputs         500 kB    250 kB  ×0.50
 aliases         500 kB    250 kB  ×0.50
 temporaries       1 MB    500 kB  ×0.50
 peak              2 MB      1 MB  ×0.50

where they come from: source line and equation (count × trips)

 from                     collective  over  count         bytes  status
 ──────────────────────────────────────────────────────────────────────
 model.py:61 dot_general  all-gather  data    2×4        990 kB  MATCH
 <unknown> dot_general    all-gather  data    2×4  0 B → 500 kB  EXTRA"""
    )
    assert not machine_json.verification(found)["ok"]


def test_lines_fit_eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    long = row("reduce-scatter", ("data", "model"), 999_000_000_000, 1_998_000_000_000, Match.DIFFERS)
    found = verification(long, lines=(line("/a/long_folder/transformer.py:1234 (attention)", 10**12, Match.MERGED),))
    assert max(map(len, str(found).splitlines())) <= 80


LAYERS = "/home/me/model.py:8 (loss)"
PIPELINE = Pipeline(where=LAYERS, stages=4, trips=11)


def permutes(trips: int, predicted: int, emitted: int, where: str = LAYERS) -> Line:
    status = Match.MATCH if predicted == emitted else Match.MISSING if predicted else Match.EXTRA
    return replace(line(where, emitted, status), kind="collective-permute", trips=trips, predicted_bytes=predicted)


def exchanges(trips: int, predicted: int, emitted: int) -> Line:
    return replace(permutes(trips, predicted, emitted), kind="all-to-all")


@pytest.mark.parametrize(
    ("lines", "trips", "said"),
    [
        ([permutes(11, 44_000, 44_000), permutes(7, 0, 9_000, "/home/me/other.py:1 (f)")], (11,), "MATCH"),
        ([permutes(11, 44_000, 0), permutes(7, 0, 44_000)], (7,), "DIFFERS"),  # of a loop with another bubble
        ([permutes(11, 44_000, 0), permutes(11, 0, 22_000)], (11,), "DIFFERS"),
        ([permutes(11, 44_000, 0)], (), "DIFFERS"),
        ([exchanges(11, 44_000, 44_000)], (11,), "MATCH"),
        ([exchanges(11, 44_000, 0), exchanges(7, 0, 44_000)], (7,), "DIFFERS"),
        ([exchanges(11, 9_000, 0), permutes(11, 44_000, 44_000)], (11,), "MATCH"),  # of the layers, not of the stages
        ([], (), "MATCH"),  # the plan splits no stages
    ],
)
def test_stages_have_a_row_of_their_own(lines: list[Line], trips: tuple[int, ...], said: str) -> None:
    found = replace(verification(GATHER), pipelines=hand_overs(lines, [PIPELINE], 0.05))
    (staged,) = found.pipelines
    assert staged.compiled_trips == trips
    assert found.ok == staged.ok == (said == "MATCH")
    text = " ".join(str(found).split())
    assert "4 stages: 3 of 11 trips are the bubble (27%)" in text
    if lines:
        assert f", compiled {trips[0] if trips else 'no'} trips; {staged.kind}s hand on " in text
    assert (f": {said} compiler" if lines else "; nothing is handed on between devices compiler") in text
    assert ("NO MATCH: stages" in text) == (said != "MATCH")
    (row,) = machine_json.verification(found)["pipelines"]
    assert (row["ok"], row["bubble"], row["compiled_trips"]) == (said == "MATCH", 3 / 11, list(trips))


def repeated(where: str, predicted: float | None, compiled: float) -> RepeatedMatmuls:
    return RepeatedMatmuls(where=where, predicted_flops=predicted, compiled_flops=compiled, tolerance=0.02)


def test_what_runs_once_more_has_a_row_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = (
        repeated("/home/me/model.py:61 (mlp)", 1e11, 0.99e11),
        repeated("/home/me/model.py:40 (qkv)", 1e11, 0.0),
        repeated("/home/me/model.py:50 (scores)", 0.0, 1e10),
    )
    found = replace(verification(GATHER), repeated=repeated("", 2e11, 1.09e11), repeated_lines=lines)
    text = str(found)
    words = " ".join(text.split())
    assert "repeated predicted 200 GFLOP of matmuls (10.0% of all), compiled 109 GFLOP: DIFFERS" in words
    assert [line.split()[-1] for line in text.splitlines()[-3:]] == ["MATCH", "MISSING", "EXTRA"]
    told = machine_json.verification(found)["repeated"]
    assert (told["predicted_flops"], told["compiled_flops"], told["status"]) == (2e11, 1.09e11, "DIFFERS")
    assert [line["status"] for line in told["lines"]] == ["MATCH", "MISSING", "EXTRA"]
    assert found.ok  # bytes and the peak are judged


def test_of_a_plan_from_a_file_only_the_compiled_matmuls_that_run_once_more_are_known() -> None:
    found = replace(verification(GATHER), repeated=repeated("", None, 1.09e11))
    assert "repeated  compiled 109 GFLOP of matmuls" in str(found)


def timeline_of(*events: Event) -> Timeline:
    return Timeline(step_s=1.0, compute_s=0.0, communication_s=1.0, exposed_s=0.0, flops=0.0, events=events)


def copied(where: str, nbytes: int, *, to_host: bool, trips: int = 4) -> Event:
    moves = HostMove(f"jit(f)/{where}", nbytes, to_host)
    return Event(name="", stream="communication", start_s=0.0, duration_s=0.0, trips=trips, where=where, moves=moves)


HERE, ELSEWHERE = "/home/me/model.py:61 (mlp)", "/home/me/model.py:70 (attend)"


@pytest.mark.parametrize(
    ("compiled", "statuses", "sums"),
    [
        ([(HERE, 1000, True), (HERE, 1000, False)], ["MATCH", "MATCH"], ["MATCH", "MATCH"]),
        ([(HERE, 500, True), (HERE, 500, True), (HERE, 1000, False)], ["MATCH", "MATCH"], ["MATCH", "MATCH"]),
        ([], ["MISSING", "MISSING"], ["MISSING", "MISSING"]),
        ([(HERE, 1000, True), (HERE, 1000, False), (HERE, 1000, False)], ["DIFFERS", "MATCH"], ["MATCH", "DIFFERS"]),
        (
            [(HERE, 1000, True), (ELSEWHERE, 1000, False)],
            ["MATCH", "MISSING", "EXTRA"],
            ["MATCH", "MATCH"],
        ),
    ],
    ids=["the same", "in halves", "dropped", "twice", "at another line"],
)
def test_what_goes_to_the_host_has_a_row_of_its_own(
    compiled: list[tuple[str, int, bool]], statuses: list[str], sums: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes are those of all trips; a copy that the compiler drops, or makes twice, is no match."""
    monkeypatch.setenv("COLUMNS", "80")
    planned = timeline_of(copied(HERE, 1000, to_host=True), copied(HERE, 1000, to_host=False))
    made = timeline_of(*(copied(where, nbytes, to_host=way) for where, nbytes, way in compiled))
    lines = offloaded_bytes(planned, made, lambda name, where: where)
    found = replace(verification(GATHER), offloaded=both_ways(lines), offloaded_lines=lines)
    assert [str(line.status) for line in lines] == statuses
    assert [str(row.status) for row in found.offloaded] == sums
    assert all(row.predicted_bytes == 4000 for row in found.offloaded)
    assert found.ok == (set(sums) == {"MATCH"})
    text = str(found)
    assert ("NO MATCH: copies to the host" in text) != found.ok
    assert max(map(len, text.splitlines())) <= 80
    words = " ".join(text.split())
    assert f"offloaded to the host predicted 4 kB, compiled {'4 kB' if compiled else '0 B'}: {sums[0]}; back" in words
    told = machine_json.verification(found)["offloaded"]
    assert [told["to_host"]["status"], told["from_host"]["status"]] == sums
    assert [line["status"] for line in told["lines"]] == statuses


def test_of_a_plan_from_a_file_only_the_compiled_copies_are_known() -> None:
    lines = offloaded_bytes(None, timeline_of(copied(HERE, 1000, to_host=True)), lambda name, where: where)
    found = replace(verification(GATHER), offloaded=both_ways(lines), offloaded_lines=lines)
    assert found.ok
    assert "offloaded  to the host compiled 4 kB; back compiled 0 B" in str(found)


def test_a_match_says_so() -> None:
    assert "MATCH (" in str(verification(GATHER))
    assert verification(GATHER).ok


def test_an_unknown_collective_is_no_match() -> None:
    assert "NO MATCH: collectives (" in str(verification(GATHER, EXTRA))


@pytest.mark.parametrize(("peak_bytes", "ok"), [(2_190_000, True), (2_210_000, False), (10_000, True)])
def test_a_program_that_needs_more_memory_is_no_match(peak_bytes: int, *, ok: bool) -> None:
    """Less is welcome: only what is above the plan runs out of memory."""
    found = verification(GATHER, compiled_peak_bytes=peak_bytes)
    assert found.ok is ok
    assert ("NO MATCH: memory (" in str(found)) is not ok


def test_a_peak_that_is_only_a_bound_is_not_judged() -> None:
    found = verification(GATHER, compiled_peak_bytes=9_000_000)
    assert not found.ok
    assert replace(found, memory=replace(found.memory, bound=True)).ok
