"""Lanes: what the rows of gathers and scatters take beyond their own bytes, where they lie in whole lanes.

A TPU's memory holds tiles of 8 × 128 elements. XLA:TPU gives most values a layout that fills them. But a gather's
rows, and those that a scatter adds, lie one after the other, the last dimension of a row along the lanes, each as
long as a multiple of 128: a bias of 8 heads for every pair of positions takes 16 times its bytes. What reads them in
another layout reads a copy that fills its tiles; so only while the gather or the scatter runs, they lie there so
(libtpu 0.0.52; `tests/compilers/test_memory_tpu.py`). What is computed from them alone, element by element, lies in
whole lanes, too, and is not planned so.
"""

import numpy as np
from numpy.typing import NDArray

from autoshard.costs.strategies import Strategies, split
from autoshard.ir.graph import Eqn
from autoshard.ir.mesh import MeshAxes
from autoshard.ir.op_traits import GATHER

LANES, SUBLANES = 128, 8


def bytes_in_lanes(eqn: Eqn, strategies: Strategies, mesh: MeshAxes) -> NDArray[np.int64]:
    """Bytes per device (S,) that the rows of a gather or a scatter take beyond their own; rows of one element, none."""
    numbers = eqn.params["dimension_numbers"]
    if eqn.primitive == GATHER:
        aval, codes, dims = eqn.results[0], strategies.results[0], numbers.offset_dims
    else:
        aval, codes, dims = eqn.operands[2], strategies.operands[2], numbers.update_window_dims
    if not dims:
        return np.zeros(len(codes), np.int64)
    local = np.stack([n // split(codes, d, aval.ndim, mesh) for d, n in enumerate(aval.shape)], axis=1)
    row = local[:, list(dims)]
    filled = row.copy()
    filled[:, -1] = _multiple(row[:, -1], LANES)
    if len(dims) > 1:  # of few sublanes, tiles of as many
        filled[:, -2] = _multiple(row[:, -2], 2 ** np.ceil(np.log2(row[:, -2].clip(1, SUBLANES))).astype(np.int64))
    elements, size = local.prod(axis=1), row.prod(axis=1)
    more = elements // size.clip(1) * (filled.prod(axis=1) - size) * aval.itemsize
    return np.where((size > 1) & (elements > size), more, 0)


def _multiple(sizes: NDArray[np.int64], of: NDArray[np.int64] | int) -> NDArray[np.int64]:
    """The least multiples that are not below."""
    return -(-sizes // of) * of
