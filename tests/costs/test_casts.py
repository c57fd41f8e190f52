"""Which values lie in memory as products cast them, by XLA:TPU."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from autoshard.costs.casts import lying_share, multiplied
from autoshard.ir.graph import build

X = jax.ShapeDtypeStruct((8, 8), jnp.float32)


@pytest.mark.parametrize(
    ("fn", "lies"),
    [
        pytest.param(lambda y: y @ y, True, id="a product takes it"),
        pytest.param(lambda y: y.reshape(4, 16) @ y.reshape(16, 4), True, id="under other names"),
        pytest.param(lambda y: y @ y + y, False, id="a sum does, too"),
        pytest.param(lambda y: y.reshape(64) @ y.reshape(64) + y[0, 0], False, id="a part of it is taken as it is"),
        pytest.param(lambda y: jnp.dot(y, y, precision="highest"), False, id="a product in float32"),
    ],
)
def test_what_products_alone_take_lies_as_they_cast_it(fn: Callable[[jax.Array], jax.Array], *, lies: bool) -> None:
    graph = build(jax.make_jaxpr(lambda x: fn(jnp.tanh(x)))(X), "tpu")
    (made,) = (graph.results[e][0] for e, eqn in enumerate(graph.eqns) if eqn.primitive == "tanh")
    names = [made, *(graph.results[e][0] for e, eqn in enumerate(graph.eqns) if eqn.primitive == "reshape")]
    cast = multiplied(graph)
    assert {lying_share(graph, cast, name) for name in names} == {0.5 if lies else 1.0}


def test_what_leaves_or_is_updated_in_its_place_lies_as_it_is() -> None:
    def program(cache: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        made, updated = jnp.tanh(x), jax.lax.dynamic_update_slice(cache, x[:1], (0, 0))
        kept = jax.lax.dynamic_update_slice(cache, x[:1], (1, 0))
        return made, made @ updated, updated + 0 * (made @ kept)

    graph = build(jax.make_jaxpr(program)(X, X), "tpu")
    cast = multiplied(graph)
    made = [
        graph.results[e][0] for e, eqn in enumerate(graph.eqns) if eqn.primitive in ("tanh", "dynamic_update_slice")
    ]
    assert len(made) == 3
    assert {lying_share(graph, cast, value) for value in made} == {1.0}


def test_what_is_given_lies_as_it_is_given() -> None:
    graph = build(jax.make_jaxpr(lambda x: x @ x)(X), "tpu")
    assert multiplied(graph)[graph.inputs[0]].alone
    assert lying_share(graph, multiplied(graph), graph.inputs[0]) == 1.0
