"""Bill: the collectives and the seconds that an assignment takes."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, groupby, repeat
from typing import NamedTuple

import numpy as np

from autoshard.backends.timeline import host_copy_name
from autoshard.costs.buckets import Bucket, collective_s
from autoshard.costs.prices import PS_PER_S
from autoshard.costs.strategies import decode
from autoshard.problem.assignment import Assignment
from autoshard.problem.collective import Collective
from autoshard.problem.decisions import Edge, Equation
from autoshard.problem.routes import moved_again

_TRANSPOSE, _APART = "transpose", "kernel beside a collective"


def transfers(assignment: Assignment) -> Iterator[tuple[Edge, Collective]]:
    """The collectives between equations: once per value, layouts and group of uses, and per operand moved again."""
    d = assignment.decisions
    seen: set[tuple[int, int, int, int]] = set()
    again = {(d.graph.operands[e][i], d.node_of[e]) for e, i in moved_again(assignment)}
    for edge in d.edges:
        source, target = int(edge.source[assignment.choice[edge.u]]), int(edge.target[assignment.choice[edge.v]])
        move = (edge.value, source, target, edge.moved.itemsize)
        if source == target or (move in seen and (edge.value, edge.v) not in again):
            continue
        seen.add(move)
        where = d.nodes[edge.v].where or d.nodes[edge.u].where
        ends = (np.array([source], np.int64), np.array([target], np.int64))
        whole = edge.total if edge.finishes(*ends, d.mesh.ndim)[0, 0] else None
        aval, trips = whole or (edge.moved_from(source, d.mesh.ndim), edge.trips)
        beside_s = float(edge.unfused_s(*ends, assignment.resharder)[0, 0])  # counts with the first collective
        for step in assignment.resharder.path(aval, source, target, bucket=edge.bucket, strides=edge.strides):
            work_s = float(assignment.resharder.machine.hbm_s(step.transposed)) if step.transposed else 0.0
            for kind, axes, nbytes in step.collectives if step.kind != "slice" else ():
                row = Collective(
                    kind=kind,
                    axes=axes,
                    nbytes=nbytes,
                    dtype=str(aval.dtype),
                    trips=trips,
                    seconds=_seconds(assignment, kind, axes, nbytes, edge.bucket),
                    window=edge.window,
                    where=where,
                    value=str(aval),
                    work_s=work_s,
                )
                first = replace(row, work_s=work_s + beside_s)
                yield from chain([(edge, first)], repeat((edge, row), edge.times - 1))
                work_s = beside_s = 0.0


def work_name(assignment: Assignment) -> str:
    """What the work around collectives is called: transposes, or kernels that products' would do if nothing moved."""
    return _TRANSPOSE if assignment.resharder.outermost else _APART


def collectives(assignment: Assignment) -> Iterator[Collective]:
    """Every collective, as emitted: between equations, and inside of them."""
    for _, row in transfers(assignment):
        yield row
    for n in range(len(assignment.decisions.nodes)):
        yield from in_op(assignment, n)


def waits(assignment: Assignment) -> Iterator[tuple[Collective, float]]:
    """Every collective, and the seconds that the step waits for it: its share of the windows' exposed seconds.

    A collective in several windows has a share in each (`formulation`), at times more than its own seconds.
    """
    d = assignment.decisions
    moved = [*_hidden(assignment)]
    hides, covers = np.zeros(d.windows.count), np.zeros(d.windows.count)
    for row, hidden in moved:
        for window, share in () if row.window is None else d.windows.hides[row.window]:
            hides[window] += share * hidden * row.seconds * row.trips
    for node, pick in zip(d.nodes, assignment.choice, strict=True):
        for window, share in d.windows.covers[node.window]:
            covers[window] += share * int(node.cover_ps[pick]) / PS_PER_S
    left = np.maximum(0.0, hides - covers) / np.where(hides > 0, hides, 1.0)
    for row, hidden in moved:
        shares = () if row.window is None else d.windows.hides[row.window]
        exposed = sum(share * float(left[window]) for window, share in shares)
        yield row, row.seconds * row.trips * (1.0 - hidden + hidden * exposed)
    for n in range(len(d.nodes)):
        yield from _in_op(assignment, n)


def _hidden(assignment: Assignment) -> Iterator[tuple[Collective, float]]:
    """Every collective between equations, and the share of its seconds that hides where there is enough beside it."""
    share = assignment.resharder.share
    for _, group in groupby(transfers(assignment), key=lambda found: id(found[0])):
        moved = list(group)
        edge = moved[0][0]
        most_s, carried = sum(row.seconds * share(row.kind) for _, row in moved) / edge.times, 1.0
        if edge.carried is not None and most_s:
            taken = np.array(edge.target[assignment.choice[edge.v]])
            carried = float(edge.carried.hidden_s(np.array(most_s), taken)) / most_s
        for _, row in moved:
            yield row, edge.hides * share(row.kind) * carried


class HostCopy(NamedTuple):
    """What a decision copies one way between a device's memory and its host's, in all trips."""

    node: int
    to_host: bool
    nbytes: int
    seconds: float
    waited_s: float

    @property
    def name(self) -> str:
        return host_copy_name(to_host=self.to_host)


def host_copies(assignment: Assignment) -> Iterator[HostCopy]:
    """Every copy to the host's memory or back, and how long the step waits for it.

    Of what its link's copies take beyond the compute that they hide behind, it has its share.
    """
    d, choice = assignment.decisions, assignment.choice
    for link in d.links:
        hidden = {n: int(ps[choice[n]]) for n, ps in link.hidden_ps.items()}
        beside, total = sum(int(d.nodes[m].cost_ps[choice[m]]) for m in link.beside), sum(hidden.values())
        left = max(0, total - beside) / max(total, 1)
        for n, ps in hidden.items():
            waited_ps = int(link.waited_ps[n][choice[n]])
            if ps or waited_ps:
                nbytes, waited_s = int(link.moved_bytes[n][choice[n]]), (ps * left + waited_ps) / PS_PER_S
                yield HostCopy(n, link.to_host, nbytes, (ps + waited_ps) / PS_PER_S, waited_s)


def in_op(assignment: Assignment, n: int) -> Iterator[Collective]:
    """The collectives inside decision n: what an equation communicates itself, and those of a body."""
    return (row for row, _ in _in_op(assignment, n))


def _in_op(assignment: Assignment, n: int) -> Iterator[tuple[Collective, float]]:
    """They, and for how many seconds the step waits for each."""
    d = assignment.decisions
    node, pick = d.nodes[n], assignment.choice[n]
    if not isinstance(node, Equation):
        return
    for inner in node.body.collectives if node.body else ():
        trips = inner.trips * d.graph.runs(node.equation)
        row = Collective(
            kind=inner.kind,
            axes=inner.axes,
            nbytes=inner.nbytes,
            dtype=inner.dtype,
            trips=trips,
            seconds=_seconds(assignment, inner.kind, inner.axes, inner.nbytes, inner.bucket),
            window=None,
            where=inner.where,
            value=inner.value,
        )
        yield row, row.seconds * trips * inner.waited
    if not node.strategies.in_op[pick].any():
        return
    e, kind = node.equation, node.strategies.in_op_kind
    axes = tuple(name for name, used in zip(d.mesh.names, node.strategies.in_op[pick], strict=True) if used)
    for aval, codes in zip(d.graph.eqns[e].results, node.strategies.results, strict=True):
        row = decode(int(codes[pick]), aval.ndim, d.mesh.ndim)
        pieces = int(np.prod([s for s, r in zip(d.mesh.sizes, row, strict=True) if r >= 0], dtype=np.int64))
        local, trips = aval.nbytes // pieces, d.graph.runs(e)
        row = Collective(
            kind=kind,
            axes=axes,
            nbytes=local,
            dtype=str(aval.dtype),
            trips=trips,
            seconds=_seconds(assignment, kind, axes, local, 0),
            window=None,
            where=node.where,
            value=str(aval),
        )
        yield row, row.seconds * trips


def node_s(assignment: Assignment, n: int) -> float:
    """Seconds of decision n over all its trips, without the collectives inside and what it waits for the host."""
    d, pick = assignment.decisions, assignment.choice[n]
    waited_ps = sum(int(link.waited_ps[n][pick]) for link in d.links if n in link.waited_ps)
    own_s = (assignment.own_ps(n) - waited_ps) / PS_PER_S
    return own_s - sum(waited_s for _, waited_s in _in_op(assignment, n))


def compute_s(assignment: Assignment) -> float:
    """Seconds of all equations and of the work around collectives, without communication."""
    own = sum(node_s(assignment, n) for n in range(len(assignment.decisions.nodes)))
    return own + sum(row.work_s * row.trips for row in collectives(assignment))


def flops(assignment: Assignment) -> float:
    """Contractions' FLOPs per device."""
    return float(sum(n.flops[c] for n, c in zip(assignment.decisions.nodes, assignment.choice, strict=True)))


def peak_flops_per_s(assignment: Assignment, rate: Callable[[str], float]) -> float | None:
    """The rate at which a device that reached each type's peak would do all contractions; None without any.

    Args:
      assignment: the choices.
      rate: the peak per element type.
    """
    at_peak_s = sum(
        float(node.flops[pick]) / rate(str(assignment.decisions.graph.eqns[node.equations[0]].operands[0].dtype))
        for node, pick in zip(assignment.decisions.nodes, assignment.choice, strict=True)
        if node.flops[pick]
    )
    return flops(assignment) / at_peak_s if at_peak_s else None


def _seconds(assignment: Assignment, kind: str, axes: tuple[str, ...], nbytes: int, bucket: Bucket) -> float:
    """What a collective takes once, merged with others into a bucket of so many bytes."""
    return float(collective_s(assignment.resharder.machine, kind, axes, nbytes, bucket=bucket))
