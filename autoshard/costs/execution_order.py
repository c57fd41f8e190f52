"""Execution order: the order in which compilers run the equations of a program.

No contraction depends on a weight's gradient, so XLA:GPU's scheduler runs it after all others. Without loops
the weights' gradients are the last contractions, small ones first: each hides the reduction of the one before. The
product on the way to the gradient of a table, which is a scatter, runs before them. In a loop they stand at the end of
the body; those outside of loops stand behind the loops that follow. Gradients of a part that `jax.checkpoint` computes
again, or that a plan repeats, stand in the next such part (counted at its end), where they hide its gathers and sums.

XLA:TPU defers a gradient if nothing runs beside compute and the gradient is whole on every device
(`problem.memory_usage`), or if something does and nothing reduces it (`problem.decision_builders.late_gradients`).
It updates a state as soon as its gradient is there, and computes the loss last (libtpu 0.0.52).
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import accumulate, groupby

import numpy as np
from numpy.typing import NDArray

from autoshard.backends.model import CompilerModel
from autoshard.ir.graph import Graph
from autoshard.ir.op_traits import LOOP_RESULT, LOOP_STACK


def positions(graph: Graph, fuses: Sequence[bool], compiler: CompilerModel) -> list[int]:
    """When a compiler runs each equation, as the position of one in the program.

    Args:
      graph: the program.
      fuses: per equation, whether XLA fuses it with its neighbours.
      compiler: who schedules it.
    """
    if compiler.updates_state_early:
        return _updates_early(graph, fuses)
    if compiler.puts_weight_gradients_last and not graph.loops:
        return _gradients_last(graph)
    return list(range(len(graph.eqns)))


def _gradients_last(graph: Graph) -> list[int]:
    """When XLA:GPU runs each equation of a program without loops."""
    onward = feeding(graph) | scattered(graph)
    contractions = [e for e, eqn in enumerate(graph.eqns) if eqn.traits.contraction]
    late = [e for e in contractions if not any(onward[v] for v in graph.results[e])]
    begin = 1 + max((e for e in contractions if any(onward[v] for v in graph.results[e])), default=-1)
    late.sort(key=lambda e: (sum(graph.avals[v].nbytes for v in graph.results[e]), e))
    calls = graph.again_of if any(graph.again_of) else _segments(graph)
    last = {again: e for e, again in enumerate(calls)}  # equation of a call
    order = list(range(len(graph.eqns)))
    free = begin
    for e in late:
        call = calls[e]
        if call and call + 1 in last:
            order[e] = last[call + 1]
        else:
            order[e] = max(e, min(free, len(order) - 1))
            free += 1
    ready = [0] * len(graph.avals)
    for e, results in enumerate(graph.results):
        order[e] = max([order[e], *(ready[v] for v in graph.operands[e])])
        for v in results:
            ready[v] = order[e]
    return order


def _segments(graph: Graph) -> Sequence[int]:
    """Per equation, the segment of the backward pass that it is in, from 1 on; 0 before the first.

    A segment begins where products of the forward pass are repeated (`ir.segments`), as a `jax.checkpoint` does.
    """
    runs = (list(run) for _, run in groupby(range(len(graph.eqns)), key=graph.repeated.__contains__))
    begins = {run[0] for run in runs if run[0] in graph.repeated and any(graph.eqns[e].traits.contraction for e in run)}
    return list(accumulate(int(e in begins) for e in range(len(graph.eqns))))


def _updates_early(graph: Graph, fuses: Sequence[bool]) -> list[int]:
    """When XLA:TPU runs each equation, as the position of one in the program.

    A state is updated as soon as its gradient is there.
    """
    updates = updating(graph, fuses)
    order = list(range(len(graph.eqns)))
    ready = [0] * len(graph.avals)
    for e, results in enumerate(graph.results):
        if e in updates:
            order[e] = max((ready[v] for v in graph.operands[e]), default=e)
        for v in results:
            ready[v] = order[e]
    return order


def updating(graph: Graph, fuses: Sequence[bool]) -> frozenset[int]:
    """The element-wise equations behind all contractions and loops: what updates a state with its gradient."""
    feeds = feeding(graph)
    return frozenset(
        e
        for e, results in enumerate(graph.results)
        if not graph.eqn_loop[e] and fuses[e] and not any(feeds[v] for v in results)
    )


def deferred(graph: Graph) -> frozenset[int]:
    """Equations that lead to scalars alone: the loss itself."""
    needed = np.zeros(len(graph.avals), bool)
    needed[[v for v in graph.outputs if graph.avals[v].ndim]] = True
    found: set[int] = set()
    for e in range(len(graph.eqns) - 1, -1, -1):
        if graph.eqn_loop[e] or any(needed[v] for v in graph.results[e]):
            needed[list(graph.operands[e])] = True
        else:
            found.add(e)
    return frozenset(found)


def late_gradients(graph: Graph) -> frozenset[int]:
    """The contractions outside of loops, ahead of one, on which no other one and no loop depends."""
    feeds, spans = feeding(graph), loop_spans(graph)
    late = [e for e in graph.backward if graph.eqns[e].traits.contraction and not graph.eqn_loop[e]]
    return frozenset(e for e in late if behind_loops(spans, e) > e and not any(feeds[v] for v in graph.results[e]))


def feeding(graph: Graph) -> NDArray[np.bool_]:
    """Values on which, in their own scope, a contraction, a loop, or the next trip depends."""
    feeds = np.zeros(len(graph.avals), bool)
    for e in range(len(graph.eqns) - 1, -1, -1):
        eqn = graph.eqns[e]
        onward = eqn.primitive != LOOP_STACK and any(feeds[v] for v in graph.results[e])
        if onward or eqn.traits.enters_loop or eqn.primitive == LOOP_RESULT or eqn.traits.contraction:
            feeds[list(graph.operands[e])] = True
    return feeds


def scattered(graph: Graph) -> NDArray[np.bool_]:
    """Values that a scatter is computed from, as the gradient of a table is from that of its rows."""
    found = np.zeros(len(graph.avals), bool)
    for e in range(len(graph.eqns) - 1, -1, -1):
        if graph.eqns[e].traits.scatters or any(found[v] for v in graph.results[e]):
            found[list(graph.operands[e])] = True
    return found


def loop_spans(graph: Graph) -> dict[int, tuple[int, int]]:
    """Loop → its first and last equation; of one that only hands constants on, the link that hands on the first."""
    spans: dict[int, tuple[int, int]] = {}
    for e, loop in enumerate(graph.eqn_loop):
        if loop:
            spans[loop] = (spans.get(loop, (e, e))[0], e)
    for e, eqn in enumerate(graph.eqns):
        loop = graph.value_loop[graph.operands[e][0]] if eqn.traits.leaves_loop else 0
        if loop:
            spans.setdefault(loop, (e, e))
    return spans


def behind_loops(spans: Mapping[int, tuple[int, int]], e: int) -> int:
    """The last equation of all loops that begin after equation e; e where none does."""
    return max((stop for begin, stop in spans.values() if begin > e), default=e)


def next_loop(graph: Graph, spans: Mapping[int, tuple[int, int]], e: int) -> int:
    """The last equation by which anything enters the first loop that begins after equation e; e where none does."""
    begin, loop = min(((begin, loop) for loop, (begin, _) in spans.items() if begin > e), default=(e, 0))
    entering = (i for i in range(begin, spans[loop][1] + 1) if graph.eqn_loop[i] == loop) if loop else ()
    return max((i for i in entering if graph.eqns[i].traits.enters_loop), default=begin)


def made_inside(graph: Graph, join: int) -> Iterator[int]:
    """The operands of a join of branches that these make, each one of them; others come from outside."""
    path = graph.makes[join][0][0]
    for v in graph.operands[join]:
        maker = graph.producers.get(v, (-1, 0))[0]
        if maker >= 0 and graph.makes[maker][0][0][: len(path)] == path:
            yield v


def in_place(graph: Graph, lasting: Container[int]) -> frozenset[int]:
    """Equations whose first operand may be overwritten: neither it nor a value that it renames is read later.

    Args:
      graph: the program.
      lasting: values that must not be overwritten: inputs that are not donated, and outputs.
    """
    made_by, consumers = graph.producers, graph.consumers
    found: set[int] = set()
    for e, operands in enumerate(graph.operands):
        value = operands[0] if operands else None
        while value is not None and value not in lasting and consumers[value][-1][0] <= e:
            maker = made_by.get(value, (-1, 0))[0]
            if maker < 0 or not graph.eqns[maker].traits.renames:
                found.add(e)
                break
            value = graph.operands[maker][0]
    return frozenset(found)
