"""Late gradients: what XLA:TPU holds until it makes a gradient that nothing reduces.

Where communication runs beside compute, a gradient outside of loops (the head's) is made at once if it is a sum that
has to be reduced. If each device has its own part of it, one kernel makes it and updates its state, and stands behind
all loops that follow: what the product takes lives until then (libtpu 0.0.52, scanned layers on v5e:4x4). The loss is
counted ahead of these loops in both cases, although libtpu computes it behind them in the second.
"""

import numpy as np

from autoshard.costs.strategies import SUM, Strategies, decode, shards
from autoshard.problem.decision_builders.draft import Draft
from autoshard.problem.decision_builders.facts import GraphFacts


def add_late_gradient(draft: Draft, node: int, strategies: Strategies) -> None:
    """Adds what the gradient that a decision makes holds under strategies that leave nothing to be reduced."""
    facts, (e,) = draft.facts, draft.nodes[node].equations
    if e not in facts.late_gradients:
        return
    graph, mesh = facts.graph, facts.mesh
    codes, end = strategies.results[0], len(graph.eqns)
    reduced = (decode(codes, graph.eqns[e].results[0].ndim, mesh.ndim) == SUM).any(axis=1)
    for v, taken in zip(graph.operands[e], strategies.operands, strict=True):
        local = graph.avals[v].size // shards(taken, graph.avals[v].ndim, mesh)
        for source in _stored(facts, v):
            start = max(int(facts.lives.end[source]), e + 1)
            if start < end:
                nbytes = local * np.dtype(graph.avals[source].dtype).itemsize
                draft.usages.add(node, start, end, np.where(reduced, 0, nbytes), "activations")


def _stored(facts: GraphFacts, value: int) -> list[int]:
    """What lies in memory and has as many elements, of what a value is computed from where it is taken.

    Not the program's inputs, which lie there all the time.
    """
    graph, made_by = facts.graph, facts.graph.producers
    found: set[int] = set()
    left, size = {value}, graph.avals[value].size
    while left:
        v = left.pop()
        if v not in made_by:
            continue
        e, _ = made_by[v]
        if facts.traits.fuses[e]:
            left |= {x for x in graph.operands[e] if graph.avals[x].size == size and x not in facts.traits.free}
        else:
            found.add(v)
    return sorted(found)
