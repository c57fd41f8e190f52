"""Attention by einsum: the seconds and the memory that a plan counts of its scores, beside the compiled kernels."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from tests.installed import needs_gpu_compiler


@needs_gpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "groups", "heads", "wide"),
    [(1024, 4, 3, True), (1024, 12, 1, True), (2048, 2, 4, False), (1536, 1, 8, True), (1024, 0, 16, True)],
)
def test_the_kernels_of_scores_take_what_they_are_said_to(length: int, groups: int, heads: int, *, wide: bool) -> None:
    """Heads in groups are written as their einsum leaves them, and the gradient of their scores is transposed.

    `wide`: the softmax is of float32; no groups: heads by themselves.
    """

    def forward(q: Any, k: Any, v: Any) -> Any:
        scores, back = ("bskgd,btkd->bkgst", "bkgst,btkd->bskgd") if groups else ("bshd,bthd->bhst", "bhst,bthd->bshd")
        products = jnp.einsum(scores, q, k)
        weights = jax.nn.softmax(products.astype(jnp.float32) if wide else products).astype(jnp.bfloat16)
        return jnp.einsum(back, weights, v)

    def step(q: Any, k: Any, v: Any) -> Any:
        out, pull = jax.vjp(forward, q, k, v)
        return pull(jnp.tanh(out))

    of = (groups, heads) if groups else (heads,)
    queries = jax.ShapeDtypeStruct((16, length, *of, 128), jnp.bfloat16)
    keys = jax.ShapeDtypeStruct((16, length, groups or heads, 128), jnp.bfloat16)
    pins = {"q": P("data"), "k": P("data"), "v": P("data")}
    plan = autoshard.plan(step, queries, keys, keys, mesh={"data": 8}, hardware="h100:1x8", pins=pins, for_grad=False)
    found = plan.verify()
    assert found.compute is not None
    assert found.memory.compiled is not None
    assert found.compute.predicted_s == pytest.approx(found.compute.compiled_s, rel=0.12)
    assert found.memory.predicted.peak == pytest.approx(found.memory.compiled.peak, rel=0.12)


@needs_gpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("length", "groups", "heads"), [(2048, 4, 3), (4096, 2, 4)])
def test_a_recomputed_layer_needs_the_memory_that_it_is_said_to(length: int, groups: int, heads: int) -> None:
    """When the gradient of its scores is transposed, the weights of its softmax are gone."""
    width = groups * heads * 128

    def layer(w: Any, x: Any) -> Any:
        q, k, v = (jnp.einsum("bsd,d...->bs...", x, w[name]) for name in ("q", "k", "v"))
        scores = jnp.einsum("bskgd,btkd->bkgst", q, k).astype(jnp.float32)
        weights = jax.nn.softmax(scores).astype(jnp.bfloat16)
        return x + jnp.einsum("bkgst,btkd->bskgd", weights, v).reshape(x.shape) @ w["out"]

    def step(w: Any, x: Any) -> Any:
        gradient = jax.grad(lambda w: jnp.mean(jax.checkpoint(layer)(w, x).astype(jnp.float32) ** 2))(w)
        return jax.tree.map(lambda w, g: w - 1e-3 * g, w, gradient)

    shapes = {"q": (groups, heads, 128), "k": (groups, 128), "v": (groups, 128), "out": (width,)}
    w = {name: jax.ShapeDtypeStruct((width, *shape), jnp.bfloat16) for name, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((8, length, width), jnp.bfloat16)
    pins = {"x": P("data"), **{f"w['{name}']": P() for name in w}}
    plan = autoshard.plan(
        step, w, x, mesh={"data": 8}, hardware="h100:1x8", pins=pins, for_grad=False, donate_argnums=0, remat="written"
    )
    memory = plan.verify().memory
    assert memory.compiled is not None
    assert memory.predicted.peak == pytest.approx(memory.compiled.peak, rel=0.1)
