"""Before which equation XLA:GPU begins to gather each weight."""

from typing import Any

import jax
import jax.numpy as jnp
from hypothesis import given
from hypothesis import strategies as st

from autoshard.costs.prefetch import begins, fetchable
from autoshard.ir.graph import build


def test_gathers_that_hide_begin_just_before_what_hides_them() -> None:
    found = begins({7: 1, 8: 2, 9: 3}, {7: 0.5, 8: 0.5, 9: 0.5}, [1.0, 1.0, 1.0, 1.0])
    assert found == {7: 0, 8: 1, 9: 2}


def test_gathers_that_take_longer_begin_at_the_beginning() -> None:
    found = begins({7: 1, 8: 2, 9: 3}, {7: 2.0, 8: 2.0, 9: 2.0}, [1.0, 1.0, 1.0, 1.0])
    assert found == {7: 0, 8: 0, 9: 1}  # the last takes two of the three before it


@given(st.lists(st.floats(0.0, 2.0), min_size=1, max_size=12), st.lists(st.floats(0.0, 4.0), min_size=12, max_size=12))
def test_they_run_one_at_a_time_and_are_there_in_time(seconds: list[float], gathers: list[float]) -> None:
    uses = {value: value for value in range(len(seconds))}  # value v is taken by equation v
    found = begins(uses, dict(enumerate(gathers)), seconds)
    assert all(0 <= found[v] <= v for v in uses)
    assert [found[v] for v in sorted(uses)] == sorted(found.values())
    for v in uses:  # as late as that: between the beginning and the use there is room, or the program begins
        hides = sum(seconds[found[v] : v])
        assert found[v] == 0 or hides >= gathers[v] - 1e-9


def test_weights_of_the_forward_pass_are_fetched() -> None:
    def loss(weights: Any, x: Any) -> Any:
        for w in weights:
            x = jax.checkpoint(lambda x, w: jnp.tanh(x @ w.astype(jnp.bfloat16)))(x, w)
        return jnp.sum(x)

    weights = [jax.ShapeDtypeStruct((16, 16), jnp.float32)] * 3
    x = jax.ShapeDtypeStruct((64, 16), jnp.bfloat16)
    graph = build(jax.make_jaxpr(jax.value_and_grad(loss))(weights, x), "cpu")
    found = fetchable(graph)
    casts = [v for v in found if graph.avals[v].shape == (16, 16)]
    assert len(casts) == 3  # and none of those that are cast again behind the loss
    assert all(graph.eqns[e].traits.contraction and not graph.again_of[e] for e in found.values())


def test_nothing_is_fetched_ahead_in_a_program_with_loops() -> None:
    def loss(stack: Any, x: Any) -> Any:
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)[0])

    stack = jax.ShapeDtypeStruct((3, 16, 16), jnp.float32)
    graph = build(jax.make_jaxpr(jax.grad(loss))(stack, jax.ShapeDtypeStruct((64, 16), jnp.float32)), "cpu")
    assert not fetchable(graph)
