"""More memory never gives a slower plan: with what may be repeated, and what may lie in the host's memory."""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from jax.sharding import PartitionSpec as P

import autoshard
import models
from autoshard.ir.recomputation import Offload
from autoshard.planner import pipeline
from autoshard.planner.budget import WORTH
from tests.end_to_end.test_recomputing import wide
from tests.ir.test_recompute import PROGRAMS, Program
from tests.planner import test_offload
from tests.random_train_steps import train_step

GAP = 1e-2
OPTIONS: dict[str, Any] = {
    "mesh": {"data": 4},
    "hardware": "h100:1x4",
    "rel_gap": GAP,
    "constraints": "all",
    "cache": False,
}
SHARES = (1.2, 1.0, 0.88, 0.7, 0.54, 0.42, 0.3)  # of the peak of the program as it is written


def plans(program: Program, offload: Offload, **options: Any) -> list[autoshard.SolvedPlan | None]:
    """The plan of a step within less and less memory; None where nothing fits."""
    fn, args = program
    asked: dict[str, Any] = {**OPTIONS, **options}
    peak = autoshard.plan(fn, *args, **asked, remat="written").record.memory.peak_bytes

    def within(memory: int) -> autoshard.SolvedPlan | None:
        try:
            plan = autoshard.plan(fn, *args, **asked, memory=memory, offload=offload)
        except autoshard.InfeasibleError:
            return None
        assert plan.record.memory.peak_bytes <= memory
        return plan

    return [within(int(share * peak)) for share in SHARES]


def assert_never_slower(found: Sequence[autoshard.SolvedPlan | None]) -> None:
    """Of every two plans, the one with more memory is no slower than its proof leaves open, and is there.

    A plan repeats nothing unless that saves `WORTH` of its step: so much is left open as well.
    """
    for more, less in pairwise(found):
        if less is None:
            continue
        assert more is not None
    there = [plan for plan in found if plan is not None]
    for i, more in enumerate(there):
        fastest = min((less.cost for less in there[i:]), default=more.cost)
        assert more.cost * (1 - more.record.certificate.gap) * (1 - WORTH) <= fastest


def deep_stack() -> Program:
    return test_offload.program(test_offload.WIDTH, test_offload.ROWS)


SPLIT: dict[str, Any] = {"in_shardings": (P(), P("data"))}


@cache
def of_deep_stack(offload: Offload) -> list[autoshard.SolvedPlan | None]:
    return plans(deep_stack(), offload, **SPLIT)


@pytest.mark.parametrize("offload", ["none", pytest.param("auto", marks=pytest.mark.slow)])
def test_more_memory_is_never_slower_for_a_deep_stack(offload: Offload) -> None:
    """Its budgets end in fewer carries, and in the host's memory."""
    found = of_deep_stack(offload)
    assert_never_slower(found)
    chosen = [plan.record.recomputation for plan in found if plan is not None]
    assert any(one is not None and one.group > 1 for one in chosen)
    assert any(one is not None and one.offloaded for one in chosen) == (offload == "auto")


def test_offloading_is_never_slower_than_none() -> None:
    """Groups of carries are tried before the host's memory is: repeating a trip may cost less than its link."""
    for without, allowed in zip(of_deep_stack("none"), of_deep_stack("auto"), strict=True):
        if without is not None:
            assert allowed is not None
            assert allowed.cost <= without.cost


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, 5, 7, 10, 12])
def test_more_memory_is_never_slower_for_random_steps(seed: int) -> None:
    assert_never_slower(plans(train_step(seed), "auto"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unrolled", "mixture", "accumulated", "nested", "checkpointed"])
def test_more_memory_is_never_slower_for_written_steps(name: str) -> None:
    assert_never_slower(plans(wide(PROGRAMS[name]()), "auto"))


@pytest.mark.slow
@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("hardware", ["h100:1x4", "tpu-v5e:2x2"])
def test_more_memory_is_never_slower_for_small_transformers(hardware: str, *, scan: bool) -> None:
    sizes: dict[str, Any] = {"layers": 2, "width": 256, "heads": 4, "hidden": 512, "kv_heads": 2, "head_dim": 64}
    step, args = models.build("tiny-llama", batch=16, sequence=256, context=256, scan=scan, vocab=512, **sizes)
    assert_never_slower(plans((step, args), "auto", hardware=hardware, donate_argnums=0))


def test_where_no_choice_is_found_loops_keep_what_they_have_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """The solver may find no choice in its time: what repeats the most may fit all the same."""
    fn, args = deep_stack()
    written = autoshard.plan(fn, *args, **OPTIONS, **SPLIT, remat="written").record
    memory = int(0.8 * written.memory.peak_bytes)
    asked: dict[str, Any] = {**OPTIONS, **SPLIT, "memory": memory}
    chosen = autoshard.plan(fn, *args, **asked)
    monkeypatch.setattr(pipeline, "ATTEMPTS", 0)
    plan = autoshard.plan(fn, *args, **asked)
    assert plan.record.memory.peak_bytes <= memory
    assert plan.record.recomputation is not None
    assert plan.record.recomputation.group == 1
    assert plan.cost >= chosen.cost
    assert "what is kept is no part of the proof" in plan.record.certificate.space
