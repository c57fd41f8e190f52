"""Contraction: products summed over shared dimensions: dot, ragged dot, convolution."""

from autoshard.ir.graph import Eqn
from autoshard.rules.rule import Dim, FactorKind, RuleBuilder, ShardingRule, register, shifted

EITHER = (frozenset({0}), frozenset({1}))


@register("dot_general")
def dot_general(eqn: Eqn) -> ShardingRule:
    """Batch and free dimensions pass; contracted dimensions sum."""
    left, right = eqn.operands
    (contract_l, contract_r), (batch_l, batch_r) = eqn.params["dimension_numbers"]
    build = RuleBuilder()
    dims_l: list[Dim] = [()] * left.ndim
    dims_r: list[Dim] = [()] * right.ndim
    for dl, dr in zip(batch_l, batch_r, strict=True):
        dims_l[dl] = dims_r[dr] = build.dims((left.shape[dl],))[0]
    for dl, dr in zip(contract_l, contract_r, strict=True):
        dims_l[dl] = dims_r[dr] = build.dims((left.shape[dl],), FactorKind.REDUCTION, "sum")[0]
    free_l = [d for d in range(left.ndim) if d not in batch_l and d not in contract_l]
    free_r = [d for d in range(right.ndim) if d not in batch_r and d not in contract_r]
    for d in free_l:
        dims_l[d] = build.dims((left.shape[d],))[0]
    for d in free_r:
        dims_r[d] = build.dims((right.shape[d],))[0]
    result = [dims_l[d] for d in (*batch_l, *free_l)] + [dims_r[d] for d in free_r]
    return build.rule([dims_l, dims_r], [result], EITHER)


@register("conv_general_dilated")
def conv_general_dilated(eqn: Eqn) -> ShardingRule:
    """Batch and output features pass, input features sum, spatial dimensions need a halo.

    With g feature groups the input features are (g, i), the output features (g, o), the
    kernel's [i] and [(g, o)]; with g batch groups the batch is (g, b), the output [b].
    Groups pass; the factors minor of a group must be whole.
    """
    image, kernel = eqn.operands
    (out,) = eqn.results
    numbers, p = eqn.params["dimension_numbers"], eqn.params
    image_n, image_c, *image_xy = numbers.lhs_spec
    kernel_o, kernel_i, *kernel_xy = numbers.rhs_spec
    out_n, out_c, *out_xy = numbers.out_spec
    build = RuleBuilder()
    dims_image: list[Dim] = [()] * image.ndim
    dims_kernel: list[Dim] = [()] * kernel.ndim
    dims_out: list[Dim] = [()] * out.ndim
    by_feature, by_batch = build.dims((p["feature_group_count"], p["batch_group_count"]))
    (dims_out[out_n],) = build.dims((out.shape[out_n],), FactorKind.REPLICATE if by_batch else FactorKind.PASS)
    per_group = out.shape[out_c] // (p["feature_group_count"] * p["batch_group_count"])
    (features,) = build.dims((per_group,), FactorKind.REPLICATE if by_feature or by_batch else FactorKind.PASS)
    (dims_kernel[kernel_i],) = build.dims((kernel.shape[kernel_i],), FactorKind.REDUCTION, "sum")
    dims_image[image_n] = (*by_batch, *dims_out[out_n])
    dims_image[image_c] = (*by_feature, *dims_kernel[kernel_i])
    dims_kernel[kernel_o] = dims_out[out_c] = (*by_feature, *by_batch, *features)
    for spatial, (di, dk, do) in enumerate(zip(image_xy, kernel_xy, out_xy, strict=True)):
        (dims_kernel[dk],) = build.dims((kernel.shape[dk],), FactorKind.REPLICATE)
        if _is_pointwise(eqn, spatial, kernel.shape[dk]):
            dims_image[di] = dims_out[do] = build.dims((image.shape[di],))[0]
        elif kernel.shape[dk] >= image.shape[di]:  # XLA gathers
            dims_image[di], dims_out[do] = build.dims((image.shape[di], out.shape[do]), FactorKind.REPLICATE)
        else:
            dims_image[di], dims_out[do] = shifted(build, image.shape[di], out.shape[do])
    return build.rule([dims_image, dims_kernel], [dims_out], EITHER)


@register("ragged_dot_general")
def ragged_dot_general(eqn: Eqn) -> ShardingRule:
    """Like `dot_general`, but the ragged dimension and the groups must be whole.

    The group sizes say which rows meet which matrix; they count rows of the whole ragged
    dimension, so a kernel call on a part of it would need other sizes. What is contracted is whole, too, where the
    result is no smaller than both operands: XLA then moves these and scatters no sum (jax-cuda12-pjrt 0.10.2 and
    libtpu 0.0.52).
    """
    left, right, groups = eqn.operands
    (out,) = eqn.results
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contract_l, contract_r), (batch_l, batch_r) = numbers.dot_dimension_numbers
    (ragged,), group_dims = numbers.lhs_ragged_dimensions, tuple(numbers.rhs_group_dimensions)
    build = RuleBuilder()
    dims_l: list[Dim] = [()] * left.ndim
    dims_r: list[Dim] = [()] * right.ndim
    for dl, dr in zip(batch_l, batch_r, strict=True):
        kind = FactorKind.REPLICATE if dl == ragged else FactorKind.PASS
        dims_l[dl] = dims_r[dr] = build.dims((left.shape[dl],), kind)[0]
    for dl, dr in zip(contract_l, contract_r, strict=True):
        whole = dl == ragged or out.nbytes >= left.nbytes + right.nbytes
        kind, operation = (FactorKind.REPLICATE, "") if whole else (FactorKind.REDUCTION, "sum")
        dims_l[dl] = dims_r[dr] = build.dims((left.shape[dl],), kind, operation)[0]
    free_l = [d for d in range(left.ndim) if d not in batch_l and d not in contract_l]
    free_r = [d for d in range(right.ndim) if d not in batch_r and d not in contract_r and d not in group_dims]
    for d in free_l:
        dims_l[d] = build.dims((left.shape[d],), FactorKind.REPLICATE if d == ragged else FactorKind.PASS)[0]
    for d in free_r:
        dims_r[d] = build.dims((right.shape[d],))[0]
    (by_group,) = build.dims(groups.shape[-1:], FactorKind.REPLICATE)
    for d in group_dims:
        dims_r[d] = by_group
    result = [dims_l[d] for d in (*batch_l, *free_l)] + [dims_r[d] for d in free_r]
    before_ragged = [*batch_l, *(contract_l if ragged in contract_l else free_l)][: groups.ndim - 1]
    dims_groups = [dims_l[d] for d in before_ragged] + [by_group]
    return build.rule([dims_l, dims_r, dims_groups], [[by_group] * (out.ndim - len(result)) + result], EITHER)


def _is_pointwise(eqn: Eqn, spatial: int, window: int) -> bool:
    """Whether a spatial dimension is convolved with one unpadded tap (see `partitioner_faults.DILATED_TAP`)."""
    p = eqn.params
    steps = (p["window_strides"][spatial], p["lhs_dilation"][spatial], p["rhs_dilation"][spatial])
    return (window, *steps, *p["padding"][spatial]) == (1, 1, 1, 1, 0, 0)
