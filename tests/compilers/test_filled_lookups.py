"""Where a lookup's rows are split, its sum is scattered, although it fills what it does not find."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.verification.collective_match import agrees
from tests.installed import GPU, TPU


def look_up(table: jax.Array, indices: jax.Array) -> jax.Array:
    return jnp.take(table, indices, axis=0)


@pytest.mark.parametrize(
    ("compiler", "hardware"),
    [
        pytest.param("gpu", "h100:1x8", marks=GPU),
        pytest.param("tpu", "v5e:2x4", marks=TPU),
    ],
)
def test_between_the_sum_and_the_cut_stands_no_select(compiler: str, hardware: str) -> None:
    table = jax.ShapeDtypeStruct((1 << 20, 4096), jnp.bfloat16)
    indices = jax.ShapeDtypeStruct((8, 1024), jnp.int32)
    plan = autoshard.plan(
        look_up,
        table,
        indices,
        mesh={"model": 8},
        hardware=hardware,
        in_shardings=(P("model"), P()),
        out_shardings=P(None, None, "model"),
    )
    rows = plan.verify(compiler).rows
    assert {(row.kind, row.axes) for row in rows} == {("reduce-scatter", ("model",))}
    assert agrees(rows, 0.01)
