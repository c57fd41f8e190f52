"""When the compilers run the equations of a program."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard.backends.known_compilers import XLA_CPU, XLA_GPU, XLA_TPU
from autoshard.backends.model import CompilerModel
from autoshard.costs.execution_order import feeding, positions
from autoshard.ir.graph import Graph, build
from autoshard.ir.recompute import rewritten
from autoshard.ir.saved_values import saved_values
from autoshard.ir.trace import trace

WIDTHS = (8, 32, 16, 8)  # of what each of three layers takes and makes


def loss(weights: Any, x: Any) -> Any:
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.sum(x)


def traced(form: Any) -> Graph:
    """A step of gradient descent."""
    weights = [jax.ShapeDtypeStruct(sides, jnp.float32) for sides in itertools.pairwise(WIDTHS)]

    def step(weights: Any, x: Any) -> Any:
        return [w - 0.1 * g for w, g in zip(weights, jax.grad(form)(weights, x), strict=True)]

    return build(jax.make_jaxpr(step)(weights, jax.ShapeDtypeStruct((64, WIDTHS[0]), jnp.float32)), "cpu")


def gradients(graph: Graph) -> list[int]:
    """The contractions that make gradients of weights."""
    feeds = feeding(graph)
    return [e for e, eqn in enumerate(graph.eqns) if eqn.traits.contraction and not feeds[graph.results[e][0]]]


def run(graph: Graph, compiler: CompilerModel) -> list[int]:
    return positions(graph, [not eqn.traits.contraction for eqn in graph.eqns], compiler)


def test_on_gpu_weights_gradients_come_last_and_small_ones_first() -> None:
    graph = traced(loss)
    when, late = run(graph, XLA_GPU), gradients(graph)
    others = [e for e, eqn in enumerate(graph.eqns) if eqn.traits.contraction and e not in late]
    assert len(late) == 3
    assert min(when[e] for e in late) > max(when[e] for e in others)
    put_off = sorted((e for e in late if when[e] > e), key=lambda e: when[e])
    sizes = [graph.avals[graph.results[e][0]].size for e in put_off]
    assert len(sizes) == 2
    assert sizes == sorted(sizes)
    assert len({when[e] for e in late}) == 3  # one after the other


def test_a_product_on_the_way_to_a_table_s_gradient_is_not_put_off() -> None:
    """Other than the weights' gradients behind it, however small: a lookup's gradient is a scatter of it."""

    def form(weights: Any, tokens: Any) -> Any:
        table, *others = weights
        x = table[tokens]
        for w in others:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    def step(weights: Any, tokens: Any) -> Any:
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(form)(weights, tokens))

    weights = [jax.ShapeDtypeStruct(sides, jnp.float32) for sides in ((16, 8), (8, 32), (32, 8))]
    graph = build(jax.make_jaxpr(step)(weights, jax.ShapeDtypeStruct((64,), jnp.int32)), "cpu")
    when, feeds = run(graph, XLA_GPU), feeding(graph)
    last = [e for e, eqn in enumerate(graph.eqns) if eqn.traits.contraction and not feeds[graph.results[e][0]]]
    shapes = {graph.avals[graph.results[e][0]].shape: e for e in last}
    rows = shapes.pop((64, 8))
    assert len(shapes) == 2
    assert when[rows] == rows
    assert all(when[e] > rows for e in shapes.values())


def test_a_weight_that_is_cut_out_of_a_stack_has_its_gradient_last_too() -> None:
    """It is padded on the way to the stack's."""

    def step(stack: Any, x: Any) -> Any:
        def form(stack: Any) -> Any:
            h = x
            for w in stack:
                h = jnp.tanh(h @ w)
            return jnp.sum(h)

        return stack - 0.1 * jax.grad(form)(stack)

    stack, x = jax.ShapeDtypeStruct((3, 16, 16), jnp.float32), jax.ShapeDtypeStruct((64, 16), jnp.float32)
    graph = build(jax.make_jaxpr(step)(stack, x), "cpu")
    when, late = run(graph, XLA_GPU), gradients(graph)
    others = [e for e, eqn in enumerate(graph.eqns) if eqn.traits.contraction and e not in late]
    assert len(late) == 3
    assert min(when[e] for e in late) > max(when[e] for e in others)


def test_nothing_runs_before_what_it_is_computed_from() -> None:
    graph = traced(loss)
    when = run(graph, XLA_GPU)
    for e, operands in enumerate(graph.operands):
        makers = [graph.producers[v][0] for v in operands if v in graph.producers]
        assert all(when[maker] <= when[e] for maker in makers)


@pytest.mark.parametrize("compiler", [XLA_CPU, XLA_TPU], ids=str)
def test_elsewhere_they_are_not_put_off(compiler: CompilerModel) -> None:
    graph = traced(loss)
    when = run(graph, compiler)
    assert all(when[e] == e for e in gradients(graph))


def test_what_is_computed_again_has_its_gradients_in_the_next_such_part() -> None:
    def form(weights: Any, x: Any) -> Any:
        for w in weights:
            x = jax.checkpoint(lambda x, w: jnp.tanh(x @ w) * 2)(x, w)
        return jnp.sum(x)

    graph = traced(form)
    assert set(graph.again_of) == {0, 1, 2, 3}
    when = run(graph, XLA_GPU)
    for e in gradients(graph):
        following = [other for other, again in enumerate(graph.again_of) if again == graph.again_of[e] + 1]
        assert (when[e] == following[-1]) if following else (when[e] >= e)


def test_a_part_inside_of_another_is_the_same_part() -> None:
    def form(weights: Any, x: Any) -> Any:
        inner = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))
        return jnp.sum(jax.checkpoint(lambda x: inner(inner(x, weights[0]), weights[1]))(x))

    assert set(traced(form).again_of) == {0, 1}


def test_so_has_what_a_plan_repeats() -> None:
    """Else all that layers repeat would live until the end, and no plan of many of them would fit."""

    def form(weights: Any, x: Any) -> Any:
        for up, down in weights:
            x = x + jax.checkpoint(lambda x, up, down: jnp.tanh(x @ up) @ down)(x, up, down)
        return jnp.sum(x * x)

    def step(weights: Any, x: Any) -> Any:
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(form)(weights, x))

    sides = [(jax.ShapeDtypeStruct((8, 64), jnp.float32), jax.ShapeDtypeStruct((64, 8), jnp.float32))] * 3
    program = trace(step, (sides, jax.ShapeDtypeStruct((64, 8), jnp.float32)), ("weights", "x"))
    kept = saved_values(program.jaxpr, remat="add").saved
    graph = build(rewritten(saved_values(program.jaxpr, remat="free"), kept), "cpu")
    assert not any(graph.again_of)
    products = [e for e, eqn in enumerate(graph.eqns) if eqn.traits.contraction]
    again, when = [e for e in products if e in graph.repeated], run(graph, XLA_GPU)
    assert len(again) == 3
    assert [when[e] for e in again] == again
    for first, following in itertools.pairwise(again):
        of_first = [e for e in gradients(graph) if first < e < following]
        assert len(of_first) == 2
        assert all(following < when[e] for e in of_first)
        assert all(when[e] < other for e in of_first for other in again if other > following)
