"""Attention as XLA:TPU makes it, beside what plans say: which kernel makes a softmax, and what of it lies in memory."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.backends import compile
from tests.installed import needs_tpu_compiler

BF16 = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
DEVICES = 4


def masked(s: jax.Array) -> jax.Array:
    return jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s.astype(jnp.float32), -1e9)


def cast(s: jax.Array) -> jax.Array:
    return s.astype(jnp.float32)


def block(onward: Callable[[jax.Array], jax.Array], weights: Any, x: jax.Array) -> jax.Array:
    """Attention with its projections; key and value heads are shared by groups of queries if there are fewer."""
    to_q, to_k, to_v, to_x = weights
    q, k, v = (jnp.einsum("bsd,dnh->bsnh", x, w) for w in (to_q, to_k, to_v))
    q = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    if q.shape[3] == 1:
        scores = onward(jnp.einsum("bsnh,btnh->bnst", q[:, :, :, 0], k) / 8)
        mixed = jnp.einsum("bnst,btnh->bsnh", jax.nn.softmax(scores).astype(x.dtype), v)
    else:
        scores = onward(jnp.einsum("bskgh,btkh->bkgst", q, k) / 8)
        mixed = jnp.einsum("bkgst,btkh->bskgh", jax.nn.softmax(scores).astype(x.dtype), v)
    return x + jnp.einsum("bsnh,nhd->bsd", mixed.reshape(*x.shape[:2], -1, v.shape[3]), to_x)


def differentiated(fn: Callable[..., jax.Array]) -> Callable[..., Any]:
    return jax.grad(lambda weights, x: fn(weights, x).astype(jnp.float32).var(), argnums=(0, 1))


@needs_tpu_compiler
@pytest.mark.parametrize(
    ("hardware", "onward", "trains", "rows", "keys", "kv_heads", "head"),
    [
        ("tpu-v5e:2x2", masked, False, 4, 2048, 8, 128),
        ("tpu-v5e:2x2", masked, True, 8, 1024, 8, 64),
        ("tpu-v5p:2x2x1", cast, True, 4, 2048, 2, 128),
        pytest.param("tpu-v5e:2x2", cast, True, 4, 2048, 8, 128, marks=pytest.mark.slow),
        pytest.param("tpu-v5e:2x2", cast, False, 8, 1024, 8, 64, marks=pytest.mark.slow),
        pytest.param("tpu-v5e:2x2", masked, False, 2, 4096, 8, 128, marks=pytest.mark.slow),
        pytest.param("tpu-v5e:2x2", masked, True, 1, 4096, 8, 64, marks=pytest.mark.slow),
        pytest.param("tpu-v5e:2x2", masked, True, 4, 2048, 2, 128, marks=pytest.mark.slow),
        pytest.param("tpu-v5e:2x2", cast, True, 4, 2048, 2, 128, marks=pytest.mark.slow),
        pytest.param("tpu-v5p:2x2x1", masked, True, 8, 1024, 8, 64, marks=pytest.mark.slow),
        pytest.param("tpu-v5p:2x2x1", masked, True, 4, 2048, 2, 128, marks=pytest.mark.slow),
        pytest.param("tpu-v5p:2x2x1", cast, True, 8, 1024, 8, 64, marks=pytest.mark.slow),
        pytest.param("tpu-v5p:2x2x1", cast, False, 1, 2048, 16, 64, marks=pytest.mark.slow),
    ],
)
def test_attention_takes_the_time_and_the_memory_of_its_kernels(
    hardware: str, onward: Callable[..., Any], rows: int, keys: int, kv_heads: int, head: int, *, trains: bool
) -> None:
    """What lies in vector memory from one kernel to the next is planned as in memory: their peaks are lower.

    In a forward pass XLA:TPU may make values, and what heads mix, in the kernel that takes them, which reads and
    writes meanwhile: planned as kernels of their own, they take up to 8 % more.
    """
    heads = max(8, kv_heads)
    width = heads * head
    weights = tuple(
        BF16(shape)
        for shape in ((width, heads, head), (width, kv_heads, head), (width, kv_heads, head), (heads, head, width))
    )
    fn = partial(block, onward)
    split, whole = P("x"), (P(),) * 4
    plan = autoshard.plan(
        differentiated(fn) if trains else fn,
        weights,
        BF16((rows * DEVICES, keys, width)),
        mesh={"x": DEVICES},
        hardware=hardware,
        in_shardings=(whole, split),
        out_shardings=(whole, split) if trains else split,
    )
    verified = plan.verify(compiler_options=compile.TPU_PLAIN_OPTIONS)
    compute, memory = verified.compute, verified.memory
    assert compute is not None
    assert memory.compiled is not None
    assert compute.predicted_s == pytest.approx(compute.compiled_s, rel=0.045 if trains else 0.08)
    assert 0.95 < memory.predicted.peak / memory.compiled.peak < 1.25


@needs_tpu_compiler
@pytest.mark.parametrize(("dtype", "heads"), [(jnp.float32, 1), (jnp.float32, 2), (jnp.bfloat16, 1)])
def test_by_passes_scores_are_written_once_and_read_twice(dtype: Any, heads: int) -> None:
    """In a forward pass of float32 factors, and of groups with one head, whose matrices einsum transposes.

    Queries, keys, values and what heads mix lie there as products cast them, and are read and written so.
    """
    width, groups, size = 1024, 8, 128

    def program(weights: Any, x: jax.Array) -> jax.Array:
        to_q, to_k, to_v, to_x = weights
        q = jnp.einsum("bsd,dkgh->bskgh", x, to_q)
        k, v = (jnp.einsum("bsd,dkh->bskh", x, w) for w in (to_k, to_v))
        scores = masked(jnp.einsum("bskgh,btkh->bkgst", q, k) / 8)
        mixed = jnp.einsum("bkgst,btkh->bskgh", jax.nn.softmax(scores).astype(x.dtype), v)
        return x + jnp.einsum("bskgh,kghd->bsd", mixed, to_x)

    of_q, of_k, of_x = (width, groups, heads, size), (width, groups, size), (groups, heads, size, width)
    weights = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in (of_q, of_k, of_k, of_x))
    x, split = jax.ShapeDtypeStruct((4 * DEVICES, 1024, width), dtype), ((P(),) * 4, P("x"))
    plan = autoshard.plan(
        program, weights, x, mesh={"x": DEVICES}, hardware="tpu-v5e:2x2", in_shardings=split, out_shardings=P("x")
    )
    compute = plan.verify().compute
    assert compute is not None
    assert compute.predicted_s == pytest.approx(compute.compiled_s, rel=0.02)
