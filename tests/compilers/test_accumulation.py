"""Accumulation: gradients are reduced once, in float32, and as often as is priced."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import autoshard
import models
from autoshard import accumulate
from autoshard.verification.collective_match import agrees
from tests.installed import needs_gpu_compiler, needs_tpu_compiler
from tests.ir.test_accumulation import PLAIN, descent, loss, plain_step
from tests.programs import GPUS, TPUS

P = PartitionSpec


def reductions(plan: autoshard.SolvedPlan, compiler: str) -> list[tuple[str, str, int, int]]:
    """(kind, dtype, trips, bytes) of every emitted reduction of more than scalars."""
    found = plan.verify(compiler).emitted
    return [
        (c.kind, c.dtype, c.trips, c.nbytes)
        for c in found
        if c.kind in ("all-reduce", "reduce-scatter") and c.nbytes > 1024
    ]


def big_step(hardware: str, *, width: int, spec: PartitionSpec) -> autoshard.SolvedPlan:
    """An MLP's step in bfloat16, parameters split or whole over eight devices, eight micro-batches."""
    wide = {
        "up": jax.ShapeDtypeStruct((width, 4 * width), jnp.float32),
        "down": jax.ShapeDtypeStruct((4 * width, width), jnp.float32),
    }
    batch = jax.ShapeDtypeStruct((32768, width), jnp.bfloat16)
    return autoshard.plan(
        descent(accumulate(loss, steps=8, parts="data")),
        wide,
        batch,
        mesh={"data": 8},
        hardware=hardware,
        donate_argnums=0,
        pins={"state.**": spec, "batch": P("data")},
    )


LAYOUTS = {"split": P(None, "data"), "whole": P()}


@needs_gpu_compiler
@pytest.mark.parametrize("layout", LAYOUTS)
def test_xla_gpu_reduces_once_in_float32(layout: str) -> None:
    found = reductions(big_step(GPUS, width=512, spec=LAYOUTS[layout]), "gpu")
    assert [(dtype, trips, nbytes) for _, dtype, trips, nbytes in found] == [("f32", 1, 4 * 512 * 2048)] * 2
    assert layout == "whole" or {kind for kind, *_ in found} == {"reduce-scatter"}


@pytest.mark.slow
@needs_tpu_compiler
@pytest.mark.parametrize("layout", LAYOUTS)
def test_xla_tpu_reduces_once_in_float32(layout: str) -> None:
    found = reductions(big_step(TPUS, width=1024, spec=LAYOUTS[layout]), "tpu")
    assert [(dtype, trips) for _, dtype, trips, _ in found] == [("f32", 1)] * 2
    assert layout == "whole" or {kind for kind, *_ in found} == {"reduce-scatter"}
    for *_, nbytes in found:
        assert nbytes == pytest.approx(4 * 1024 * 4096, rel=0.04)  # padded to tiles


@pytest.mark.slow
@needs_gpu_compiler
def test_a_transformer_accumulates_as_planned_on_gpus() -> None:
    """All layers' gradients, norms and embedding included: nothing is reduced in the loop, bytes as predicted."""
    module, config = models.find("tiny-llama", compute_dtype="bfloat16", width=256, hidden=512, context=128)
    state = jax.eval_shape(partial(module.init, config), jax.random.key(0)).params
    batch = module.example_batch(config, batch=64)
    plan = autoshard.plan(
        descent(accumulate(partial(module.loss, config), steps=4, parts="data")),
        state,
        batch,
        mesh={"data": 8},
        hardware=GPUS,
        donate_argnums=0,
        pins={"state.**": P(), "batch.**": P("data")},
    )
    verified = plan.verify("gpu")
    assert agrees(verified.rows, verified.tolerance), str(verified)
    summed = [c for c in verified.emitted if c.kind in ("all-reduce", "reduce-scatter") and c.nbytes > 1024]
    assert {(c.dtype, c.trips) for c in summed} == {("f32", 1)}


def check_plain(accumulator: str, hardware: str, compiler: str, dtype: str) -> None:
    spec, kind, trips = PLAIN[accumulator]
    plan = plain_step(hardware, spec=spec)
    found = reductions(plan, compiler)
    assert {(c[0], c[1], c[2]) for c in found} == {(kind, dtype, trips)}
    promised = [c for c in plan.record.collectives if c.kind == kind and c.nbytes > 1024]
    assert sorted((c.nbytes, c.trips) for c in promised) == sorted((nbytes, trips) for *_, nbytes in found)


@needs_gpu_compiler
@pytest.mark.parametrize("accumulator", sorted(PLAIN))
def test_plain_scans_reduce_on_gpus_as_priced(accumulator: str) -> None:
    """In the dtype of the products, which casts follow."""
    check_plain(accumulator, GPUS, "gpu", "bf16")


@pytest.mark.slow
@needs_tpu_compiler
def test_plain_scans_reduce_on_tpus_as_priced() -> None:
    """What is moved behind the loop has been cast to the accumulator's dtype."""
    check_plain("whole", TPUS, "tpu", "f32")


@pytest.mark.slow
@needs_tpu_compiler
def test_plain_scans_into_parts_reduce_in_the_loop_on_tpus() -> None:
    """As often and as wide as priced; libtpu 0.0.52 scatters one sum, and slices the other after an all-reduce."""
    plan = plain_step(TPUS, spec=PLAIN["split"][0])
    found = reductions(plan, "tpu")
    assert {(c[1], c[2]) for c in found} == {("bf16", 8)}
    assert {c[0] for c in found} <= {"reduce-scatter", "all-reduce"}
    promised = [c for c in plan.record.collectives if c.kind == "reduce-scatter" and c.nbytes > 1024]
    assert sorted((c.nbytes, c.trips) for c in promised) == sorted((nbytes, trips) for *_, trips, nbytes in found)
