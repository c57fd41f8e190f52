"""Windows: what XLA:GPU merges of what a trip reduces, and of the sums of updates."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.backends import compile, devices, hlo
from autoshard.backends.known_compilers import XLA_GPU, XLA_TPU
from autoshard.costs.buckets import TRIP_BYTES
from autoshard.costs.overlap import overlap_windows
from autoshard.costs.unmerged_sums import unmerged_sums
from autoshard.costs.windows import OUTSIDE
from autoshard.ir.graph import build
from autoshard.ir.mesh import MeshAxes
from tests.installed import needs_gpu_compiler


@needs_gpu_compiler
def test_a_gpu_merges_what_a_trip_reduces() -> None:
    """Two small gradients of a layer, one collective; XLA:TPU does so outside of loops alone."""
    mesh = MeshAxes(("x",), (8,))

    def loss(w: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return jnp.tanh(x * w["scale"] + w["bias"]), None

        return jnp.sum(jax.lax.scan(layer, x, w)[0])

    w = {name: jax.ShapeDtypeStruct((4, 256), jnp.float32) for name in ("scale", "bias")}
    x = jax.ShapeDtypeStruct((64, 256), jnp.float32)
    graph = build(jax.make_jaxpr(jax.grad(loss))(w, x), "cpu")
    buckets = {of.name: overlap_windows(graph, of).buckets[OUTSIDE] for of in (XLA_GPU, XLA_TPU)}
    assert buckets == {"gpu": TRIP_BYTES, "tpu": 0}

    split, rows = (NamedSharding(devices.abstract(mesh), P(*spec)) for spec in ((None, "x"), ("x",)))
    step = jax.jit(jax.grad(loss), in_shardings=(split, rows), out_shardings=split)
    compiled = compile.compile(step.trace(w, x), topology="h100:1x8", mesh=mesh)
    found = [c for c in hlo.collectives(hlo.read(compiled.hlo_text), mesh) if c.kind == "reduce-scatter"]
    assert [c.trips for c in found] == [4, 4]
    assert len({c.instruction for c in found}) == 1


def _normed_twice(w: Any) -> Any:
    """Every weight over its norm, and over the norm of that."""
    return [(half := one / jnp.sum(one**2)) / jnp.sum(half**4) for one in w]


def _normed_by_all(w: Any) -> Any:
    """Every weight over the norm of all, and over its own norm after that."""
    total = sum(jnp.sum(one**2) for one in w)
    return [(part := one / total) / jnp.sum(part**4) for one in w]


@needs_gpu_compiler
@pytest.mark.parametrize(("update", "begins"), [(_normed_twice, 6), (_normed_by_all, 1)])
def test_a_gpu_begins_to_merge_sums_anew_at_one_that_depends_on_those_before(update: Any, begins: int) -> None:
    mesh = MeshAxes(("x",), (8,))
    w = [jax.ShapeDtypeStruct((256 * i, 256), jnp.float32) for i in range(1, 7)]
    graph = build(jax.make_jaxpr(update)(w), "cpu")
    anew = unmerged_sums(graph, frozenset(range(len(graph.eqns))))
    sums = [graph.results[e][0] for e, eqn in enumerate(graph.eqns) if eqn.primitive == "reduce_sum"]
    assert len(anew.intersection(sums)) == begins

    split = NamedSharding(devices.abstract(mesh), P("x"))
    step = jax.jit(update, in_shardings=split, out_shardings=split)
    compiled = compile.compile(step.trace(w), topology="h100:1x8", mesh=mesh)
    found = [c for c in hlo.collectives(hlo.read(compiled.hlo_text), mesh) if c.kind == "all-reduce"]
    assert len({c.instruction for c in found}) == begins + 1
