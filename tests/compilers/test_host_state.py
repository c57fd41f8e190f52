"""State in the host's memory as XLA:GPU compiles it: peaks, and the bytes of copies both ways."""

from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
import models
from autoshard import _jax
from autoshard.backends import compile
from autoshard.backends.devices import abstract
from autoshard.errors import InfeasibleError
from autoshard.ir.host_state import HOST_MEMORY, state_groups, with_host_state
from autoshard.ir.mesh import MeshAxes
from autoshard.verification.collective_match import Match
from autoshard.verification.result import Verification
from tests.installed import GPU, TPU, needs_gpu_compiler
from tests.ir.test_host_state import OPTIMIZERS, step_of, traced_of

OPTIONS: dict[str, Any] = {
    "mesh": {"data": 8},
    "hardware": "h100:1x8",
    "donate_argnums": 0,
    "rel_gap": 1e-2,
    "cache": False,
}


def compiled(plan: autoshard.SolvedPlan) -> tuple[Verification, int]:
    """The comparison with the compiled program, and its device's memory: of all values, without the host's."""
    found = plan.verify()
    parts = found.memory.compiled
    assert parts is not None
    return found, parts.arguments + parts.outputs - parts.aliases + parts.temporaries


def assert_planned(plan: autoshard.SolvedPlan, found: Verification, peak: int) -> None:
    """Copies, memory and step are as planned."""
    there = sum(_local_bytes(plan, leaf) for leaf in plan.record.inputs if leaf.on_host)
    assert [(x.to_host, x.compiled_bytes, x.status) for x in found.offloaded] == [
        (True, there, Match.MATCH),
        (False, there, Match.MATCH),
    ]
    assert found.memory.bound
    assert 0.95 < plan.record.memory.peak_bytes / peak < 1.1
    assert found.timeline is not None
    assert plan.record.cost.step_s == pytest.approx(found.timeline.step_s, rel=0.05)


def _local_bytes(plan: autoshard.SolvedPlan, leaf: Any) -> int:
    parts = 1
    for dim in leaf.spec:
        for axis in (dim,) if isinstance(dim, str) else dim or ():
            parts *= plan.record.mesh.shape[axis]
    size = 4
    for n in leaf.shape:
        size *= n
    return size // parts


@pytest.mark.slow
@needs_gpu_compiler
def test_moments_of_unrolled_layers_leave_the_device() -> None:
    """Two layers and large embeddings: the peak falls to the update of the largest weight."""
    program, args = models.build("llama3-8b", layers=2, batch=8, sequence=512)
    plain = autoshard.plan(program, *args, **OPTIONS, remat="written")
    _, before = compiled(plain)
    plan = autoshard.plan(program, *args, **OPTIONS, remat="written", offload="state", memory=2_700_000_000)
    found, peak = compiled(plan)
    assert_planned(plan, found, peak)
    assert peak < before - 600_000_000
    assert peak < 2_700_000_000 * 1.05


@pytest.mark.slow
@needs_gpu_compiler
def test_a_scanned_llama_fits_with_its_moments_on_the_host() -> None:
    """In 35 % of the memory of 8 H100 nothing fits without."""
    program, args = models.build("llama3-8b", scan=True, batch=8, sequence=4096)
    limit = int(autoshard.plan(program, *args, **OPTIONS).record.memory.limit_bytes * 0.35)
    with pytest.raises(InfeasibleError, match="offload="):
        autoshard.plan(program, *args, **OPTIONS, memory=limit)
    plan = autoshard.plan(program, *args, **OPTIONS, memory=limit, offload="state")
    found, peak = compiled(plan)
    assert_planned(plan, found, peak)
    assert peak < limit


@pytest.mark.slow
@pytest.mark.parametrize("topology", [pytest.param("h100:1x8", marks=GPU), pytest.param("tpu-v5e:2x4", marks=TPU)])
def test_groups_are_on_the_device_one_at_a_time(topology: str) -> None:
    """What a device holds falls by all moments but those of a weight, on their way in and on their way out."""
    mesh, optimizer = MeshAxes(("x",), (8,)), OPTIMIZERS["adamw"]
    shape = jax.ShapeDtypeStruct((2048, 2048), jnp.float32)
    params = {"layers": [shape] * 6, "head": shape, "bias": jax.ShapeDtypeStruct((2048,), jnp.float32)}
    state = {"params": params, "opt": jax.eval_shape(optimizer.init, params)}
    traced, tied = traced_of(step_of(optimizer), (state, jax.ShapeDtypeStruct((512, 2048), jnp.float32)))
    moments = sorted(i for group in state_groups(traced, tied) for i in group.inputs)

    def held(program: Any) -> int:
        jaxpr = program.jaxpr

        def shardings(atoms: Any) -> tuple[NamedSharding, ...]:
            on = abstract(mesh)
            kinds = [HOST_MEMORY if _jax.is_on_host(x.aval) else "device" for x in atoms]
            specs = [P("x") if x.aval.shape else P() for x in atoms]
            return tuple(NamedSharding(on, spec, memory_kind=kind) for spec, kind in zip(specs, kinds, strict=True))

        jitted = jax.jit(
            jax.extend.core.jaxpr_as_fun(program),
            in_shardings=shardings(jaxpr.invars),
            out_shardings=list(shardings(jaxpr.outvars)),
            donate_argnums=tuple(tied.values()),
        )
        return compile.compile(jitted.trace(*traced.in_avals), topology=topology, mesh=mesh).memory.total_bytes

    one = 2048 * 2048 * 4 // 8
    before, after = held(traced.jaxpr), held(with_host_state(traced, tied, moments).jaxpr)
    assert before - after > (14 - 4 - 2) * one  # fourteen moments; two come in, two go out, and gradients wait for them
