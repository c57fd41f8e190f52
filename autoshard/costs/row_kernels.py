"""Row kernels: softmaxes and norms of what a loop reads from a stack.

XLA:GPU (jax-cuda12-pjrt 0.10.2 to 0.12) computes a value, reductions of its rows, and what is made of both in one
kernel for as long as rows are short, by Triton. That kernel takes no slice of a stack: the slice is copied, and the
copy is read by every kernel. Element-wise kernels read a trip's slice where it lies; one that joins two values writes
their result for the kernels of rows.
"""

from collections.abc import Sequence

from autoshard.ir.graph import Graph
from autoshard.ir.op_traits import LOOP_SLICE

_NONE = frozenset[int]()


def sliced_rows(graph: Graph, fuses: Sequence[bool], longest: int) -> frozenset[int]:
    """The slices of stacks that a row kernel takes.

    Args:
      graph: the program.
      fuses: per equation, whether XLA fuses it with its neighbours.
      longest: elements of a row, at most.
    """
    slices = {graph.results[e][0] for e, eqn in enumerate(graph.eqns) if eqn.primitive == LOOP_SLICE}
    if not slices:
        return _NONE
    found = set[int]()
    made: dict[int, frozenset[int]] = {}  # value → the values of its size that it is made of, element by element
    reduced: dict[int, frozenset[int]] = {}  # value → the values of whose rows it holds reductions
    for e, eqn in enumerate(graph.eqns):
        if not graph.results[e]:
            continue
        result, operands = graph.results[e][0], graph.operands[e]
        size = graph.avals[result].size
        if eqn.traits.ends_fusion and operands:
            if size < graph.avals[operands[0]].size <= longest * size:
                reduced[result] = made.get(operands[0], _NONE)
        elif eqn.primitive != LOOP_SLICE and (fuses[e] or eqn.traits.renames):
            alike = (made.get(v, frozenset({v})) for v in operands if graph.avals[v].size == size)
            made[result] = _NONE.union(*alike)
            reduced[result] = _NONE.union(*(reduced.get(v, _NONE) for v in operands))
            if len(made[result]) == 1:
                found |= made[result] & reduced[result]
    return frozenset(found & slices)
