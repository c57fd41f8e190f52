"""Dependences: which contractions a program's equations follow or feed, and what its outputs are made of."""

from collections.abc import Container, Mapping, Set
from functools import reduce
from operator import or_

from autoshard.ir.graph import Eqn, Graph
from autoshard.ir.op_traits import BRANCH_JOIN, LOOP_RESULT, SHARD_MAP


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


def whole_steps(graph: Graph) -> frozenset[int]:
    """The loops whose body has a forward and a backward pass: the next trip takes nothing but their gradients."""
    forward, backward = (
        {
            loop
            for e, loop in enumerate(graph.eqn_loop)
            if loop and multiplies(graph.eqns[e]) and (e in graph.backward) == of
        }
        for of in (False, True)
    )
    return frozenset(forward & backward)


def awaited_first(graph: Graph) -> frozenset[int]:
    """The values of a loop's body that its first contraction is computed from; the same outside of loops.

    There, the first contractions are those that follow no other, and an awaited value is needed by all of them.
    """
    first: dict[int, list[int]] = {}
    before = contractions_before(graph, {e for e, loop in enumerate(graph.eqn_loop) if not loop})
    for e, (eqn, loop) in enumerate(zip(graph.eqns, graph.eqn_loop, strict=True)):
        if multiplies(eqn) and (loop not in first if loop else not before[e]):
            first.setdefault(loop, []).append(e)
    made_by = graph.producers
    needed = [[sources(graph, e, made_by) for e in contractions] for contractions in first.values()]
    return frozenset().union(*(frozenset.intersection(*sets) for sets in needed))


def sources(graph: Graph, e: int, made_by: Mapping[int, tuple[int, int]]) -> frozenset[int]:
    """Values of its own loop, or outside of loops, that an equation is computed from."""
    found: set[int] = set()
    left = list(graph.operands[e])
    while left:
        value = left.pop()
        if value in found or graph.value_loop[value] != graph.eqn_loop[e]:
            continue
        found.add(value)
        left.extend(graph.operands[made_by[value][0]] if value in made_by else ())
    return frozenset(found)


def feeding_products(graph: Graph, makers: Set[int], *, inside: bool) -> set[int]:
    """Values from which some of these equations are computed; `inside` of a loop in their trip, or the next trip.

    Of a loop over whole steps the next trip takes nothing that counts.
    """
    feeds: set[int] = set()
    steps = whole_steps(graph) if inside else frozenset[int]()
    for e in range(len(graph.eqns) - 1, -1, -1):
        eqn = graph.eqns[e]
        link = inside and eqn.traits.link and eqn.primitive != BRANCH_JOIN
        onward = not link and not feeds.isdisjoint(graph.results[e])
        next_trip = inside and eqn.primitive == LOOP_RESULT and graph.value_loop[graph.operands[e][0]] not in steps
        if e in makers or next_trip or onward:
            feeds.update(graph.operands[e])
    return feeds
