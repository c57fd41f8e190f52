"""Ragged products as compilers make them: their FLOPs, their copies, and the sums that are not scattered."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.ir import graph
from autoshard.rules import rule_of
from autoshard.rules.rule import FactorKind
from tests.compilers.test_compiler_models import collectives, constrained, text_of
from tests.installed import GPU, TPU


def experts(rows: int, width: int, features: int, count: int) -> tuple[Any, ...]:
    """Abstract rows, two matrices of each expert, and how many rows each has."""
    shapes = (rows, width), (count, width, features), (count, features, width)
    return *(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes), jax.ShapeDtypeStruct((count,), jnp.int32)


def multiplied(x: Any, up: Any, down: Any, sizes: Any) -> Any:
    return jax.lax.ragged_dot(jax.nn.relu(jax.lax.ragged_dot(x, up, sizes)), down, sizes)


def trained(x: Any, up: Any, down: Any, sizes: Any) -> Any:
    """Rows and both matrices, less their gradients."""

    def loss(x: Any, up: Any, down: Any) -> Any:
        return (multiplied(x, up, down, sizes).astype(jnp.float32) ** 2).sum()

    gradients = jax.grad(loss, (0, 1, 2))(x, up, down)
    return tuple(w - 0.1 * g for w, g in zip((x, up, down), gradients, strict=True))


@pytest.mark.parametrize(
    ("hardware", "slack"), [pytest.param("h100:1x1", 0.08, marks=GPU), pytest.param("tpu-v5e:1x1", 0.15, marks=TPU)]
)
@pytest.mark.parametrize("sizes", [(4096, 2048, 4096, 8), (8192, 1024, 1536, 32)])
@pytest.mark.parametrize("fn", [multiplied, trained])
def test_flops_and_seconds_are_those_that_are_compiled(
    fn: Any, sizes: Sequence[int], hardware: str, slack: float
) -> None:
    """XLA:GPU multiplies all rows with every expert's matrix, XLA:TPU each row once."""
    donated = (0, 1, 2) if fn is trained else ()
    plan = autoshard.plan(fn, *experts(*sizes), mesh={"x": 1}, hardware=hardware, donate_argnums=donated)
    found = plan.verify()
    assert found.compute is not None
    assert found.memory.compiled is not None
    assert found.compute.predicted_flops == pytest.approx(found.compute.compiled_flops, rel=0.02)
    assert found.compute.predicted_s == pytest.approx(found.compute.compiled_s, rel=slack)
    if hardware.startswith("h100"):
        assert found.memory.predicted.peak == pytest.approx(found.memory.compiled.peak, rel=0.15)


@pytest.mark.parametrize("hardware", [pytest.param("h100:1x8", marks=GPU), pytest.param("tpu-v5e:2x4", marks=TPU)])
@pytest.mark.parametrize(
    "sizes", [(32_760, 2048, 4096, 8), (32_768, 2048, 4096, 8), (8192, 1024, 4096, 8), (16_384, 1024, 4096, 8)]
)
def test_a_sum_is_offered_where_it_is_scattered(sizes: Sequence[int], hardware: str) -> None:
    """Of a result as large as rows and matrices together it is not: these are moved."""
    x, up, _, rows_of = experts(*sizes)
    text = text_of(
        hardware,
        lambda *args: constrained(jax.lax.ragged_dot(*args), None, "x"),
        (x, up, rows_of),
        (P(None, "x"), P(None, "x"), P()),
    )
    scattered = "reduce-scatter" in {found.kind for found in collectives(text)}
    (eqn,) = graph.build(jax.make_jaxpr(jax.lax.ragged_dot)(x, up, rows_of), "cuda").eqns
    offered = FactorKind.REDUCTION in {factor.kind for factor in rule_of(eqn).factors}
    assert scattered == offered
