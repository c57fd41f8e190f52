"""Reported pathologies, rebuilt: the first finding, priced; its change keeps the promise. Healthy steps have none.

The table in docs/guides/doctor.md is `python -m benchmarks.hand_sharded`.
"""

import pytest

from benchmarks.code_patterns import PATTERNS, found
from benchmarks.hand_sharded import CASES, HEALTHY, Case, diagnosis, kept_gathers, small_table
from tests.installed import needs_gpu_compiler, needs_tpu_compiler

KEPT = 0.8  # of the promised seconds, by the compiled schedule


@pytest.mark.slow
@needs_gpu_compiler
@needs_tpu_compiler
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_pathology_is_the_first_finding_and_its_change_pays(case: Case) -> None:
    sick = diagnosis(case.sick(), case.hardware, donate=case.donate)
    first = sick.findings[0]
    assert first.kind == case.kind
    assert "hand_sharded.py" in first.where or first.where.startswith("state")
    mended = diagnosis(case.mended(), case.hardware, donate=case.donate)
    assert sick.step_s - mended.step_s >= KEPT * first.seconds > 0.01 * sick.step_s
    assert all(one.kind != case.kind or one.seconds < 0.01 * mended.step_s for one in mended.findings)


@pytest.mark.slow
@needs_tpu_compiler
@pytest.mark.parametrize(
    "name", ["zero", "reshard", "experts", "generated", "micro-batches", "tied", "clipped", "summed-by-hand"]
)
def test_a_pathology_is_the_first_finding_on_tpus_too(name: str) -> None:
    (case,) = (one for one in CASES if one.name == name)
    sick, mended = (diagnosis(one(), "tpu-v5e:2x4", donate=case.donate) for one in (case.sick, case.mended))
    first = sick.findings[0]
    assert first.kind == case.kind
    assert sick.step_s - mended.step_s >= KEPT * first.seconds > 0.01 * sick.step_s
    assert "unasked" not in {one.kind for one in mended.findings}


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_steps_have_no_finding_above_a_percent(name: str) -> None:
    target, donate = HEALTHY[name]
    assert diagnosis(target(), donate=donate).worst < 0.01


@pytest.mark.slow
@needs_tpu_compiler
@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_steps_have_no_finding_above_a_percent_on_tpus_too(name: str) -> None:
    target, donate = HEALTHY[name]
    assert diagnosis(target(), "tpu-v5e:2x4", donate).worst < 0.01


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize("name", ["nnx", "equinox", "megatron", "explicit", "experts", "decode"])
def test_steps_in_the_styles_of_code_bases_have_no_finding_above_a_percent(name: str) -> None:
    (pattern,) = (one for one in PATTERNS if one.name == name)
    assert found(pattern, "h100:1x8").worst < 0.01


@pytest.mark.slow
@needs_gpu_compiler
def test_a_warning_that_does_not_pay_to_mend_is_a_note() -> None:
    found = diagnosis(small_table(between=False))
    assert found.findings == ()
    (note,) = found.notes
    assert "leave it" in note
    assert diagnosis(small_table(between=True)).notes == ()
    assert found.step.exposed_s < 0.02 * found.step_s


@pytest.mark.slow
@needs_gpu_compiler
def test_gathered_values_that_wait_for_the_backward_pass_are_found() -> None:
    """jax#25010: the price is memory, and the promise is kept by the compiled peak."""
    sick, mended = (diagnosis(kept_gathers(again=again), donate=(0,)) for again in (False, True))
    first = sick.findings[0]
    assert first.kind == "gathered and kept"
    assert sick.step.peak_bytes is not None
    assert mended.step.peak_bytes is not None
    assert sick.step.peak_bytes - mended.step.peak_bytes >= KEPT * first.bytes
    assert "gathered and kept" not in {one.kind for one in mended.findings}
