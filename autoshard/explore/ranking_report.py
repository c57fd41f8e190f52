"""Ranking report: the result of a search as a table for terminals, as Markdown, and as JSON."""

from collections.abc import Callable, Sequence
from typing import Any

from autoshard.explore.ranking import Curve, RankedPlan, Ranking
from autoshard.report.tables import GAP, bytes_text, columns, count_text, fields, paragraph, render, table, time_text

SCHEMA = 1
SHOWN = 20  # rows in a terminal
DISPENSABLE = ("exposed", "memory", "tokens/s")  # columns that go first where a terminal is narrow
REASONS = 8  # reasons why candidates are left out


def text(found: Ranking, *, width: int | None = None) -> str:
    """The verdict, the ranking, the scaling curves, and the candidates left out."""
    width = columns() if width is None else width
    every = _table(found)
    head, rows, right = _fitting(*every, width)
    unseen = [name for name in every[0] if name not in head]
    parts: list[Any] = [
        paragraph(verdict(found), width),
        table("", head, rows[:SHOWN], right=right, whole=("mesh", "slice")),
    ]
    if len(rows) > SHOWN:
        parts.append(f"and {len(rows) - SHOWN} more: --json shows all\n")
    for curve in found.scaling:
        parts.append(_curve(found, curve))
    hint = [("no room", f"for {', '.join(unseen)}: a wider terminal, or --json, shows them")] if unseen else []
    parts.append(fields([*hint, *_remarks(found)], width))
    return render(*parts, width=width)


def markdown(found: Ranking) -> str:
    """The same as Markdown, every row of it."""
    head, rows, _ = _table(found)
    lines = [f"# Search: {found.name}", "", verdict(found), "", _md_row(head), _md_row(["---"] * len(head))]
    lines += [_md_row(row) for row in rows]
    for curve in found.scaling:
        lines += ["", f"## Scaling: {curve.name}, knee at {curve.knee} chips", ""]
        lines += [_md_row(_CURVE_HEAD), _md_row(["---"] * len(_CURVE_HEAD))]
        lines += [_md_row(cells) for cells in _curve_rows(found, curve)]
    lines += ["", *(f"- {name}: {what}" for name, what in _remarks(found))]
    return "\n".join(lines) + "\n"


def to_json(found: Ranking) -> dict[str, Any]:
    """Everything, in SI units."""
    return {
        "schema": SCHEMA,
        "name": found.name,
        "verdict": verdict(found),
        "budget_tokens": found.budget_tokens,
        "prices_per_chip_hour": dict(found.prices),
        "rows": [_row_json(found, rank, row) for rank, row in enumerate(found.rows)],
        "scaling": [
            {
                "name": curve.name,
                "knee_chips": curve.knee,
                "points": [
                    {"chips": p.chips, "rank": p.rank + 1, "per_s": p.per_s, "slope": p.slope} for p in curve.points
                ],
            }
            for curve in found.scaling
        ],
        "left_out": [{"candidate": str(out.candidate), "reason": out.reason} for out in found.left_out],
        "twins": found.twins,
        "missing": found.missing,
        "wall_s": found.wall_s,
        "notes": list(found.notes),
    }


def verdict(found: Ranking) -> str:
    """The answer in one sentence."""
    best = found.best
    record = best.record
    rate = f"{best.tokens_per_s:,.0f} tokens/s, " if best.tokens else ""
    said = (
        f"{found.name} runs fastest as {best.candidate}: {time_text(best.step_s)} a step, {rate}{best.mfu:.1%} MFU, "
        f"{bytes_text(record.memory.peak_bytes)} of {bytes_text(record.memory.limit_bytes)} per device"
    )
    days, dollars = found.days(best), found.dollars(best)
    if days is not None:
        said += f"; {_tokens(found.budget_tokens)} tokens take {_number(days)} days"
        said += f" and ${_number(dollars)}" if dollars is not None else ""
    rest = [row for row in found.rows[1:] if row.order[0] > 1.001 * best.order[0]]
    ties = len(found.rows) - 1 - len(rest)
    if ties:
        said += f"; {ties} more {'is' if ties == 1 else 'are'} within 0.1%"
    priced = [(dollars, i) for i, row in enumerate(found.rows) if (dollars := found.dollars(row)) is not None]
    if priced and min(priced)[1]:
        _, rank = min(priced)
        said += f"; cheapest is {found.rows[rank].candidate} (rank {rank + 1}), ${_dollars(found, found.rows[rank])}"
        said += " per million steps" if found.days(best) is None else ""
    return said + "."


def _row_json(found: Ranking, rank: int, row: RankedPlan) -> dict[str, Any]:
    record = row.record
    return {
        "rank": rank + 1,
        "hardware": row.candidate.hardware,
        "chips": row.candidate.chips,
        "devices": row.devices,
        "mesh": row.candidate.shape,
        "choice": dict(row.candidate.choice),
        "microbatches": record.microbatches,
        "stages": row.stages,
        "step_s": row.step_s,
        "compute_s": record.cost.compute_s,
        "exposed_s": record.cost.exposed_s,
        "hidden_s": record.cost.hidden_s,
        "tokens_per_step": row.tokens,
        "tokens_per_s": row.tokens_per_s,
        "mfu": row.mfu,
        "hfu": row.hfu,
        "peak_bytes": record.memory.peak_bytes,
        "limit_bytes": record.memory.limit_bytes,
        "gap": record.certificate.gap,
        "status": record.certificate.status,
        "days": found.days(row),
        "dollars": found.dollars(row),
        "pareto": rank in found.pareto,
    }


def _table(found: Ranking) -> tuple[list[str], list[list[str]], tuple[str, ...]]:
    """Head, rows and the columns that are aligned to the right."""
    shown: list[tuple[str, Callable[[int, RankedPlan], str]]] = [
        ("", lambda rank, row: f"{rank + 1}{'*' if rank in found.pareto else ''}"),
        ("slice", lambda rank, row: row.candidate.hardware),
        ("mesh", lambda rank, row: "×".join(str(size) for _, size in row.candidate.mesh)),
    ]
    for key in dict.fromkeys(key for row in found.rows for key, _ in row.candidate.choice):
        shown.append((key, lambda rank, row, key=key: str(dict(row.candidate.choice).get(key, ""))))
    if any(row.record.microbatches is not None for row in found.rows):
        shown.append(("micro-batches", lambda rank, row: str(row.record.microbatches or "")))
    if any(row.stages is not None for row in found.rows):
        shown.append(("stages", lambda rank, row: _stages(row)))
    varied = len(shown) - 3
    shown.append(("step", lambda rank, row: time_text(row.step_s)))
    if found.best.tokens:
        shown.append(("tokens/s", lambda rank, row: f"{row.tokens_per_s:,.0f}"))
    shown += [
        ("MFU", lambda rank, row: f"{row.mfu:.1%}"),
        ("memory", lambda rank, row: bytes_text(row.record.memory.peak_bytes)),
        ("exposed", lambda rank, row: time_text(row.record.cost.exposed_s)),
    ]
    if found.days(found.best) is not None:
        shown.append(("days", lambda rank, row: _number(found.days(row))))
    if found.prices:
        shown.append((_dollars_of(found), lambda rank, row: _dollars(found, row)))
    head = [name for name, _ in shown]
    rows = [[cell(rank, row) for _, cell in shown] for rank, row in enumerate(found.rows)]
    return head, rows, (head[0], *head[3 : 3 + varied], *head[3 + varied :])


def _stages(row: RankedPlan) -> str:
    """`4 over node`, or `1`; empty where the program leaves no choice."""
    if row.stages is None:
        return ""
    return f"{row.candidate.shape[row.stages]} over {row.stages}" if row.stages else "1"


def _fitting(
    head: list[str], rows: list[list[str]], right: tuple[str, ...], width: int
) -> tuple[list[str], list[list[str]], tuple[str, ...]]:
    """The table without the columns that matter least, until it is no wider than a terminal."""
    for name in DISPENSABLE:
        if sum(max(len(row[i]) for row in (head, *rows)) + GAP for i in range(len(head))) <= width:
            break
        if name in head:
            at = head.index(name)
            head = head[:at] + head[at + 1 :]
            rows = [row[:at] + row[at + 1 :] for row in rows]
    return head, rows, tuple(name for name in right if name in head)


def _tokens(count: float) -> str:
    """`15T`, `300B`, `2.4M`: as `--tokens` takes them."""
    unit, scale = next(((u, x) for u, x in (("T", 1e12), ("B", 1e9)) if count >= x), ("M", 1e6))
    return f"{count / scale:.4g}{unit}"


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _dollars_of(found: Ranking) -> str:
    """The head of the dollars' column: of the token budget; without one, of a million steps."""
    return "$/1M steps" if found.days(found.best) is None else "$"


def _dollars(found: Ranking, row: RankedPlan) -> str:
    dollars = found.dollars(row)
    return _number(dollars if dollars is None or found.days(row) is not None else 1e6 * dollars)


_CURVE_HEAD = ("chips", "tokens/s", "of perfect", "mesh")


def _curve_rows(found: Ranking, curve: Curve) -> list[tuple[str, ...]]:
    first = curve.points[0]
    return [
        (
            f"{p.chips:,}",
            count_text(p.per_s),
            f"{p.per_s / first.per_s * first.chips / p.chips:.0%}",
            f"{found.rows[p.rank].candidate.mesh_text} on {found.rows[p.rank].candidate.hardware}",
        )
        for p in curve.points
    ]


def _curve(found: Ranking, curve: Curve) -> Any:
    return table(
        f"scaling of {curve.name}: knee at {curve.knee} chips",
        _CURVE_HEAD,
        _curve_rows(found, curve),
        right=_CURVE_HEAD[:3],
    )


def _remarks(found: Ranking) -> list[tuple[str, str]]:
    """The remarks below the tables: the Pareto front, candidates left out, assumptions."""
    rows = [
        ("*", "on the Pareto front of time, memory per device and chips"),
        ("planned", f"{len(found.rows)} candidates in {found.wall_s:.1f} s"),
    ]
    if found.twins:
        differ = "mesh differs" if found.twins == 1 else "meshes differ"
        rows.append(("twins", f"{found.twins} {differ} from these in the order of equal links alone"))
    reasons: dict[str, list[str]] = {}
    for out in found.left_out:
        reasons.setdefault(out.reason, []).append(str(out.candidate))
    for reason, which in list(reasons.items())[:REASONS]:
        rest = f" and {len(which) - 1} more" if len(which) > 1 else ""
        rows.append(("left out", f"{which[0]}{rest}: {reason}"))
    if len(reasons) > REASONS:
        rows.append(("left out", f"{len(reasons) - REASONS} more reasons: --json shows all"))
    return rows + [("note", note) for note in found.notes]


def _md_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
