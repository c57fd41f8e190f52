"""Uses that are far apart: libtpu gathers for each of them, and the plan knows."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autoshard
import models
from autoshard import compilers, meshes
from autoshard.graph import build
from autoshard.mesh import MeshAxes
from autoshard.problem.sharing import NEAR, groups
from models import layouts

W = jax.ShapeDtypeStruct((16, 16), jnp.float32)


@pytest.mark.parametrize(("between", "parts"), [(NEAR - 10, 1), (NEAR + 10, 2)])
def test_uses_are_grouped_by_what_lies_between(between: int, parts: int) -> None:
    def program(w: jax.Array, x: jax.Array) -> jax.Array:
        x = x @ w
        for _ in range(between):
            x = jnp.sin(x)
        return x @ w

    graph = build(jax.make_jaxpr(program)(W, W))
    found = groups(graph).get(graph.inputs[0], ())
    assert len(found) == (parts if parts > 1 else 0)
    assert all(len(part) == 1 for part in found)


@pytest.mark.tpu_compiler
@pytest.mark.skipif(not compilers.available("tpu"), reason="the XLA:TPU compiler is not installed")
def test_libtpu_gathers_weights_again_for_the_backward_pass() -> None:
    """FSDP by hand: of three layers all but the last perceptron's weights are gathered twice."""
    step, (state, batch) = models.build("tiny-gpt2", layers=3, width=1024, heads=8, head_dim=128, hidden=4096, batch=8)
    hand = layouts.find("tiny-gpt2", "fsdp")
    specs = hand.specs(state, batch)
    mesh = {"data": 8}
    on: Any = meshes.abstract(MeshAxes.of(mesh))
    found = autoshard.evaluate(
        layouts.constrained(step, hand.activation, on),
        state,
        batch,
        mesh=mesh,
        hardware="tpu-v5e:2x4",
        in_specs=specs,
        donate_argnums=0,
    )
    of_weights = [c for c in found.record.collectives if c.kind == "all-gather" and c.nbytes > 2**20]
    assert len(of_weights) == 2 * 3 * 6 - 2
    (row,) = (
        row
        for row in found.verify(compiler_options=compilers.TPU_PLAIN_OPTIONS).rows
        if row.kind == "all-gather" and row.axes == ("data",)
    )
    assert row.emitted_bytes == pytest.approx(row.predicted_bytes, rel=1e-2)
