"""Every rule of the case table against four oracles: text, XLA's partitioner, execution, linearity."""

from itertools import combinations

import numpy as np
import pytest
from jax import lax

from autoshard.rules import FactorKind, rule_of
from tests.rules_cases import CASES, Case
from tests.rules_oracle import (
    Traced,
    check_linear,
    check_passes,
    check_reduces,
    collectives,
    equations,
    executions,
    majors,
    splits,
)

# What XLA's CPU compiler does where it differs from the claim, by case.
EXCEPTIONS: dict[str, dict[FactorKind, list[str]]] = {
    # Partial (value, index) pairs are gathered, then reduced again.
    "argmax": {FactorKind.REDUCTION: ["all-gather", "all-gather"]},
    # XLA:GPU and XLA:TPU partition the batch of a top-k (see test_rules_compilers.py), XLA:CPU gathers it.
    "top_k": {FactorKind.PASS: ["all-gather"]},
}


def traced(case: Case) -> Traced:
    found = equations(case.fn, *(arg.abstract() for arg in case.args))
    return next(one for one in found if one.eqn.primitive == case.primitive)


def operands(case: Case, seed: int) -> list[object]:
    """The operands of the case's equation when the function runs on drawn data."""
    rng = np.random.default_rng(seed)
    ran = executions(case.fn, *(arg.draw(rng) for arg in case.args))
    return next(values for one, values in ran if one.eqn.primitive == case.primitive)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_text(case: Case) -> None:
    assert str(rule_of(traced(case).eqn)) == case.rule


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_xla_inserts_what_the_rule_claims(case: Case) -> None:
    one = traced(case)
    rule = rule_of(one.eqn)
    for factor, shards in splits(rule):
        kind = rule.factors[factor].kind
        got = collectives(one, rule, {factor: shards})
        assert got is not None, "cases fit on eight devices"
        if case.name in EXCEPTIONS and kind in EXCEPTIONS[case.name]:
            assert got == EXCEPTIONS[case.name][kind]
        elif kind is FactorKind.PERMUTATION:  # none where the blocks happen to fit
            assert set(got) <= {"collective-permute"}
        else:
            assert got == (["all-reduce"] if kind is FactorKind.REDUCTION else [])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_xla_inserts_what_two_factors_claim(case: Case) -> None:
    """Two factors over an axis each: all-reduces if one of them reduces, else nothing."""
    one = traced(case)
    rule = rule_of(one.eqn)
    splittable = [
        f
        for f, factor in enumerate(rule.factors)
        if factor.kind in (FactorKind.PASS, FactorKind.REDUCTION) and factor.size % 2 == 0 and not majors(rule, f)
    ]
    for pair in combinations(splittable, 2):
        kinds = {rule.factors[f].kind for f in pair}
        claim = {"all-reduce"} if FactorKind.REDUCTION in kinds else set[str]()
        exceptions = [set(found) for kind, found in EXCEPTIONS.get(case.name, {}).items() if kind in kinds]
        assert set(collectives(one, rule, dict.fromkeys(pair, 2)) or ()) in [claim, *exceptions]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_execution_per_shard(case: Case) -> None:
    one = traced(case)
    rule = rule_of(one.eqn)
    args, others = operands(case, 0), operands(case, 1)
    for factor, shards in splits(rule):
        kind = rule.factors[factor].kind
        if kind is FactorKind.PASS:
            check_passes(one, rule, factor, shards, args, others)
        elif kind is FactorKind.REDUCTION and not rule.factors[factor].reduction.startswith("arg"):
            check_reduces(one, rule, factor, shards, args)
    for together in rule.linear:
        check_linear(one, together, args, others)


def test_a_window_of_one_that_no_index_is_for_is_whole() -> None:
    """It is the first row, which one shard alone holds."""
    rows = np.zeros((4, 1), np.int32)
    gather = lax.GatherDimensionNumbers((1,), (0,), (1,))
    scatter = lax.ScatterDimensionNumbers((1,), (0,), (1,))
    x, updates = np.zeros((6, 8), np.float32), np.zeros((4, 8), np.float32)
    one = next(equations(lambda x, i: lax.gather(x, i, gather, (1, 8), mode="clip"), x, rows))
    other = next(equations(lambda x, i, u: lax.scatter_add(x, i, u, scatter), x, rows, updates))
    assert str(rule_of(one.eqn)) == "([i,j],[k,1])->([k,j]) {i=6,j=8,k=4} replicate={i}"
    assert str(rule_of(other.eqn)) == "([i,j],[k,1],[k,j])->([i,j]) {i=6,j=8,k=4} reduction={k} replicate={i}"


def test_what_is_empty_is_whole() -> None:
    one = next(equations(lambda x, y: x @ y, np.zeros((4, 8), np.float32), np.zeros((8, 0), np.float32)))
    assert str(rule_of(one.eqn)) == "([i,j],[j,k])->([i,k]) {i=4,j=8,k=0} replicate={i,j,k}"
