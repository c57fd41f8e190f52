"""Backward passes: what a plan keeps for them, and what it runs once more in them, in words and as plain values."""

from collections.abc import Sequence
from typing import Any

from autoshard.planner.record import KEEPS
from autoshard.problem.assignment import Assignment
from autoshard.problem.memory_profile import kept_bytes, offloaded_bytes
from autoshard.problem.repeated import RepeatedLine, RepeatedWork, repeated_work
from autoshard.report.tables import bytes_text, flops_text, short_place, time_text

LINES = 3  # that are named, of those where most FLOPs are repeated


def decided_text(assignment: Assignment, step_s: float, count: int, offloaded: int) -> str:
    """What a plan chose: how many values it keeps, how many of these in the host's memory, and what it repeats."""
    work = repeated_work(assignment)
    bytes_ = bytes_text(kept_bytes(assignment.decisions, assignment.choice))
    values = f"{count} value" if count == 1 else f"{count} values"
    repeats = "repeat nothing" if work is None else f"repeat {repeated_text(work, step_s)}"
    there = ""
    if offloaded:
        nbytes = bytes_text(offloaded_bytes(assignment.decisions, assignment.choice))
        there = f", {offloaded} of them ({nbytes} per device) in the host's memory,"
    return f"{KEEPS} {values} kept ({bytes_} per device){there} and {repeats}"


def repeated_text(work: RepeatedWork, step_s: float) -> str:
    """`12 equations, 3 of them matrix products (model.py:61, …): 550 GFLOP (14% of all), 812 µs (10% of the step)`."""
    equations = "1 equation" if work.equations == 1 else f"{work.equations} equations"
    time = f"{time_text(work.seconds)} ({work.seconds / step_s:.1%} of the step)" if step_s else time_text(0.0)
    if not work.lines:
        return f"{equations}, none of them a matrix product: {time}"
    products = "1 matrix product" if work.contractions == 1 else f"{work.contractions} matrix products"
    flops = f"{flops_text(work.flops)} per device ({work.share:.1%} of all)"
    return f"{equations}, among them {products} ({_places(work.lines)}): {flops}, {time}"


def _places(lines: Sequence[RepeatedLine]) -> str:
    places = list(dict.fromkeys(short_place(line.where).partition(" (")[0] for line in lines))
    return ", ".join(places[:LINES]) + (", …" if len(places) > LINES else "")


def to_json(assignment: Assignment) -> dict[str, Any]:
    """The same in SI units."""
    work = repeated_work(assignment)
    return {
        "kept_bytes": kept_bytes(assignment.decisions, assignment.choice),
        "offloaded_bytes": offloaded_bytes(assignment.decisions, assignment.choice),
        "repeated": None
        if work is None
        else {
            "equations": work.equations,
            "flops": work.flops,
            "share_of_flops": work.share,
            "compute_s": work.compute_s,
            "waited_s": work.waited_s,
            "lines": [
                {"where": x.where, "primitive": x.primitive, "count": x.count, "flops": x.flops} for x in work.lines
            ],
        },
    }
