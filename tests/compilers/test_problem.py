"""Casts: XLA:GPU gathers the narrow side."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.backends import compile, devices, hlo
from autoshard.costs.casts import narrow_side
from autoshard.ir.graph import build
from autoshard.ir.mesh import MeshAxes
from tests.installed import needs_gpu_compiler


@needs_gpu_compiler
@pytest.mark.parametrize(
    ("made", "moved"),
    [
        (lambda w, s: w.astype(jnp.float32), jnp.bfloat16),
        (lambda w, s: w.astype(jnp.float32) * s, jnp.bfloat16),
        (lambda w, s: 3 * w.astype(jnp.float32), jnp.bfloat16),
        (lambda w, s: w.astype(jnp.float32) / s, jnp.bfloat16),
        (lambda w, s: s / w.astype(jnp.float32), jnp.float32),
        (lambda w, s: w.astype(jnp.float32) * s * s, jnp.float32),
        (lambda w, s: w.astype(jnp.float32).reshape(2048, 512), jnp.bfloat16),
        (lambda w, s: (w > 0).astype(jnp.float32), jnp.bool_),
    ],
)
def test_a_gpu_moves_the_narrow_side_of_a_widening_cast(made: Callable[..., Any], moved: Any) -> None:
    """And XLA:GPU gathers just that, wherever it is asked to."""
    mesh = MeshAxes(("x",), (8,))
    rows, whole = (NamedSharding(devices.abstract(mesh), P(*spec)) for spec in (("x", None), (None, None)))
    args = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16), jax.ShapeDtypeStruct((), jnp.float32)
    graph = build(jax.make_jaxpr(made)(*args), "cpu")
    assert narrow_side(graph, graph.producers, graph.outputs[0]).dtype == moved

    def gathered(w: jax.Array, s: jax.Array) -> jax.Array:
        pinned = jax.lax.with_sharding_constraint(made(w, s), rows)
        return jnp.sin(jax.lax.with_sharding_constraint(pinned, whole))

    traced = jax.jit(gathered, in_shardings=(rows, None)).trace(*args)
    compiled = compile.compile(traced, topology="h100:1x8", mesh=mesh)
    found = [c for c in hlo.collectives(hlo.read(compiled.hlo_text), mesh) if c.nbytes > 1024]
    assert [(c.kind, c.nbytes) for c in found] == [("all-gather", 1024**2 * jnp.dtype(moved).itemsize)]
