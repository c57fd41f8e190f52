"""Scale: ranked layouts of a training step in closed form, for terminals and as JSON."""

from dataclasses import asdict
from typing import Any

from autoshard.tables import bytes_text, columns, fields, render, table, time_text
from cost_models.layout_search import LayoutRanking, Priced, describe

EXECUTABLE = (
    "one program with data, FSDP, tensor, context and expert axes runs as `autoshard.plan` emits it; "
    "pipeline stages are priced, not emitted"
)


_HEAD = ("", "layout", "step", "tokens/s", "MFU", "memory")


def text(found: LayoutRanking, *, sequences: int, sequence: int, width: int | None = None) -> str:
    """The ranking, where the best step's time goes, and what each parallelism is worth."""
    width = columns() if width is None else width
    best = found.ranked[0]
    rows = [
        (
            str(i + 1),
            describe(p.layout),
            time_text(p.step.seconds),
            f"{sequences * sequence / p.step.seconds:,.0f}",
            f"{p.step.mfu:.1%}",
            bytes_text(p.step.peak_bytes),
        )
        for i, p in enumerate(found.ranked)
    ]
    spent = [
        (part.name, time_text(part.seconds), f"{part.seconds / best.step.seconds:.1%}", part.reason)
        for part in sorted(best.step.parts, key=lambda part: -part.seconds)
        if part.seconds > 0
    ]
    notes = [*_reasons(found), ("tried", f"{found.tried:,} layouts, {found.too_large:,} of them too large")]
    return render(
        f"{describe(best.layout)}: {time_text(best.step.seconds)} a step, {best.step.mfu:.1%} MFU\n",
        table(
            "",
            ("", "layout", "step", "tokens/s", "MFU", "memory"),
            rows,
            right=("", "step", "tokens/s", "MFU", "memory"),
        ),
        table("where the best step goes", ("part", "time", "share", "why"), spent, right=("time", "share")),
        fields([*notes, ("runs", EXECUTABLE)], width),
        width=width,
    )


def to_json(found: LayoutRanking, *, sequences: int, sequence: int) -> dict[str, Any]:
    """The same in SI units."""
    return {
        "rows": [_row(p, sequences * sequence) for p in found.ranked],
        "worth": [
            {
                "parallelism": worth.parallelism,
                "ways": worth.ways,
                "without": None if worth.without is None else _row(worth.without, sequences * sequence),
            }
            for worth in found.worth
        ],
        "tried": found.tried,
        "too_large": found.too_large,
        "executable": EXECUTABLE,
    }


def _row(priced: Priced, tokens: int) -> dict[str, Any]:
    return {
        "layout": asdict(priced.layout),
        "described": describe(priced.layout),
        "step_s": priced.step.seconds,
        "tokens_per_s": tokens / priced.step.seconds,
        "mfu": priced.step.mfu,
        "peak_bytes": priced.step.peak_bytes,
        "parts": {part.name: part.seconds for part in priced.step.parts},
    }


def _reasons(found: LayoutRanking) -> list[tuple[str, str]]:
    """One line per parallelism of the best layout: what is lost without it."""
    best = found.ranked[0].step.seconds
    said: list[tuple[str, str]] = []
    for worth in found.worth:
        name = f"{worth.parallelism.replace('_', ' ')} {worth.ways}"
        if worth.without is None:
            said.append((name, "nothing fits without it"))
        else:
            slower = worth.without.step.seconds / best - 1
            said.append((name, f"without it {slower:+.1%}: {describe(worth.without.layout)}"))
    return said
