"""Gathered scores: what lies in memory for a gather alone, of what is computed from a product element by element.

A loss takes the labels' scores, or their logarithms, by a gather. XLA:TPU (libtpu 0.0.52, by its text of heads of
language models with and without a bias, a cap, a scale and weights of the loss, tied and not, in bfloat16 and float32)
writes what it gathers from: float32 scores, where the product is cast for the loss. They lie there until the gather
has run; everyone else takes the product, and computes from it again.

The product's kernel writes them, beside the product, where they are a mere cast of what it writes. Where more is
computed (a cap, a logarithm), or where a bias's gradient is summed over all rows, a kernel does that reads the product
in any case: the one of that sum, or of the gradient of the scores, if it lies in memory.

Where all else is computed from them, too, and they are of the product's type (a sum of it and a bias), they lie in
its place.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.ir.graph import Graph
from autoshard.ir.op_traits import GATHER, REDUCE_SUM

_NONE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredScores:
    """Scores that are computed for a gather.

    Attributes:
      value: the scores.
      lie: whether they have memory of their own: not in their product's place.
      apart: whether another kernel than their product's writes them.
      beside: what that kernel makes besides, of the backward pass: a gradient, or its sum over all rows.
      waits: whether they wait for reductions of their rows, and are written for the loss alone, when it is computed.
    """

    value: int
    lie: bool
    apart: bool
    beside: int | None
    waits: bool


def computed_scores(graph: Graph, fuses: Sequence[bool], e: int) -> bool:
    """Whether equation e gathers from what fusions compute, element by element, of a contraction's product."""
    scores = graph.operands[e][0] if graph.eqns[e].primitive == GATHER else _NONE
    return scores >= 0 and graph.avals[scores].ndim > 0 and bool(products_of(graph, fuses, scores) - {scores})


def gathered_scores(graph: Graph, fuses: Sequence[bool], held: NDArray[np.bool_]) -> dict[int, GatheredScores]:
    """Gather → the scores that are computed for it, if they do not lie in memory in any case.

    Args:
      graph: the program.
      fuses: per equation, whether XLA fuses it with its neighbours.
      held: the values that lie in memory, also under another name.
    """
    found: dict[int, GatheredScores] = {}
    for e, eqn in enumerate(graph.eqns):
        scores = graph.operands[e][0] if eqn.primitive == GATHER else _NONE
        if scores >= 0 and not held[scores] and computed_scores(graph, fuses, e):
            products = products_of(graph, fuses, scores)
            sums = _sum_over_rows(graph, fuses, scores, products)
            apart = sums is not None or not _is_cast(graph, scores, products)
            beside = _gradient(graph, fuses, scores, products, held) if sums is None and apart else sums
            found[e] = GatheredScores(
                value=scores,
                lie=not _in_place(graph, scores),
                apart=apart,
                beside=beside,
                waits=beside is None and _reduces_rows(graph, fuses, scores),
            )
    return found


def products_of(graph: Graph, fuses: Sequence[bool], value: int) -> frozenset[int]:
    """The contractions' products from which fusions compute a value, element by element."""
    behind = _behind(graph, fuses, value, lambda e, v: _elements(graph, e, v))
    return frozenset(v for v, e in behind if graph.eqns[e].traits.contraction)


def _reduces_rows(graph: Graph, fuses: Sequence[bool], value: int) -> bool:
    """Whether fusions compute a value from reductions of its rows, too."""
    behind = _behind(graph, fuses, value, lambda e, _: graph.made_from(e))
    return any(graph.eqns[e].traits.ends_fusion for _, e in behind)


def _behind(
    graph: Graph, fuses: Sequence[bool], value: int, operands: Callable[[int, int], Iterable[int]]
) -> Iterator[tuple[int, int]]:
    """Values from which fusions compute a value, itself first, and the equations that make them.

    As far as those that fusions do not compute: products, reductions. `operands`: of an equation and its result, those
    to go on to.
    """
    seen, left = set[int](), [value]
    while left:
        v = left.pop()
        maker, _ = graph.producers.get(v, (_NONE, 0))
        if maker < 0 or v in seen:
            continue
        seen.add(v)
        yield v, maker
        traits = graph.eqns[maker].traits
        if (fuses[maker] or traits.renames) and not traits.ends_fusion:
            left += operands(maker, v)


def _elements(graph: Graph, e: int, result: int) -> list[int]:
    """The operands of which an equation takes an element for each of its result: as many, or those that it cuts.

    Nothing that repeats a smaller one (a bias for every row).
    """
    cuts, size = graph.eqns[e].traits.cuts, graph.avals[result].size
    alike = [v for v in graph.made_from(e) if cuts or graph.avals[v].size == size]
    return [v for v in alike if v not in graph.producers or not graph.eqns[graph.producers[v][0]].traits.repeats]


def _is_cast(graph: Graph, scores: int, products: Iterable[int]) -> bool:
    """Whether scores are a mere cast, of a product or of what is computed from it in its own type; or a part of one."""
    maker, _ = graph.producers[scores]
    while graph.eqns[maker].traits.renames or graph.eqns[maker].traits.cuts:
        maker, _ = graph.producers[graph.operands[maker][0]]
    taken = graph.avals[graph.operands[maker][0]].dtype
    return graph.eqns[maker].traits.cast and all(graph.avals[v].dtype == taken for v in products)


def _sum_over_rows(graph: Graph, fuses: Sequence[bool], scores: int, products: frozenset[int]) -> int | None:
    """What is computed from the product of scores and summed over all of their rows: the gradient of a bias."""
    aval = graph.avals[scores]
    for e, eqn in enumerate(graph.eqns):
        if eqn.primitive == REDUCE_SUM and eqn.operands[0].size >= aval.size:
            of_rows = eqn.results[0].size == aval.shape[-1]
            if of_rows and products & products_of(graph, fuses, graph.operands[e][0]):
                return graph.results[e][0]
    return None


def _gradient(
    graph: Graph, fuses: Sequence[bool], scores: int, products: frozenset[int], held: NDArray[np.bool_]
) -> int | None:
    """What lies in memory of the gradient of scores, if anything does."""
    size = graph.avals[scores].size
    for e in sorted(graph.backward):
        for v in graph.results[e] if fuses[e] else ():
            if held[v] and graph.avals[v].size >= size and products & products_of(graph, fuses, v):
                return v
    return None


def _in_place(graph: Graph, scores: int) -> bool:
    """Whether nothing but scores is computed from a product of their type, so that they lie in its place."""
    v, aval = scores, graph.avals[scores]
    while True:
        maker, _ = graph.producers.get(v, (_NONE, 0))
        if maker < 0 or graph.avals[v].dtype != aval.dtype or (v != scores and len(graph.consumers[v]) > 1):
            return False
        if graph.eqns[maker].traits.contraction:
            return True
        made_from = _elements(graph, maker, v)
        if len(made_from) != 1:
            return False
        (v,) = made_from
