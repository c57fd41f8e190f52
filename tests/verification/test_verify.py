"""What a plan promises against what the compilers emit: a plan that is not followed is a failing test."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autoshard
import models
from autoshard import SolvedPlan, _jax
from autoshard.backends import compile, devices
from autoshard.backends.known_compilers import XLA_GPU, XLA_GPU_0_10
from autoshard.backends.model import CompilerModel
from autoshard.errors import HloError, VerifyError
from autoshard.verification.collective_match import agrees
from autoshard.verification.result import Match, Verification
from autoshard.verification.verify import MEMORY_TOLERANCE, compared_by
from benchmarks.unseen_models import MODELS

MESH = {"data": 2, "model": 4}
AT_ONCE = "xla_gpu_experimental_parallel_collective_overlap_limit"


def planned(name: str, hardware: str, **fields: Any) -> SolvedPlan:
    step, (state, batch) = models.build(name, **fields)
    return autoshard.plan(
        step, state, batch, mesh=MESH, hardware=hardware, donate_argnums=0, memory=80 * 10**9, rel_gap=2e-2
    )


def check(found: Verification, *, memory: float = MEMORY_TOLERANCE) -> None:
    """Bytes within 5 %, in total and in each large row, nothing unknown, and the peak not above the plan's by more."""
    assert agrees(found.rows, found.tolerance), str(found)
    assert replace(found.memory, tolerance=memory).ok, str(found)
    assert sum(row.emitted_bytes for row in found.rows) > 0, "nothing was compared"
    for row in found.by_kind():
        assert row.status is not Match.EXTRA, str(found)


@pytest.mark.parametrize(("scan", "estimates"), [(True, True), (True, False), (False, True)])
def test_loops_are_scheduled_by_analytical_estimates_where_these_work(
    monkeypatch: pytest.MonkeyPatch,
    scan: bool,  # noqa: FBT001
    estimates: bool,  # noqa: FBT001
) -> None:
    compiler = XLA_GPU_0_10 if estimates else XLA_GPU
    monkeypatch.setattr(devices, "compiler_of", lambda hardware: compiler)
    step, args = models.build("mlp-tiny", scan=scan)
    options = autoshard.plan(step, *args, mesh={"data": 8}, hardware="h100:1x8", donate_argnums=0).compiler_options
    assert ("xla_gpu_enable_analytical_latency_estimator" in options) == (scan and estimates)


@pytest.mark.parametrize(
    ("scan", "compiler", "hardware", "expected"),
    [
        (True, XLA_GPU, "h100:2x8", 2),
        (True, XLA_GPU, "h100:1x8", None),
        (False, XLA_GPU, "h100:2x8", 2),
        (False, XLA_GPU, "h100:1x8", None),
        (True, XLA_GPU_0_10, "h100:2x8", None),
        (False, XLA_GPU_0_10, "h100:2x8", 2),
    ],
)
def test_two_collectives_are_under_way_between_nodes_but_in_loops_that_estimates_schedule(
    monkeypatch: pytest.MonkeyPatch,
    scan: bool,  # noqa: FBT001
    compiler: CompilerModel,
    hardware: str,
    expected: int | None,
) -> None:
    monkeypatch.setattr(devices, "compiler_of", lambda hardware: compiler)
    step, args = models.build("mlp-tiny", scan=scan)
    mesh = {"data": 16 if hardware == "h100:2x8" else 8}
    options = autoshard.plan(step, *args, mesh=mesh, hardware=hardware, donate_argnums=0).compiler_options
    assert options.get(AT_ONCE) == expected


@pytest.mark.slow
@pytest.mark.skipif(_jax.JAX_VERSION < (0, 11), reason="the estimates work")
def test_gathers_between_nodes_take_a_shorter_schedule_two_at_once() -> None:
    step, args = MODELS["scan-float32-tied"].program(32)
    plan = autoshard.plan(
        step, *args, mesh={"data": 4, "model": 8}, hardware="h100:4x8", donate_argnums=0, rel_gap=1e-2
    )
    two, one = (plan.verify(compiler_options=options).timeline for options in ({}, {AT_ONCE: 1}))
    assert two is not None
    assert one is not None
    assert two.step_s < 0.98 * one.step_s


@pytest.mark.parametrize("name", ["linear-8k", "mlp-8k"])
def test_the_cpu_compiler_follows_the_plan(name: str) -> None:
    """In fp32, since XLA:CPU multiplies bf16 in fp32."""
    check(planned(name, "cpu:8", compute_dtype="float32").verify("cpu"))


@pytest.fixture(scope="module")
def on_cpu() -> SolvedPlan:
    return planned("mlp-1k", "cpu:8", compute_dtype="float32")


def test_every_collective_comes_from_an_equation_of_the_model(on_cpu: SolvedPlan) -> None:
    found = on_cpu.verify("cpu")
    check(found)
    large = [line for line in found.lines if line.emitted_bytes > 1000]
    assert large
    for line in large:
        assert line.status in (Match.MATCH, Match.MERGED), line
        assert line.where.partition(":")[0].endswith(
            ("models/mlp.py", "optax/tree_utils/_tree_math.py", "optax/_src/update.py")
        ), line


def test_memory_and_compute_stand_beside_the_compilers(on_cpu: SolvedPlan) -> None:
    found = on_cpu.verify("cpu")
    assert found.memory.compiled is not None
    assert found.memory.predicted.arguments == found.memory.compiled.arguments
    assert found.memory.predicted.aliases == found.memory.compiled.aliases
    assert found.compute is not None
    assert found.compute.predicted_flops == pytest.approx(found.compute.compiled_flops, rel=0.02)


def test_a_loop_of_which_nobody_knows_the_trips_counts_as_often_as_in_the_plan() -> None:
    def settled(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda x: jnp.max(jnp.abs(x)) > 1e-3, lambda x: x @ w, x)

    arguments = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((64, 64), (32, 64))]
    compute = autoshard.plan(settled, *arguments, mesh=MESH, hardware="cpu:8").verify("cpu").compute
    assert compute is not None
    assert compute.predicted_flops
    assert compute.compiled_flops == compute.predicted_flops


def test_the_users_own_executable_is_checked(on_cpu: SolvedPlan) -> None:
    _, (state, batch) = models.build("mlp-1k", compute_dtype="float32")
    compiled = on_cpu.jit().lower(state, batch).compile()
    found = on_cpu.check(compiled)
    check(found)
    assert found.memory.compiled is not None
    assert "8 × cpu" in found.topology
    from_text = on_cpu.check(compiled.as_text())
    assert from_text.rows == found.rows
    assert from_text.memory.compiled is None
    assert from_text.ok


def test_another_layout_of_the_same_program_is_not_the_plan(on_cpu: SolvedPlan) -> None:
    """Everything replicated: nothing is emitted that the plan expects."""
    step, (state, batch) = models.build("mlp-1k", compute_dtype="float32")
    on = jax.sharding.NamedSharding(on_cpu.mesh(), jax.sharding.PartitionSpec())
    compiled = jax.jit(step, in_shardings=on, out_shardings=on).lower(state, batch).compile()
    found = on_cpu.check(compiled)
    assert not found.ok
    assert Match.MISSING in {row.status for row in found.rows}


def test_what_is_no_executable_is_refused(on_cpu: SolvedPlan) -> None:
    with pytest.raises(VerifyError, match="cannot check a function"):
        on_cpu.check(check)
    with pytest.raises(HloError, match="is for 1 devices"):
        on_cpu.check(jax.jit(jnp.sin).lower(1.0).compile())


@pytest.mark.parametrize(
    ("hardware", "flags"),
    [("tpu-v5p:2x2x2", compile.TPU_PLAIN_OPTIONS), ("tpu-v5e:2x4", {}), ("h100:1x8", {}), ("cpu:8", {})],
)
def test_a_plan_is_compared_with_the_program_that_is_priced(hardware: str, flags: Any) -> None:
    """Sums over a whole cube are priced as XLA:TPU makes them without windowed einsum."""
    record = autoshard.plan(
        jnp.sin, jax.ShapeDtypeStruct((8,), jnp.float32), mesh={"data": 8}, hardware=hardware
    ).record
    assert compared_by(record, hardware, None) == flags
    assert compared_by(record, "cpu:8", None) == {}
