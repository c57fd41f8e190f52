"""Sums of a program's updates that XLA merges with none before them, as they depend on one of those.

XLA merges collectives of one kind in the order in which the program's outputs lead to them, depth first, up to the
first that depends on one of those before it; there it begins anew (openxla/xla service/collective_combiner_utils.h).
So chains of sums, one for every weight, as those of Adafactor are (means of rows and columns, clipping, the scale of
the weight), are not merged link by link over all weights: a collective for almost every link is left, and the next
link waits for it.
"""

from collections.abc import Iterator
from functools import reduce
from operator import or_

from autoshard.ir.graph import Graph
from autoshard.ir.op_traits import REDUCE_SUM


def unmerged_sums(graph: Graph, updates: frozenset[int]) -> frozenset[int]:
    """The values at which XLA begins to merge anew, if every sum of the updates is one over devices.

    Args:
      graph: the program.
      updates: the equations outside of loops that update its state.

    Returns:
      Results of sums, and what is made of them number by number up to where they are finished at the latest.
    """
    sums = {e for e in updates if _shrinks(graph, e)}
    before = _before(graph, sums)
    if not any(before.values()):
        return frozenset()
    found: set[int] = set()
    merged = 0  # a bit set of equations
    for e in _as_outputs_lead(graph):
        if e not in sums:
            continue
        if before[e] & merged:
            found.update(graph.results[e])
            merged = 0
        merged |= 1 << e
    for e in sorted(updates - sums):
        if not found.isdisjoint(graph.operands[e]) and _stays_a_sum(graph, e):
            found.update(graph.results[e])
    return frozenset(found)


def _shrinks(graph: Graph, e: int) -> bool:
    """Whether an equation sums more than one number into one."""
    if graph.eqns[e].primitive != REDUCE_SUM:
        return False
    return graph.avals[graph.operands[e][0]].size > graph.avals[graph.results[e][0]].size


def _before(graph: Graph, sums: set[int]) -> dict[int, int]:
    """Sum → those that it is computed from, as a bit set."""
    made: dict[int, int] = {}  # value → bit set
    found: dict[int, int] = {}
    for e, (operands, results) in enumerate(zip(graph.operands, graph.results, strict=True)):
        bits = reduce(or_, (made.get(v, 0) for v in operands), 0)
        if e in sums:
            found[e] = bits
            bits |= 1 << e
        if bits:
            made.update(dict.fromkeys(results, bits))
    return found


def _as_outputs_lead(graph: Graph) -> Iterator[int]:
    """The equations in the order in which the program's outputs lead to them, depth first, operands first."""
    made_by = graph.producers
    seen: set[int] = set()
    left = [(-1, iter(graph.outputs))]  # equations on the way, with the operands that are still to be followed
    while left:
        e, operands = left[-1]
        value = next(operands, None)
        if value is None:
            left.pop()
            if left:
                yield e
        elif value in made_by and (maker := made_by[value][0]) not in seen:
            seen.add(maker)
            left.append((maker, iter(graph.operands[maker])))


def _stays_a_sum(graph: Graph, e: int) -> bool:
    """Whether sums may be finished after an equation that computes as many numbers of them."""
    traits = graph.eqns[e].traits
    sizes = {graph.avals[v].size for v in (*graph.operands[e], *graph.results[e])}
    return len(sizes) == 1 and (traits.scale or traits.linear or traits.combines)
