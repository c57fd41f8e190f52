"""Reduction: a dimension is summed, maximised, scanned or windowed away.

A split reduced dimension leaves partial results. Those of `argmax` and `argmin` are
(value, index) pairs: the compiler gathers the pairs of all shards and reduces again.
"""

import numpy as np
from jax import numpy as jnp

from autoshard.ir import partitioner_faults
from autoshard.ir.graph import Eqn
from autoshard.rules.rule import Dim, FactorKind, RuleBuilder, ShardingRule, register, shifted

REDUCTIONS = {
    "argmax": "argmax",
    "argmin": "argmin",
    "reduce_and": "and",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_or": "or",
    "reduce_prod": "prod",
    "reduce_sum": "sum",
    "reduce_xor": "xor",
}
CUMULATIVE = ("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum")
WINDOWED = ("reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum")
FIRST = (frozenset({0}),)


@register(*REDUCTIONS)
def reduce(eqn: Eqn) -> ShardingRule:
    """Reduced dimensions reduce with the primitive's operation, if there is a collective of it; the others pass."""
    operation, reduced = REDUCTIONS[eqn.primitive], set(eqn.params["axes"])
    build = RuleBuilder()
    kind, operation = (FactorKind.REPLICATE, "") if _lacks_collective(eqn) else (FactorKind.REDUCTION, operation)
    dims = [
        _dim(build, size, kind, operation) if d in reduced else _dim(build, size)
        for d, size in enumerate(eqn.operands[0].shape)
    ]
    kept = [dim for d, dim in enumerate(dims) if d not in reduced]
    return build.rule([dims], [kept], FIRST if operation == "sum" else ())


def _lacks_collective(eqn: Eqn) -> bool:
    """Whether no all-reduce puts parts of a reduction together."""
    dtype = eqn.operands[0].dtype
    bits = partitioner_faults.BITS.of(eqn.primitive) and (eqn.primitive == "reduce_xor" or dtype != np.dtype(bool))
    return bits or (partitioner_faults.COMPLEX_ORDER.of(eqn.primitive) and jnp.issubdtype(dtype, jnp.complexfloating))


@register("reduce")
def reduce_by_function(eqn: Eqn) -> ShardingRule:
    """Dimensions reduced with the user's own function must be whole; initial values are scalars."""
    arrays, reduced = len(eqn.results), set(eqn.params["dimensions"])
    build = RuleBuilder()
    dims = [
        _dim(build, size, FactorKind.REPLICATE if d in reduced else FactorKind.PASS)
        for d, size in enumerate(eqn.operands[0].shape)
    ]
    kept = [dim for d, dim in enumerate(dims) if d not in reduced]
    scalars: list[list[Dim]] = [[]] * arrays
    return build.rule([dims] * arrays + scalars, [kept] * arrays)


@register(*CUMULATIVE)
def cumulative(eqn: Eqn) -> ShardingRule:
    """The scanned dimension must be whole; the others pass."""
    build = RuleBuilder()
    dims = [
        _dim(build, size, FactorKind.REPLICATE if d == eqn.params["axis"] else FactorKind.PASS)
        for d, size in enumerate(eqn.operands[0].shape)
    ]
    return build.rule([dims], [dims], FIRST if eqn.primitive == "cumsum" else ())


@register(*WINDOWED)
def reduce_window(eqn: Eqn) -> ShardingRule:
    """Dimensions whose windows do not overlap pass; the others need a halo."""
    arrays, (out, *_) = len(eqn.results), eqn.results
    build = RuleBuilder()
    pairs = [_windowed(build, eqn, d, size, out.shape[d]) for d, size in enumerate(eqn.operands[0].shape)]
    scalars: list[list[Dim]] = [[]] * (len(eqn.operands) - arrays)
    operands = [[pair[0] for pair in pairs]] * arrays + scalars
    linear = FIRST if eqn.primitive == "reduce_window_sum" else ()
    return build.rule(operands, [[pair[1] for pair in pairs]] * arrays, linear)


@register("select_and_gather_add")
def select_and_gather_add(eqn: Eqn) -> ShardingRule:
    """Tangents follow the operand that selects; linear in the tangents."""
    tangents, out = eqn.operands[0], eqn.results[0]
    build = RuleBuilder()
    pairs = [_windowed(build, eqn, d, size, out.shape[d]) for d, size in enumerate(tangents.shape)]
    return build.rule([[pair[0] for pair in pairs]] * 2, [[pair[1] for pair in pairs]], FIRST)


@register("select_and_scatter", "select_and_scatter_add")
def select_and_scatter(eqn: Eqn) -> ShardingRule:
    """The transpose of a window's selection: the source has one element per window."""
    add = eqn.primitive == "select_and_scatter_add"
    source, operand = (eqn.operands[0], eqn.operands[1]) if add else (eqn.operands[1], eqn.operands[0])
    build = RuleBuilder()
    pairs = [_windowed(build, eqn, d, size, source.shape[d]) for d, size in enumerate(operand.shape)]
    dims, per_window = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    scalars: list[list[Dim]] = [[]] * (len(eqn.operands) - 2)
    operands = [per_window, dims] if add else [dims, per_window, *scalars]
    return build.rule(operands, [dims], FIRST if add else ())


def _windowed(build: RuleBuilder, eqn: Eqn, d: int, size: int, windows: int) -> list[Dim]:
    """Dimension `d` of the array under the windows, and of the array of windows."""
    window, stride = eqn.params["window_dimensions"][d], eqn.params["window_strides"][d]
    dilated = any(eqn.params[key][d] != 1 for key in ("base_dilation", "window_dilation") if key in eqn.params)
    if dilated or window >= size > 1:  # XLA gathers
        return build.dims((size, windows), FactorKind.REPLICATE)
    if window == stride and size == windows * window and eqn.params["padding"][d][0] == 0:
        passing = _dim(build, windows)
        return [(*passing, *_dim(build, window, FactorKind.REPLICATE)), passing]
    return shifted(build, size, windows)


def _dim(build: RuleBuilder, size: int, kind: FactorKind = FactorKind.PASS, operation: str = "") -> Dim:
    return build.dims((size,), kind, operation)[0]
