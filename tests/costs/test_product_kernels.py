"""Which kernels of contractions compute what, of small programs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.backends.known_compilers import XLA_TPU
from autoshard.costs.dimension_orders import DimensionOrders
from autoshard.costs.fusion import fusion_traits, levels
from autoshard.costs.liveness import live_ranges
from autoshard.costs.product_kernels import ProductKernels, product_kernels
from autoshard.costs.resharding import Unfused
from autoshard.costs.softmaxes import SoftmaxFacts
from autoshard.ir.graph import Graph, build
from autoshard.rules import rules_of

ROWS, WIDTH = 64, 32
X = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16)
W = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16)
WIDE = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
NBYTES = 2 * ROWS * WIDTH  # of an array of rows in bfloat16


def kernels(program: Callable[..., Any], *arguments: Any) -> tuple[Graph, ProductKernels]:
    graph = build(jax.make_jaxpr(program)(*arguments), "tpu")
    rules = rules_of(graph.eqns)
    traits = fusion_traits(graph, rules, (), XLA_TPU)
    facts = SoftmaxFacts(devices=1, stores_quotients=False, stores_gradients=False)
    lives = live_ranges(
        graph, rules, traits.fuses, XLA_TPU, orders=DimensionOrders(), softmax_facts=facts, loss_last=True
    )
    return graph, product_kernels(
        graph, traits.fuses, traits.flows, lives, levels(graph, traits.fuses, (), lives.maxima), traits.free
    )


def made_by(graph: Graph, primitive: str) -> list[int]:
    """The first results of the equations of a kind."""
    return [graph.results[e][0] for e, eqn in enumerate(graph.eqns) if eqn.primitive == primitive]


def products(graph: Graph) -> list[int]:
    return [e for e, eqn in enumerate(graph.eqns) if eqn.traits.contraction]


def test_a_product_that_nothing_else_reads_is_not_written() -> None:
    graph, found = kernels(lambda x, w: jnp.tanh(x @ w), X, W)
    (product,) = products(graph)
    kernel = found.kernels[product]
    assert not kernel.writes_product
    assert (kernel.adds_bytes, kernel.finishes_bytes) == (0, NBYTES)
    assert found.unfused[graph.results[product][0]] == Unfused(nbytes=NBYTES, before=False)
    assert found.host[made_by(graph, "tanh")[0]] == product


def test_a_product_that_something_else_reads_is_written() -> None:
    def twice(x: jax.Array, w: jax.Array) -> Any:
        y = x @ w
        return jnp.tanh(y), y @ w

    graph, found = kernels(twice, X, W)
    assert found.kernels[products(graph)[0]].writes_product


def test_the_last_of_two_products_reads_the_other() -> None:
    graph, found = kernels(lambda x, a, b: jnp.tanh(x @ a) * (x @ b), X, W, W)
    first, second = products(graph)
    assert found.kernels[first].writes_product
    assert found.kernels[first].finishes_bytes == 0
    assert not found.kernels[second].writes_product
    assert found.kernels[second].finishes_bytes == 2 * NBYTES  # the first is read, and the gate is written
    assert found.host[made_by(graph, "mul")[0]] == second


def test_an_operand_is_made_from_what_lies_in_memory() -> None:
    graph, found = kernels(lambda x, y, w: jnp.tanh(x + y) @ w, X, X, W)
    (product,) = products(graph)
    assert found.kernels[product].made_from == {0: graph.inputs[:2]}
    (operand,) = made_by(graph, "tanh")
    assert not found.apart[operand]
    assert found.unfused[operand] == Unfused(nbytes=3 * NBYTES, before=True)  # two are read, and one is written


def test_what_another_kernel_needs_is_computed_there_too() -> None:
    graph, found = kernels(lambda x, w: (jnp.tanh(x) @ w, jnp.tanh(x) + 1), X, W)
    assert all(found.apart[v] for v in made_by(graph, "add"))


def test_rows_are_reduced_in_the_kernel_but_not_read_again() -> None:
    """The maximum is found where the product is made; what subtracts it is in a kernel apart."""

    def softened(x: jax.Array, w: jax.Array) -> jax.Array:
        scores = (x @ w).astype(jnp.float32)
        return jnp.exp(scores - jnp.max(scores, 1, keepdims=True))

    graph, found = kernels(softened, X, W)
    (product,) = products(graph)
    (e,) = (e for e, eqn in enumerate(graph.eqns) if eqn.primitive == "reduce_max")
    assert e in found.reduced
    assert found.kernels[product].writes_product
    (result,) = made_by(graph, "exp")
    assert found.apart[result]
    assert found.host[result] < 0


def test_a_kernel_waits_for_what_does_not_need_its_product() -> None:
    """However many kernels make that, and goes on from there; of what they leave it reads what lies in memory."""

    def scaled(x: jax.Array, w: jax.Array) -> jax.Array:
        y, shares = x @ w, x / x.sum(axis=1, keepdims=True)
        return jnp.tanh(y * (shares - shares.max(axis=1, keepdims=True)))

    graph, found = kernels(scaled, X, W)
    (product,) = products(graph)
    assert found.host[made_by(graph, "mul")[-1]] == found.host[made_by(graph, "tanh")[0]] == product
    assert not found.kernels[product].writes_product


def test_a_kernel_does_not_wait_for_what_needs_its_product() -> None:
    def scaled(x: jax.Array, w: jax.Array) -> jax.Array:
        y = x @ w
        return y * jnp.sin(x * y.sum(axis=1, keepdims=True))

    graph, found = kernels(scaled, X, W)
    (product,) = products(graph)
    assert (found.host[[made_by(graph, name)[-1] for name in ("sin", "mul")]] == -1).all()
    assert found.kernels[product].writes_product


def test_of_two_products_the_later_waits() -> None:
    """For what needs the earlier."""

    def gated(x: jax.Array, w: jax.Array, u: jax.Array) -> jax.Array:
        y = x @ w
        return (y - y.max(axis=1, keepdims=True)) * (x @ u)

    graph, found = kernels(gated, X, W, W)
    earlier, later = products(graph)
    assert found.host[made_by(graph, "mul")[0]] == later
    assert found.kernels[earlier].writes_product
    assert not found.kernels[later].writes_product


def test_what_takes_a_wider_cast_reads_what_was_cast() -> None:
    """It is made apart for a reduction or another name, which do not; not for what is computed from its elements."""

    def softened(x: jax.Array, w: jax.Array) -> jax.Array:
        scores = (x @ w).astype(jnp.float32)
        return jnp.exp(scores - scores.max(axis=1, keepdims=True))

    graph, found = kernels(softened, X, W)
    (product,) = products(graph)
    (cast,), (below,) = (made_by(graph, name) for name in ("convert_element_type", "sub"))
    assert found.narrow[cast] == graph.results[product][0]
    assert found.kernels[product].writes_product  # the maximum is found where it is made, the rest is not
    assert found.apart[below]
    assert not found.apart[cast]
    for program in (lambda x: x.astype(jnp.float32).sum(axis=1), lambda x: jnp.sin(x.astype(jnp.float32).reshape(-1))):
        graph, found = kernels(program, X)
        assert found.apart[made_by(graph, "convert_element_type")[0]]


def test_a_wider_cast_is_read_as_what_was_cast() -> None:
    """What is stored wide for a gather is read narrow by all others."""

    def taken(x: jax.Array, w: jax.Array, at: jax.Array) -> Any:
        scores = (x @ w).astype(jnp.float32)
        return jnp.take_along_axis(scores, at, 1), jnp.exp(scores - jnp.max(scores, 1, keepdims=True))

    graph, found = kernels(taken, X, W, jax.ShapeDtypeStruct((ROWS, 1), jnp.int32))
    (product,) = products(graph)
    (cast,) = (graph.results[e][0] for e, eqn in enumerate(graph.eqns) if eqn.traits.cast and eqn.operands[0].ndim > 1)
    assert found.narrow == {cast: graph.results[product][0]}


def test_sums_of_terms_are_added_before_they_are_reduced() -> None:
    graph, found = kernels(lambda x, a, b: jnp.tanh(x @ a + x @ b), X, W, W)
    _, second = products(graph)
    kernel = found.kernels[second]
    assert kernel.adds_bytes == NBYTES  # the first term is read
    assert kernel.finishes_bytes == NBYTES
    (total,) = made_by(graph, "add")
    assert found.unfused[total] == Unfused(nbytes=NBYTES, before=False)


def test_kernels_end_where_a_loop_does() -> None:
    def looped(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(jax.lax.scan(lambda h, _: (h @ w, None), x, None, length=2)[0])

    graph, found = kernels(looped, X, W)
    (result,) = made_by(graph, "tanh")
    assert found.host[result] < 0
    assert found.apart[result]


def test_what_has_other_elements_than_the_product_is_in_no_kernel_of_it() -> None:
    graph, found = kernels(lambda x, w: jnp.tanh(jnp.concatenate([x @ w, x])), X, W)
    assert found.host[made_by(graph, "tanh")[0]] < 0


def test_casts_of_weights_are_made_where_they_are_multiplied() -> None:
    graph, found = kernels(lambda x, w: x @ w.astype(jnp.bfloat16), X, WIDE)
    (product,) = products(graph)
    assert found.kernels[product].made_from == {1: (graph.inputs[1],)}
    (cast,) = made_by(graph, "convert_element_type")
    assert found.unfused[cast] == Unfused(nbytes=(4 + 2) * WIDTH * WIDTH, before=True)
