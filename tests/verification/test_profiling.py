"""Predicted beside measured, on the eight CPU devices of the tests."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autoshard
import models
from autoshard import SolvedPlan
from autoshard.errors import VerifyError
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


def test_what_is_not_jitted_is_refused(plan: SolvedPlan) -> None:
    with pytest.raises(VerifyError, match="takes a jitted step"):
        plan.profile(lambda state, batch: state, 1, 2)
