"""What XLA:TPU moves to products of float32, which it multiplies in bfloat16."""

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

F32 = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
ROWS, WIDTH = 16_384, 2048
X, W, STACK = F32((ROWS, WIDTH)), F32((WIDTH, WIDTH)), F32((4, WIDTH, WIDTH))


def read_elsewhere(x: Any, w: Any) -> Any:
    """The gather is for the product alone: the sum takes what a device has."""
    y = jnp.tanh(x) * 2
    return y @ w, y + 1


def read_whole(x: Any, w: Any) -> Any:
    """As it is: something else needs it whole, too."""
    y = jnp.tanh(x)
    return y @ w, y + 1


def updated(x: Any, w: Any) -> Any:
    """The update moves its part of the weight as it is, and cuts none from what the product takes."""
    return jnp.tanh(x @ w), w * 2


def summed(x: Any, a: Any, b: Any) -> Any:
    """Products' results are float32 until they are taken by another one."""
    return jnp.tanh(x @ a @ b)


def constant(x: Any, w: Any) -> Any:
    return jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=4)[0]


def sliced(x: Any, ws: Any) -> Any:
    def layer(h: Any, w: Any) -> Any:
        heads = jnp.einsum("bd,dhk->bhk", h, w.reshape(WIDTH, 16, -1))
        return jnp.tanh(heads.reshape(h.shape)), None

    return jax.lax.scan(layer, x, ws)[0]


def reversed_(x: Any, ws: Any) -> Any:
    """Gathered ahead of both loops, as it is cast there, or in both; gradients are summed in float32."""
    layer = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None))
    return jax.grad(lambda ws: jnp.sum(jax.lax.scan(layer, x, ws)[0] ** 2))(ws)


def experts(x: Any, w: Any) -> Any:
    return jnp.einsum("bte,bef->btf", x, w)


def convolved(x: Any, w: Any) -> Any:
    layout = ("NHWC", "HWIO", "NHWC")
    return jnp.tanh(jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=layout))


@needs_tpu_compiler
def test_an_update_moves_an_input_as_it_is_beside_the_product_that_casts_it() -> None:
    plan = autoshard.plan(
        updated,
        X,
        W,
        mesh={"x": 8},
        hardware="tpu-v5e:2x4",
        in_shardings=(P("x"), P(None, "x")),
        out_shardings=(P("x"), P("x")),
    )
    rows = {row.kind: (row.predicted_bytes, row.emitted_bytes) for row in plan.verify().rows}
    assert rows == {"all-gather": (2 * WIDTH**2,) * 2, "all-to-all": (4 * WIDTH**2 // 8,) * 2}


def gathers(program: Callable[..., Any], *arguments: Any, **options: Any) -> int:
    """Bytes that a plan gathers; everything that it moves is emitted."""
    plan = autoshard.plan(program, *arguments, mesh={"x": 8}, hardware="tpu-v5e:2x4", **options)
    rows = {row.kind: row for row in plan.verify(compiler_options=compile.TPU_PLAIN_OPTIONS).rows}
    assert {k: row.predicted_bytes for k, row in rows.items()} == {k: row.emitted_bytes for k, row in rows.items()}
    return rows["all-gather"].predicted_bytes


@needs_tpu_compiler
@pytest.mark.parametrize(
    ("program", "arguments", "come", "leave", "gathered"),
    [
        (read_elsewhere, (X, W), (P("x"), P(None, "x")), (P(None, "x"), P("x")), 2 * WIDTH * WIDTH),
        (read_whole, (X, W), (P("x"), P(None, "x")), (P(None, "x"), P()), 4 * ROWS * WIDTH),
        (summed, (X, W, W), (P("x"), P("x"), P("x")), P("x"), 2 * 2 * WIDTH * WIDTH),
        (constant, (X, W), (P("x"), P("x")), P("x"), 2 * WIDTH * WIDTH),
        (sliced, (X, STACK), (P("x"), P(None, "x")), P("x"), 4 * 2 * WIDTH * WIDTH),
        (
            convolved,
            (F32((64, 64, 64, 256)), F32((3, 3, 256, 512))),
            (P("x"), P(None, None, None, "x")),
            P("x"),
            2 * 9 * 256 * 512,
        ),
    ],
    ids=["elsewhere", "whole", "summed", "constant", "sliced", "convolved"],
)
def test_bytes_are_those_of_what_is_multiplied(
    program: Callable[..., Any], arguments: Any, come: Any, leave: Any, gathered: int
) -> None:
    assert gathers(program, *arguments, in_shardings=come, out_shardings=leave) == gathered


@needs_tpu_compiler
@pytest.mark.parametrize(
    ("memory", "times"), [(140_000_000, 2), pytest.param(None, 1, marks=pytest.mark.slow)], ids=["in-both", "ahead"]
)
def test_a_stack_is_gathered_in_both_loops_or_once_ahead_of_them(memory: int | None, times: int) -> None:
    """The first product of a trip waits for its weights, so once is faster where the memory is there."""
    sharded = {"in_shardings": (P("x"), P(None, "x")), "out_shardings": P(None, "x")}
    assert gathers(reversed_, X, STACK, memory=memory, **sharded) == times * 4 * 2 * WIDTH * WIDTH


@needs_tpu_compiler
@pytest.mark.parametrize(
    ("second", "leave", "kind"), [(P(), P("x"), "reduce-scatter"), (P(None, "x"), P(None, "x"), "all-reduce")]
)
def test_sums_of_products_are_finished_in_float32(second: P, leave: P, kind: str) -> None:
    plan = autoshard.plan(
        lambda x, a, b: (x @ a) @ b,
        F32((256, WIDTH)),
        W,
        W,
        mesh={"x": 8},
        hardware="tpu-v5e:2x4",
        in_shardings=(P(None, "x"), P("x"), second),
        out_shardings=leave,
    )
    (row,) = plan.verify().rows
    assert (row.kind, row.predicted_bytes, row.emitted_bytes) == (kind, 4 * 256 * WIDTH, 4 * 256 * WIDTH)


@needs_tpu_compiler
def test_a_ragged_product_is_cast_too() -> None:
    plan = autoshard.plan(
        lambda x, w, sizes: jnp.tanh(jax.lax.ragged_dot(x, w, sizes)),
        X,
        F32((8, WIDTH, 256)),
        jax.ShapeDtypeStruct((8,), jnp.int32),
        mesh={"x": 8},
        hardware="tpu-v5e:2x4",
        in_shardings=(P("x"), P(None, "x"), P()),
        out_shardings=P("x"),
    )
    rows = [(row.kind, row.predicted_bytes, row.emitted_bytes) for row in plan.verify().rows]
    assert ("all-to-all", 8 * WIDTH * 256 * 2, 8 * WIDTH * 256 * 2) in rows


@needs_tpu_compiler
def test_an_all_to_all_moves_what_is_multiplied() -> None:
    plan = autoshard.plan(
        experts,
        F32((64, ROWS, 256)),
        F32((64, 256, 512)),
        mesh={"x": 8},
        hardware="tpu-v5e:2x4",
        in_shardings=(P("x"), P(None, "x")),
        out_shardings=P("x"),
    )
    (row,) = plan.verify().rows
    assert (row.kind, row.predicted_bytes, row.emitted_bytes) == ("all-to-all", 2**21, 2**21)
