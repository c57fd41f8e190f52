"""Compute: the seconds of one strategy of one equation on a machine.

Contractions are priced by their FLOPs and their operands' and results' bytes. Every
other equation is bound by HBM: it reads operands and writes results that lie in memory.
XLA fuses element-wise chains, so a value counts only if it is *held* in memory
(`autoshard.costs.liveness`): a fused value is not.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from autoshard.costs.merged_products import MergedProduct
from autoshard.costs.prices import Machine, Seconds
from autoshard.costs.ragged_products import DenseProduct, group_count, ragged_dimension
from autoshard.costs.strategies import Codes, Strategies, shards, split
from autoshard.ir import manual_calls
from autoshard.ir.graph import Aval, Eqn
from autoshard.ir.mesh import MeshAxes
from autoshard.ir.op_traits import CONVOLUTION, DOT_GENERAL, LOOP_SLICE, LOOP_STACK, RAGGED_DOT
from autoshard.rules.rule import ShardingRule
from cost_models.machines.roofline import taps_on_data


def contraction_s(
    eqn: Eqn,
    rule: ShardingRule,
    strategies: Strategies,
    mesh: MeshAxes,
    machine: Machine,
    beside_bytes: NDArray[np.float64] | float = 0.0,
    merged: MergedProduct | None = None,
    dense: DenseProduct | None = None,
) -> tuple[Seconds, NDArray[np.float64]]:
    """Roofline seconds (S,) and FLOPs per device (S,) of a contraction of two operands.

    Args:
      eqn: the contraction.
      rule: its rule.
      strategies: those to price.
      mesh: the mesh.
      machine: the machine.
      beside_bytes: (S,), what its kernel reads and writes besides, on a device (`costs.product_kernels`).
      merged: the products that it is one with: all are split alike, and it pays its part.
      dense: what a ragged product is made of, by a compiler that multiplies all rows with all matrices.
    """
    batch, m, n, k = _matmul(eqn, rule, strategies, mesh, dense=dense is not None)
    flops = np.multiply(2.0 * batch * m, n * k, dtype=np.float64)
    dtype, times = multiplied_dtype(eqn), 1.0
    if merged is not None:
        own, other = (m, n) if merged.shared == 0 else (n, m)
        nbytes = own * k * eqn.operands[merged.shared].itemsize
        nbytes = nbytes + merged.smallest * other * (k * eqn.operands[1 - merged.shared].itemsize)
        nbytes = nbytes + merged.smallest * m * n * eqn.results[0].itemsize
        times = np.where(batch * nbytes <= merged.up_to, merged.times, 1.0)
        m, n = (m, np.rint(n * times)) if merged.shared == 0 else (np.rint(m * times), n)
    seconds = np.asarray(machine.matmul_s(batch, m, n, k, dtype, beside_bytes=beside_bytes * times)) / times
    if merged is not None and merged.copied:
        nbytes = batch * m * n * eqn.results[0].itemsize / times
        seconds = seconds + machine.hbm_s(np.where(times > 1.0, _COPY * nbytes, 0.0))
    if dense is not None:
        seconds = seconds + machine.hbm_s(dense.touched_bytes(operand_bytes(eqn, strategies, mesh)))
    return seconds, flops


def operand_bytes(eqn: Eqn, strategies: Strategies, mesh: MeshAxes) -> tuple[NDArray[np.int64], ...]:
    """Bytes per device (S,) of each operand of an equation."""
    operands = zip(eqn.operands, strategies.operands, strict=True)
    return tuple(aval.nbytes // shards(codes, aval.ndim, mesh) for aval, codes in operands)


def added_up_s(
    eqn: Eqn, rule: ShardingRule, strategies: Strategies, mesh: MeshAxes, machine: Machine, whole_s: Seconds
) -> Seconds:
    """Seconds (S,) of a dot that a compiler may cut into sums: they are a batch of products, which a kernel adds.

    Args:
      eqn: the dot.
      rule: its rule.
      strategies: those to price.
      mesh: the mesh.
      machine: the machine.
      whole_s: (S,), what it takes where it is left whole.
    """
    sums, (batch, m, n, k) = _sums(eqn, rule, strategies, mesh, machine)
    dtype, written = multiplied_dtype(eqn), sums * batch * m * n
    wider = _sum_itemsize(eqn) - jax.numpy.dtype(dtype).itemsize
    parts_s = machine.matmul_s(batch * sums, m, n, np.ceil(k / sums), dtype, beside_bytes=written * wider)
    adding_s = machine.hbm_s(written * _sum_itemsize(eqn))
    filling_s = machine.hbm_s(_COPY * _filled_bytes(eqn, strategies, mesh, sums, k))
    return np.where(sums > 1, parts_s + adding_s + filling_s, whole_s)


def is_part_computed(product: Aval, codes: Codes, mesh: MeshAxes) -> NDArray[np.bool_]:
    """Whether no more than the part is computed in each layout (S,) of a product."""
    local = [size // split(codes, d, product.ndim, mesh) for d, size in enumerate(product.shape)]
    return np.logical_and.reduce([size != 1 for size in local])


def rule_of_part(rule: ShardingRule, taken: Aval) -> ShardingRule:
    """The rule of a dot, with the sizes of the part of its product that is taken."""
    sizes = {dim[0]: size for dim, size in zip(rule.results[0], taken.shape, strict=True) if len(dim) == 1}
    factors = (replace(factor, size=sizes.get(f, factor.size)) for f, factor in enumerate(rule.factors))
    return replace(rule, factors=tuple(factors))


def single_row_s(
    eqn: Eqn, rule: ShardingRule, strategies: Strategies, mesh: MeshAxes, machine: Machine, whole_s: Seconds
) -> Seconds:
    """Seconds (S,) of a dot with a single row or column, which a fusion adds up: of its operands and its result.

    One whose batch is a single one on a device is a matmul again. The arguments are those of `added_up_s`.
    """
    (batch, *_), (result,) = _matmul(eqn, rule, strategies, mesh), eqn.results
    nbytes = sum(
        operand_bytes(eqn, strategies, mesh), result.nbytes // shards(strategies.results[0], result.ndim, mesh)
    )
    alone = (batch == 1) & bool(eqn.params["dimension_numbers"][1][0])
    return np.where(alone, whole_s, machine.hbm_s(nbytes))


def partial_sums_bytes(
    eqn: Eqn, rule: ShardingRule, strategies: Strategies, mesh: MeshAxes, machine: Machine
) -> NDArray[np.int64]:
    """Bytes per device (S,) of the sums that a product is cut into, before they are added; 0 where it is left whole."""
    sums, (batch, m, n, _) = _sums(eqn, rule, strategies, mesh, machine)
    return np.where(sums > 1, sums * batch * m * n * _sum_itemsize(eqn), 0)


def filled_bytes(
    eqn: Eqn, rule: ShardingRule, strategies: Strategies, mesh: MeshAxes, machine: Machine
) -> NDArray[np.int64]:
    """Bytes per device (S,) of a product's operands that are copied and filled up to be cut into equal sums; else 0."""
    sums, (*_, k) = _sums(eqn, rule, strategies, mesh, machine)
    return _filled_bytes(eqn, strategies, mesh, sums, k)


def _filled_bytes(
    eqn: Eqn, strategies: Strategies, mesh: MeshAxes, sums: NDArray[np.int64], k: NDArray[Any]
) -> NDArray[np.int64]:
    """The same, of contractions of k elements into so many sums: 50,257 are no two equal parts."""
    part = _PART_BYTES // jax.numpy.dtype(multiplied_dtype(eqn)).itemsize
    return np.where((sums > 1) & (k % (sums * part) != 0), sum(operand_bytes(eqn, strategies, mesh)), 0)


_PART_BYTES = 16  # each part of a contraction is a multiple of (openxla/xla splitk_rewriter.cc)
_COPY = 2  # times that it reads or writes an array
_SUM_BYTES = 4  # of an element: sums are float32


def _sum_itemsize(eqn: Eqn) -> int:
    return max(_SUM_BYTES, eqn.results[0].itemsize)


def _sums(
    eqn: Eqn, rule: ShardingRule, strategies: Strategies, mesh: MeshAxes, machine: Machine
) -> tuple[NDArray[np.int64], tuple[NDArray[Any], ...]]:
    """Into how many sums (S,) a contraction is cut, 1 where it is left whole; and its sizes as a matmul."""
    sizes, (result,) = _matmul(eqn, rule, strategies, mesh), eqn.results
    if eqn.primitive != DOT_GENERAL or not jax.numpy.issubdtype(result.dtype, np.inexact):
        return np.ones(len(strategies), np.int64), sizes
    return machine.contraction_sums(*sizes, multiplied_dtype(eqn), jax.numpy.dtype(result.dtype).name), sizes


def _matmul(
    eqn: Eqn, rule: ShardingRule, strategies: Strategies, mesh: MeshAxes, *, dense: bool = False
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """The sizes (S,) of a contraction as a matmul: batch, m, n, k.

    Factors in both operands and the result are batch, in the left and the result m, in the right and the result n,
    in both operands but not in the result k. Groups of a ragged product are batch, and share its rows equally, or
    what it contracts; in a `dense` one every group has all rows, and rows contract the groups, too. A convolution is
    the matmul of its outputs (m) and output features (n) over the input features and the taps that fall on data (k,
    their mean per output; the image counts as read once per tap, as if unrolled).
    """
    left, right = ({f for dim in dims for f in dim} for dims in rule.operands[:2])
    out = {f for dim in rule.results[0] for f in dim}
    local = np.maximum(strategies.local_sizes(rule, mesh), [min(factor.size, 1) for factor in rule.factors])

    def size(factors: set[int]) -> NDArray[np.int64]:
        return local[:, sorted(factors)].prod(axis=1) if factors else np.ones(len(local), np.int64)

    batch, n, k = size(left & right & out), size((right & out) - left), size((left & right) - out)
    m = size(out - right if eqn.primitive == CONVOLUTION else (left & out) - right)
    if eqn.primitive == CONVOLUTION:
        everywhere = np.array([[factor.size for factor in rule.factors]])
        parts = (everywhere // local.clip(1)).clip(1)[:, sorted(left | right | out)].prod(axis=1)
        k = _convolution_flops(eqn) / (2.0 * np.maximum(batch * m * n, 1) * parts)
    if eqn.primitive == RAGGED_DOT and (ragged := ragged_dimension(eqn)) != "batch":
        groups = group_count(eqn)
        if dense:
            return (batch, m, n, k * groups) if ragged == "rows" else (batch * groups, m, n, k)
        groups = np.minimum(groups, np.maximum(m if ragged == "rows" else k, 1))
        m, k = (m // groups, k) if ragged == "rows" else (m, k // groups)
        batch = batch * groups
    return batch, m, n, k


def multiplied_dtype(eqn: Eqn) -> str:
    """The dtype that a contraction multiplies: compilers cast a mask of integers first, and the narrower operand."""
    dtypes = [jax.numpy.dtype(operand.dtype) for operand in eqn.operands[:2]]
    inexact = [dtype for dtype in dtypes if jax.numpy.issubdtype(dtype, np.inexact)]
    return max(inexact or dtypes, key=lambda dtype: dtype.itemsize).name


def _convolution_flops(eqn: Eqn) -> float:
    """FLOPs of a whole convolution; only taps that fall on data count."""
    p, numbers = eqn.params, eqn.params["dimension_numbers"]
    (image, kernel), (out,) = eqn.operands, eqn.results
    flops = 2.0 * out.shape[numbers.out_spec[0]] * out.shape[numbers.out_spec[1]] * kernel.shape[numbers.rhs_spec[1]]
    for i, (d_image, d_kernel, d_out) in enumerate(
        zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)
    ):
        flops *= taps_on_data(
            out.shape[d_out],
            kernel.shape[d_kernel],
            image.shape[d_image],
            stride=p["window_strides"][i],
            pad=p["padding"][i][0],
            image_step=p["lhs_dilation"][i],
            kernel_step=p["rhs_dilation"][i],
        )
    return flops


def kernel_s(eqn: Eqn, strategies: Strategies, mesh: MeshAxes, machine: Machine) -> tuple[Seconds, NDArray[np.float64]]:
    """Seconds and FLOPs per device (S,) that a Pallas kernel estimates of itself, shared among its parts."""
    found = manual_calls.estimate(eqn)
    values = zip((*eqn.operands, *eqn.results), (*strategies.operands, *strategies.results), strict=True)
    parts = np.max([shards(codes, aval.ndim, mesh) for aval, codes in values], axis=0)
    dtypes = [jax.numpy.dtype(aval.dtype) for aval in eqn.operands if jax.numpy.issubdtype(aval.dtype, np.inexact)]
    rate = 2.0 * _LARGE**3 / float(machine.matmul_s(1, _LARGE, _LARGE, _LARGE, (dtypes or [np.dtype("f4")])[0].name))
    flops = found.flops / parts
    return np.maximum(flops / rate, machine.hbm_s(found.bytes_accessed / parts)), flops


_LARGE = 8192  # a matmul of this size is bound by its FLOPs


def in_op_s(eqn: Eqn, rule: ShardingRule, strategies: Strategies, mesh: MeshAxes, machine: Machine) -> Seconds:
    """Seconds of what an equation communicates itself: reductions that it finishes (maxima), elements that hop."""
    seconds = np.zeros(len(strategies))
    if not strategies.in_op.any():
        return seconds
    subsets, member = np.unique(strategies.in_op, axis=0, return_inverse=True)
    for index, subset in enumerate(subsets):
        axes = tuple(n for n, used in zip(mesh.names, subset, strict=True) if used)
        rows = np.flatnonzero(member.ravel() == index)
        for aval, codes in zip(eqn.results, strategies.results, strict=True):
            if axes:
                local = aval.nbytes / shards(codes[rows], aval.ndim, mesh)
                seconds[rows] += machine.collective_s(strategies.in_op_kind, axes, local)
    return seconds


def touched_bytes(
    eqn: Eqn, strategies: Strategies, mesh: MeshAxes, reads: Sequence[bool], writes: Sequence[bool], readers: int
) -> NDArray[np.float64]:
    """HBM bytes per device (S,) of an equation that is not a contraction.

    `reads[i]`, `writes[i]`: whether operand or result i lies in memory; `readers`: how many equations take its results.
    A gather reads only the rows that it returns, a slice only its part. A scatter rewrites only the rows that it
    updates, in place: it first writes a table that is not in memory, and copies a table (`writes[0]`) whose old value
    is still needed. A constraint touches nothing; nor does a transpose, because XLA's layout assignment only renames
    the order of the bytes. A loop's constants are read in place. A stacked output is zeroed, read if it lies in memory,
    and written. A slice of a stacked input is read, and written if it lies in memory; if not, each kernel that takes it
    reads it, and at most two of them count.
    """
    if eqn.traits.moves_nothing:
        return np.zeros(len(strategies))

    def local(avals_index: int, *, result: bool) -> NDArray[np.float64]:
        aval = (eqn.results if result else eqn.operands)[avals_index]
        codes = (strategies.results if result else strategies.operands)[avals_index]
        return aval.nbytes / shards(codes, aval.ndim, mesh)

    total = np.zeros(len(strategies))
    sparse = eqn.traits.reads_part
    update = eqn.traits.updates
    if update and not reads[0]:
        total += local(0, result=False)
    if eqn.primitive == LOOP_STACK:
        return (2 + reads[0]) * local(0, result=False)
    if eqn.primitive == LOOP_SLICE:
        return (1 + (writes[0] or readers > 1)) * local(0, result=True)
    for i, read in enumerate(reads):
        if read and eqn.traits.cuts and i == 0 and not sparse:
            total += np.minimum(local(0, result=False), sum(local(r, result=True) for r in range(len(eqn.results))))
        elif read and not (sparse and i == 0) and not (update and i == 0):
            total += local(i, result=False) * (2 if update and i == len(reads) - 1 else 1)
    for i, write in enumerate(writes):
        if write or sparse:
            total += local(i, result=True) * (2 if sparse or update else 1)
    return total


def comparing_s(eqn: Eqn, strategies: Strategies, mesh: MeshAxes, machine: Machine) -> Seconds:
    """Seconds (S,) in which a kernel compares each position of a scatter's result, and selects by it.

    As many as a device has of the most finely split result cost nothing: the kernel reads something of that size (the
    scores whose gradient it is), and is bound by memory.
    """
    (result,) = eqn.results
    seconds = machine.vector_s(_COMPARING * result.size / shards(strategies.results[0], result.ndim, mesh))
    return np.asarray(seconds - np.min(seconds))


_COMPARING = 2.0  # operations per element: a comparison and a selection
