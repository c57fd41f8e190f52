"""Sums that wait for additions: what may be unreduced, and what is taken for additions alone."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard.backends.known_compilers import XLA_CPU, XLA_GPU, XLA_TPU
from autoshard.backends.model import CompilerModel
from autoshard.costs.fusion import FusionTraits, fusion_traits
from autoshard.costs.scattered_terms import scattered_terms
from autoshard.ir.graph import Graph, build
from autoshard.rules import rules_of

TABLE, ROWS, IDS = (
    jax.ShapeDtypeStruct(s, d) for s, d in (((64, 16), "float32"), ((32, 16), "float32"), ((32,), "int32"))
)


def traits(fn: Callable[..., Any], *args: Any, compiler: CompilerModel) -> tuple[Graph, FusionTraits]:
    graph = build(jax.make_jaxpr(fn)(*args), "cpu")
    return graph, fusion_traits(graph, rules_of(graph.eqns, unknown="error"), (), compiler)


def reduced(a: jax.Array, b: jax.Array) -> jax.Array:
    return a.sum(0) + b[None].sum(1).sum(0)


def looked_up(table: jax.Array, ids: jax.Array) -> jax.Array:
    """A table of which rows are looked up, and with which these are multiplied."""
    rows = jnp.tanh(table[ids])
    return jnp.square(rows @ table.T).sum()


@pytest.mark.parametrize(("compiler", "added"), [(XLA_GPU, True), (XLA_TPU, True), (XLA_CPU, False)], ids=str)
def test_sums_of_reductions_and_scatters_wait_for_an_addition(compiler: CompilerModel, *, added: bool) -> None:
    for fn, args in ((reduced, (TABLE, TABLE)), (jax.grad(looked_up), (TABLE, IDS))):
        graph, found = traits(fn, *args, compiler=compiler)
        additions = [e for e, eqn in enumerate(graph.eqns) if eqn.traits.addition and eqn.results[0].ndim]
        assert found.flows[additions[-1]] == added


def test_a_sum_that_is_only_renamed_does_not_wait() -> None:
    """As the gradient of a bias is: it is reduced where it is made."""
    graph, found = traits(lambda x: jnp.sin(x.sum(0).reshape(4, 4)), TABLE, compiler=XLA_GPU)
    assert not any(found.flows)
    assert any(eqn.traits.passes_sums for eqn in graph.eqns)


def test_what_is_renamed_several_times_is_taken_for_additions_alone() -> None:
    graph, found = traits(jax.grad(looked_up), TABLE, IDS, compiler=XLA_GPU)
    turned = {graph.eqns[graph.producers[v][0]].primitive for v in found.turned_terms}
    assert turned == {"dot_general", "transpose"}  # transposed twice on the way to the addition


def test_a_value_that_is_taken_otherwise_too_is_finished_for_all() -> None:
    def program(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        product = x.T @ y
        return product.T + (y.T @ x), jnp.sin(product)

    assert not traits(program, ROWS, ROWS, compiler=XLA_GPU)[1].turned_terms


@pytest.mark.parametrize(("compiler", "onto"), [(XLA_GPU, True), (XLA_CPU, False)], ids=str)
def test_a_product_is_scattered_onto_where_both_are_finished_together(compiler: CompilerModel, *, onto: bool) -> None:
    graph, found = traits(lambda *args: 2 * jax.grad(looked_up)(*args), TABLE, IDS, compiler=compiler)
    assert bool(scattered_terms(graph, found.fuses, compiler)) == onto


def test_a_product_that_others_read_is_not_scattered_onto() -> None:
    def twice(table: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, back = jax.vjp(lambda table, other: jnp.square(jnp.tanh(table[ids]) @ other.T).sum(), table, table)
        looked, multiplied = back(value)
        return 2 * (looked + multiplied), multiplied

    graph, found = traits(twice, TABLE, IDS, compiler=XLA_GPU)
    assert not scattered_terms(graph, found.fuses, XLA_GPU)
