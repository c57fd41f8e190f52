"""Predicted timeline: draws the prices of a plan as a timeline of the step.

The planner has no order of events: for each window (`costs.overlap`) it has the seconds of
compute, of hideable communication, and of exposed communication. This room lays the windows out
in the order of the program: first the compute of a window and, from the same beginning, its
hideable collectives; collectives that cannot hide stand at their equation. The window of a loop
shows its first trip, and lasts as long as all trips.
"""

from collections import defaultdict
from dataclasses import replace

import numpy as np

from autoshard.backends.timeline import Event, HostMove, Multiplication, Stream, Timeline
from autoshard.costs.windows import EARLY
from autoshard.ir.graph import Graph
from autoshard.ir.op_traits import LOOP_SLICE, LOOP_STACK
from autoshard.problem import bill
from autoshard.problem.assignment import Assignment
from autoshard.problem.bill import HostCopy
from autoshard.problem.collective import Collective
from autoshard.problem.repeated import repeated_share


def schedule(assignment: Assignment) -> Timeline:
    """The predicted timeline of a step; its end is the plan's predicted step, to rounding."""
    d = assignment.decisions
    place = _Places(assignment)
    compute: dict[int, list[tuple[int, int]]] = defaultdict(list)  # window → (equation, node)
    for n, node in enumerate(d.nodes):
        if assignment.own_ps(n):
            e = min(node.equations, default=0)
            compute[d.windows.whole[d.windows.of_equation[e]] if d.graph.eqns else 0].append((e, n))
    hides: dict[int, list[tuple[Collective, float]]] = defaultdict(list)
    blocks: dict[int, list[Collective]] = defaultdict(list)
    for row, waited_s in bill.waits(assignment):
        if row.window is None:
            blocks[place(row)].append(row)
        else:
            hides[d.windows.whole[row.window]].append((row, waited_s))
    copies: dict[int, list[HostCopy]] = defaultdict(list)
    for copy in bill.host_copies(assignment):
        copies[d.windows.whole[d.windows.of_equation[d.nodes[copy.node].equations[0]]]].append(copy)
    now_s = communication_s = exposed_s = compute_s = 0.0
    events: list[Event] = []
    windows = compute.keys() | hides.keys() | blocks.keys() | copies.keys()
    for window in sorted(windows, key=lambda w: _first(w, compute)):
        begin_s = sent_s = now_s
        busy_s = 0.0
        for e, n in sorted(compute[window]):
            node, pick = d.nodes[n], assignment.choice[n]
            trips, seconds = (d.graph.runs(e) if node.equations else 1), bill.node_s(assignment, n)
            event = _event(node.name, "compute", now_s, seconds / trips, trips, node.where)
            if repeated_share(d, n) > 0.5:
                flops = float(node.flops[pick]) / trips
                multiplies = (Multiplication(node.name, node.where, flops),) if flops else ()
                event = replace(event, repeated=True, repeats=multiplies)
            events.append(event)
            busy_s += seconds
            now_s += seconds / trips
        for row in (*(row for row, _ in hides[window]), *blocks[window]):
            if row.work_s:
                events.append(_event(bill.work_name(assignment), "compute", now_s, row.work_s, row.trips, row.where))
                busy_s += row.work_s * row.trips
                now_s += row.work_s
        hidden_s = left_s = 0.0
        for row, waited_s in hides[window]:
            under_way_s = max(row.seconds, waited_s / row.trips)  # others may hold it up
            events.append(_event(_name(row), "communication", sent_s, under_way_s, row.trips, row.where))
            sent_s += under_way_s
            hidden_s += under_way_s * row.trips
            left_s += waited_s
        for copy in copies[window]:
            e = d.nodes[copy.node].equations[0]
            trips, where = d.graph.runs(e), _line_of_copy(d.graph, e)
            event = _event(copy.name, "communication", begin_s, copy.seconds / trips, trips, where)
            events.append(replace(event, moves=HostMove(copy.name, copy.nbytes // trips, copy.to_host)))
            hidden_s += copy.seconds
            left_s += copy.waited_s
        now_s = begin_s + busy_s + left_s
        sent_s = max(sent_s, now_s)
        for row in blocks[window]:
            events.append(_event(_name(row), "communication", sent_s, row.seconds, row.trips, row.where))
            sent_s += row.seconds
            left_s += row.seconds * row.trips
            hidden_s += row.seconds * row.trips
        now_s = begin_s + busy_s + left_s
        compute_s, exposed_s, communication_s = compute_s + busy_s, exposed_s + left_s, communication_s + hidden_s
    return Timeline(
        step_s=now_s,
        compute_s=compute_s,
        communication_s=communication_s,
        exposed_s=exposed_s,
        flops=bill.flops(assignment),
        events=tuple(events),
    )


class _Places:
    """The window in whose program text a collective stands: that of the first equation of its line and trips."""

    def __init__(self, assignment: Assignment) -> None:
        d = assignment.decisions
        self._windows: dict[tuple[str, int], int] = {}
        for e, eqn in enumerate(d.graph.eqns):
            self._windows.setdefault((eqn.where, d.graph.runs(e)), d.windows.whole[d.windows.of_equation[e]])
        self._last = d.windows.whole[d.windows.of_equation[-1]] if d.graph.eqns else 0

    def __call__(self, row: Collective) -> int:
        return self._windows.get((row.where, row.trips), self._last)


def _line_of_copy(graph: Graph, e: int) -> str:
    """The line by which compilers know a copy to the host's memory or back: where a loop stacks it, the loop's."""
    around = [u for v in graph.results[e] for u, _ in graph.consumers.get(v, ())]
    around += [graph.producers[v][0] for v in graph.operands[e] if v in graph.producers]
    links = [graph.eqns[u] for u in around if graph.eqns[u].primitive in (LOOP_STACK, LOOP_SLICE)]
    return links[0].where if links else graph.eqns[e].where


def _first(window: int, compute: dict[int, list[tuple[int, int]]]) -> float:
    """The first equation of a window; a window without compute comes last, the early one first."""
    return min((e for e, _ in compute[window]), default=-1 if window == EARLY else np.inf)


def _name(row: Collective) -> str:
    return f"{row.kind} {'·'.join(row.axes)}"


def _event(name: str, stream: Stream, start_s: float, duration_s: float, trips: int, where: str) -> Event:
    return Event(
        name=name,
        stream=stream,
        start_s=start_s,
        duration_s=duration_s,
        trips=trips,
        where=where,
    )
