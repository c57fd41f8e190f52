"""The roofline: a local operation takes its arithmetic or its memory traffic, whichever is longer.

Source: Williams, Waterman & Patterson 2009; tiles and waves as in NVIDIA,
Matrix Multiplication Background User's Guide; padding to the matrix unit from
Austin et al., How to Scale Your Model (2026-06-24), tpus.md:182.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from cost_models.machines.alpha_beta import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulUnit:
    """How a device multiplies matrices of one dtype.

    Attributes:
        peak_flops_per_s: Data-sheet rate, dense.
        achieved_fraction: Fraction of it that large matmuls reach.
        tile_rows, tile_columns, tile_depth: Operands are padded to these: m, n, k of
            the smallest piece of work. Rows and columns may swap roles.
        units: Tiles that run at once; a last wave that does not fill them costs as a full one.
        launch_s: Fixed cost of one operation.
    """

    peak_flops_per_s: float
    achieved_fraction: float
    tile_rows: int
    tile_columns: int
    tile_depth: int
    units: int
    launch_s: float

    def compute_s(self, batch: ArrayLike, m: ArrayLike, n: ArrayLike, k: ArrayLike, splits: int = 1) -> Floats:
        """Seconds of arithmetic for `[batch, m, k] @ [batch, k, n]`, without memory or launch.

        `splits`: into how many sums the contraction is cut, which run at once where tiles are few.
        """
        b, m_, n_, k_ = (np.asarray(x, float) for x in (batch, m, n, k))
        rows, columns, depth = float(self.tile_rows), float(self.tile_columns), float(self.tile_depth)
        tiles = b * np.minimum(np.ceil(m_ / rows) * np.ceil(n_ / columns), np.ceil(n_ / rows) * np.ceil(m_ / columns))
        waves = np.ceil(tiles * splits / self.units)
        padded_flops = 2 * waves * self.units * rows * columns * np.ceil(k_ / (depth * splits)) * depth
        return padded_flops / (self.peak_flops_per_s * self.achieved_fraction)


# Into how many sums a contraction may be cut. Source: XLA, splitk_rewriter.cc (at most 128 sums).
SPLITS = (1, 2, 4, 8, 16, 32, 64, 128)
# What a loop over elements, without tiles, reaches of the vector units' rate. XLA:GPU emits one where (m + n)·k is
# below 100, and for integers (jax-cuda12-pjrt 0.10.2). Source: assumed; such a product waits for memory in any case.
LOOP_FRACTION = 0.1


def matmul_bytes(
    batch: ArrayLike,
    m: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    operand_itemsize: float,
    result_itemsize: float,
) -> Floats:
    """HBM traffic of a matmul that reads its operands once and writes its result once."""
    b, m_, n_, k_ = (np.asarray(x, float) for x in (batch, m, n, k))
    return b * ((m_ * k_ + k_ * n_) * operand_itemsize + m_ * n_ * result_itemsize)


def partial_sums_bytes(batch: ArrayLike, m: ArrayLike, n: ArrayLike, splits: int) -> Floats:
    """HBM traffic of the float32 sums into which a contraction is cut: each is written, and read to be added."""
    b, m_, n_ = (np.asarray(x, float) for x in (batch, m, n))
    return (0.0 if splits == 1 else 8.0 * splits) * b * m_ * n_


def taps_on_data(
    outputs: int, kernel: int, image: int, *, stride: int, pad: int, image_step: int, kernel_step: int
) -> int:
    """How often a kernel's taps fall on data along one dimension of a convolution, over all outputs.

    Padding and the zeros of a dilated image are no data. Source: HloCostAnalysis::HandleConvolution (XLA).

    Args:
        outputs: Size of the result.
        kernel: Taps of the kernel.
        image: Size of the image.
        stride: From one output to the next.
        pad: In front of the image; negative where it is cut off.
        image_step: Dilation of the image.
        kernel_step: Dilation of the kernel.
    """
    begin = np.arange(outputs) * stride - pad
    first = np.maximum(-(begin // kernel_step), 0)  # tap on the image, by its dilated points
    last = np.minimum(((image - 1) * image_step - begin) // kernel_step, kernel - 1)
    # begin + tap · kernel_step is a multiple of image_step for one tap of `every`, if for any.
    common = math.gcd(kernel_step, image_step)
    every = image_step // common
    tap = -(begin // common) * pow(kernel_step // common, -1, every) % every
    found = (last - tap) // every - (first - 1 - tap) // every
    return int(found[(begin % common == 0) & (first <= last)].sum())


def arithmetic_intensity(flops: ArrayLike, nbytes: ArrayLike) -> Floats:
    """FLOPs per byte of memory traffic. Source: scaling book roofline.md:119."""
    return np.asarray(flops, float) / np.asarray(nbytes, float)


def roofline_s(flops: ArrayLike, nbytes: ArrayLike, flops_per_s: ArrayLike, bytes_per_s: ArrayLike) -> Floats:
    """The longer of arithmetic and memory traffic. Source: scaling book roofline.md:104-116."""
    compute_s = np.asarray(flops, float) / np.asarray(flops_per_s, float)
    memory_s = np.asarray(nbytes, float) / np.asarray(bytes_per_s, float)
    return np.maximum(compute_s, memory_s)


def elementwise_bytes(elements: ArrayLike, operands: int, results: int, itemsize: float) -> Floats:
    """HBM traffic of a fused chain of element-wise operations: each input read once, each output written once.

    Source: XLA fuses producers into consumers; scaling book gpus.md:248 Q7 for a single add.
    """
    return np.asarray(elements, float) * (operands + results) * itemsize
