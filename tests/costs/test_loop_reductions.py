"""Loop reductions: which sums over trips the compiler finishes after the loop, all the same."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard.costs.loop_reductions import accumulators
from autoshard.ir.graph import build

WIDTH = 8
X = jax.ShapeDtypeStruct((3, 16, WIDTH), jnp.float32)


def terms_of(term: Callable[[Any], Any], begin: Any) -> set[tuple[int, ...]]:
    """The shapes of the values whose reduction is moved behind the loop."""

    def run(x: Any) -> Any:
        return jax.lax.scan(lambda c, rows: (c + term(rows), None), begin, x)[0]

    graph = build(jax.make_jaxpr(run)(X), "cuda")
    return {graph.avals[value].shape for value in accumulators(graph, past_transposes=False).terms}


def test_a_sum_that_is_reshaped_or_cast_on_its_way_is_one() -> None:
    assert terms_of(lambda rows: rows.sum(0), jnp.zeros(WIDTH)) == {(WIDTH,)}
    shared = terms_of(lambda rows: rows.sum(0)[None].sum(0), jnp.zeros(WIDTH))  # as of a weight broadcast to rows
    assert shared == {(WIDTH,), (1, WIDTH)}


@pytest.mark.parametrize("term", [lambda rows: jnp.tanh(rows.sum(0)), lambda rows: rows.T.sum(1) * 2])
def test_what_else_is_between_ends_it(term: Callable[[Any], Any]) -> None:
    assert terms_of(term, jnp.zeros(WIDTH)) == {(WIDTH,)}  # the term that is added alone


def test_another_shape_ends_it() -> None:
    grouped = terms_of(lambda rows: rows.sum(0).reshape(2, WIDTH // 2), jnp.zeros((2, WIDTH // 2)))
    assert grouped == {(2, WIDTH // 2)}
