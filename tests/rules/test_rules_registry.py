"""The registry: every primitive of JAX is known, refused with a reason, or an error that helps."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive, primitives

from autoshard.errors import MissingRuleError, RuleError
from autoshard.ir.graph import Aval, Eqn, build
from autoshard.rules import (
    Factor,
    FactorKind,
    RuleBuilder,
    ShardingRule,
    refusals,
    register,
    registered,
    rule_of,
    rules_of,
    whole,
)
from autoshard.rules.control_flow import BODIES
from autoshard.rules.rule import refuse, registry_name, unregister

F32 = np.dtype("float32")


def eqn(primitive: str, operands: tuple[tuple[int, ...], ...], result: tuple[int, ...], **params: Any) -> Eqn:
    return Eqn(
        primitive=primitive,
        operands=tuple(Aval(shape, F32) for shape in operands),
        results=(Aval(result, F32),),
        params=params,
        where="model.py:7 (mlp)",
    )


@pytest.fixture
def fresh() -> Iterator[str]:
    yield "fresh"
    unregister("fresh")


def test_every_primitive_of_jax_has_a_rule_or_a_reason() -> None:
    names = {
        value.name for module in (primitives, lax) for value in vars(module).values() if isinstance(value, Primitive)
    }
    assert len(names) > 180
    assert names - registered() - set(refusals()) == set()


def test_at_most_twelve_primitives_are_refused() -> None:
    refused = set(refusals()) - set(BODIES)
    assert len(refused) <= 12
    assert all(refusals()[name] for name in refused)


def test_unknown_primitive_names_the_source_line_and_the_way_out() -> None:
    mystery = Primitive("mystery")
    mystery.def_abstract_eval(lambda x: x)

    def model(x: Any) -> Any:
        return mystery.bind(jnp.sin(x))  # the line that the error names

    *_, unknown = build(jax.make_jaxpr(model)(jax.ShapeDtypeStruct((4, 6), F32)), "cpu").eqns
    with pytest.raises(MissingRuleError) as caught:
        rule_of(unknown)
    line = model.__code__.co_firstlineno + 1
    assert str(caught.value) == (
        f"no sharding rule for `mystery` at {__file__}:{line} "
        "(test_unknown_primitive_names_the_source_line_and_the_way_out.<locals>.model): "
        "autoshard does not know this primitive (operands [4, 6])\n"
        '  register one: autoshard.register_rule("mystery", "b i k, b k j -> b i j"), '
        'or plan with unknown="replicate"'
    )
    assert (caught.value.primitive, caught.value.where) == ("mystery", unknown.where)


def test_refused_primitive_says_why() -> None:
    with pytest.raises(MissingRuleError, match=r"`psum` at model\.py:7 \(mlp\): a collective belongs to a `shard_map`"):
        rule_of(eqn("psum", ((4,),), (4,)))


def test_primitive_with_a_body_says_so() -> None:
    with pytest.raises(
        MissingRuleError, match=r"`scan` at model\.py:7 \(mlp\): it has a body, whose equations have the rules"
    ):
        rule_of(eqn("scan", ((4,),), (4,)))


def test_registering_twice_is_an_error() -> None:
    for register_again in (lambda: register("add")(rule_of), lambda: refuse({"add": "why not"})):
        with pytest.raises(RuleError, match="`add` already has a rule"):
            register_again()


def test_refused_primitive_cannot_be_registered_silently() -> None:
    with pytest.raises(RuleError, match="`psum` already has a rule"):
        register("psum")(rule_of)


@pytest.mark.parametrize(
    ("operands", "result", "message"),
    [
        (((4, 6), (4, 6)), (4, 6), "fresh: 1 operands in the rule, 2 in the equation"),
        (((4, 5),), (4, 6), r"fresh: operand 0 has shape \(4, 5\), the rule says \(4, 6\)"),
        (((4, 6),), (24,), r"fresh: result 0 has shape \(24,\), the rule says \(4, 6\)"),
    ],
)
def test_rule_must_cover_every_dimension(
    fresh: str, operands: tuple[tuple[int, ...], ...], result: tuple[int, ...], message: str
) -> None:
    def careless(_: Eqn) -> ShardingRule:
        builder = RuleBuilder()
        dims = builder.dims((4, 6))
        return builder.rule([dims], [dims])

    register(fresh)(careless)
    with pytest.raises(RuleError, match=message):
        rule_of(eqn(fresh, operands, result))


@pytest.mark.parametrize(("kind", "reduction"), [(FactorKind.REDUCTION, ""), (FactorKind.PASS, "sum")])
def test_only_reduction_factors_name_an_operation(kind: FactorKind, reduction: str) -> None:
    with pytest.raises(RuleError, match="a reduction factor names its operation"):
        Factor(4, kind, reduction)


def test_equal_rules_are_equal_values() -> None:
    """The order in which a rule function makes its factors does not show."""

    def dot(*, contracted_first: bool) -> ShardingRule:
        builder = RuleBuilder()
        builder.new(99)  # never used
        sizes = {"i": 4, "j": 8, "k": 6}
        f: dict[str, tuple[int, ...]] = {}
        for name in "kij" if contracted_first else "ijk":
            kind, operation = (FactorKind.REDUCTION, "sum") if name == "k" else (FactorKind.PASS, "")
            f[name] = (builder.new(sizes[name], kind, operation),)
        return builder.rule([[f["i"], f["k"]], [f["k"], f["j"]]], [[f["i"], f["j"]]])

    one, other = dot(contracted_first=True), dot(contracted_first=False)
    assert one == other
    assert hash(one) == hash(other)
    assert str(one) == "([i,j],[j,k])->([i,k]) {i=4,j=6,k=8} reduction={j}"


def test_text_names_kinds_operations_and_many_factors() -> None:
    builder = RuleBuilder()
    dims = builder.dims((2,) * 27)
    top = builder.dims((3, 5), FactorKind.REDUCTION, "max")
    halo = builder.dims((7,), FactorKind.PERMUTATION)
    text = str(builder.rule([[*dims, *top, *halo]], [[*dims, *halo]]))
    assert text.startswith("([i,j,k,l,m,n,o,p,q,r,s,t,u,v,w,x,y,z,a,b,c,d,e,f,g,h,i_1,j_1,k_1,l_1])->")
    assert text.endswith(" reduction={j_1:max,k_1:max} permutation={l_1}")


def test_foreign_kernels_are_named() -> None:
    assert registry_name(eqn("ffi_call", ((4,),), (4,), target_name="my_norm")) == "ffi_call[my_norm]"
    assert registry_name(eqn("pallas_call", ((4,),), (4,), name="flash")) == "pallas_call[flash]"
    assert registry_name(eqn("add", ((4,),), (4,), name="x")) == "add"
    with pytest.raises(MissingRuleError, match=r'register_rule\("ffi_call\[my_norm\]"'):
        rule_of(eqn("ffi_call", ((4,),), (4,), target_name="my_norm"))


def test_rules_of_a_graph_are_worked_out_once_for_equations_alike(fresh: str) -> None:
    calls: list[Eqn] = []

    @register(fresh)
    def counted(one: Eqn) -> ShardingRule:
        calls.append(one)
        return whole(one)

    block = Primitive(fresh)
    block.def_abstract_eval(lambda x, **_: x)

    def model(x: Any) -> Any:
        for axis in (0, 0, 1):  # the parameters tell equations apart
            x = block.bind(jnp.sin(x), axis=axis)
        return x

    eqns = build(jax.make_jaxpr(model)(jax.ShapeDtypeStruct((4, 6), F32)), "cpu").eqns
    assert rules_of(eqns) == [rule_of(one) for one in eqns]
    assert len(calls) == 2 + 3
    assert counted(eqns[1]) == rules_of(eqns)[1]


def test_unknown_equations_stay_whole_by_choice() -> None:
    one = eqn("mystery", ((4, 6),), (4,))
    (rule,) = rules_of([one], unknown="replicate")
    assert str(rule) == "([i,j])->([k]) {i=4,j=6,k=4} replicate={i,j,k}"
    with pytest.raises(MissingRuleError):
        rules_of([one])
