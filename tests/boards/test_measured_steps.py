"""Steps measured on a GPU: what is kept of them is read and priced, and the same is measured where the tests run."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks import measured_steps
from benchmarks.measured_steps import How, Subject
from benchmarks.unseen_models import MODELS

TINY = replace(
    MODELS["gated-51k"], layers=1, width=64, heads=2, groups=1, features=128, vocabulary=2000, tokens=64, length=32
)
HARDWARE = "h100:1x1"


def test_kept_steps_are_priced() -> None:
    rows = measured_steps.read(measured_steps.RESULTS / "steps", HARDWARE)
    assert len(rows) == 18
    assert [row.name for row in rows] == [x.name for x in measured_steps.subjects() if x.name in {r.name for r in rows}]
    for row in rows:
        assert 0.5 < row.schedule.step_s / row.found["measured_s"] < 1.5, row.name
    told = list(measured_steps.steps(rows))
    assert sum(line.startswith(("| unseen", "| gpt2")) for line in told) == len(rows)
    off = float(np.median([abs(row.found["predicted_s"] / row.found["measured_s"] - 1) for row in rows]))
    assert any(line.startswith(f"\nPlans: {off:.1%} off (median)") for line in told)


def test_kernels_have_their_classes() -> None:
    rows = measured_steps.read(measured_steps.RESULTS / "kernels", HARDWARE)
    told = list(measured_steps.kernels(rows))
    sums = {cells[1].strip(): cells for line in told if line.startswith("| ") for cells in [line.split("|")]}
    assert float(sums["loop_add_fusion"][5]) == pytest.approx(1.0, abs=0.1)
    assert float(sums["products, bfloat16, rows of no whole 16 bytes"][5]) < float(sums["products, bfloat16"][5])
    measured_ms = sum(float(cells[4]) for cells in sums.values() if cells[4].strip()[0].isdigit())
    whole_ms = 1e3 * sum(sum(row.found["kernels"].values()) for row in rows)
    assert 0.85 * whole_ms < measured_ms <= whole_ms


def test_kernels_that_are_far_from_their_prices_are_named() -> None:
    told = list(measured_steps.far(measured_steps.read(measured_steps.RESULTS / "kernels", HARDWARE)))
    dots = next(i for i, line in enumerate(told) if "gpt2-medium 16x1024 · dots: 213." in line)
    listed = [line.split("|")[1].strip() for line in told[dots + 3 : dots + 3 + measured_steps.FARTHEST]]
    assert {"fusion.148", "gemm_fusion_dot.37"} <= set(listed)  # the softmax's gradient, and that of 50,257 scores


def test_values_are_random_and_a_first_state_is_zero() -> None:
    _, args = TINY.program(1)
    (params, moments), *examples = measured_steps.concrete(args)
    for x, abstract in zip(jax.tree.leaves(params), jax.tree.leaves(args[0][0]), strict=True):
        assert (x.shape, x.dtype) == (abstract.shape, abstract.dtype)
        assert x.ndim < 2 or 0.01 < float(np.std(x)) < 0.05
    assert all(not np.any(x) for x in jax.tree.leaves(moments))
    assert all(0 <= np.min(x) < np.max(x) < measured_steps.HIGHEST_ID for x in examples)


@pytest.mark.parametrize("plain", [False, True])
def test_a_step_is_measured(tmp_path: Path, *, plain: bool) -> None:
    subject = Subject(name="unseen gated-51k", build=lambda: TINY.program(1))
    how = How(hardware=HARDWARE, plain=plain, kernels=True)
    measured_steps.measured(subject, how, tmp_path)
    found = json.loads((tmp_path / "unseen-gated-51k.json").read_text())
    assert found["measured_s"] > 0
    assert ("predicted_s" in found) is not plain
    (row,) = measured_steps.read(tmp_path, HARDWARE)
    named = {x.name for computation in row.module for x in computation}
    assert found["kernels"].keys() <= named
    assert sum(found["kernels"].values()) > 0
