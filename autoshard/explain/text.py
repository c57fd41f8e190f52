"""Explanations as text and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from autoshard.explain.explanation import Blocked, Explanation, Flip, Recall
from autoshard.report.tables import (
    bytes_text,
    columns,
    fields,
    paragraph,
    render,
    short_aval,
    short_place,
    table,
    time_text,
)

LONGEST = 8  # changes elsewhere, and collectives, that are shown one by one

# What stands in a text → how it is read.
_NOTATION = (
    (",-]", "[x,-]", "the first dimension is split over the mesh axis x, the second is whole"),
    ("·", "x·y", "over both axes"),
    (" -> ", "a -> b", "an operation's operands, and its results"),
    ("Σ{", "Σ{x}", "each device along x holds a part of a sum"),
    (" … at", "add …", "with the element-wise operations that share its layout"),
)


def text(
    found: Sequence[Explanation],
    flips: Sequence[Flip] = (),
    blocked: Sequence[Blocked] = (),
    recalls: Sequence[Recall] = (),
    *,
    unexplained: int = 0,
    width: int | None = None,
) -> str:
    """One paragraph per decision, what is kept for backward passes, turning points, dimensions that do not divide.

    Args:
      found: the decisions.
      flips: where they turn.
      blocked: dimensions that a mesh axis does not divide.
      recalls: what the backward pass reads of the same line.
      unexplained: how many more decisions the question is about.
      width: columns; None takes the terminal's.
    """
    width = columns() if width is None else width
    parts: list[Any] = []
    for one in found:
        parts += _one(one, width)
    if unexplained:
        parts.append(paragraph(f"{unexplained} more decisions there: a narrower question explains them", width))
    if recalls:
        parts += ["for the backward pass\n", fields([_recall_row(one) for one in recalls], width) + "\n"]
    if flips:
        parts.append(table("where the decision turns", ("number", "now", "turns at", "into"), map(_flip_row, flips)))
    if blocked:
        parts.append(
            table(
                "what a mesh axis does not divide",
                ("input", "dimension", "axis", "ways out"),
                [_blocked_row(b) for b in blocked[:LONGEST]],
            )
        )
    written = render(*parts, width=width)
    signs = [(sign, meaning) for mark, sign, meaning in _NOTATION if mark in written]
    return render(written + "\n", "how to read it\n", fields(signs, width), width=width) if signs else written


def to_json(
    found: Sequence[Explanation],
    flips: Sequence[Flip] = (),
    blocked: Sequence[Blocked] = (),
    recalls: Sequence[Recall] = (),
) -> dict[str, Any]:
    """The same in SI units."""
    return {
        "decisions": [asdict(one) for one in found],
        "flips": [asdict(one) for one in flips],
        "blocked": [asdict(one) for one in blocked],
        "recalls": [asdict(one) for one in recalls],
    }


def _one(one: Explanation, width: int) -> list[Any]:
    what = short_place(one.what[0]) + (f" and {len(one.what) - 1} like it" if len(one.what) > 1 else "")
    rows = [("lies", f"{one.layout}  ({short_aval(one.value)}, {one.choices} choices)")]
    if one.where:
        rows.append(("line", short_place(one.where)))
    up = one.runner_up
    if up is None:
        rows.append(("otherwise", "nothing else fits in memory or can be" if one.choices > 1 else "it has no choice"))
    else:
        more = up.step_s - one.step_s
        worth = f"{time_text(more)} ({more / one.step_s:.2%}) slower" if more > 0 else "as fast: a tie"
        rows.append(("otherwise", f"{up.layout}: a step of {time_text(up.step_s)}, {worth}"))
        rows.append(
            (
                "proof",
                f"without its layout nothing takes less than {time_text(up.bound_s)}; peak {bytes_text(up.peak_bytes)}",
            )
        )
        for kind, axes, nbytes, seconds in up.collectives[:LONGEST]:
            sign = "more" if nbytes > 0 else "less"
            rows.append(
                (
                    "moves",
                    f"{bytes_text(abs(nbytes))} {sign} in {kind} over {'·'.join(axes)} ({time_text(abs(seconds))})",
                )
            )
        for change in up.changes[:LONGEST]:
            times = f"{change.count}× " if change.count > 1 else ""
            rows.append(("then", f"{times}{short_place(change.what)}: {change.before} becomes {change.after}"))
        if len(up.changes) > LONGEST:
            rows.append(("then", f"{len(up.changes) - LONGEST} more decisions: --json shows all"))
    for layout, step_s in one.others:
        slower = step_s / one.step_s - 1
        rows.append(("alone", f"{layout}, nothing else changed: a step of {time_text(step_s)} ({slower:+.2%})"))
    return [f"{what}\n", fields(rows, width) + "\n"]


def _recall_row(one: Recall) -> tuple[str, str]:
    times = f", {one.trips} times" if one.trips > 1 else ""
    value = f"{one.what}: {short_aval(one.value)}{times}; "
    takes = "" if one.nbytes is None else f" takes {bytes_text(one.nbytes)} per device"
    if not one.kept:
        if one.kept_from_bytes is None:
            return ("repeated", f"{value}keeping it{takes or ' takes memory'} and is no faster, whatever the limit")
        since = f"kept from about {bytes_text(one.kept_from_bytes)} of memory up"
        return ("repeated", f"{value}keeping it{takes}; {since}" if takes else f"{value}{since}")
    held = f"keeping it{takes}; " if takes else ""
    held = "it lies in the host's memory; " if one.on_host else held
    if one.more_s is None:
        return ("kept", f"{value}{held}nothing that repeats it was found to fit")
    return ("kept", f"{value}{held}repeating it costs {time_text(one.more_s)}")


def _flip_row(flip: Flip) -> tuple[str, ...]:
    unit = "/s" if flip.number.endswith("per_s") else ""

    def show(value: float) -> str:
        return bytes_text(value) + unit if "bytes" in flip.number else f"{value:,.0f}"

    low, high = map(show, flip.range)
    at = f"not from {low} to {high}" if flip.at is None else f"{show(flip.at)} ({flip.at / flip.now:.3g}×)"
    return (flip.number, show(flip.now), at, flip.layout)


def _blocked_row(b: Blocked) -> tuple[str, ...]:
    ways = f"pad to {b.padded} ({b.padded / b.size - 1:+.0%})"
    if b.divides > 1:
        ways += f", or an axis of {b.divides}"
    return (b.path, f"{b.dim}: {b.size}", f"{b.axis}={b.ways}", ways)
