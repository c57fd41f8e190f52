"""Reductions: which of them are kernels of their own, and what these read again.

A reduction is fused with what its operand is computed from, so that an operand that lies nowhere in memory costs it
nothing by itself: but the kernel reads the values that the operand is made from. XLA:GPU (jax-cuda12-pjrt 0.10.2)
reduces short rows in the kernel that uses them, and again in every other that computes the same expression: the
maximum of a softmax. If more than one expression takes the result, a kernel of its own writes it: sums of a softmax
that the backward pass divides by once more, norms. Reductions of the same values share that kernel, unless their rows
are long: a vocabulary's maximum and its sum are two.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.costs.liveness import SHORT_ROW
from autoshard.ir.graph import Graph


def reread(graph: Graph, fuses: Sequence[bool], held: NDArray[np.bool_]) -> Mapping[int, float]:
    """Reduction → bytes per element of its operand that a kernel of its own reads; none for the others.

    Args:
      graph: the program.
      fuses: per equation, whether XLA fuses it with its neighbours.
      held: the values that lie in memory, also under another name.
    """
    sources = _sources(graph, fuses, held)
    found: dict[int, float] = {}
    counted: set[frozenset[int]] = set()
    for e, eqn in enumerate(graph.eqns):
        if not eqn.traits.ends_fusion or not eqn.operands:
            continue
        operand, result = graph.operands[e][0], graph.results[e][0]
        read, aval = sources.get(operand, frozenset[int]()), graph.avals[operand]
        if held[operand] or not read or aval.size <= graph.avals[result].size:
            continue
        long = aval.size > SHORT_ROW * graph.avals[result].size
        if long or (read not in counted and len(_expressions(graph, fuses, result)) > 1):
            counted.add(read)
            found[e] = sum(graph.avals[v].nbytes for v in read) / aval.size
    return found


def _sources(graph: Graph, fuses: Sequence[bool], held: NDArray[np.bool_]) -> dict[int, frozenset[int]]:
    """Value that is not held → the large values in memory that it is computed from, other than reductions of them."""
    found: dict[int, frozenset[int]] = {}
    for e, eqn in enumerate(graph.eqns):
        if not (fuses[e] or eqn.traits.renames) or eqn.traits.ends_fusion:
            continue
        for result in graph.results[e]:
            if not held[result]:
                large = graph.avals[result].size // 2
                found[result] = frozenset[int]().union(
                    *(
                        (frozenset({v}) if graph.avals[v].size > large else frozenset[int]())
                        if held[v]
                        else found.get(v, frozenset[int]())
                        for v in graph.operands[e]
                    )
                )
    return found


def _expressions(graph: Graph, fuses: Sequence[bool], reduction: int) -> frozenset[int]:
    """The larger values that are computed from a reduction directly, or from values as small as it; and other uses."""
    found, left, seen = set[int](), [reduction], {reduction}
    outputs = frozenset(graph.outputs)
    while left:
        value = left.pop()
        if value in outputs:
            found.add(value)
        for e, _ in graph.consumers.get(value, ()):
            traits = graph.eqns[e].traits
            for result in graph.results[e]:
                small = graph.avals[result].size <= graph.avals[reduction].size or traits.repeats or traits.renames
                if not (small and (fuses[e] or traits.renames)):
                    found.add(result)
                elif result not in seen:
                    seen.add(result)
                    left.append(result)
    return frozenset(found)
