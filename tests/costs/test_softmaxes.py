"""What XLA:TPU keeps of a softmax, and the kernel that makes it: by what is computed between a product and it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.backends.known_compilers import XLA_TPU
from autoshard.costs.dimension_orders import DimensionOrders
from autoshard.costs.fusion import fusion_traits, levels
from autoshard.costs.liveness import LiveRanges, live_ranges
from autoshard.costs.product_kernels import ProductKernels, product_kernels
from autoshard.costs.softmaxes import LEAST_QUOTIENTS, LONG_ROW, SoftmaxFacts
from autoshard.ir.graph import Graph, build
from autoshard.rules import rules_of

F32 = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
BF16 = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
ROWS, QUERIES, KEYS, HEADS, SIZE = 4, 32, 64, 2, 8


def kept(
    fn: Callable[..., Any], *args: Any, devices: int = 1, quotients: bool = False, gradients: bool = False
) -> tuple[Graph, LiveRanges, ProductKernels]:
    graph = build(jax.make_jaxpr(fn)(*args), "tpu")
    rules = rules_of(graph.eqns)
    traits = fusion_traits(graph, rules, (), XLA_TPU)
    facts = SoftmaxFacts(devices=devices, stores_quotients=quotients, stores_gradients=gradients)
    lives = live_ranges(
        graph, rules, traits.fuses, XLA_TPU, orders=DimensionOrders(), softmax_facts=facts, loss_last=True
    )
    level = levels(graph, traits.fuses, (), lives.maxima)
    return graph, lives, product_kernels(graph, traits.fuses, traits.flows, lives, level, traits.free)


def results(graph: Graph, primitive: str) -> list[int]:
    return [graph.results[e][0] for e, eqn in enumerate(graph.eqns) if eqn.primitive == primitive]


def inputs(dtype: Any = jnp.bfloat16, keys: int = KEYS) -> tuple[Any, ...]:
    q, k = (jax.ShapeDtypeStruct((ROWS, n, HEADS, SIZE), dtype) for n in (QUERIES, keys))
    return q, k, k


def masked(s: jax.Array) -> jax.Array:
    return jnp.where(jnp.arange(s.shape[-1]) <= jnp.arange(s.shape[-2])[:, None], s, jnp.finfo(s.dtype).min)


def attention(q: Any, k: Any, v: Any, *, onward: Callable[[jax.Array], jax.Array], product: Any = None) -> jax.Array:
    scores = onward(jnp.einsum("bqnh,bknh->bnqk", q, k, preferred_element_type=product))
    return jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(scores).astype(v.dtype), v)


def gradient(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The result and the gradients of a function."""

    def both(*args: Any) -> Any:
        found, pull = jax.vjp(fn, *args)
        return found, pull(args[0])

    return both


def wide(s: jax.Array) -> jax.Array:
    return s.astype(jnp.float32)


@pytest.mark.parametrize(
    ("onward", "product", "dtype", "inside"),
    [
        pytest.param(lambda s: masked(wide(s)), None, jnp.bfloat16, True, id="masked in float32"),
        pytest.param(lambda s: wide(s) / 8, None, jnp.bfloat16, True, id="scaled in float32"),
        pytest.param(lambda s: 30 * jnp.tanh(wide(s)), None, jnp.bfloat16, True, id="capped in float32"),
        pytest.param(lambda s: s, jnp.float32, jnp.bfloat16, True, id="a float32 product"),
        pytest.param(masked, jnp.float32, jnp.bfloat16, True, id="a float32 product, masked"),
        pytest.param(lambda s: s, None, jnp.float32, True, id="float32 factors"),
        pytest.param(wide, None, jnp.bfloat16, False, id="cast"),
        pytest.param(lambda s: wide(masked(s / 8)), None, jnp.bfloat16, False, id="masked and cast"),
    ],
)
def test_the_scores_kernel_makes_the_softmax_where_something_is_computed_in_float32(
    onward: Callable[[jax.Array], jax.Array], product: Any, dtype: Any, *, inside: bool
) -> None:
    """Its exponentials lie in memory then, and no scores; else scores do, as their product leaves them."""
    graph, lives, kernels = kept(partial(attention, onward=onward, product=product), *inputs(dtype))
    (numerators,), (scores, _) = results(graph, "exp"), results(graph, "dot_general")
    found, aval = lives.numerators[numerators], graph.avals[numerators]
    assert found.product == scores
    assert found.by_passes != inside
    assert found.nbytes(aval) == aval.size * (4 if inside else graph.avals[scores].itemsize)
    assert lives.stored[numerators]
    assert not lives.stored[scores]  # the two are one in memory,
    assert lives.start[numerators] == lives.start[scores]  # from when the product is made
    first = graph.producers[scores][0]
    assert (kernels.host[numerators] == first) == inside
    assert (found.maximum is not None) == inside
    assert kernels.kernels[first].writes_product != inside


def test_masked_scores_of_float32_factors_lie_there_and_their_exponentials_are_computed_of_them() -> None:
    graph, lives, kernels = kept(partial(attention, onward=masked), *inputs(jnp.float32), devices=ROWS)
    (numerators,), (scores, _) = results(graph, "exp"), results(graph, "dot_general")
    assert lives.stored[numerators] != lives.stored[scores]
    assert lives.numerators[numerators].are_products(graph.avals[numerators], np.array([1, ROWS])).all()
    assert kernels.host[numerators] < 0


def test_a_long_row_needs_a_kernel_of_its_own_which_reads_scores_in_float32() -> None:
    fn = partial(attention, onward=lambda s: masked(wide(s)))
    for keys, inside in ((LONG_ROW, True), (2 * LONG_ROW, False)):
        graph, lives, kernels = kept(fn, *inputs(keys=keys))
        (numerators,), (product, _) = results(graph, "exp"), results(graph, "dot_general")
        (scores,) = (v for v in results(graph, "select_n") if graph.avals[v].ndim == 4)
        assert lives.stored[scores] != inside
        assert (kernels.host[numerators] < 0) != inside
        assert not lives.stored[product]


def test_a_device_with_one_sequence_keeps_its_product() -> None:
    fn = partial(attention, onward=lambda s: masked(wide(s)))
    for devices, few in ((ROWS - 1, False), (ROWS, True)):
        graph, lives, _ = kept(fn, *inputs(), devices=devices)
        (numerators,) = results(graph, "exp")
        assert lives.numerators[numerators].few == few
        assert (lives.numerators[numerators].maximum is None) == few


def test_transposed_scores_are_kept_for_a_gradient_as_their_product_leaves_them() -> None:
    """In a forward pass alone, and where nothing is transposed, the numerators are, unless groups have one head."""

    def heads(q: Any, k: Any, v: Any, *, order: str) -> Any:
        scores = jax.nn.softmax(wide(jnp.einsum(f"bskgd,btkd->{order}", q, k)) / 8)
        return jnp.einsum(f"{order},btkd->bskgd", scores.astype(jnp.bfloat16), v)

    for differentiated, order, size, by_passes in (
        (True, "bksgt", 3, False),
        (True, "bkgst", 3, True),
        (False, "bkgst", 3, False),
        (False, "bkgst", 1, True),
        (False, "bksgt", 1, False),
    ):
        fn, args = partial(heads, order=order), (BF16((4, 64, 2, size, 8)), BF16((4, 64, 2, 8)), BF16((4, 64, 2, 8)))
        graph, lives, _ = kept(gradient(fn) if differentiated else fn, *args)
        (numerators,) = results(graph, "exp")
        assert lives.stored[numerators]
        assert lives.numerators[numerators].by_passes == by_passes


@pytest.mark.parametrize("masks", [True, False])
@pytest.mark.parametrize("differentiated", [True, False])
@pytest.mark.parametrize("stores", [True, False])
def test_quotients_lie_in_memory_where_chips_store_them(*, stores: bool, differentiated: bool, masks: bool) -> None:
    """For several products, unless scores are mere casts: see `cost_models.Machine.stores_quotients`."""
    fn = partial(attention, onward=lambda s: masked(wide(s)) if masks else wide(s))
    args = inputs(keys=LEAST_QUOTIENTS // QUERIES)
    graph, lives, _ = kept(gradient(fn) if differentiated else fn, *args, quotients=stores)
    (scores, *_) = results(graph, "dot_general")
    divided = next(
        graph.results[e][0]
        for e, eqn in enumerate(graph.eqns)
        if eqn.traits.cast and eqn.results[0].itemsize == 2 and eqn.results[0].shape == graph.avals[scores].shape
    )
    assert lives.stored[divided] == (stores and differentiated and masks)
    assert lives.absorbed[divided] != lives.stored[divided]


def test_few_quotients_are_divided_for_each_product() -> None:
    """Fewer of one matrix of scores than XLA:TPU stores: `compilers/test_lanes.py` compiles such."""
    fn = gradient(partial(attention, onward=lambda s: masked(wide(s))))
    for keys in (LEAST_QUOTIENTS // QUERIES, LEAST_QUOTIENTS // QUERIES - 1):
        graph, lives, _ = kept(fn, *inputs(keys=keys), quotients=True)
        shape = graph.avals[results(graph, "dot_general")[0]].shape
        quotients = [
            graph.results[e][0]
            for e, eqn in enumerate(graph.eqns)
            if eqn.traits.cast and eqn.results[0].itemsize == 2 and eqn.results[0].shape == shape
        ]
        assert lives.stored[quotients[0]] == (keys == LEAST_QUOTIENTS // QUERIES)


def test_one_number_is_no_softmax() -> None:
    def softmax(x: jax.Array) -> jax.Array:
        raised = jnp.exp(x)
        return raised / jnp.sum(raised)

    graph, lives, _ = kept(softmax, F32(()))
    assert results(graph, "div")
    assert not lives.numerators


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("stores", "devices"), [(True, 1), (False, 1), (True, ROWS), (False, ROWS)])
def test_gradients_of_scores_lie_in_memory_where_chips_store_them(devices: int, *, stores: bool, turned: bool) -> None:
    """Not those of a device's one sequence, unless the product is transposed, as that of grouped heads is."""

    def grouped(q: Any, k: Any, v: Any) -> Any:
        weights = jax.nn.softmax(wide(jnp.einsum("bqgnh,bkgh->bgnqk", q, k)))
        return jnp.einsum("bgnqk,bkgh->bqgnh", weights.astype(v.dtype), v)

    shared = BF16((ROWS, KEYS, 1, SIZE))
    args = (BF16((ROWS, QUERIES, 1, HEADS, SIZE)), shared, shared) if turned else inputs()
    fn = gradient(grouped if turned else partial(attention, onward=wide))
    graph, lives, _ = kept(fn, *args, gradients=stores, devices=devices)
    *_, made, _ = [e for e, eqn in enumerate(graph.eqns) if eqn.traits.contraction]
    read = {x for x in graph.operands[made] if graph.avals[x].size == ROWS * HEADS * QUERIES * KEYS}
    assert len(read) == 1
    assert bool((lives.stored | lives.named)[list(read)].any()) == (stores and (turned or devices == 1))
