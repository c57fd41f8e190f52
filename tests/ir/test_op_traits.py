"""The table of primitives: complete, without dead rows, and the only one."""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, primitives

import autoshard
from autoshard.ir.graph import build
from autoshard.ir.op_traits import OP_TRAITS, OpTraits, traits_of
from autoshard.rules import pointwise, refusals, registered

ROOT = Path(autoshard.__file__).parent
ELEMENT_WISE = {
    *pointwise.NONLINEAR,
    *pointwise.LINEAR_TOGETHER,
    *pointwise.LINEAR_IN_FIRST,
    *pointwise.LINEAR_IN_EACH,
}
KNOWN = frozenset(p.name for p in vars(primitives).values() if isinstance(p, Primitive)) | frozenset(OP_TRAITS)

# Calls whose rule is that of what they call.
CALLS = frozenset({"custom_partitioning", "ffi_call", "pallas_call"})

# Folders and rooms that may name primitives, and why.
MAY_NAME = {
    "_jax": "what JAX calls things differs between its versions",
    "ir": "the program is made of primitives; the table is here",
    "rules": "primitive → factors",
    "backends": "opcodes of HLO and StableHLO, and collectives, some of which are called like primitives",
}
# Words of ours that are a primitive's name, too.
OUR_WORDS = frozenset(
    {
        *("call", "complex", "copy", "device_put", "empty", "gather", "jit", "name", "reduce", "scatter", "slice"),
        *("transpose", "while"),
    }
)


def test_every_primitive_with_a_rule_has_a_row_or_is_element_wise() -> None:
    named = {name for name in registered() if "[" not in name}  # a kernel by its name has the traits of its call
    assert named - set(OP_TRAITS) <= ELEMENT_WISE


def test_every_row_is_of_a_primitive_that_exists() -> None:
    collectives = {name for name, traits in OP_TRAITS.items() if traits.collective is not None}
    assert set(OP_TRAITS) - collectives <= registered() | CALLS
    assert not collectives & registered()  # bodies of `shard_map` alone have them
    assert {"psum", "all_to_all"} <= collectives & set(refusals())


def test_every_trait_holds_of_something_and_not_of_what_nobody_knows() -> None:
    unknown = traits_of("a primitive of somebody's")
    for field in fields(OpTraits):
        assert not getattr(unknown, field.name)
        assert any(getattr(traits, field.name) for traits in OP_TRAITS.values()), field.name


def test_an_equation_says_what_its_primitive_is() -> None:
    def step(x: jax.Array) -> jax.Array:
        return jnp.sum(x.T @ x, axis=0).astype(jnp.bfloat16)

    found = {eqn.primitive: eqn.traits for eqn in build(jax.make_jaxpr(step)(jnp.ones((4, 8))), "cpu").eqns}
    assert found["dot_general"].contraction
    assert found["reduce_sum"].ends_fusion
    assert found["convert_element_type"].cast
    assert found["transpose"].renames
    assert not found["dot_general"].fusible


def test_a_reduction_of_single_numbers_is_a_reshape() -> None:
    """As the gradient of a broadcast has one; which of one number is largest, is not that number."""

    def step(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        return jnp.sum(x, axis=0), jnp.sum(x, axis=1), jax.lax.argmax(x, 0, jnp.int32)

    sums_of_one, sums, places = build(jax.make_jaxpr(step)(jnp.ones((1, 8))), "cpu").eqns
    assert sums_of_one.traits == traits_of("reshape")
    assert sums.traits == traits_of("reduce_sum")
    assert places.traits == traits_of("argmax")


def test_what_contradicts_itself_is_in_no_row() -> None:
    for name, traits in OP_TRAITS.items():
        assert not (traits.renames and traits.contraction), name
        assert not (traits.ends_fusion and not traits.fusible), name
        assert not (traits.enters_loop and traits.leaves_loop), name
        assert traits.link or not (traits.enters_loop or traits.leaves_loop), name
        assert traits.updates or not traits.scatters, name


def test_no_other_room_names_primitives() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted(ROOT.rglob("*.py"))
        if path.relative_to(ROOT).parts[0] not in MAY_NAME
        for line, name in _named(ast.parse(path.read_text()))
    ]
    assert not found, "say it in autoshard/ir/op_traits.py:\n" + "\n".join(found)


def test_a_list_of_primitives_would_be_found() -> None:
    source = 'SUMS = {"reduce_sum", "cumsum"}\nfound = eqn.primitive == "exp" or eqn.primitive in ("copy", "neg")'
    assert {name for _, name in _named(ast.parse(source))} == {"reduce_sum", "cumsum", "exp", "copy", "neg"}


def _named(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of every string that is a primitive's name alone, or with which a primitive is compared."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and "primitive" in ast.unparse(node.left).split("."):
            yield from (text for side in node.comparators for text in _texts(ast.walk(side)) if text[1] in OUR_WORDS)
        yield from (text for text in _texts([node]) if text[1] not in OUR_WORDS)


def _texts(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and text of the constants that are names of primitives."""
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in KNOWN:
            yield node.lineno, node.value
