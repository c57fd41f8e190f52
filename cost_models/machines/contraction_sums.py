"""Into how many sums XLA:GPU cuts a contraction, so that a result of few tiles fills the device (split-K).

The sums are computed at once, each in float32 and whole, and a kernel adds them. XLA decides it when it rewrites the
program, by weights that were tuned for each generation of GPUs; it is no result of autotuning.
Source: openxla/xla (0c1ab89), xla/backends/gpu/transforms/splitk_rewriter.cc: EstimateGemmCostAfterSplitK.
Checked: 86 products of each of two dtypes compiled for a100, h100, b200 and gb200, 0 others (jax-cuda12-pjrt 0.10.2;
the first three by 0.12.0.1, too).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

COUNTS = tuple(2**i for i in range(12))
_TILE = 128  # rows and columns of a tile
_ACCUMULATOR_BYTES = 4


@dataclass(frozen=True, slots=True)
class SumWeights:
    """What a generation of GPUs weighs against the FLOPs of one unit.

    Attributes:
        traffic: FLOPs per byte that the products read and write.
        adding: FLOPs per byte that the kernel reads and writes that adds the sums.
        launch: FLOPs of the launch of that kernel.
    """

    traffic: float
    adding: float
    launch: float


# By the major number of CUDA's compute capability, from this one on. Source: GetCostWeights, over a FLOP's weight of
# 100.
_WEIGHTS = {
    10: SumWeights(0.000848863, 1.89711, 1.21563e6),
    9: SumWeights(0.00194136, 1.931384, 4.36e5),
    0: SumWeights(0.000666955, 4.67815, 5.65307e5),
}


@dataclass(frozen=True, slots=True)
class Product:
    """`[batch, m, k] @ [batch, k, n]`; the sizes broadcast.

    Attributes:
        batch, m, n, k: Sizes on one device.
        operand_itemsize: Bytes per element of the operands.
        result_itemsize: Bytes per element of the result.
    """

    batch: ArrayLike
    m: ArrayLike
    n: ArrayLike
    k: ArrayLike
    operand_itemsize: float
    result_itemsize: float


def contraction_sums(product: Product, units: int, capability: int) -> NDArray[np.int64]:
    """How many sums a product is cut into: 1 where it is left whole.

    Args:
        product: Its sizes.
        units: Tiles that the device computes at once.
        capability: The major number of its CUDA compute capability.
    """
    weights = next(weights for least, weights in _WEIGHTS.items() if capability >= least)
    batch, m, n, k = np.broadcast_arrays(*(np.asarray(x, float) for x in _sizes(product)))
    rows, columns = np.minimum(m, _TILE), np.minimum(n, _TILE)
    tiles, slots = batch * np.ceil(m / _TILE) * np.ceil(n / _TILE), units * _TILE**2 / np.maximum(rows * columns, 1)
    read = batch * (m + n) * k * product.operand_itemsize
    result = batch * m * n * product.result_itemsize

    def flops(count: int) -> NDArray[np.float64]:
        arithmetic = 2 * rows * columns * np.ceil(k / count) * np.maximum(1, tiles * count / slots)
        sums = batch * m * n * count * _ACCUMULATOR_BYTES
        dot = np.maximum(arithmetic, weights.traffic * (read + (result if count == 1 else sums)))
        return dot if count == 1 else dot + weights.launch + weights.adding * (sums + result)

    return np.array(COUNTS)[np.argmin([flops(count) for count in COUNTS], axis=0)]


def _sizes(product: Product) -> tuple[ArrayLike, ...]:
    return product.batch, product.m, product.n, product.k
