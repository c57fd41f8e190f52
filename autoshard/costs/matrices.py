"""Matrices: which dimensions of values are rows and columns of products with a batch.

Of what such a product takes and makes, of what that is cut from, and of what is computed from it element by element, up
to the next product: queries, keys and scores. Of several dimensions of one operand's own it is the last.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoshard.ir.graph import Aval, Eqn, Graph
from autoshard.ir.op_traits import DOT_GENERAL
from autoshard.rules.rule import ShardingRule

LANES = 128  # elements of a row of a tile of a TPU's memory

_Factors = tuple[tuple[int, ...], ...]  # of each dimension


@dataclass(frozen=True, slots=True)
class Matrix:
    """The dimensions of a value that are rows and columns of products with a batch, and the sizes of these.

    A dimension may be longer than its size: heads and the width of each are one dimension before they are split.
    """

    dims: tuple[int, int]
    sizes: tuple[int, int]


def matrices(graph: Graph, rules: Sequence[ShardingRule]) -> Mapping[int, Matrix]:
    """Value → the matrices that it consists of."""
    found: dict[int, Matrix] = {}
    multiplies = [eqn.traits.contraction for eqn in graph.eqns]
    for e in range(len(graph.eqns) - 1, -1, -1):
        if multiplies[e]:
            for v, matrix in zip(graph.operands[e], _taken(graph.eqns[e]), strict=False):
                found.setdefault(v, matrix)
            continue
        for r, to in zip(graph.results[e], rules[e].results, strict=True):
            if r in found:
                for v, dims in zip(graph.operands[e], rules[e].operands, strict=True):
                    _hand_on(graph, found, r, to, v, dims)
    for e in range(len(graph.eqns)):
        if multiplies[e]:
            if (made := _made(graph.eqns[e])) is not None:
                found[graph.results[e][0]] = made
            continue
        for v, dims in zip(graph.operands[e], rules[e].operands, strict=True):
            if v in found:
                for r, to in zip(graph.results[e], rules[e].results, strict=True):
                    _hand_on(graph, found, v, dims, r, to)
    return found


def _taken(eqn: Eqn) -> tuple[Matrix, ...]:
    """Rows and columns of the operands of a product with a batch."""
    if eqn.primitive != DOT_GENERAL:
        return ()
    contracted, batch = eqn.params["dimension_numbers"]
    if not batch[0]:
        return ()
    taken: list[Matrix] = []
    for aval, summed, each in zip(eqn.operands, contracted, batch, strict=True):
        own = [d for d in range(aval.ndim) if d not in (*summed, *each)]
        if not own or not summed:
            return ()
        dims = own[-1], summed[-1]
        taken.append(Matrix(dims, (aval.shape[dims[0]], aval.shape[dims[1]])))
    return tuple(taken)


def _made(eqn: Eqn) -> Matrix | None:
    """Rows and columns of the result of a product with a batch: last of each operand's own dimensions."""
    taken = _taken(eqn)
    if not taken:
        return None
    (contracted, _), _ = eqn.params["dimension_numbers"]
    rows, columns = eqn.operands[0].ndim - len(contracted) - 1, eqn.results[0].ndim - 1
    return Matrix((rows, columns), (taken[0].sizes[0], taken[1].sizes[0]))


def _hand_on(graph: Graph, found: dict[int, Matrix], v: int, dims: _Factors, other: int, to: _Factors) -> None:
    """Gives a value the matrix of another that one equation takes or makes with it, where it has both dimensions."""
    if other in found:
        return
    places: list[int] = []
    for d in found[v].dims:
        place = next((k for k, factors in enumerate(to) if set(factors) & set(dims[d])), None)
        if place is None and len(dims) == len(to) and not to[d]:
            place = d  # a part of it
        if place is None or graph.avals[other].shape[place] == 1:
            return
        places.append(place)
    if places[0] != places[1]:
        found[other] = Matrix((places[0], places[1]), found[v].sizes)


def part_in_lanes(part: Aval, whole: Aval) -> int:
    """Bytes of what is padded or put together to a value of whole lanes: it lies in whole lanes before (halves do)."""
    if not whole.ndim or whole.shape[-1] % LANES:
        return part.nbytes
    return part.nbytes // max(part.shape[-1], 1) * -(-part.shape[-1] // LANES) * LANES
