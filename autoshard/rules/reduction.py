"""Reduction: a dimension is summed, maximised, scanned or windowed away."""

from autoshard.graph import Eqn
from autoshard.rules.rule import Dim, FactorKind, RuleBuilder, ShardingRule, register

REDUCTIONS = {
    "reduce_and": "and",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_or": "or",
    "reduce_prod": "prod",
    "reduce_sum": "sum",
    "reduce_xor": "xor",
}
FIRST = (frozenset({0}),)


@register(*REDUCTIONS)
def reduce(eqn: Eqn) -> ShardingRule:
    """Reduced dimensions reduce with the primitive's operation; the others pass."""
    operation, reduced = REDUCTIONS[eqn.primitive], set(eqn.params["axes"])
    build = RuleBuilder()
    dims = [
        _dim(build, size, FactorKind.REDUCTION, operation) if d in reduced else _dim(build, size)
        for d, size in enumerate(eqn.operands[0].shape)
    ]
    kept = [dim for d, dim in enumerate(dims) if d not in reduced]
    return build.rule([dims], [kept], FIRST if operation == "sum" else ())


@register("argmax", "argmin")
def arg_reduce(eqn: Eqn) -> ShardingRule:
    """The searched dimension must be whole: partial results are (value, index) pairs."""
    return _along(eqn, set(eqn.params["axes"]), drop=True)


@register("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum")
def cumulative(eqn: Eqn) -> ShardingRule:
    """The scanned dimension must be whole; the others pass."""
    return _along(eqn, {eqn.params["axis"]}, drop=False)


def _along(eqn: Eqn, axes: set[int], *, drop: bool) -> ShardingRule:
    """Dimensions in `axes` must be whole, and vanish from the result if `drop`."""
    build = RuleBuilder()
    dims = [
        _dim(build, size, FactorKind.REPLICATE if d in axes else FactorKind.PASS)
        for d, size in enumerate(eqn.operands[0].shape)
    ]
    kept = [dim for d, dim in enumerate(dims) if not (drop and d in axes)]
    return build.rule([dims], [kept], FIRST if eqn.primitive == "cumsum" else ())


def _dim(build: RuleBuilder, size: int, kind: FactorKind = FactorKind.PASS, operation: str = "") -> Dim:
    return build.dims((size,), kind, operation)[0]
