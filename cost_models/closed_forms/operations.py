"""The seconds of the other operations of a training or decoding step on one device.

Element-wise chains, attention with and without a flash kernel, look-ups, the
optimizer's update: each is a roofline of its own FLOPs and HBM traffic.
"""

import numpy as np
from numpy.typing import ArrayLike

from cost_models.machines.alpha_beta import Floats
from cost_models.machines.amounts import amounts, count
from cost_models.machines.dtypes import itemsize
from cost_models.machines.machine import Machine
from cost_models.machines.roofline import elementwise_bytes


def elementwise_s(machine: Machine, elements: ArrayLike, operands: int, results: int, dtype: str) -> Floats:
    """A fused chain that reads `operands` arrays of so many elements and writes `results`."""
    return machine.hbm_s(elementwise_bytes(amounts(elements, "elements"), operands, results, itemsize(dtype)))


def attention_s(
    machine: Machine,
    batch: ArrayLike,
    heads: int,
    kv_heads: int,
    queries: ArrayLike,
    keys: ArrayLike,
    head_dim: int,
    dtype: str,
    *,
    causal: bool = True,
    flash: bool = True,
) -> Floats:
    """Scores, softmax and weighted values of one forward pass.

    With a flash kernel (Dao et al. 2022) the scores never leave the chip and the
    half above the diagonal is not computed. Without, the score tensor
    `[batch, heads, queries, keys]` is written in float32, read by the softmax,
    written again and read by the second matmul, masked or not.

    Args:
        machine: The device.
        batch: Sequences.
        heads: Query heads.
        kv_heads: Key and value heads.
        queries: Query positions.
        keys: Key positions.
        head_dim: Width of a head.
        dtype: Of queries, keys and values.
        causal: Whether later keys are masked.
        flash: Whether a flash kernel runs.

    Raises:
        CostModelError: A size is negative or unknown, or there is no such dtype.
    """
    b, q, k = (amounts(x, "elements") for x in (batch, queries, keys))
    for heads_ in (heads, kv_heads, head_dim):
        count(heads_, "a number or width of heads")
    width = itemsize(dtype)
    streams = width * head_dim * b * (2 * heads * q + 2 * kv_heads * k)
    if not flash:
        scores = elementwise_bytes(b * heads * q * k, 2, 2, itemsize("float32"))
        both = machine.matmul_s(b * heads, q, k, head_dim, dtype) + machine.matmul_s(b * heads, q, head_dim, k, dtype)
        return both + machine.hbm_s(scores)
    skipped = 0.5 if causal else 1.0
    unit = machine.matmul_unit(dtype)
    lanes = min(unit.tile_depth, 128)
    padded = lanes * np.ceil(head_dim / lanes)
    flops = 4 * b * heads * q * k * padded * skipped
    achieved = machine.chip.numbers["attention_achieved_fraction"].value
    return unit.launch_s + np.maximum(flops / (unit.peak_flops_per_s * achieved), machine.hbm_s(streams))


def lookup_s(machine: Machine, rows: ArrayLike, width: int, dtype: str) -> Floats:
    """A gather of rows of a table, or a scatter back: each row is read and written once."""
    return machine.hbm_s(elementwise_bytes(amounts(rows, "rows") * width, 1, 1, itemsize(dtype)))


def optimizer_s(
    machine: Machine, parameters: ArrayLike, *, read_bytes: float = 16.0, written_bytes: float = 12.0
) -> Floats:
    """The update of so many local parameters, bound by memory.

    By default Adam in float32: reads weight, gradient and two moments, writes
    weight and moments (Kingma & Ba 2015).
    """
    return machine.hbm_s(amounts(parameters, "parameters") * (read_bytes + written_bytes))
