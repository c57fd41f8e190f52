"""State in the host's memory as XLA:GPU compiles it: peaks, and the bytes of copies both ways."""

from typing import Any

import pytest

import autoshard
import models
from autoshard.errors import InfeasibleError
from autoshard.verification.collective_match import Match
from autoshard.verification.result import Verification
from tests.installed import needs_gpu_compiler

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
