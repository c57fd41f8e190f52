"""Findings as text, JSON and annotations of a build; a diagnosis beside an earlier one."""

import base64
import gzip
import json
import re
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from autoshard.diagnosis.against import compared, saved
from autoshard.diagnosis.finding import Diagnosis, Finding, Step, Trial, annotation, schema
from autoshard.diagnosis.kinds import KINDS
from autoshard.errors import PlanFileError
from autoshard.report.tables import columns

SUMS = Finding(
    kind="sums in every trip",
    seconds=0.010,
    where="/repo/train/step.py:11 (add)",
    cause="A loop adds, 100% of its trips: all-reduce, 4 times",
    change="Add once",
)
STATE = Finding(
    kind="optimizer state whole", seconds=0.002, where="state.m", cause="It lies whole", change="Split it", bytes=7
)
FOUND = Diagnosis(
    step=Step(step_s=0.1, communication_s=0.03, exposed_s=0.02, peak_bytes=10, best_s=0.08, hand_s=0.1),
    findings=(SUMS, STATE),
    notes=("One thing may stay",),
    trials=(
        Trial(flag="--xla_fast=true", step_s=0.09, peak_bytes=12),
        Trial(flag="--xla_no=1", step_s=None, peak_bytes=None),
    ),
)


def test_json_has_its_schema_and_reads_back() -> None:
    data = json.loads(json.dumps(FOUND.to_json()))
    jsonschema.validate(data, schema())
    assert data["findings"][0]["share"] == pytest.approx(0.1)
    assert Diagnosis.from_json(data).to_json() == data
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**data, "more": 1}, schema())


def test_the_page_holds_the_findings_and_says_the_dearest() -> None:
    made = FOUND.to_html()
    packed = re.search(r'id="data">([^<]*)<', made)
    assert packed is not None
    data = json.loads(gzip.decompress(base64.b64decode(packed[1])))["diagnosis"]
    assert [one["kind"] for one in data["findings"]] == [SUMS.kind, STATE.kind]
    assert "<h1>100 ms a step, 2 findings: sums in every trip would save 10 ms (10.0% of the step)</h1>" in made
    assert "<h1>100 ms a step, 0 findings</h1>" in replace(FOUND, findings=()).to_html()


def test_the_text_fits_and_names_everything() -> None:
    told = str(FOUND)
    assert max(map(len, told.splitlines())) <= columns()
    for part in (
        "1. sums in every trip: 10 ms (10.0% of the step)",
        "step.py:11",
        "--xla_fast=true",
        "-10.0%",
        "+25.0%",
    ):
        assert part in told
    assert "does not compile" in told
    assert "One thing may stay." in told
    assert "no change is known" in str(replace(FOUND, findings=()))


def test_a_price_names_time_and_memory_the_larger_share_first() -> None:
    found = replace(FOUND, step=replace(FOUND.step, limit_bytes=100))
    assert found.price(SUMS) == "10 ms (10.0% of the step)"
    assert found.price(STATE) == "7 B (7.0% of a device's memory) and 2 ms (2.0% of the step)"
    assert found.price(replace(STATE, seconds=0.0)) == "7 B (7.0% of a device's memory)"
    assert "title=optimizer state whole%3A 7 B" in found.annotations()
    assert FOUND.price(STATE) == "2 ms (2.0% of the step)"


def test_a_long_flag_is_broken_before_its_value_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    flag = "--xla_gpu_reduce_scatter_combine_threshold_bytes=1073741824"
    lines = str(replace(FOUND, trials=(Trial(flag=flag, step_s=0.1, peak_bytes=654_000_000),))).splitlines()
    assert max(map(len, lines)) <= 80
    (at,) = (i for i, line in enumerate(lines) if "threshold_bytes" in line)
    assert lines[at].split()[0] == "--xla_gpu_reduce_scatter_combine_threshold_bytes"
    assert lines[at + 1].split() == ["=1073741824"]


def test_a_narrow_terminal_has_the_same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    flag = "--xla_gpu_reduce_scatter_combine_threshold_bytes=1073741824"
    found = replace(FOUND, trials=(Trial(flag=flag, step_s=0.1, peak_bytes=654_000_000),))
    moved = replace(
        STATE, seconds=0.02, where="/repo/train/a_module_with_a_long_name.py:11 (a_function_of_that_module)"
    )
    changed = compared(FOUND, replace(FOUND, findings=(SUMS, moved)))
    for told in (found, changed):
        texts: list[str] = []
        for width in (80, 60):
            monkeypatch.setenv("COLUMNS", str(width))
            texts.append(str(told))
            assert max(map(len, texts[-1].splitlines())) <= width
        assert len({"".join(sorted("".join(text.split()).replace("─", ""))) for text in texts}) == 1
    lines = [line.split()[0] for line in str(found).splitlines() if "_" in line]
    assert lines == ["--xla_gpu_reduce_scatter_combine_", "threshold_bytes"]  # between words of a name, not in one


def test_annotations_stand_at_their_lines() -> None:
    lines = FOUND.annotations(Path("/repo")).splitlines()
    assert lines[0].startswith("::warning file=train/step.py,line=11,title=sums in every trip%3A 10 ms (10.0%25 of ")
    assert "A loop adds, 100%25 of its trips: all-reduce" in lines[0]
    assert lines[1].startswith("::warning title=optimizer state whole%3A")
    assert "::state.m: It lies whole. Split it." in lines[1]
    assert "file=/repo/train/step.py" in annotation(SUMS, "10 ms", Path("/elsewhere"))
    assert "\n" not in annotation(replace(SUMS, cause="two\nlines"), "10 ms", Path("/repo"))


def test_what_is_new_gone_or_dearer_is_told() -> None:
    moved = replace(SUMS, where="/other/train/step.py:99 (add)", seconds=0.015)
    wide = replace(SUMS, kind="gathered wide", seconds=0.004)
    after = replace(FOUND, findings=(moved, wide), step=replace(FOUND.step, step_s=0.12))
    found = compared(FOUND, after)
    assert [(one.what, one.kind) for one in found.changes] == [
        ("changed", "sums in every trip"),
        ("new", "gathered wide"),
        ("gone", "optimizer state whole"),
    ]
    assert found.worst == pytest.approx((0.12 - 0.1) / 0.12)
    assert [one.kind for one in found.regressions().findings] == ["sums in every trip", "gathered wide"]
    assert "+20.0%" in str(found)
    assert max(map(len, str(found).splitlines())) <= columns()


def test_what_is_the_same_is_no_regression() -> None:
    moved = replace(SUMS, where=SUMS.where.replace(":11", ":12"), seconds=0.0105)
    found = compared(FOUND, replace(FOUND, findings=(moved, STATE)))
    assert found.changes == ()
    assert found.worst == 0
    assert found.regressions().findings == ()


def test_a_file_that_is_no_diagnosis_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "saved.json"
    path.write_text(json.dumps(compared(FOUND, FOUND).to_json()))
    assert saved(path).to_json() == FOUND.to_json()
    for wrong in ("no json", "[]", json.dumps({**FOUND.to_json(), "schema": 2})):
        path.write_text(wrong)
        with pytest.raises(PlanFileError, match=r"saved\.json"):
            saved(path)
    with pytest.raises(PlanFileError, match="cannot read"):
        saved(tmp_path / "missing.json")


def test_kinds_are_told_apart() -> None:
    assert len(set(KINDS)) == len(KINDS)
    assert {SUMS.kind, STATE.kind} <= set(KINDS)
