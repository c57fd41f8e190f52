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
