"""Lanes: what values take beyond their own bytes, where their dimensions do not fill the tiles of a TPU's memory.

A TPU's memory holds tiles of 8 × 128 elements. XLA:TPU gives most values a layout that fills them. But a gather's
rows, and those that a scatter adds, lie one after the other, the last dimension of a row along the lanes, each as
long as a multiple of 128: a bias of 8 heads for every pair of positions takes 16 times its bytes. What reads them in
another layout reads a copy that fills its tiles; so only while the gather or the scatter runs, they lie there so
(libtpu 0.0.52; `tests/compilers/test_memory_tpu.py`). What is computed from them alone, element by element, lies in
whole lanes, too, and is not planned so.

The tables that rows are gathered from, or added to, lie so, too, while that runs: one that is given is copied for it,
and one of zeros behind it.

What products with a batch take and make (queries, keys, scores) lies in tiles of its own rows and columns, in the order
of the two that takes less: 12 heads' scores of 49 × 49 positions in 56 × 128 elements each, their queries of 32 × 49 in
32 × 128. So does what they are cut from, and what is computed of them element by element.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.costs.strategies import Codes, Strategies, shards, split
from autoshard.ir.graph import Aval, Eqn, Graph
from autoshard.ir.mesh import MeshAxes
from autoshard.ir.op_traits import DOT_GENERAL, GATHER
from autoshard.rules.rule import ShardingRule

LANES, SUBLANES = 128, 8


def bytes_in_lanes(eqn: Eqn, strategies: Strategies, mesh: MeshAxes) -> NDArray[np.int64]:
    """Bytes per device (S,) that the rows of a gather or a scatter take beyond their own; rows of one element, none."""
    numbers = eqn.params["dimension_numbers"]
    if eqn.primitive == GATHER:
        aval, codes, dims = eqn.results[0], strategies.results[0], numbers.offset_dims
    else:
        aval, codes, dims = eqn.operands[2], strategies.operands[2], numbers.update_window_dims
    own, filled = _rows(aval, codes, dims, mesh)
    return filled - own


def table_in_lanes(eqn: Eqn, strategies: Strategies, mesh: MeshAxes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Bytes per device (S,) of a table, and in whole lanes, that a gather takes rows of or a scatter adds them to.

    Both are 0 where its own rows fill lanes.
    """
    numbers = eqn.params["dimension_numbers"]
    if eqn.primitive == GATHER:
        aval, codes, single = eqn.operands[0], strategies.operands[0], numbers.collapsed_slice_dims
        batch = numbers.operand_batching_dims
    else:
        aval, codes, single = eqn.results[0], strategies.results[0], numbers.inserted_window_dims
        batch = numbers.operand_batching_dims
    dims = tuple(d for d in range(aval.ndim) if d not in (*single, *batch))
    own, filled = _rows(aval, codes, dims, mesh)
    return np.where(filled > own, own, 0), np.where(filled > own, filled, 0)


def _rows(aval: Aval, codes: Codes, dims: Sequence[int], mesh: MeshAxes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Bytes per device (S,) of rows along some dimensions, and in whole lanes; the same if they have one element."""
    if not dims:
        own = aval.nbytes // shards(codes, aval.ndim, mesh)
        return own, own
    local = np.stack([n // split(codes, d, aval.ndim, mesh) for d, n in enumerate(aval.shape)], axis=1)
    elements = local.prod(axis=1)
    own = elements * aval.itemsize
    row = local[:, list(dims)]
    filled = row.copy()
    filled[:, -1] = _multiple(row[:, -1], LANES)
    if len(dims) > 1:  # of few sublanes, tiles of as many
        filled[:, -2] = _multiple(row[:, -2], 2 ** np.ceil(np.log2(row[:, -2].clip(1, SUBLANES))).astype(np.int64))
    size = row.prod(axis=1)
    more = elements // size.clip(1) * (filled.prod(axis=1) - size) * aval.itemsize
    return own, own + np.where((size > 1) & (elements > size), more, 0)


@dataclass(frozen=True, slots=True)
class Matrix:
    """The dimensions of a value that are rows and columns of products with a batch, and the sizes of these."""

    dims: tuple[int, int]
    sizes: tuple[int, int]

    def share(self, shape: Sequence[int], codes: Codes, mesh: MeshAxes) -> NDArray[np.float64]:
        """Bytes that a value takes in each layout (S,), by its own bytes."""
        rows, columns = (
            np.minimum(size, shape[d]) // np.minimum(split(codes, d, len(shape), mesh), size)
            for d, size in zip(self.dims, self.sizes, strict=True)
        )
        orders = (_multiple(a, SUBLANES) * _multiple(b, LANES) for a, b in ((rows, columns), (columns, rows)))
        return np.where(np.minimum(rows, columns) < SUBLANES, 1.0, np.minimum(*orders) / (rows * columns))


def matrices(graph: Graph, rules: Sequence[ShardingRule]) -> Mapping[int, Matrix]:
    """Value → the matrices that it consists of; of values that products with a batch take or make, at once or not."""
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


Factors = tuple[tuple[int, ...], ...]  # of each dimension


def _hand_on(graph: Graph, found: dict[int, Matrix], v: int, dims: Factors, other: int, to: Factors) -> None:
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


def _multiple(sizes: NDArray[np.int64], of: NDArray[np.int64] | int) -> NDArray[np.int64]:
    """The least multiples that are not below."""
    return -(-sizes // of) * of
