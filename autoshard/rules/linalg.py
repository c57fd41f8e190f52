"""Linalg: decompositions, solves and Fourier transforms, one matrix at a time.

Leading batch dimensions pass. The dimensions that one kernel call works on must be
whole: neither XLA's partitioner nor the vendor libraries behind the calls split them.
"""

from autoshard.ir.graph import Eqn
from autoshard.rules.rule import FactorKind, RuleBuilder, ShardingRule, register, whole

# Trailing dimensions of the first operand that one kernel call works on.
KERNEL_RANK = {
    "cholesky": 2,
    "cholesky_update": 2,
    "eig": 2,
    "eigh": 2,
    "hessenberg": 2,
    "householder_product": 2,
    "lu": 2,
    "lu_pivots_to_permutation": 1,
    "ormqr": 2,
    "qr": 2,
    "schur": 2,
    "svd": 2,
    "symmetric_product": 2,
    "triangular_solve": 2,
    "tridiagonal": 2,
    "tridiagonal_solve": 1,
}
LINEAR_IN = {"triangular_solve": 1, "tridiagonal_solve": 3}  # the right-hand side


@register(*KERNEL_RANK)
def batched(eqn: Eqn) -> ShardingRule:
    """Batch dimensions pass, in all operands and results alike; the others must be whole."""
    first = eqn.operands[0]
    build = RuleBuilder()
    batch = build.dims(first.shape[: first.ndim - KERNEL_RANK[eqn.primitive]])
    operands, results = (
        [batch + build.dims(aval.shape[len(batch) :], FactorKind.REPLICATE) for aval in side]
        for side in (eqn.operands, eqn.results)
    )
    linear = (frozenset({LINEAR_IN[eqn.primitive]}),) if eqn.primitive in LINEAR_IN else ()
    return build.rule(operands, results, linear)


@register("custom_linear_solve")
def custom_linear_solve(eqn: Eqn) -> ShardingRule:
    """The user's solver is a black box: every dimension must be whole."""
    return whole(eqn)


@register("fft")
def fft(eqn: Eqn) -> ShardingRule:
    """Batch dimensions pass, since it runs on each device's part (`opaque`); the transformed ones must be whole."""
    (operand,), (out,) = eqn.operands, eqn.results
    build = RuleBuilder()
    batch = build.dims(operand.shape[: operand.ndim - len(eqn.params["fft_lengths"])])
    before, after = (build.dims(aval.shape[len(batch) :], FactorKind.REPLICATE) for aval in (operand, out))
    return build.rule([batch + before], [batch + after], (frozenset({0}),))
