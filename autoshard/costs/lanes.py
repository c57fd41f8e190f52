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

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.costs.matrices import LANES, Matrix
from autoshard.costs.strategies import Codes, Strategies, shards, split
from autoshard.ir.graph import Aval, Eqn
from autoshard.ir.mesh import MeshAxes
from autoshard.ir.op_traits import GATHER

SUBLANES = 8


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
    else:
        aval, codes, single = eqn.results[0], strategies.results[0], numbers.inserted_window_dims
    dims = tuple(d for d in range(aval.ndim) if d not in (*single, *numbers.operand_batching_dims))
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


def share_in_lanes(matrix: Matrix, shape: Sequence[int], codes: Codes, mesh: MeshAxes) -> NDArray[np.float64]:
    """Bytes that a value of such matrices takes in each layout (S,), by its own bytes; single rows are no matrix."""
    rows, columns = (
        np.minimum(shape[d] // split(codes, d, len(shape), mesh), size)
        for d, size in zip(matrix.dims, matrix.sizes, strict=True)
    )
    orders = (_multiple(a, SUBLANES) * _multiple(b, LANES) for a, b in ((rows, columns), (columns, rows)))
    share = np.minimum(*orders) / np.maximum(rows * columns, 1)
    return np.where(np.minimum(rows, columns) < SUBLANES, 1.0, share)


def _multiple(sizes: NDArray[np.int64], of: NDArray[np.int64] | int) -> NDArray[np.int64]:
    """The least multiples that are not below."""
    return -(-sizes // of) * of
