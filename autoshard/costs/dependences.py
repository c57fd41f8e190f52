"""Dependences: which contractions a program's equations follow, and what its outputs are made of."""

from collections.abc import Container
from functools import reduce
from operator import or_

from autoshard.ir.graph import Eqn, Graph
from autoshard.ir.op_traits import SHARD_MAP


def multiplies(eqn: Eqn) -> bool:
    """Whether communication may hide behind an equation: a contraction, or a `shard_map`, whose body has them."""
    return eqn.traits.contraction or eqn.primitive == SHARD_MAP


def contractions_before(graph: Graph, scope: Container[int]) -> dict[int, int]:
    """Equation → the contractions of a scope that it is computed from, as a bit set."""
    before: dict[int, int] = {}
    made: dict[int, int] = {}  # value → bit set of contractions among its ancestors
    for e, eqn in enumerate(graph.eqns):
        before[e] = bits = reduce(or_, (made.get(v, 0) for v in graph.operands[e]), 0)
        if multiplies(eqn) and e in scope:
            bits |= 1 << e
        made.update(dict.fromkeys(graph.results[e], bits))
    return before


def gradients(graph: Graph) -> frozenset[int]:
    """Values that outputs of the program are made of, element by element: of its products, gradients of weights."""
    found = set(graph.outputs)
    for e in range(len(graph.eqns) - 1, -1, -1):
        eqn, results = graph.eqns[e], graph.results[e]
        if found.isdisjoint(results) or multiplies(eqn) or eqn.traits.scatters or eqn.traits.ends_fusion:
            continue
        size = graph.avals[results[0]].size
        found.update(v for v in graph.operands[e] if graph.avals[v].size == size)
    return frozenset(found)
