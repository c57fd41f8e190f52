"""Programs that put residuals or optimizer state into the host's memory, as XLA:GPU and XLA:TPU compile them."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
import cost_models
from autoshard.backends import compile
from autoshard.backends.devices import abstract
from autoshard.errors import CompileError
from autoshard.ir.mesh import MeshAxes
from autoshard.ir.recomputed import savable
from autoshard.ir.trace import trace
from autoshard.verification import machine_json
from autoshard.verification.collective_match import Match
from tests.cli.test_schemas import of
from tests.compilers.test_compiler_models import F32, MESH, offloaded
from tests.installed import GPU, TPU, needs_gpu_compiler
from tests.planner.test_offload import CARRY, TRIPS, loss, offloading

ARGS = (F32(4, 512, 1024), F32(8192, 512))
OPTIONS: dict[str, Any] = {"mesh": MESH.shape, "in_shardings": (P(), P("x")), "rel_gap": 1e-2}
LOSS = loss.__code__
STACK = 4 * 1024 * 1024 * 4  # bytes of one device


@pytest.mark.parametrize(
    "hardware",
    [pytest.param("h100:1x8", marks=GPU), pytest.param("tpu-v5e:2x4", marks=[*TPU, pytest.mark.slow])],
)
def test_a_program_that_offloads_is_planned_and_compiled(hardware: str) -> None:
    """The device does not hold the stack, in the plan and by the compiler; its copies take their time, each way."""
    plan = autoshard.plan(jax.grad(offloaded), *ARGS, **OPTIONS, hardware=hardware, remat="written")
    assert not [note for note in plan.record.notes if "the host's memory" in note]
    copy_s = STACK / cost_models.hardware(hardware).chip.numbers["host_bytes_per_s"].value
    assert plan.record.cost.step_s > copy_s
    found = plan.verify()
    assert found.timeline is not None
    copies = [event for event in found.timeline.events if event.name.endswith("the host's memory")]
    for way in ("to", "from"):  # XLA:TPU has two copies of half a slice each
        took_s = [event.duration_s * event.trips for event in copies if event.name.split()[1] == way]
        assert sum(took_s) == pytest.approx(copy_s), (way, took_s)
    assert found.timeline.step_s > copy_s
    assert [(x.to_host, x.predicted_bytes, x.compiled_bytes) for x in found.offloaded] == [
        (True, STACK, STACK),
        (False, STACK, STACK),
    ]
    assert found.memory.compiled is not None
    kept = autoshard.plan(jax.grad(unoffloaded), *ARGS, **OPTIONS, hardware=hardware, remat="written")
    beside = kept.verify().memory.compiled
    assert beside is not None
    assert plan.record.memory.peak_bytes < kept.record.memory.peak_bytes - STACK // 2
    if hardware.startswith("h100"):  # the sums that its small products are cut into are a sixth of the peak
        for predicted, compiled in ((plan, found.memory.compiled), (kept, beside)):
            assert 0.97 < predicted.record.memory.peak_bytes / compiled.peak < 1.1
    assert found.memory.compiled.peak < beside.peak - STACK // 2  # with slices on their way
    assert found.memory.bound


@needs_gpu_compiler
def test_what_a_plan_offloads_is_copied_at_the_line_of_its_loop() -> None:
    found = offloading().verify()
    assert [x.status for x in found.offloaded] == [Match.MATCH] * 2
    line = f"{LOSS.co_filename}:{LOSS.co_firstlineno + 2} ({LOSS.co_name})"
    assert [x.where.startswith(line) for x in found.offloaded_lines] == [True, True]
    assert [(x.to_host, x.status) for x in found.offloaded_lines] == [(True, Match.MATCH), (False, Match.MATCH)]
    told = machine_json.verification(found)
    of("verify").validate(told)
    assert told["offloaded"]["to_host"]["compiled_bytes"] == TRIPS * CARRY


@pytest.mark.parametrize("remat", ["add", "free"])
def test_what_goes_to_the_host_goes_there_once(remat: Any) -> None:
    saved = savable(trace(jax.grad(offloaded), ARGS, ("ws", "x")), remat)
    hosts = {v.id for one in saved.passes for v in one.values if "the host's memory" in v.must_keep}
    assert hosts
    repeated = {at for step in saved.repeated(saved.missing([])) for at in step.results}
    assert hosts.isdisjoint(repeated)


def unoffloaded(ws: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.square(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w) @ w.T, None), x, ws)[0]).sum()


@needs_gpu_compiler
def test_estimates_of_xla_gpu_die_of_slices_in_the_host_s_memory() -> None:
    """So a plan of such a program does not ask for them (`build_record`)."""
    shardings = (NamedSharding(abstract(MESH), P()), NamedSharding(abstract(MESH), P("x")))
    step = jax.jit(jax.grad(offloaded), in_shardings=shardings).trace(*ARGS)
    flag = {"xla_gpu_enable_analytical_latency_estimator": True}
    with pytest.raises(CompileError, match="signal"):
        compile.compile(step, topology="h100:1x8", mesh=MESH, compiler_options=flag)


@pytest.mark.parametrize(
    "topology",
    [pytest.param("h100:1x8", marks=GPU), pytest.param("tpu-v5e:2x4", marks=[*TPU, pytest.mark.slow])],
)
def test_donated_state_in_the_host_s_memory_is_copied_in_and_out(topology: str) -> None:
    """It stays where it was, and each device has a copy of its own while it is updated."""
    mesh = MeshAxes(("x",), (8,))

    def update(m: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
        new = 0.9 * jax.device_put(m, jax.memory.Space.Device) + g
        return jax.device_put(new, jax.memory.Space.Host), 2 * new

    here, there = (NamedSharding(abstract(mesh), P("x"), memory_kind=kind) for kind in ("device", "pinned_host"))
    state = F32(1024, 1024)
    jitted = jax.jit(update, in_shardings=(there, here), out_shardings=(there, here), donate_argnums=0)
    found = compile.compile(jitted.trace(state, state), topology=topology, mesh=mesh)
    assert "input_output_alias={ {0}: (0, {}, may-alias) }" in found.hlo_text
    assert found.hlo_text.count(" copy-start(") == 2
    assert found.memory.argument_bytes < 1.1 * 1024 * 1024 * 4 / 8  # the gradient alone
