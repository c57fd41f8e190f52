"""Casts: a value beside a cast is moved on the side with fewer bytes."""

from collections.abc import Mapping

from autoshard.ir.graph import Aval, Eqn, Graph
from autoshard.ir.op_traits import MUL


def widening(eqn: Eqn) -> int:
    """Bytes per element that a cast adds, fewer than none for a narrowing one; 0 for all other equations."""
    if not eqn.traits.cast:
        return 0
    return eqn.results[0].itemsize - eqn.operands[0].itemsize


def narrow_side(graph: Graph, made_by: Mapping[int, tuple[int, int]], value: int) -> Aval:
    """The array that XLA:GPU moves for a value: the operand of a widening cast, if one makes the value.

    A scale may follow the cast. XLA:GPU moves the collective before both
    (xla/hlo/transforms/collectives/collective_quantizer.cc).

    Args:
      graph: the program.
      made_by: value → the equation that makes it, and which of its results it is.
      value: the value to move.
    """

    def maker(v: int) -> int:
        return made_by[v][0] if v in made_by else -1

    def one_number(v: int) -> bool:
        e = maker(v)
        repeated = e >= 0 and graph.eqns[e].traits.repeats
        return not graph.avals[graph.operands[e][0] if repeated else v].ndim

    aval, e = graph.avals[value], maker(value)
    while e >= 0 and graph.eqns[e].traits.reshapes:  # may stand between a cast and a collective
        e = maker(graph.operands[e][0])
    if e >= 0 and graph.eqns[e].traits.scale:
        left, right = graph.operands[e]
        if one_number(left) and graph.eqns[e].primitive == MUL:
            left, right = right, left
        e = maker(left) if one_number(right) else -1
    return Aval(aval.shape, graph.eqns[e].operands[0].dtype) if e >= 0 and widening(graph.eqns[e]) > 0 else aval
