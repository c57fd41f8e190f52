"""Uses that are far apart: libtpu gathers for each of them, and the plan knows."""

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
    found = autoshard.evaluate(
        layouts.constrained(step, hand.activation, meshes.abstract(MeshAxes.of(mesh))),
        state,
        batch,
        mesh=mesh,
        hardware="tpu-v5e:2x4",
        in_specs=specs,
        donate_argnums=0,
    )
    gathers = [c for c in found.record.collectives if c.kind == "all-gather" and c.value.startswith("bfloat16[1024")]
    assert len(gathers) > 0
    assert found.verify(compiler_options=compilers.TPU_PLAIN_OPTIONS).ok
