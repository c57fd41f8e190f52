"""Contraction: products summed over shared dimensions, the einsum of the family of rules."""

from autoshard.graph import Eqn
from autoshard.rules.rule import Dim, FactorKind, RuleBuilder, ShardingRule, register

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
