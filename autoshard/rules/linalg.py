"""Linalg: decompositions, solves and Fourier transforms, one matrix at a time.

Leading batch dimensions pass. The dimensions that one kernel call works on must be
whole: neither XLA's partitioner nor the vendor libraries behind the calls split them.
"""

from autoshard.graph import Eqn
from autoshard.rules.rule import FactorKind, RuleBuilder, ShardingRule, register

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


@register("custom_linear_solve", "fft")
def whole(eqn: Eqn) -> ShardingRule:
    """Every dimension must be whole.

    A custom solver is a black box, and XLA's partitioner gathers all operands of a
    Fourier transform, batch dimensions too.
    """
    build = RuleBuilder()
    operands, results = (
        [build.dims(aval.shape, FactorKind.REPLICATE) for aval in side] for side in (eqn.operands, eqn.results)
    )
    return build.rule(operands, results, (frozenset({0}),) if eqn.primitive == "fft" else ())
