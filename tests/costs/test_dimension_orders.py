"""Which products XLA:GPU transposes where they meet, and what it reduces across, by hand."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard.backends.known_compilers import XLA_GPU
from autoshard.costs.dimension_orders import DimensionOrders, dimension_orders
from autoshard.costs.fusion import fusible, is_pointwise
from autoshard.costs.liveness import live_ranges
from autoshard.costs.softmaxes import SoftmaxFacts
from autoshard.ir.graph import Graph, build
from autoshard.rules import rules_of

BF16 = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)


def orders(fn: Any, *args: Any) -> tuple[Graph, DimensionOrders]:
    graph = build(jax.make_jaxpr(fn)(*args), "cuda")
    rules = rules_of(graph.eqns, unknown="error")
    fuses = [fusible(e, pointwise=is_pointwise(r), compiler=XLA_GPU) for e, r in zip(graph.eqns, rules, strict=True)]
    return graph, dimension_orders(graph, fuses)


def gradient(equation: str, back: str) -> Any:
    """A softmax between two products, and its gradient."""

    def fn(q: Any, k: Any, v: Any) -> Any:
        def forward(q: Any, k: Any, v: Any) -> Any:
            weights = jax.nn.softmax(jnp.einsum(equation, q, k).astype(jnp.float32)).astype(jnp.bfloat16)
            return jnp.einsum(back, weights, v)

        out, pull = jax.vjp(forward, q, k, v)
        return pull(jnp.tanh(out))

    return fn


GROUPED = ("bskgd,btkd->bkgst", "bkgst,btkd->bskgd")
PLAIN = ("bshd,bthd->bhst", "bhst,bthd->bshd")


def test_the_gradient_of_grouped_heads_scores_is_turned_and_what_reduces_them_is_across() -> None:
    """The scores lie as [b,k,t,s,g], their gradient comes as [b,k,g,s,t]: it is written anew as float32."""
    graph, found = orders(gradient(*GROUPED), BF16((2, 64, 4, 3, 8)), BF16((2, 96, 4, 8)), BF16((2, 96, 4, 8)))
    (turned,) = found.turned
    maker, _ = graph.producers[turned]
    product = graph.eqns[graph.producers[graph.operands[maker][0]][0]]
    assert graph.eqns[maker].traits.cast
    assert graph.avals[turned].itemsize == 4
    assert product.primitive == "dot_general"
    assert graph.avals[turned].shape == (2, 4, 3, 64, 96)
    reduced = {graph.eqns[e].primitive for e in found.across}
    assert reduced == {"reduce_max", "reduce_sum"}
    assert len(found.across) == 3
    scores = next(r[0] for r, eqn in zip(graph.results, graph.eqns, strict=True) if eqn.traits.contraction)
    assert scores in found.onto.values()


@pytest.mark.parametrize("scanned", [False, True])
def test_what_contractions_have_read_is_gone_when_the_gradient_of_scores_is_turned(scanned: bool) -> None:  # noqa: FBT001
    """The weights of the softmax, whose last reader is the gradient of values that other weights make.

    In a loop's trip they are there until the kernel that turns it has run: scan-remat of `benchmarks.unseen_steps`.
    """
    attend = gradient(*GROUPED)

    def fn(q: Any, k: Any, x: Any, w: Any) -> Any:
        v, pull = jax.vjp(lambda w: jnp.einsum("btd,dkh->btkh", x, w), w)
        of_q, of_k, of_v = attend(q, k, v)
        return of_q, of_k, pull(of_v)

    def trips(q: Any, *others: Any) -> Any:
        return jax.lax.scan(lambda q, _: (q + 1, fn(q, *others)), q, None, length=3)

    args = BF16((2, 64, 4, 3, 8)), BF16((2, 96, 4, 8)), BF16((2, 96, 16)), BF16((16, 4, 8))
    graph, found = orders(trips if scanned else fn, *args)
    (turned,) = found.turned
    rules = rules_of(graph.eqns, unknown="error")
    fuses = [fusible(e, pointwise=is_pointwise(r), compiler=XLA_GPU) for e, r in zip(graph.eqns, rules, strict=True)]
    facts = SoftmaxFacts(devices=1, stores_quotients=True, stores_gradients=True)
    lives = live_ranges(graph, rules, fuses, XLA_GPU, orders=found, softmax_facts=facts, loss_last=False)
    casts = (r[0] for e, r in enumerate(graph.results) if graph.eqns[e].traits.cast)
    weights = next(v for v in casts if graph.avals[v].shape == (2, 4, 3, 64, 96) and graph.avals[v].itemsize == 2)
    assert lives.stored[weights]
    assert (lives.end[weights] <= lives.start[turned]) == (not scanned)


def test_nothing_is_turned_where_products_come_in_one_order() -> None:
    _, found = orders(gradient(*PLAIN), BF16((2, 64, 4, 8)), BF16((2, 96, 4, 8)), BF16((2, 96, 4, 8)))
    assert found == DimensionOrders()


@pytest.mark.parametrize(("heads", "turned"), [(4, 1), (1, 0)])
def test_dimensions_of_one_element_have_no_order(heads: int, turned: int) -> None:
    """[s,h] and [h,s] are one order if there is one head."""

    def fn(x: Any, y: Any, w: Any) -> Any:
        return jnp.exp((x @ w).T) + jnp.einsum("hd,sd->hs", y, x)

    _, found = orders(fn, BF16((64, 8)), BF16((heads, 8)), BF16((8, heads)))
    assert len(found.turned) == turned


def test_a_reshape_that_merges_dimensions_of_another_order_says_nothing() -> None:
    def fn(x: Any, w: Any, y: Any, z: Any) -> Any:
        merged = jnp.transpose(jnp.einsum("bsd,dh->bsh", x, w), (0, 2, 1)).reshape(32, 64)
        return jnp.exp(merged) + y @ z

    _, found = orders(fn, BF16((8, 64, 16)), BF16((16, 4)), BF16((32, 8)), BF16((8, 64)))
    assert not found.turned
