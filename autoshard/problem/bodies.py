"""Bodies: prices the body of a `shard_map` on one device, as every other equation is priced.

A body is a program of its own on local shapes: it is decided on a mesh of one device, where nothing is left to
choose. Its collectives are those that its author wrote, and hide as in any program. A sum that is a result of
the body can be scattered by its consumer, as compilers do with an all-reduce that is sliced. The most expensive
branch of a `cond` counts. The memory of a body is its peak less its operands and results.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autoshard.backends.model import CompilerModel
from autoshard.costs.buckets import BUCKET_BYTES, COMBINED, collective_s
from autoshard.costs.overlap import hidden_shares
from autoshard.costs.prices import PS_PER_S, Machine
from autoshard.ir.graph import Aval, Eqn, Graph, Path, build
from autoshard.ir.layout import Layout
from autoshard.ir.mesh import MeshAxes
from autoshard.ir.op_traits import AXIS_INDEX, BRANCH_JOIN, SHARD_MAP
from autoshard.problem import memory_profile
from autoshard.problem.decisions import Body, Decision, Decisions, Equation, Inner
from autoshard.problem.unpriced import unpriced

ALONE = MeshAxes.of({})

Row = tuple[int, str, tuple[str, ...], Aval]  # equation, kind, axes, bytes sent
Decide = Callable[[Graph], Decisions]  # on a mesh of one device


@dataclass(frozen=True, slots=True)
class _Item:
    """The seconds of one decision or collective of a body in all its trips, and its place."""

    path: Path
    seconds: float
    flops: float = 0.0
    inside: tuple[Inner, ...] = ()  # its collectives


class Bodies:
    """The prices of bodies, each found once.

    Args:
      mesh: without axes of size 1.
      machine: the cost model with the mesh placed on it.
      compiler: who compiles them.
      decide: the decisions of a graph on a mesh of one device.
    """

    def __init__(self, mesh: MeshAxes, machine: Machine, compiler: CompilerModel, decide: Decide) -> None:
        self._mesh, self._machine, self._compiler, self._decide = mesh, machine, compiler, decide
        # Keeps the jaxprs alive: ids stay unique.
        self._known: dict[tuple[int, tuple[bool, ...]], tuple[Any, Body]] = {}

    def of(self, eqn: Eqn, results: Sequence[Layout], live: Sequence[bool]) -> Body:
        """The body of a `shard_map`.

        Args:
          eqn: the equation.
          results: the layouts of its results; none are given within another body.
          live: which of them anything takes: the rest is not computed.
        """
        jaxpr = eqn.params["jaxpr"]
        key = (id(jaxpr), tuple(live))
        if key not in self._known:
            self._known[key] = jaxpr, self._priced(eqn, results, live)
        return self._known[key][1]

    def _priced(self, eqn: Eqn, results: Sequence[Layout], live: Sequence[bool]) -> Body:
        """The price of one run."""
        machine = self._machine
        graph = build(eqn.params["jaxpr"], self._compiler.platform, live=live)
        d = self._decide(graph)
        paths = graph.paths
        items = [
            _Item(
                path=paths[node.equations[0]],
                seconds=int(node.cost_ps[0]) / PS_PER_S,
                flops=float(node.flops[0]),
                inside=_inside(node, graph),
            )
            for node in d.nodes
            if node.equations
        ]
        names: list[str] = []
        rows, summed = [], dict[int, tuple[str, ...]]()
        for row in _collectives(graph, self._mesh, names):
            position = _last_sum(graph, row, results, live)
            if position is None:
                rows.append(row)
            else:
                summed[position] = row[2]
        buckets = [_bucket(graph, row, rows) for row in rows]
        seconds = [
            float(collective_s(machine, kind, axes, aval.nbytes, bucket=bucket)) * graph.runs(e)
            for (e, kind, axes, aval), bucket in zip(rows, buckets, strict=True)
        ]
        shares = hidden_shares(machine, self._compiler)
        most = [shares.get(kind, 0.0) if shares else machine.overlap for _, kind, *_ in rows]
        waited = _waited(d, rows, seconds, most)
        for (e, kind, axes, aval), bucket, moving_s, share in zip(rows, buckets, seconds, waited, strict=True):
            inner = Inner(
                kind=kind,
                axes=axes,
                nbytes=aval.nbytes,
                dtype=str(aval.dtype),
                trips=graph.runs(e),
                where=graph.eqns[e].where,
                value=str(aval),
                bucket=bucket,
                waited=share,
            )
            items.append(_Item(path=paths[e], seconds=moving_s * share, inside=(inner,)))
        items = _dearest(items, graph)
        auto = sorted(set(self._mesh.names) - _manual(eqn))
        if auto:
            names.append(f"how the body of shard_map at {eqn.where} is split over {', '.join(auto)}")
        peak = memory_profile.live_peak(d, np.zeros(len(d.nodes), np.int64))
        ends = sum(graph.avals[v].nbytes for v in {*graph.inputs, *graph.outputs})
        return Body(
            seconds=sum(item.seconds for item in items),
            flops=sum(item.flops for item in items),
            multiplying_s=sum(item.seconds for item in items if item.flops),
            collectives=tuple(inner for item in items for inner in item.inside),
            summed=summed,
            results=len(eqn.results),
            beside_bytes=max(0, peak - ends),
            unpriced=tuple(dict.fromkeys((*names, *unpriced(d)))),
        )


def pending(layouts: Sequence[Layout], body: Body) -> list[Layout]:
    """The layouts of a `shard_map`'s operands, then results; sums at its end are pending."""
    found = list(layouts)
    for position, axes in body.summed.items():
        at = position + len(layouts) - body.results
        found[at] = Layout(found[at].dims, axes)
    return found


def _last_sum(graph: Graph, row: Row, results: Sequence[Layout], live: Sequence[bool]) -> int | None:
    """The result that a collective is, if it is a sum which nothing else takes, and no dimension of it on the axes."""
    e, _, axes, _ = row
    collective = graph.eqns[e].traits.collective
    if collective is None or not collective.sums or len(graph.results[e]) > 1 or graph.runs(e) > 1:
        return None
    (value,) = graph.results[e]
    positions = [i for i, taken in enumerate(live) if taken]
    found = [i for i, v in zip(positions, graph.outputs, strict=True) if v == value]
    taken = any(value in operands for operands in graph.operands)
    if len(found) != 1 or taken or not results or {axis for dim in results[found[0]].dims for axis in dim} & set(axes):
        return None
    return found[0]


def _bucket(graph: Graph, row: Row, rows: Sequence[Row]) -> int:
    """The bytes of those with which a collective is merged: of its kind, over its axes, in the same jaxpr."""
    place = graph.paths[row[0]][:-1]
    alike = [other for other in rows if other[1:3] == row[1:3] and graph.paths[other[0]][:-1] == place]
    return min(sum(aval.nbytes for *_, aval in alike), BUCKET_BYTES) if len(alike) > 1 and row[1] in COMBINED else 0


def _waited(d: Decisions, rows: Sequence[Row], seconds: Sequence[float], overlap: Sequence[float]) -> list[float]:
    """The share of each collective's seconds that hides behind no contraction, in the windows of any program.

    `overlap`: the most of each that hides.
    """
    windows = d.windows
    values = [d.graph.results[e][0] for e, *_ in rows]
    hides, covers = np.zeros(windows.count), np.zeros(windows.count)
    for node in d.nodes:
        for window, share in windows.covers[node.window]:
            covers[window] += share * int(node.cover_ps[0]) / PS_PER_S
    shares = [() if (w := windows.of_value[v]) is None else windows.hides[w] for v in values]
    most = [share * windows.share(v) if found else 0.0 for v, found, share in zip(values, shares, overlap, strict=True)]
    for found, hidden, moving_s in zip(shares, most, seconds, strict=True):
        for window, share in found:
            hides[window] += share * hidden * moving_s
    left = np.maximum(0.0, hides - covers) / np.where(hides > 0, hides, 1.0)
    exposed = [sum(share * float(left[window]) for window, share in found) for found in shares]
    return [1.0 - hidden + hidden * part for hidden, part in zip(most, exposed, strict=True)]


def _inside(node: Decision, graph: Graph) -> tuple[Inner, ...]:
    """The collectives of a `shard_map` within a body."""
    if not isinstance(node, Equation) or node.body is None:
        return ()
    runs = graph.runs(node.equation)
    return tuple(replace(inner, trips=inner.trips * runs) for inner in node.body.collectives)


def _manual(eqn: Eqn) -> set[str]:
    """The axes that a body's author splits it over by hand."""
    return {str(axis) for axis in eqn.params.get("newly_manual_axes", eqn.params.get("manual_axes", ()))}


def _collectives(graph: Graph, mesh: MeshAxes, unknown: list[str]) -> Iterator[Row]:
    """(equation, kind, axes, bytes sent) of a body's collectives; those of other kinds are added to `unknown`."""
    for e, eqn in enumerate(graph.eqns):
        if eqn.traits.link or eqn.primitive in (SHARD_MAP, AXIS_INDEX):
            continue
        axes = over(eqn, mesh)
        if not axes:
            continue
        collective = eqn.traits.collective
        if collective is None or eqn.params.get("axis_index_groups") is not None:
            unknown.append(f"{eqn.primitive} at {eqn.where}")
            continue
        for aval in eqn.results if collective.of_result else eqn.operands:
            yield e, collective.kind, axes, aval


def over(eqn: Eqn, mesh: MeshAxes) -> tuple[str, ...]:
    """The axes of the mesh that a collective of a body is over, in the mesh's order."""
    named = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    found = {named} if isinstance(named, str) else set(named) if isinstance(named, tuple | list | frozenset) else set()
    return tuple(axis for axis in mesh.names if axis in found)


def _dearest(items: list[_Item], graph: Graph) -> list[_Item]:
    """The items without those in branches of a `cond` that take less than its dearest."""
    joins = {graph.makes[e][0][0] for e, eqn in enumerate(graph.eqns) if eqn.primitive == BRANCH_JOIN}
    for here in sorted(joins, key=len, reverse=True):
        branches: dict[int, list[_Item]] = {}
        for item in items:
            if len(item.path) > len(here) and item.path[: len(here)] == here:
                branches.setdefault(item.path[len(here)], []).append(item)
        if not branches:
            continue
        kept = max(branches.values(), key=lambda found: sum(item.seconds for item in found))
        left_out = {id(item) for found in branches.values() if found is not kept for item in found}
        items = [item for item in items if id(item) not in left_out]
    return items
