"""JAX's own primitive harnesses as a sweep: every equation has a checked rule.

The harnesses (`jax._src.internal_test_util.test_harnesses`, 5,594 in JAX 0.10.2) call
the primitives with many shapes, dtypes and parameters. All their equations are checked
for a rule that covers the dimensions; a sample, and by `-m slow` one equation per
distinct rule, is compiled by XLA and executed per shard.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from jax._src.internal_test_util import test_harnesses  # noqa: TID251  JAX's own test data

from autoshard.errors import AutoshardError
from autoshard.rules import FactorKind, ShardingRule, rule_of
from autoshard.rules.pointwise import NONLINEAR
from tests.rules_compiled import MESHES, Split, hostile, splits_of, wrong
from tests.rules_oracle import (
    Traced,
    check_linear,
    check_passes,
    check_reduces,
    collectives,
    equations,
    executions,
    splits,
)

INVALID = ("scatter_add_dtypes_shape_bool", "scatter_mul_dtypes_shape_bool")  # JAX rejects them
PLAIN = {"bool", "float32", "int32", "key<fry>", "uint32"}  # dtypes that every CPU kernel takes
LARGEST = 20_000  # elements of an operand that is compiled or executed

# What XLA's CPU compiler does where it differs from the claim.
EXCEPTIONS: dict[tuple[str, FactorKind], list[str]] = {
    # Partial (value, index) pairs are gathered, then reduced again.
    ("argmax", FactorKind.REDUCTION): ["all-gather", "all-gather"],
    ("argmin", FactorKind.REDUCTION): ["all-gather", "all-gather"],
    # Their series run until every element has converged: one boolean per trip is reduced.
    ("igamma", FactorKind.PASS): ["all-reduce", "all-reduce"],
    ("igammac", FactorKind.PASS): ["all-reduce", "all-reduce"],
    ("random_gamma", FactorKind.PASS): ["all-reduce", "all-reduce"],
    ("regularized_incomplete_beta", FactorKind.PASS): ["all-reduce"],
    # XLA:GPU and XLA:TPU partition the batch of a top-k (see test_rules_compilers.py), XLA:CPU gathers it.
    ("top_k", FactorKind.PASS): ["all-gather"],
}
UNSTABLE = {
    "eig",
    "eigh",
    "svd",
    "schur",
    "hessenberg",
    "tridiagonal",
    "householder_product",
    "lu",
    "qr",
}  # signs of vectors

Harness = tuple[str, Callable[..., Any], list[Any]]
Key = tuple[str, str]


def harnesses() -> Iterator[Harness]:
    """Name, function and arguments of every harness that JAX accepts."""
    for harness in test_harnesses.all_harnesses:
        if not harness.fullname.startswith(INVALID):
            yield harness.fullname, harness.dyn_fun, list(harness.dyn_args_maker(np.random.RandomState(0)))


def by_rule(one: Traced) -> Key:
    return one.eqn.primitive, f"{rule_of(one.eqn)} {one.eqn.params.get('mode')}"


def sample(one: Traced) -> Key:
    """One equation per primitive, but only one for the many that are alike."""
    return "nonlinear" if one.eqn.primitive in NONLINEAR else one.eqn.primitive, ""


@pytest.fixture(scope="module")
def swept() -> list[tuple[Harness, list[Traced]]]:
    """Every harness with its equations."""
    return [(harness, list(equations(harness[1], *harness[2]))) for harness in harnesses()]


Swept = list[tuple[Harness, list[Traced]]]


def distinct(swept: Swept, key: Callable[[Traced], Key]) -> Iterator[tuple[Harness, dict[int, Traced]]]:
    """Harnesses that bring equations with a new key, and these equations by position."""
    seen: set[Key] = set()
    for harness, found in swept:
        new: dict[int, Traced] = {}
        if any(str(a.dtype) not in PLAIN or a.size > LARGEST for one in found for a in one.eqn.operands):
            continue
        for position, one in enumerate(found):
            filled = all(a.size for a in one.eqn.results)  # an empty result needs no collective
            if key(one) not in seen and filled and any(splits(rule_of(one.eqn))):
                seen.add(key(one))
                new[position] = one
        if new:
            yield harness, new


def test_every_equation_has_a_rule(swept: Swept) -> None:
    wrong: list[str] = []
    for (name, _, _), found in swept:
        for one in found:
            try:
                rule_of(one.eqn)
            except AutoshardError as error:
                wrong.append(f"{name}: {error}")
    assert wrong == []
    primitives = Counter(one.eqn.primitive for _, found in swept for one in found)
    assert primitives.total() > 6_500
    assert len(primitives) > 120


def compiled_otherwise(swept: Swept, key: Callable[[Traced], Key]) -> tuple[list[str], int]:
    """Strategies for which XLA inserts other collectives than the rule claims; strategies tried."""
    wrong: list[str] = []
    tried = 0
    for (name, _, _), new in distinct(swept, key):
        for one in new.values():
            rule = rule_of(one.eqn)
            for factor, shards in splits(rule):
                got = collectives(one, rule, {factor: shards})
                if got is None:
                    continue
                tried += 1
                kind = rule.factors[factor].kind
                claim = ["all-reduce"] if kind is FactorKind.REDUCTION else []
                allowed = EXCEPTIONS.get((one.eqn.primitive, kind), claim)
                permuted = kind is FactorKind.PERMUTATION and set(got) <= {"collective-permute"}
                if got != allowed and not permuted:
                    wrong.append(f"{name}: {one.eqn.primitive} {rule} factor {factor}: {got}")
    return wrong, tried


def executed_otherwise(swept: Swept, key: Callable[[Traced], Key]) -> tuple[list[str], int]:
    """Strategies and linear sets whose execution per shard is not the whole one; how many were tried."""
    wrong: list[str] = []
    tried = 0
    for (name, fn, args), new in distinct(swept, key):
        for position, (one, operands) in enumerate(executions(fn, *args)):
            if position in new:
                for message in failures(one, rule_of(one.eqn), operands):
                    tried += 1
                    if message:
                        wrong.append(f"{name}: {message}")
    return wrong, tried


def failures(one: Traced, rule: ShardingRule, operands: list[Any]) -> Iterator[str]:
    """One message per check, empty where it holds."""
    others = [shuffled(operand) for operand in operands]
    for factor, shards in splits(rule):
        kind, operation = rule.factors[factor].kind, rule.factors[factor].reduction
        try:
            if kind is FactorKind.PASS:
                check_passes(one, rule, factor, shards, operands, others)
            elif kind is FactorKind.REDUCTION and not operation.startswith("arg"):
                check_reduces(one, rule, factor, shards, operands)
            yield ""
        except AssertionError as error:
            yield f"{one.eqn.primitive} {rule} factor {factor}: {error}"
    for together in rule.linear:
        if all(one.eqn.operands[i].dtype != bool for i in together):
            try:
                check_linear(one, together, operands, others)
                yield ""
            except AssertionError as error:
                yield f"{one.eqn.primitive} {rule} linear in {sorted(together)}: {error}"


def shuffled(operand: Any) -> Any:
    """Other data from the same range."""
    order = np.random.default_rng(1).permutation(operand.size)
    return operand.reshape(-1)[order].reshape(operand.shape)


def test_xla_inserts_what_a_sample_claims(swept: Swept) -> None:
    wrong, tried = compiled_otherwise(swept, sample)
    assert wrong == []
    assert tried > 60


def test_execution_per_shard_of_a_sample(swept: Swept) -> None:
    wrong, tried = executed_otherwise(swept, sample)
    assert wrong == []
    assert tried > 60


def compiled_wrongly(swept: Swept, key: Callable[[Traced], Key], most: int) -> tuple[list[str], int]:
    """Splits whose compiled program is not the unsharded equation; how many were compiled."""
    mesh, rng = MESHES[0], np.random.default_rng(0)
    found: list[Split] = []
    for (name, fn, args), new in distinct(swept, key):
        for position, (one, operands) in enumerate(executions(fn, *args)):
            if position in new and one.eqn.primitive not in UNSTABLE:
                found += splits_of(name, one, hostile(one, operands, rng), mesh, rng, most)
    batches = [found[i : i + 100] for i in range(0, len(found), 100)]
    return [message for batch in batches for message in wrong(batch, mesh)], len(found)


def test_what_xla_makes_of_a_sample(swept: Swept) -> None:
    bad, tried = compiled_wrongly(swept, sample, 2)
    assert bad == []
    assert tried > 80


@pytest.mark.slow
def test_what_xla_makes_of_every_rule(swept: Swept) -> None:
    bad, tried = compiled_wrongly(swept, by_rule, 4)
    assert bad == []
    assert tried > 1_500


@pytest.mark.slow
def test_xla_inserts_what_every_rule_claims(swept: Swept) -> None:
    wrong, tried = compiled_otherwise(swept, by_rule)
    assert wrong == []
    assert tried > 800


@pytest.mark.slow
def test_execution_per_shard_of_every_rule(swept: Swept) -> None:
    wrong, tried = executed_otherwise(swept, by_rule)
    assert wrong == []
    assert tried > 800
