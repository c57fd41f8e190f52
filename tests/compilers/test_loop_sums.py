"""Sums over a loop's trips of the program's own, as XLA:GPU compiles them: none is finished in a trip."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from benchmarks.loop_sums import mamba
from tests.installed import needs_gpu_compiler
from tests.programs import GPUS

LAYERS, WIDTH, MICRO, ROWS = 4, 512, 8, 4096


def own_accumulation(weights: Any, batch: Any) -> Any:
    """A loop over micro-batches around one over layers: XLA takes no reduction out of the inner one."""

    def loss(weights: Any, x: Any) -> Any:
        x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w.astype(x.dtype)), None), x, weights)
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    def add(total: Any, x: Any) -> Any:
        return total + jax.grad(loss)(weights, x), None

    return weights - 0.1 * jax.lax.scan(add, jnp.zeros_like(weights), batch)[0]


def in_trips(plan: autoshard.SolvedPlan) -> list[str]:
    return [str(c) for c in plan.verify("gpu").emitted if c.trips > 1 and c.kind in ("all-reduce", "reduce-scatter")]


@needs_gpu_compiler
def test_an_accumulation_of_ones_own_sums_once() -> None:
    weights = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
    batch = jax.ShapeDtypeStruct((MICRO, ROWS, WIDTH), jnp.bfloat16)
    plan = autoshard.plan(
        own_accumulation,
        weights,
        batch,
        mesh={"data": 8},
        hardware=GPUS,
        donate_argnums=0,
        pins={"weights": P(), "batch": P(None, "data")},
    )
    assert plan.loop_sums
    assert in_trips(plan) == []


@needs_gpu_compiler
@pytest.mark.slow
def test_a_selective_scan_sums_once() -> None:
    fn, args = mamba(layers=2, width=256, batch=32, sequence=64, vocab=1024, scan=False)
    plan = autoshard.plan(fn, *args, mesh={"data": 8}, hardware=GPUS, donate_argnums=0, rel_gap=0.02)
    assert in_trips(plan) == []
