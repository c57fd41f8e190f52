"""Widened arguments: what is computed in float32 of a narrower value, which lies in memory for it.

An exact gelu in bfloat16 computes `erfc` in float32: between a product and it stands a cast. Where a matmul has several
dimensions of rows, the program's product is a reshape of it, which XLA moves behind the bias and all else that is
computed element by element, as far as the cast. What is cast has two shapes then, that of the matmul and the program's:
the kernel of the gelu writes it, and the backward pass reads it (jax-cuda12-pjrt 0.10.2 and 0.12.0.1). A vector that
multiplies the product, or a residual, holds the reshape up, and nothing is written.
"""

from collections.abc import Collection, Sequence
from math import prod

from autoshard.ir.graph import Graph
from autoshard.ir.op_traits import BROADCAST, DOT_GENERAL


def widened_arguments(graph: Graph, fuses: Sequence[bool], primitives: Collection[str]) -> frozenset[int]:
    """The arguments of these primitives, narrower than float32, that are made of a reshaped matmul and its bias."""
    return frozenset(
        graph.operands[e][0]
        for e, eqn in enumerate(graph.eqns)
        if eqn.primitive in primitives and eqn.operands[0].itemsize < _WIDE and _is_of_a_product(graph, fuses, e)
    )


_WIDE = 4  # bytes of an element that is not widened


def _is_of_a_product(graph: Graph, fuses: Sequence[bool], e: int) -> bool:
    """Whether an equation's operand is made of a reshaped matmul with nothing but numbers and a bias."""
    made_by, (value,) = graph.producers, graph.operands[e]
    while value in made_by:
        e, _ = made_by[value]
        eqn, shape = graph.eqns[e], graph.avals[value].shape
        if eqn.primitive == DOT_GENERAL:
            contracted, batch = eqn.params["dimension_numbers"]
            own = (a.ndim - len(c) - len(b) for a, c, b in zip(eqn.operands, contracted, batch, strict=True))
            return eqn.traits.contraction and max(*own, len(batch[0])) > 1
        sources = {v: _source(graph, v) for v in graph.operands[e]}
        whole = [v for v, source in sources.items() if prod(source) == prod(shape)]
        bias = (shape[-1:],) if eqn.traits.addition else ()
        if len(whole) != 1 or not fuses[e] or eqn.traits.moves_nothing:
            return False
        if any(source not in ((), *bias) for v, source in sources.items() if v not in whole):
            return False
        (value,) = whole
    return False


def _source(graph: Graph, value: int) -> tuple[int, ...]:
    """The sizes, other than 1, of what an operand is repeated from."""
    made_by = graph.producers
    while value in made_by and graph.eqns[made_by[value][0]].primitive == BROADCAST:
        (value,) = graph.operands[made_by[value][0]]
    return tuple(size for size in graph.avals[value].shape if size > 1)
