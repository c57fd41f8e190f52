"""The report of `benchmarks.comparison_board`: a table in `docs/comparing.md` from its result lines."""

from collections.abc import Callable
from math import exp, fsum, inf, log
from pathlib import Path

from benchmarks.verification_report import Line, read

BEGIN, END = "<!-- board: python -m benchmarks.comparison_board -->", "<!-- end of board -->"
ALLOWED = 1.02  # ours over the best hand-written layout
SOLVED = 1e-3  # the gap that is asked of the solver

# Causes that were found by looking at the compiled programs of the cells.
CAUSES = """\
Where ours loses, or wins by less than predicted:

- **What is chosen for hiding hides less**, as a plan takes what the prices take for hidden, where they err in its
  favour, too. XLA:GPU runs one collective at a time and fills a trip of a loop from its end; the prices know how much
  there is to hide behind, and how much of that it takes on average (`problem.windows` has the fit), but not
  which collective takes it first. What a trip waits for is off by 1.3 % of the step (root mean square; 2 % in small
  batches), so that of meshes whose plans are predicted within some 2 % of each other the wrong one may come first.
  `refine` compiles the next ones, too.
- **All-reduces of activations** wait for half of what is priced, or less, as what is saved for the backward pass is
  written beside them: gemma-7b, small, 8 H100, 0.6 ms of `megatron`, where 1.6 are predicted. It is the hand-written
  layouts that have most of them.
- **The solver's 8 s a mesh**: plans are within 0 to 1.7 % of what is proven, and nearer on a machine that does
  nothing else (gemma-7b, small, 16 H100: 1.006 alone, 1.021 beside other work).
- **The gather of an untied head** hides behind the labels' part of the loss in llama3-8b (1.3 of 2.7 ms, huge, 8
  H100); that of gpt2-xl's tied one does not. Half of what there is counts as cover.
- **Small collectives between nodes**: of one kind and over the same axes they are merged, and priced by their share of
  a bucket; one that is alone of its kind pays a latency in every trip (gpt2-xl, medium, 32 H100: an all-reduce of the
  gradients of biases, 83 µs a trip).
- **The flags** of `refine`: more collectives at once shorten plans that move weights and activations by turns, and
  lengthen some that gather weights alone; gathers for the next trip shorten small batches, and lengthen large ones.
  `scheduled` in the results has all of them.
"""


def steps(line: Line) -> tuple[float | None, float | None, float | None]:
    """Compiled steps: of ours, of ours at its best (mesh and flags), of the best hand layout; None where none fits."""
    ours, hands = _fitting(line["ours"]), _fitting(line["hands"])
    refined = ours + _fitting(line["scheduled"]["ours"])
    return ours[0] if line["ours"][0]["fits"] else None, min(refined, default=None), min(hands, default=None)


def rival_s(line: Line) -> float | None:
    """The compiled step of the best hand layout, with flags where that is faster; None where none fits."""
    return min(_fitting([*line["hands"], *line["scheduled"]["hand"]]), default=None)


def _fitting(told: list[Line]) -> list[float]:
    """Compiled steps of the layouts that fit."""
    return [x["compiled"]["step_s"] for x in told if x["fits"]]


def floor_s(line: Line) -> float:
    """A lower bound of the compute of any layout: by the model, or a compiled layout with less."""
    return min(line["floor_s"], *(x["compiled"]["compute_s"] for x in (*line["ours"], *line["hands"])))


def compiled_floor_s(line: Line) -> float:
    """The least compute of the compiled schedules of a cell."""
    return min(x["compiled"]["compute_s"] for x in (*line["ours"], *line["hands"]))


def remaining(line: Line, which: int, floor: Callable[[Line], float] = floor_s) -> float:
    """The share of the distance between best hand layout and floor that ours (0) or refined ours (1) leaves.

    Infinite where there is no distance.
    """
    step_s, hand_s = steps(line)[which], rival_s(line) if which else steps(line)[2]
    distance_s = 0.0 if hand_s is None else hand_s - floor(line)
    return (step_s - floor(line)) / distance_s if step_s is not None and distance_s > 0 else inf


def consistent(line: Line) -> bool:
    """Whether the model agrees with itself, up to the solver's gap: ours ≤ a hand's at best ≤ by Shardy."""
    ours, done = line["ours"][0], line["completed"]
    fitting = [x["step_s"] for x in line["predicted"] if x["fits"]]
    least_s = min([*fitting, *([done["best_s"]] if done["fits"] else [])], default=inf)
    not_dearer = ours["predicted"]["step_s"] <= least_s * (1 + SOLVED + ours["gap"])
    return not_dearer and done["best_s"] <= done["shardy_s"] * (1 + SOLVED + done["gap"])


def said(line: Line) -> str:
    """A cell in one line."""
    ours_s, refined_s, hand_s = steps(line)
    if ours_s is None or refined_s is None or hand_s is None:
        return "nothing to compare"
    return f"{ours_s / hand_s:.3f}, refined {_ratio(line, 1):.3f}, in {line['wall_s']:.0f} s"


def geometric_mean(values: list[float]) -> float:
    """The geometric mean of positive numbers."""
    return exp(fsum(map(log, values)) / len(values))


def write(results: Path, page: Path, total: int) -> None:
    """Replaces the board in a page; it would have `total` cells.

    Raises:
      ValueError: the page has no place for it.
    """
    text = page.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise ValueError(f"{page} has no place for a board: {BEGIN} … {END}")
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    page.write_text(f"{head}{BEGIN}\n{board(read(results), total)}\n{END}{tail}", encoding="utf-8")


def board(lines: list[Line], total: int) -> str:
    """The summary of the cells that were run, of `total`, and the table, in Markdown."""
    failed = [x for x in lines if "error" in x]
    cells = [x for x in lines if "error" not in x]
    compared = [x for x in cells if None not in steps(x)]
    if not compared:
        return "No cell was compared yet."
    ours = [_ratio(x, 0) for x in compared]
    refined = [_ratio(x, 1) for x in compared]
    left, seen = (
        [[remaining(x, which, floor) for x in compared] for which in (0, 1)] for floor in (floor_s, compiled_floor_s)
    )
    dates = sorted({x["date"] for x in cells})
    commits = sorted({x["versions"]["autoshard"] for x in cells})
    compilers = sorted({y["compiler"] for x in cells for y in x["ours"]})
    within = sum(r <= ALLOWED for r in ours)
    summary = [
        f"{len(lines)} of {total} cells were run so far, {len(compared)} compared"
        + (f", {len(failed)} failed" if failed else "")
        + f" ({' to '.join(dict.fromkeys((dates[0], dates[-1])))}; JAX {cells[0]['versions']['jax']}, "
        f"{', '.join(compilers)}; commit {', '.join(commits)}).",
        "",
        f"- ours ≤ {ALLOWED:g} × the best hand-written layout in {within} of {len(compared)} cells, ≤ 1.00 × in "
        f"{sum(r <= 1.0 for r in ours)}; geometric mean {geometric_mean(ours):.3f}, worst {max(ours):.3f}",
        f"- refined (our three best meshes, the fastest with the flags that `refine` tries) over the best hand-written "
        f"layout, with flags where that is faster: ≤ 1.00 × in {sum(r <= 1.0 for r in refined)}; geometric mean "
        f"{geometric_mean(refined):.3f}, worst {max(refined):.3f}; in the other {sum(r > 1.0 for r in refined)} the "
        f"hand-written layout is the plan where it is a candidate (`also=`)",
        f"- of the distance between the best hand-written layout and the compute floor, {_closed(left, 0)} is closed "
        f"in the geometric mean (refined: {_closed(left, 1)}); the floor is the lower of the model's bound of any "
        f"layout's compute and the least compiled one. Down to the least compiled compute of the cell alone: "
        f"{_closed(seen, 0)} (refined: {_closed(seen, 1)})",
        f"- in the model, as a check with itself: ours ≤ the fastest hand-written layout completed at best ≤ by the "
        f"partitioner, and ours ≤ all others, in {sum(map(consistent, compared))} of {len(compared)}",
    ]
    head = (
        "| model | sequences × tokens | hardware | ours: mesh | ms | best hand: layout, mesh | ms | ours ÷ hand | "
        "refined ÷ hand | closed |\n|---|---:|---|---|---:|---|---:|---:|---:|---:|"
    )
    return "\n".join([*summary, "", head, *map(_row, compared), *map(_failed, failed), "", CAUSES.rstrip()])


def _closed(left: list[list[float]], which: int) -> str:
    """1 less the geometric mean of what is left of the distance; without cells whose hand layout is at the floor."""
    positive = [r for r in left[which] if 0 < r < inf]
    return f"{1 - geometric_mean(positive):.0%}" if positive else "nothing"


def _step(line: Line, which: int) -> float:
    step_s = steps(line)[which]
    assert step_s is not None  # asked of compared cells alone
    return step_s


def _ratio(line: Line, which: int) -> float:
    """Ours over the best hand layout (0), refined ours over the best hand layout with the same choice of flags (1)."""
    rival = rival_s(line) if which else _step(line, 2)
    assert rival is not None  # some hand layout fits
    return _step(line, which) / rival


def _row(line: Line) -> str:
    fields = line["fields"]
    hand = min((x for x in line["hands"] if x["fits"]), key=lambda x: x["compiled"]["step_s"])
    ratio, refined, left = _ratio(line, 0), _ratio(line, 1), remaining(line, 0)
    mark = "**" if ratio > ALLOWED else ""
    return " | ".join(
        (
            f"| {line['model']}",
            f"{fields['batch']:,} × {fields.get('sequence', 1):,}",
            line["hardware"],
            _mesh(line["ours"][0]["mesh"]),
            f"{_step(line, 0) * 1e3:.2f}",
            f"{hand['layout']}, {_mesh(hand['mesh'])}",
            f"{_step(line, 2) * 1e3:.2f}",
            f"{mark}{ratio:.3f}{mark}",
            f"{refined:.3f}",
            ("" if left == inf else f"{round(1 - left, 2) + 0.0:.0%}") + " |",
        )
    )


def _failed(line: Line) -> str:
    return f"| {line['key']} | {line['error'].partition(chr(10))[0][:80]} |" + " |" * 8


def _mesh(mesh: dict[str, int]) -> str:
    return "×".join(map(str, mesh.values()))
