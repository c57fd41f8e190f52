"""The report of `benchmarks.recomputation`: a table from its result lines."""

from pathlib import Path

from benchmarks.comparison_report import geometric_mean
from benchmarks.verification_report import Line, read

__all__ = ["OURS", "Line", "board", "ratio", "read", "said", "write"]

OURS = "ours"
BEGIN, END = "<!-- board: python -m benchmarks.recomputation -->", "<!-- end of board -->"
PEAK_WITHIN, FLOPS_WITHIN = 0.05, 0.02


def fits(line: Line) -> bool:
    """Whether a run was compiled, and its compiled peak is within the budget."""
    return "compiled" in line and line["compiled"]["peak_bytes"] <= line["limit_bytes"]


def best_rival(lines: list[Line]) -> Line | None:
    """Of one cell's runs the rival that fits whose compiled step is the shortest."""
    rivals = [x for x in lines if x["policy"] != OURS and fits(x)]
    return min(rivals, key=lambda x: x["compiled"]["step_s"], default=None)


def ratio(lines: list[Line]) -> float | None:
    """Ours over the best rival that fits, of one cell; None where one of the two is missing or does not fit."""
    ours, rival = _ours(lines), best_rival(lines)
    if ours is None or rival is None or not fits(ours):
        return None
    return ours["compiled"]["step_s"] / rival["compiled"]["step_s"]


def said(line: Line) -> str:
    """A run in one line."""
    if "error" in line:
        return line["error"].partition("\n")[0]
    if "infeasible" in line:
        return f"infeasible, {line['plan_s']:.0f} s"
    predicted, made = line["predicted"], line["compiled"]
    same = f"; as {line['as']}" if "as" in line else ""
    return (
        f"{_ms(predicted['step_s'])} ms predicted, {_ms(made['step_s'])} compiled; peak "
        f"{made['peak_bytes'] / 1e9:.1f} GB of {line['limit_bytes'] / 1e9:.1f}, "
        f"{_peak_ratio(line):.3f} of predicted; FLOPs {_flops_ratio(line):.3f}; "
        f"planned in {line['plan_s']:.0f} s{same}"
    )


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
    cells: dict[str, list[Line]] = {}
    for x in lines:
        cells.setdefault(x["cell"], []).append(x)
    cells = {cell: runs for cell, runs in cells.items() if _ours(runs) is not None}
    if not cells:
        return "No cell was run yet."
    compared = [r for r in map(ratio, cells.values()) if r is not None]
    ours = [x for x in map(_ours, cells.values()) if x is not None]
    made = [x for x in ours if "compiled" in x]
    told = [x for x in lines if "versions" in x]
    summary = [
        f"{len(cells)} of {total} cells were run so far, {len(compared)} compared (JAX {told[0]['versions']['jax']}, "
        f"{', '.join(sorted({x['versions']['compiler'] for x in told}))}; "
        f"{' to '.join(dict.fromkeys((min(x['date'] for x in told), max(x['date'] for x in told))))}; commit "
        f"{', '.join(sorted({x['versions']['autoshard'] for x in told}))}).",
        "",
    ]
    if compared:
        summary.append(
            f"- ours ≤ 1.00 × the best rival that fits in {sum(r <= 1.0 for r in compared)} of {len(compared)} cells; "
            f"geometric mean {geometric_mean(compared):.3f}, worst {max(compared):.3f}"
        )
    alone = [cell for cell, runs in cells.items() if _fitting_ours(runs) and best_rival(runs) is None]
    lost = [cell for cell, runs in cells.items() if not _fitting_ours(runs) and best_rival(runs) is not None]
    summary += [
        f"- ours alone fits in {len(alone)} cells{_listed(alone)}; a rival fits and ours does not in "
        f"{len(lost)}{_listed(lost)}",
        f"- ours: compiled peak within {PEAK_WITHIN:.0%} of the predicted in "
        f"{sum(abs(_peak_ratio(x) - 1) <= PEAK_WITHIN for x in made)} of {len(made)}, above the budget in "
        f"{sum(not fits(x) for x in made)}; FLOPs within {FLOPS_WITHIN:.0%} in "
        f"{sum(abs(_flops_ratio(x) - 1) <= FLOPS_WITHIN for x in made)}",
        "",
        "| model, batch, hardware | budget | predicted ms | compiled ms | peak GB | ÷ predicted | FLOPs ÷ predicted | "
        "planned in s | best rival that fits | ms | ours ÷ rival | rivals that do not fit |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---|---:|---:|---|",
    ]
    return "\n".join([*summary, *map(_row, cells.values())])


def _row(lines: list[Line]) -> str:
    """A cell as a row of the table."""
    ours, rival, compared = _ours(lines), best_rival(lines), ratio(lines)
    assert ours is not None  # of cells that have a run of ours alone
    if "compiled" in ours:
        over = "" if fits(ours) else " (above the budget)"
        own = (
            _ms(ours["predicted"]["step_s"]),
            _ms(ours["compiled"]["step_s"]),
            f"{ours['compiled']['peak_bytes'] / 1e9:.1f}{over}",
            f"{_peak_ratio(ours):.2f}",
            f"{_flops_ratio(ours):.2f}",
            f"{ours['plan_s']:.0f}",
        )
    else:
        own = ("infeasible" if "infeasible" in ours else "failed", *[""] * 5)
    excluded = [x["policy"] for x in lines if x["policy"] != OURS and not fits(x)]
    cells = (
        ours["subject"],
        f"{ours['budget']} %",
        *own,
        "none" if rival is None else rival["policy"],
        "" if rival is None else _ms(rival["compiled"]["step_s"]),
        "" if compared is None else f"**{compared:.3f}**" if compared > 1 else f"{compared:.3f}",
        ", ".join(excluded),
    )
    return f"| {' | '.join(cells)} |"


def _ours(lines: list[Line]) -> Line | None:
    return next((x for x in lines if x["policy"] == OURS), None)


def _fitting_ours(lines: list[Line]) -> bool:
    ours = _ours(lines)
    return ours is not None and fits(ours)


def _peak_ratio(line: Line) -> float:
    return line["compiled"]["peak_bytes"] / line["predicted"]["peak_bytes"]


def _flops_ratio(line: Line) -> float:
    """Compiled FLOPs of matrix products over the plan's."""
    return line["compiled"]["flops"] / line["compiled"]["predicted_flops"]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def _listed(names: list[str]) -> str:
    return f" ({'; '.join(names)})" if names else ""
