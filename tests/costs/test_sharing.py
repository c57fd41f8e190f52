"""Uses that are far apart: libtpu gathers for each of them, and the plan knows."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
import models
from autoshard.backends import compile, devices
from autoshard.costs.shared_gathers import NEAR, SURE, doubtful, groups
from autoshard.ir.graph import build
from autoshard.ir.mesh import MeshAxes
from models import layouts

W = jax.ShapeDtypeStruct((16, 16), jnp.float32)


def used_twice(between: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Two products with one weight, and so many equations in between."""

    def program(w: jax.Array, x: jax.Array) -> jax.Array:
        x = x @ w
        for _ in range(between):
            x = jnp.sin(x)
        return x @ w

    return program


@pytest.mark.parametrize(("between", "parts"), [(SURE - 10, 1), (NEAR - 10, 1), (NEAR + 10, 2)])
def test_uses_are_grouped_by_what_lies_between(between: int, parts: int) -> None:
    """Where it is doubtful what libtpu makes of them, they are one group, and pinned as one."""

    graph = build(jax.make_jaxpr(used_twice(between))(W, W))
    found = groups(graph).get(graph.inputs[0], ())
    assert len(found) == (parts if parts > 1 else 0)
    assert all(len(part) == 1 for part in found)
    assert doubtful(graph) == ({graph.inputs[0]} if between == NEAR - 10 else set())


@pytest.mark.parametrize(("between", "gathers"), [(10, 1), (NEAR + 10, 2)])
def test_a_plan_pins_what_is_gathered_for_groups_where_it_is_used(between: int, gathers: int) -> None:
    """One constraint where the weight comes in would be one gather, of which the second use is far."""

    w, x = (jax.ShapeDtypeStruct((rows, 1024), jnp.bfloat16) for rows in (1024, 65_536))
    plan = autoshard.plan(
        used_twice(between),
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


@pytest.mark.skipif(not compile.available("tpu"), reason="the TPU compiler is not installed")
def test_a_weight_whose_product_is_reshaped_is_gathered_once() -> None:
    """Before it partitions, XLA:TPU reshapes the weight in place of the product."""

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        heads = x.reshape(16, 512, 4, 4, 128)
        heads = (heads * heads[..., :1]).reshape(16, 512, 16, 128)
        return jnp.tanh(jnp.einsum("bsnh,nhd->bsd", heads, w.astype(jnp.bfloat16))), None

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        y, _ = jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), x, w)
        return (y.astype(jnp.float32) ** 2).sum()

    plan = autoshard.plan(
        jax.grad(loss),
        jax.ShapeDtypeStruct((16, 512, 2048), jnp.bfloat16),
        jax.ShapeDtypeStruct((2, 16, 128, 2048), jnp.float32),
        mesh={"data": 8},
        hardware="tpu-v5e:2x4",
        in_shardings=(P("data"), P(None, "data")),
        out_shardings=P("data"),
    )
    assert [(c.kind, c.nbytes, c.trips) for c in plan.record.collectives] == [
        ("all-gather", 2 * 16 * 128 * 2048, 2)
    ] * 2
    (row,) = plan.verify(compiler_options=compile.TPU_PLAIN_OPTIONS).rows
    assert (row.kind, row.emitted_bytes) == ("all-gather", 2 * 2 * 2 * 16 * 128 * 2048)


@pytest.mark.skipif(not compile.available("tpu"), reason="the TPU compiler is not installed")
def test_a_weight_that_is_gathered_for_each_use_is_so_where_its_product_is_reshaped() -> None:
    def program(w: jax.Array, x: jax.Array) -> jax.Array:
        y = used_twice(NEAR + 10)(w.astype(jnp.bfloat16), x)
        return y.reshape(len(y), 8, 128)

    plan = autoshard.plan(
        program,
        jax.ShapeDtypeStruct((1024, 1024), jnp.float32),
        jax.ShapeDtypeStruct((65_536, 1024), jnp.bfloat16),
        mesh={"data": 8},
        hardware="tpu-v5e:2x4",
        in_shardings=(P("data"), P("data")),
        out_shardings=P("data"),
        for_grad=False,
    )
    (row,) = plan.verify(compiler_options=compile.TPU_PLAIN_OPTIONS).rows
    assert (row.kind, row.predicted_bytes, row.emitted_bytes) == ("all-gather", 2**22, 2**22)


def test_a_pending_sum_is_finished_once_however_far_its_uses_are() -> None:
    def program(x: jax.Array, w: jax.Array, square: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = x @ w
        y = h @ square
        for _ in range(NEAR + 10):
            y = jnp.sin(y)
        return y, jnp.einsum("ij,ik->jk", h, y)

    x, w, square = (jax.ShapeDtypeStruct((m, n), jnp.bfloat16) for m, n in ((1024, 4096), (4096, 1024), (1024, 1024)))
    plan = autoshard.plan(
        program,
        x,
        w,
        square,
        mesh={"data": 8},
        hardware="tpu-v5e:2x4",
        in_shardings=(P(None, "data"), P("data"), P()),
        out_shardings=(P(), P()),
        constraints="all",
    )
    assert [c.kind for c in plan.record.collectives] == ["all-reduce"]
    assert ((0,), 0) in plan.record.pins.made
    assert not plan.record.pins.taken


@pytest.mark.parametrize(("between", "stays"), [(SURE - 10, False), (NEAR - 10, True)])
def test_a_gathered_weight_stays_pinned_where_libtpu_may_gather_it_twice(between: int, *, stays: bool) -> None:
    x = jax.ShapeDtypeStruct((65_536, 1024), jnp.bfloat16)
    plan = autoshard.plan(
        used_twice(between),
        jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16),
        x,
        mesh={"data": 8},
        hardware="tpu-v5e:2x4",
        in_shardings=(P("data"), P("data")),
        out_shardings=P("data"),
    )
    assert (0 in plan.record.pins.inputs) == stays


@pytest.mark.tpu_compiler
@pytest.mark.skipif(not compile.available("tpu"), reason="the XLA:TPU compiler is not installed")
def test_libtpu_gathers_weights_again_for_the_backward_pass() -> None:
    """FSDP by hand: of three layers all but the last perceptron's weights are gathered twice."""
    step, (state, batch) = models.build("tiny-gpt2", layers=3, width=1024, heads=8, head_dim=128, hidden=4096, batch=8)
    hand = layouts.find("tiny-gpt2", "fsdp")
    specs = hand.specs(state, batch)
    mesh = {"data": 8}
    on: Any = devices.abstract(MeshAxes.of(mesh))
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
        for row in found.verify(compiler_options=compile.TPU_PLAIN_OPTIONS).rows
        if row.kind == "all-gather" and row.axes == ("data",)
    )
    assert row.emitted_bytes == pytest.approx(row.predicted_bytes, rel=1e-2)
