"""Shardy's own rules as an oracle: what it splits, we split, but where XLA would communicate."""

import pytest

from autoshard.backends.shardy.passes import FactorRule, factor_rules
from autoshard.ir.graph import Aval
from autoshard.rules import FactorKind, ShardingRule, rule_of
from tests.rules_cases import CASES, Case
from tests.rules_oracle import Traced, equations

Positions = frozenset[tuple[str, int, int]]  # ("operand" or "result", which one, dimension)

# Where the lowering of a primitive has several ops, the one that is compared.
LOWERED = {
    "argmax": "stablehlo.reduce",
    "cholesky": "stablehlo.custom_call",
    "cumsum": "stablehlo.reduce_window",
    "gather": "stablehlo.gather",
    "reduce_window_max": "stablehlo.reduce_window",
    "reduce_window_sum": "stablehlo.reduce_window",
    "scatter-add": "stablehlo.scatter",
    "select_and_scatter_add": "stablehlo.select_and_scatter",
}
# Nothing to compare: no op with a rule, or arithmetic that has no op of its own.
WITHOUT_OP = {
    *("copy", "integer_pow", "iota", "optimization_barrier", "platform_index", "ragged_dot_general", "random_bits"),
    *("random_clone", "random_fold_in", "random_split", "split", "tile", "top_k"),
}
# Cases with dimensions that Shardy (in some version of JAX) propagates through and we do not split.
EXCEPTIONS = {
    "conv_general_dilated:grouped": "the group passes, what lies minor of it must be whole",
    "conv_general_dilated:batch groups": "the group passes, what lies minor of it does not: XLA permutes",
    "conv_general_dilated:stride": "kernel taps that a stride keeps apart: XLA exchanges halos all the same",
    "dynamic_update_slice": "XLA gathers the operand unless a single row is replaced",
    "pad:shift": "padding that keeps the size shifts every element: XLA permutes",
}


def lowered(one: Traced) -> FactorRule:
    rules = factor_rules(one.run, *one.abstract())
    wanted = LOWERED.get(one.eqn.primitive)
    fits = [
        text
        for op, text in rules
        if op == wanted or (wanted is None and (len(rules) == 1 or op != "stablehlo.broadcast_in_dim"))
    ]
    (text,) = fits
    return FactorRule.parse(text)


def theirs(rule: FactorRule, factor: str, one: Traced) -> Positions:
    """Where a factor lies, but for what the lowering added: broadcast operands, the words of keys."""
    return frozenset(
        (side, v, d)
        for side, values, avals in (
            ("operand", rule.operands, one.eqn.operands),
            ("result", rule.results, one.eqn.results),
        )
        for v, (dims, aval) in enumerate(zip(values, avals, strict=False))
        for d, dim in enumerate(dims)
        if factor in dim and same_dimension(aval, dims, d)
    )


def same_dimension(aval: Aval, dims: tuple[tuple[str, ...], ...], d: int) -> bool:
    return aval.ndim == len(dims) and aval.shape[d] > 1


def ours(rule: ShardingRule) -> set[tuple[Positions, FactorKind]]:
    return {
        (
            frozenset(
                (side, v, d)
                for side, values in (("operand", rule.operands), ("result", rule.results))
                for v, dims in enumerate(values)
                for d, dim in enumerate(dims)
                if f in dim
            ),
            factor.kind,
        )
        for f, factor in enumerate(rule.factors)
    }


COMPARED = tuple(case for case in CASES if case.primitive not in WITHOUT_OP)


@pytest.mark.parametrize("case", COMPARED, ids=lambda case: case.name)
def test_splits_what_shardy_splits(case: Case) -> None:
    found = equations(case.fn, *(arg.abstract() for arg in case.args))
    one = next(one for one in found if one.eqn.primitive == case.primitive)
    known = ours(rule_of(one.eqn))
    shardy = lowered(one)
    missing: set[str] = set()
    for factor, size in shardy.sizes.items():
        held = {*shardy.need_replication, *shardy.permutation, *shardy.blocked}
        positions = theirs(shardy, factor, one)
        if size == 1 or factor in held or len({(side, v) for side, v, _ in positions}) < 2:
            continue  # a factor of one value alone propagates nowhere
        kind = FactorKind.REDUCTION if factor in shardy.reduction else FactorKind.PASS
        if (positions, kind) not in known:
            missing.add(factor)
    assert not missing or case.name in EXCEPTIONS


def test_every_exception_is_a_case() -> None:
    assert set(EXCEPTIONS) <= {case.name for case in COMPARED}
