"""Which contractions carry on which gathers, of small programs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.costs.carriers import Carried, Carriers, carriers
from autoshard.ir.graph import Graph, build

X = jax.ShapeDtypeStruct((16, 16), jnp.bfloat16)
WIDE = jax.ShapeDtypeStruct((16, 16), jnp.float32)
STACK = jax.ShapeDtypeStruct((4, 16, 16), jnp.bfloat16)


def carried(program: Callable[..., Any], *arguments: Any) -> tuple[Graph, Carriers, list[int]]:
    """The graph, its carriers, and its contractions."""
    graph = build(jax.make_jaxpr(program)(*arguments), "tpu")
    return graph, carriers(graph), [e for e, eqn in enumerate(graph.eqns) if eqn.traits.contraction]


def carrier(graph: Graph, found: Carriers, value: int) -> int | None:
    return found.of(value, [e for e, _ in graph.consumers[value]])


def test_weights_are_carried_by_the_product_before_theirs() -> None:
    graph, found, products = carried(lambda x, a, b, c: jnp.tanh(x @ a) @ b @ c.T, X, X, X, X)
    assert [carrier(graph, found, v) for v in graph.inputs] == [None, None, products[0], products[1]]
    assert found.reach(graph.inputs[3]) == [products[1], products[0]]


def test_what_products_make_is_waited_for() -> None:
    graph, found, products = carried(lambda x, a, b, c: jnp.tanh(x @ a) @ b + jnp.tanh(x @ c) @ b, *[X] * 4)
    assert [carrier(graph, found, graph.results[e][0]) for e in products] == [None] * 4


def test_what_is_narrowed_is_carried_behind_its_cast() -> None:
    graph, found, products = carried(lambda x, a, b: x @ a @ b.astype(x.dtype) + 2 * b.astype(x.dtype), X, X, WIDE)
    (cast,) = {graph.operands[products[1]][1]}
    assert carrier(graph, found, graph.inputs[2]) is None
    assert carrier(graph, found, cast) == products[0]


def test_nothing_is_carried_into_a_trip_or_over_a_loop() -> None:
    def program(x: jax.Array, stack: jax.Array, others: jax.Array, head: jax.Array) -> jax.Array:
        x = x @ head
        others = jnp.tanh(others @ head)  # a product makes them, but none of the trip
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w[0]) @ w[1], None), x, (stack, others))
        return x @ head.T @ head

    graph, found, products = carried(program, X, STACK, STACK, X)
    first, made, into, within, behind, last = products
    slices = [graph.operands[e][1] for e in (into, within)]
    assert [carrier(graph, found, v) for v in slices] == [None, into]
    assert found.of(graph.inputs[3], [behind]) is None
    assert found.of(graph.inputs[3], [last]) == behind
    assert carrier(graph, found, graph.inputs[3]) is None  # the first use is the first product
    assert found.before == {first: -1, made: first, into: -1, within: into, behind: -1, last: behind}


@pytest.mark.parametrize(
    ("each_s", "first_s", "reach_s", "gather_s", "hidden_s"),
    [
        ((3.0,), 3.0, 3.0, 2.0, 2.0),
        ((3.0,), 3.0, 3.0, 4.0, 3.0),
        ((3.0,), 3.0, 5.0, 8.0, 3.0),
        ((3.0,), 3.0, 5.0, 10.5, 0.0),
        ((3.0, 9.0), 3.0, 3.0, 5.0, 4.0),
        ((9.0,), 0.0, 0.0, 5.0, 0.0),
    ],
    ids=["whole", "as-much-as-it-takes", "by-two", "too-long", "two-uses", "waited-for-before"],
)
def test_what_hides_is_what_the_carrier_takes(
    each_s: tuple[float, ...], first_s: float, reach_s: float, gather_s: float, hidden_s: float
) -> None:
    found = Carried(each_s=each_s, first_s=first_s, reach_s=reach_s)
    assert found.hidden_s(np.array([gather_s]), np.array([0])) == pytest.approx([hidden_s])


def test_one_product_carries_nothing_long_beside_another_gather() -> None:
    found = Carried(each_s=(3.0,), first_s=3.0, reach_s=6.0, beside=(7,))
    assert found.hidden_s(np.array([[5.0, 5.0], [8.0, 8.0]]), np.array([7, 8])).tolist() == [[3.0, 3.0], [0.0, 3.0]]


def test_a_weight_that_is_gathered_again_is_waited_for_if_it_was_at_first() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(x @ w.astype(x.dtype)))

    graph, found, products = carried(jax.grad(loss, argnums=(0, 1)), WIDE, X)
    first, *_, last = products
    (cast,) = {graph.operands[first][1]}
    assert found.of(cast, [last]) is not None
    assert found.reach(cast) == []


def test_another_shape_of_a_weight_is_that_weight() -> None:
    graph, found, products = carried(lambda x, w: jnp.tanh(x @ w) @ w.T, X, X)
    turned = graph.operands[products[1]][1]
    assert turned != graph.inputs[1]
    assert carrier(graph, found, turned) == products[0]
    assert found.reach(turned) == []  # the first product waits for it
