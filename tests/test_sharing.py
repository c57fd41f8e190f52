"""Uses that are far apart: libtpu gathers for each of them, and the plan knows."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
import models
from autoshard import compilers, meshes
from autoshard.graph import build
from autoshard.mesh import MeshAxes
from autoshard.problem.sharing import NEAR, SURE, doubtful, groups
from models import layouts

W = jax.ShapeDtypeStruct((16, 16), jnp.float32)


@pytest.mark.parametrize(("between", "parts"), [(SURE - 10, 1), (NEAR - 10, 1), (NEAR + 10, 2)])
def test_uses_are_grouped_by_what_lies_between(between: int, parts: int) -> None:
    """Where it is doubtful what libtpu makes of them, they are one group, and pinned as one."""

    def program(w: jax.Array, x: jax.Array) -> jax.Array:
        x = x @ w
        for _ in range(between):
            x = jnp.sin(x)
        return x @ w

    graph = build(jax.make_jaxpr(program)(W, W))
    found = groups(graph).get(graph.inputs[0], ())
    assert len(found) == (parts if parts > 1 else 0)
    assert all(len(part) == 1 for part in found)
    assert doubtful(graph) == ({graph.inputs[0]} if between == NEAR - 10 else set())


@pytest.mark.parametrize(("between", "gathers"), [(10, 1), (NEAR + 10, 2)])
def test_a_plan_pins_what_is_gathered_for_groups_where_it_is_used(between: int, gathers: int) -> None:
    """One constraint where the weight comes in would be one gather, of which the second use is far."""

    def program(w: jax.Array, x: jax.Array) -> jax.Array:
        x = x @ w
        for _ in range(between):
            x = jnp.sin(x)
        return x @ w

    w, x = (jax.ShapeDtypeStruct((rows, 1024), jnp.bfloat16) for rows in (1024, 65_536))
    plan = autoshard.plan(
        program,
        w,
        x,
        mesh={"data": 8},
        hardware="tpu-v5e:2x4",
        in_shardings=(P("data"), P("data")),
        out_shardings=P("data"),
        constraints="all",
    )
    assert [(c.kind, c.nbytes) for c in plan.record.collectives] == gathers * [("all-gather", 2 * 1024 * 1024)]
    assert (0 in plan.record.pins.inputs) == (gathers == 1)


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
