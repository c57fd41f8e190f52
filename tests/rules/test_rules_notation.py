"""The einsum-like notation: what it means, and what it refuses."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive

from autoshard.errors import RuleError
from autoshard.ir.graph import Aval, Eqn
from autoshard.rules import register_rule, rule_of
from autoshard.rules.notation import Notation
from autoshard.rules.rule import unregister
from tests.rules_oracle import equations

Shapes = tuple[tuple[int, ...], ...]


def eqn(primitive: str, operands: Shapes, results: Shapes) -> Eqn:
    avals = [tuple(Aval(shape, np.dtype("float32")) for shape in side) for side in (operands, results)]
    return Eqn(primitive=primitive, operands=avals[0], results=avals[1], params={})


@pytest.fixture
def fresh() -> Iterator[str]:
    yield "fresh"
    unregister("fresh")


@pytest.mark.parametrize(
    ("text", "operands", "results", "rule"),
    [
        (
            "b i k, b k j -> b i j",
            ((2, 4, 6), (2, 6, 8)),
            ((2, 4, 8),),
            "([i,j,k],[i,k,l])->([i,j,l]) {i=2,j=4,k=6,l=8} reduction={k}",
        ),
        ("i j -> j i", ((4, 6),), ((6, 4),), "([i,j])->([j,i]) {i=4,j=6}"),
        ("(b s) d -> b s d", ((8, 6),), ((2, 4, 6),), "([ij,k])->([i,j,k]) {i=2,j=4,k=6}"),
        ("b s d -> (b s) d", ((2, 4, 6),), ((8, 6),), "([i,j,k])->([ij,k]) {i=2,j=4,k=6}"),
        ("... d, d -> ... d", ((2, 4, 6), (6,)), ((2, 4, 6),), "([i,j,k],[k])->([i,j,k]) {i=2,j=4,k=6}"),
        ("... d, ... d -> ... d", ((2, 4, 6), (4, 6)), ((2, 4, 6),), "([i,j,k],[j,k])->([i,j,k]) {i=2,j=4,k=6}"),
        ("b 1 d -> b d", ((2, 1, 6),), ((2, 6),), "([i,1,j])->([i,j]) {i=2,j=6}"),
        ("b _ -> b _, b", ((2, 6),), ((2, 3), (2,)), "([i,j])->([i,k],[i]) {i=2,j=6,k=3} replicate={j,k}"),
        ("-> i", (), ((4,),), "()->([i]) {i=4}"),
        ("i, -> i", ((4,), ()), ((4,),), "([i],[])->([i]) {i=4}"),
        ("... i ->", ((4,),), ((),), "([i])->([]) {i=4} reduction={i}"),
    ],
)
def test_meaning(fresh: str, text: str, operands: Shapes, results: Shapes, rule: str) -> None:
    register_rule(fresh, text)
    assert str(rule_of(eqn(fresh, operands, results))) == rule


def test_kinds(fresh: str) -> None:
    register_rule(
        fresh, "b s v d -> b s d", whole="d", permutations="s", reductions={"v": "max"}, linear=[[0]], replace=True
    )
    rule = rule_of(eqn(fresh, ((2, 4, 6, 8),), ((2, 4, 8),)))
    assert str(rule) == "([i,j,k,l])->([i,j,l]) {i=2,j=4,k=6,l=8} reduction={k:max} permutation={j} replicate={l}"
    assert rule.linear == (frozenset({0}),)


def test_agrees_with_the_built_in_rule() -> None:
    (dot,) = equations(
        lambda q, k: lax.dot_general(q, k, (((2,), (2,)), ((0,), (0,)))),
        *[jax.ShapeDtypeStruct((2, 4, 6), "float32")] * 2,
    )
    written = Notation.parse("b s d, b t d -> b s t", linear=(frozenset({0}), frozenset({1})))
    assert written.rule(dot.eqn) == rule_of(dot.eqn)


def test_primitive_or_name(fresh: str) -> None:
    primitive = Primitive(fresh)
    primitive.def_abstract_eval(lambda x: x)
    register_rule(primitive, "... -> ...")
    (found,) = equations(primitive.bind, jnp.zeros((4, 6)))
    assert str(rule_of(found.eqn)) == "([i,j])->([i,j]) {i=4,j=6}"


def test_replacing_is_explicit(fresh: str) -> None:
    register_rule(fresh, "i -> i")
    with pytest.raises(RuleError, match="`fresh` already has a rule"):
        register_rule(fresh, "i -> i", whole="i")
    register_rule(fresh, "i -> i", whole="i", replace=True)
    assert str(rule_of(eqn(fresh, ((4,),), ((4,),)))) == "([i])->([i]) {i=4} replicate={i}"


def test_one_kernel_of_a_foreign_call() -> None:
    register_rule("ffi_call[my_norm]", "... d -> ... d", whole="d")
    try:
        call = eqn("ffi_call", ((4, 6),), ((4, 6),))
        mine = Eqn(
            primitive="ffi_call", operands=call.operands, results=call.results, params={"target_name": "my_norm"}
        )
        assert str(rule_of(mine)) == "([i,j])->([i,j]) {i=4,j=6} replicate={j}"
    finally:
        unregister("ffi_call[my_norm]")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("i j", "reads `operands -> results`"),
        ("i -> i -> i", "reads `operands -> results`"),
        ("(i j -> i", r"cannot read `\(i j`"),
        ("i) -> i", r"cannot read `\)`"),
        ("((i)) -> i", r"cannot read `\(`"),
        ("i* -> i", r"cannot read `i\*`"),
        ("2 -> 1", "cannot read `2`"),
        ("... i ... -> i", r"cannot read `\.\.\. i \.\.\.`"),
        ("(i _) -> i", "cannot read `_`"),
    ],
)
def test_unreadable(text: str, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        Notation.parse(text)


def test_keywords_must_name_factors() -> None:
    with pytest.raises(RuleError, match=r"\['k'\] are named but not in"):
        Notation.parse("i -> i", whole=frozenset({"k"}))
    with pytest.raises(RuleError, match=r"\['i'\] are in a result and cannot be reduced"):
        Notation.parse("i -> i", reductions={"i": "max"})
    with pytest.raises(RuleError, match="`linear` names operands 0 to 0"):
        Notation.parse("i -> i", linear=(frozenset({1}),))


@pytest.mark.parametrize(
    ("text", "operands", "results", "message"),
    [
        ("i -> i", ((4,), (4,)), ((4,),), "1 values on a side where the equation has 2"),
        ("i -> i", ((4, 6),), ((4,),), r"does not fit a value of shape \(4, 6\)"),
        ("i j ... -> i", ((4,),), ((4,),), r"does not fit a value of shape \(4,\)"),
        ("i, i -> i", ((4,), (6,)), ((4,),), "`i` does not make a dimension of 6"),
        ("i 1 -> i", ((4, 2),), ((4,),), "`` does not make a dimension of 2"),
        ("(i j) -> i j", ((7,),), ((2, 3),), "`i j` does not make a dimension of 7"),
        ("(i j) -> (j i)", ((8,),), ((8,),), "leaves the size of `i j` open"),
    ],
)
def test_shapes_that_do_not_fit(text: str, operands: Shapes, results: Shapes, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        Notation.parse(text).rule(eqn("fresh", operands, results))
