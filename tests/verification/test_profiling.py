"""Predicted beside measured, on the eight CPU devices of the tests."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autoshard
import models
from autoshard import SolvedPlan
from autoshard.backends import known_compilers
from autoshard.errors import VerifyError
from autoshard.verification import profile as profile_room
from autoshard.verification.profile import MATMULS, OTHERS, Profile

SIZES: dict[str, Any] = {"layers": 2, "width": 256, "hidden": 512, "batch": 128, "compute_dtype": "float32"}
STEPS = 3


@pytest.fixture(scope="module")
def plan() -> SolvedPlan:
    step, args = models.build("mlp-1k", **SIZES)
    mesh = {"data": 2, "model": 4}
    return autoshard.plan(step, *args, mesh=mesh, hardware="cpu:8", donate_argnums=0, rel_gap=1e-2, constraints="all")


@pytest.fixture(scope="module")
def profile(plan: SolvedPlan) -> Profile:
    _, args = models.build("mlp-1k", **SIZES)
    values = jax.tree.map(lambda a: jnp.full(a.shape, 0.01, a.dtype), args)
    return plan.profile(plan.jit(), *jax.device_put(values, plan.in_shardings()), steps=STEPS)


def test_every_planned_class_was_measured(plan: SolvedPlan, profile: Profile) -> None:
    measured = {(row.name, row.axes): row for row in profile.rows}
    for collective in plan.record.collectives:
        row = measured[collective.kind, collective.axes]
        assert row.measured_s > 0, row
        assert row.predicted_s is not None
    assert measured[MATMULS, ()].measured_s > 0
    assert measured[OTHERS, ()].predicted_s is not None


def test_collectives_run_as_often_as_planned(plan: SolvedPlan, profile: Profile) -> None:
    for row in profile.rows:
        planned = sum(c.trips for c in plan.record.collectives if (c.kind, c.axes) == (row.name, row.axes))
        if planned:
            assert 0 < row.count <= planned, row


def test_predicted_seconds_add_up_to_the_plan(plan: SolvedPlan, profile: Profile) -> None:
    compute_s = sum(row.predicted_s or 0.0 for row in profile.rows if row.name in (MATMULS, OTHERS))
    assert compute_s == pytest.approx(plan.record.cost.compute_s)
    others_s = sum(row.predicted_s or 0.0 for row in profile.rows if row.name not in (MATMULS, OTHERS))
    assert others_s == pytest.approx(plan.record.cost.communication_s, rel=1e-6)


def test_a_profile_prints_itself(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    told = str(profile)
    assert f"(mean of {STEPS} steps on 8 × cpu)" in " ".join(told.split())
    assert max(map(len, told.splitlines())) <= 80


def test_kernels_are_told_apart(plan: SolvedPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA:GPU's command buffers have a name, not the kernels in them: what is profiled is compiled without any."""
    assert known_compilers.named("gpu").profiling_flags == {"xla_gpu_enable_command_buffer": ""}
    flags = {"xla_cpu_enable_fast_math": False}
    monkeypatch.setattr(profile_room, "of_devices", lambda _: replace(known_compilers.XLA_CPU, profiling_flags=flags))
    _, args = models.build("mlp-1k", **SIZES)
    step = Compiled(plan.jit())
    values = jax.device_put(jax.tree.map(lambda a: jnp.full(a.shape, 0.01, a.dtype), args), plan.in_shardings())
    measured = plan.profile(step, *values, steps=STEPS)
    assert step.options == [flags]
    assert step.calls == profile_room.WARM_UP + STEPS  # what is timed is the step as it is
    assert measured.steps == STEPS


class Compiled:
    """A jitted step that remembers how often it ran, and with which options it was compiled beside that."""

    def __init__(self, jitted: Any) -> None:
        self.jitted, self.calls, self.options = jitted, 0, list[Any]()

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        return self.jitted(*args)

    def lower(self, *args: Any) -> "Compiled":
        self.lowered = self.jitted.lower(*args)
        return self

    def compile(self, options: Any) -> Any:
        self.options.append(options)
        return self.lowered.compile(options)


def test_what_is_not_jitted_is_refused(plan: SolvedPlan) -> None:
    with pytest.raises(VerifyError, match="takes a jitted step"):
        plan.profile(lambda state, batch: state, 1, 2)
