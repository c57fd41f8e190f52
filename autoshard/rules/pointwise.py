"""Pointwise: every element of a result depends on the same element of each operand.

One rule function serves the whole family. Its members differ in `linear`: the operands
through which partial sums may flow. `convert_element_type` counts as linear between
inexact types, though rounding commutes with a sum only up to the precision of the
type: that is the contract of every partial sum in a reduced precision.
"""

import numpy as np
from jax import numpy as jnp

from autoshard.ir.graph import Aval, Eqn
from autoshard.rules.rule import Dim, FactorKind, RuleBuilder, ShardingRule, register

NONLINEAR = (
    *("abs", "acos", "acosh", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e", "bessel_i1e"),
    *("cbrt", "ceil", "clamp", "clz", "cos", "cosh", "digamma", "eq", "eq_to", "erf", "erf_inv", "erfc"),
    *("exp", "exp2", "expm1", "floor", "ge", "gt", "igamma", "igamma_grad_a", "igammac", "integer_pow"),
    *("is_finite", "le", "le_to", "lgamma", "log", "log1p", "log2", "logistic", "lt", "lt_to", "max", "min"),
    *("mulhi", "ne", "nextafter", "not", "one_minus_square", "or", "polygamma", "polynomial", "population_count"),
    *("pow", "regularized_incomplete_beta", "rem", "round", "rsqrt", "shift_left", "shift_right_arithmetic"),
    *("shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "tan", "tanh", "threefry2x32", "xor", "zeta"),
)
LINEAR_TOGETHER = ("add", "add_any", "complex", "sub")  # all operands unreduced
LINEAR_IN_FIRST = (
    *("conj", "convert_element_type", "copy", "copy_p", "div", "imag", "name", "neg", "real"),
    *("reduce_precision", "sharding_constraint", "stage", "stop_gradient"),
)
LINEAR_IN_EACH = ("mul",)  # any one operand unreduced


@register(*NONLINEAR, *LINEAR_TOGETHER, *LINEAR_IN_FIRST, *LINEAR_IN_EACH)
def pointwise(eqn: Eqn) -> ShardingRule:
    """Every dimension passes; scalars and dimensions of size 1 broadcast."""
    build = RuleBuilder()
    dims = build.dims(eqn.results[0].shape)
    operands = [_align(operand, eqn.results[0], dims) for operand in eqn.operands]
    return build.rule(operands, [list(dims) for _ in eqn.results], _linear(eqn))


@register("bitcast_convert_type")
def bitcast_convert_type(eqn: Eqn) -> ShardingRule:
    """Pointwise; a narrower type has one dimension more, whose parts make one element."""
    (operand,), (out,) = eqn.operands, eqn.results
    build = RuleBuilder()
    short, long = sorted((operand.shape, out.shape), key=len)
    dims = build.dims(short)
    parts = build.dims(long[len(short) :], FactorKind.REPLICATE)
    return build.rule([(dims + parts)[: operand.ndim]], [(dims + parts)[: out.ndim]])


@register("select_n")
def select_n(eqn: Eqn) -> ShardingRule:
    """Pointwise; the predicate may be a scalar, and the cases are linear together."""
    build = RuleBuilder()
    dims = build.dims(eqn.results[0].shape)
    operands = [_align(operand, eqn.results[0], dims) for operand in eqn.operands]
    return build.rule(operands, [dims], (frozenset(range(1, len(operands))),))


@register("dce_sink", "device_put", "optimization_barrier")
def each_on_its_own(eqn: Eqn) -> ShardingRule:
    """The identity on several values (or their mere use): each keeps its own factors."""
    build = RuleBuilder()
    dims = [build.dims(operand.shape) for operand in eqn.operands]
    return build.rule(dims, dims[: len(eqn.results)], (frozenset(range(len(dims))),))


def _align(operand: Aval, result: Aval, dims: list[Dim]) -> list[Dim]:
    """An operand's dimensions: those of the result, less the ones that broadcast."""
    if operand.ndim != result.ndim:
        return []
    return [dim if size == out else () for dim, size, out in zip(dims, operand.shape, result.shape, strict=True)]


def _linear(eqn: Eqn) -> tuple[frozenset[int], ...]:
    name, count = eqn.primitive, len(eqn.operands)
    if name in LINEAR_TOGETHER:
        return (frozenset(range(count)),)
    if name in LINEAR_IN_EACH:
        return tuple(frozenset({i}) for i in range(count))
    if name in LINEAR_IN_FIRST and _keeps_sums(eqn):
        return (frozenset({0}),)
    return ()


def _keeps_sums(eqn: Eqn) -> bool:
    """Whether the dtypes let a sum through: no truncation to integers or booleans, no integer division."""
    source, target = eqn.operands[0].dtype, eqn.results[0].dtype
    inexact = jnp.issubdtype(source, np.inexact) and jnp.issubdtype(target, np.inexact)
    return inexact or (source == target and eqn.primitive != "div")
