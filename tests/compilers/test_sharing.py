"""Which gathers XLA:TPU shares among their uses."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
import models
from autoshard.backends import compile, devices
from autoshard.costs.shared_gathers import NEAR
from autoshard.ir.mesh import MeshAxes
from autoshard.verification.collective_match import CollectiveRow
from models import layouts
from tests.costs.test_sharing import used_twice
from tests.installed import GPU, needs_tpu_compiler


@needs_tpu_compiler
@pytest.mark.parametrize(
    ("memory", "gathers"),
    [
        pytest.param(45_000_000, [(2 * 16 * 128 * 2048, 2)] * 2, marks=pytest.mark.slow),
        (None, [(2 * 2 * 16 * 128 * 2048, 1)]),
    ],
    ids=["each layer's", "the stack"],
)
def test_a_weight_whose_product_is_reshaped_is_gathered_once(
    memory: int | None, gathers: list[tuple[int, int]]
) -> None:
    """Before it partitions, XLA:TPU reshapes the weight in place of the product.

    Where there is room for the whole stack, it is cast, then gathered, ahead of both loops.
    """

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
        memory=memory,
    )
    assert [(c.kind, c.nbytes, c.trips) for c in plan.record.collectives] == [("all-gather", *one) for one in gathers]
    (row,) = plan.verify(compiler_options=compile.TPU_PLAIN_OPTIONS).rows
    assert (row.kind, row.emitted_bytes) == ("all-gather", sum(nbytes * trips for nbytes, trips in gathers))


@pytest.mark.parametrize("hardware", [pytest.param("h100:1x8", marks=GPU), "cpu:8"])
def test_a_call_of_checkpoint_gathers_its_weights_again(hardware: str) -> None:
    """Layers that are not scanned, in one dtype: no cast of a call's own stands before the gather."""

    def layer(weights: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
        return x + jnp.tanh(x @ weights[0]) @ weights[1]

    def loss(weights: list[tuple[jax.Array, jax.Array]], x: jax.Array) -> jax.Array:
        for one in weights:
            x = jax.checkpoint(layer)(one, x)
        return (x**2).mean()

    split = 3 * [(P("data"), P(None, "data"))]
    plan = autoshard.plan(
        jax.grad(loss),
        3 * [(jax.ShapeDtypeStruct((1024, 4096), jnp.float32), jax.ShapeDtypeStruct((4096, 1024), jnp.float32))],
        jax.ShapeDtypeStruct((32_768, 1024), jnp.float32),
        mesh={"data": 8},
        hardware=hardware,
        in_shardings=(split, P("data")),
        out_shardings=split,
    )
    gathers = [c for c in plan.record.collectives if c.kind == "all-gather"]
    assert [c.nbytes for c in gathers] == 3 * 2 * 2 * [4 * 1024 * 4096]
    (row,) = (row for row in plan.verify().rows if row.kind == "all-gather")
    assert (row.emitted_count, row.emitted_bytes) == (len(gathers), row.predicted_bytes)


def the_row(program: Callable[[jax.Array, jax.Array], jax.Array], w: Any) -> CollectiveRow:
    """The only collectives of a program of a weight and of activations, both split by their rows, on v5e:2x4."""
    x = jax.ShapeDtypeStruct((65_536, w.shape[1]), jnp.bfloat16)
    plan = autoshard.plan(
        program,
        w,
        x,
        mesh={"data": 8},
        hardware="tpu-v5e:2x4",
        in_shardings=(P("data"), P("data")),
        out_shardings=P("data"),
        for_grad=False,
    )
    (row,) = plan.verify(compiler_options=compile.TPU_PLAIN_OPTIONS).rows
    return row


@pytest.mark.slow  # most of a minute, in libtpu
@needs_tpu_compiler
def test_a_weight_that_is_gathered_for_each_use_is_so_where_its_product_is_reshaped() -> None:
    def program(w: jax.Array, x: jax.Array) -> jax.Array:
        y = used_twice(NEAR + 10)(w.astype(jnp.bfloat16), x)
        return y.reshape(len(y), 8, 128)

    row = the_row(program, jax.ShapeDtypeStruct((1024, 1024), jnp.float32))
    assert (row.kind, row.predicted_bytes, row.emitted_bytes) == ("all-gather", 2**22, 2**22)


@needs_tpu_compiler
@pytest.mark.parametrize("between", [8, pytest.param(NEAR + 40, marks=pytest.mark.slow)])
def test_libtpu_gathers_again_what_is_turned_for_far_products(between: int) -> None:
    """Once for near ones, under whatever names; as the plan has it."""

    def program(w: jax.Array, x: jax.Array) -> jax.Array:
        h = x @ w.T
        for n in range(between):
            h = jnp.sin(h) if n % 2 else h + 1
        return h @ w.T

    row = the_row(program, jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16))
    assert (row.kind, row.predicted_bytes, row.emitted_bytes) == ("all-gather", *2 * (2**23 * (1 + (between > NEAR)),))


@pytest.mark.slow
@needs_tpu_compiler
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
