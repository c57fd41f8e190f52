"""Filled buckets: how many bytes an assignment puts into what compilers merge, and decisions priced at that.

Small collectives share one latency if there is a bucket's worth of them (`costs.buckets`). Each decision is priced as
if there were; in a small program, or over axes that little else is moved over, one pays nearly all of the latency. What
is merged is known once everything is decided: then decisions can be priced at that, and decided again. Prices per byte
of a fixed charge, found so from one solution for the next, are *dynamic slope scaling* (Kim and Pardalos 1999).
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from autoshard.costs.buckets import COMBINED, Filled, Like, collective_s
from autoshard.problem.assignment import Assignment
from autoshard.problem.bill import transfers
from autoshard.problem.collective import Collective
from autoshard.problem.decisions import Decisions


def unpaid_s(assignment: Assignment) -> float:
    """Seconds of a step that merged collectives take beyond what they are priced at, as buckets are less full."""
    machine, total_s = assignment.resharder.machine, 0.0
    for (_, kind, axes, most), rows in _merged(assignment).items():
        bucket = min(most, sum(row.nbytes for row in rows))
        for row in rows:
            total_s += row.trips * (float(collective_s(machine, kind, axes, row.nbytes, bucket=bucket)) - row.seconds)
    return total_s


def refilled(assignment: Assignment) -> Decisions:
    """The decisions of an assignment, priced at what it merges in every window.

    Over other axes there can be no more to merge than all that moves in the window.
    """
    found: dict[int, dict[Like, int]] = defaultdict(dict)
    most: dict[int, int] = {}
    for (window, kind, axes, bucket), rows in _merged(assignment).items():
        found[window][kind, axes] = sum(row.nbytes for row in rows)
        most[window] = bucket
    return with_filled(
        assignment.decisions,
        {
            window: Filled(
                of=tuple(sorted((like, min(nbytes, most[window])) for like, nbytes in known.items())),
                rest=min(sum(known.values()), most[window]),
            )
            for window, known in found.items()
        },
    )


def with_filled(decisions: Decisions, filled: Mapping[int, Filled]) -> Decisions:
    """Decisions priced at so many bytes that there are to merge in whole windows."""
    windows = replace(decisions.windows, filled={**decisions.windows.filled, **filled})
    buckets = [windows.bucket(edge.value) for edge in decisions.edges]
    edges = (
        edge if edge.bucket == bucket else replace(edge, bucket=bucket)
        for edge, bucket in zip(decisions.edges, buckets, strict=True)
    )
    return replace(decisions, windows=windows, edges=tuple(edges))


def _merged(assignment: Assignment) -> Mapping[tuple[int, str, tuple[str, ...], int], list[Collective]]:
    """The collectives that are merged: by whole window, kind, axes, and the bytes up to which they are."""
    windows = assignment.decisions.windows
    found: dict[tuple[int, str, tuple[str, ...], int], list[Collective]] = defaultdict(list)
    for edge, row in transfers(assignment):
        window = windows.of_value[edge.value]
        if edge.bucket and window is not None and edge.value not in windows.merged and row.kind in COMBINED:
            found[windows.whole[window], row.kind, row.axes, windows.buckets[window]].append(row)
    return found
