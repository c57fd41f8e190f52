"""Locked plans hold until they do not fit; cached plans are found again, and a miss says what changed."""

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import autoshard
from autoshard import PlanFileError, PlanMismatchError, SpecError
from autoshard.planner import pipeline
from autoshard.planner.record import write_plan_file
from autoshard.planner.request import PlanRequest
from autoshard.planner.store import cache_at, changes
from tests.programs import GPUS, MESH

P = PartitionSpec
W = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)
X = np.random.default_rng(1).normal(size=(32, 16)).astype(np.float32)

plan = partial(autoshard.plan, mesh=MESH, hardware=GPUS)


def loss(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ w) ** 2)


@pytest.fixture(autouse=True)
def _outside_of_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("AUTOSHARD_CACHE", raising=False)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what was really planned."""
    names: list[str] = []
    real = pipeline.solve_request

    def make(request: PlanRequest, *args: Any, **kwargs: Any) -> Any:
        names.append(request.name)
        return real(request, *args, **kwargs)

    monkeypatch.setattr(pipeline, "solve_request", make)
    return names


# --- The lock ----------------------------------------------------------------------------


def test_a_locked_plan_is_written_once_and_then_read(tmp_path: Path, made: list[str]) -> None:
    path = tmp_path / "plans" / "loss.json"
    first = plan(loss, W, X, lock=path)
    assert path.read_text() == first.record.dumps()
    second = plan(loss, W, X, lock=path)
    assert second.record == first.record
    assert made == ["loss"]
    np.testing.assert_allclose(second.jit()(W, X), loss(W, X), rtol=1e-5)
    assert second.specs == first.specs


CHANGED: dict[str, tuple[dict[str, Any], str]] = {
    "mesh": ({"mesh": {"data": 8}}, r"mesh \(data=2 × model=4 → data=8\)"),
    "hardware": ({"hardware": "a100:1x8"}, r"hardware \(h100:1x8 → a100:1x8\)"),
    "pins": ({"pins": {"w": P("data")}}, "pins and donations"),
    "memory": ({"memory": 10**9}, r"memory limit \(.* → 1000000000\)"),
}


@pytest.mark.parametrize("what", CHANGED)
def test_what_does_not_fit_is_planned_again_and_an_error_in_ci(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "loss.json"
    options, words = CHANGED[what]
    plan(loss, W, X, lock=path)
    before = path.read_text()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(PlanMismatchError, match=f"the locked plan of loss changed.*{words}.*commit the file"):
        plan(loss, W, X, lock=path, **options)
    assert path.read_text() == before
    plan(loss, W, X, lock=path)  # what fits is no change
    monkeypatch.setenv("CI", "false")
    with caplog.at_level(logging.INFO, "autoshard"):
        again = plan(loss, W, X, lock=path, **options)
    assert path.read_text() == again.record.dumps() != before
    assert any("was made for another" in record.message for record in caplog.records)


def test_another_program_or_another_shape_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "loss.json"
    monkeypatch.setenv("CI", "1")
    with pytest.raises(PlanMismatchError, match=r"there is no .*loss\.json"):
        plan(loss, W, X, lock=path)
    monkeypatch.delenv("CI")
    plan(loss, W, X, lock=path)
    monkeypatch.setenv("CI", "1")
    with pytest.raises(PlanMismatchError, match=r"arguments \(x: float32\[32, 16\] → x: float32\[16, 16\]\)"):
        plan(loss, W, X[:16], lock=path)

    def other(w: Any, x: Any) -> Any:
        return jnp.sum(jnp.tanh(x @ w) ** 2)

    with pytest.raises(PlanMismatchError, match="program"):
        plan(other, W, X, lock=path)


def test_a_lock_that_was_edited_against_what_is_asked_is_planned_again(
    tmp_path: Path, made: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "loss.json"
    options: dict[str, Any] = {"lock": path, "pins": {"x": P("data")}, "for_grad": False}
    right = plan(loss, W, X, **options).record
    for edited in (P("model"), P("data", "model"), P()):
        inputs = tuple(replace(leaf, spec=edited) if leaf.path == "x" else leaf for leaf in right.inputs)
        write_plan_file(replace(right, inputs=inputs), path)
        made.clear()
        assert plan(loss, W, X, **options).record == right
        assert made
        assert "layout of x" in caplog.text
        write_plan_file(replace(right, inputs=inputs), path)
        monkeypatch.setenv("CI", "1")
        with pytest.raises(PlanMismatchError, match="layout of x"):
            plan(loss, W, X, **options)
        monkeypatch.delenv("CI")
    open_pin: dict[str, Any] = {**options, "pins": {"x": P(P.UNCONSTRAINED, None)}, "lock": tmp_path / "open.json"}
    plan(loss, W, X, **open_pin)
    made.clear()
    plan(loss, W, X, **open_pin)
    assert not made


def test_a_lock_with_other_constraints_is_planned_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "loss.json"
    options: dict[str, Any] = {"lock": path, "in_shardings": (P("data"), P("model")), "for_grad": False}
    few = plan(loss, W, X, **options).record
    every = plan(loss, W, X, **options, constraints="all").record
    assert every.pins.count > few.pins.count
    assert "constraints (needed → all)" in caplog.text
    monkeypatch.setenv("CI", "1")
    assert plan(loss, W, X, **options, constraints="all").record == every
    with pytest.raises(PlanMismatchError, match=r"constraints \(all → needed\)"):
        plan(loss, W, X, **options)
    path.write_text(path.read_text().replace(' "emitted": "all",\n', ""))  # as older files are
    plan(loss, W, X, **options)


def test_a_second_function_does_not_replace_the_firsts_lock(tmp_path: Path) -> None:
    path = tmp_path / "loss.json"
    plan(loss, W, X, lock=path, for_grad=False)
    text = path.read_text()

    def other(w: Any, x: Any) -> Any:
        return jnp.sum(jnp.tanh(x @ w) ** 2)

    with pytest.raises(SpecError, match="holds the plan of loss, and would be replaced by that of other"):
        plan(other, W, X, lock=path, for_grad=False)
    assert path.read_text() == text


def test_a_call_and_its_gradient_do_not_share_a_lock(tmp_path: Path) -> None:
    fn = autoshard.jit(loss, mesh=MESH, hardware=GPUS, lock=tmp_path / "loss.json")
    fn.plan(W, X)
    with pytest.raises(SpecError, match="holds one plan"):
        jax.grad(fn)(W, X)


def test_a_broken_lock_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "loss.json"
    path.write_text("{")
    with pytest.raises(PlanFileError, match="truncated or not JSON"):
        plan(loss, W, X, lock=path)
    assert path.read_text() == "{"


def test_a_jitted_function_of_several_shapes_has_a_lock_for_each(tmp_path: Path, made: list[str]) -> None:
    one = autoshard.jit(loss, mesh=MESH, hardware=GPUS, lock=tmp_path / "loss.json")
    one(W, X)
    with pytest.raises(SpecError, match=r"several shapes.*loss-\{digest\}.json"):
        one(W, X[:16])
    for _ in range(2):
        several = autoshard.jit(loss, mesh=MESH, hardware=GPUS, lock=tmp_path / "many" / "{digest}.json")
        several(W, X)
        several(W, X[:16])
    assert len(list((tmp_path / "many").iterdir())) == 2
    assert len(made) == 3


# --- The cache ---------------------------------------------------------------------------


def test_a_plan_is_found_again_in_the_cache(
    tmp_path: Path, made: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = plan(loss, W, X, cache=tmp_path)
    monkeypatch.setenv("AUTOSHARD_CACHE", str(tmp_path))
    with caplog.at_level(logging.INFO, "autoshard"):
        second = plan(loss, W, X)
    assert made == ["loss"]
    assert any("plan from" in record.message for record in caplog.records)
    assert second.record == first.record
    assert second.summary()
    np.testing.assert_allclose(second.jit()(W, X), loss(W, X), rtol=1e-5)
    assert made == ["loss"]
    assert second.planned.record == first.record
    assert second.planned is second.planned
    assert made == ["loss", "loss"]
    plan(loss, W, X, cache=False)
    assert len(made) == 3


def test_a_miss_says_what_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cached = partial(plan, cache=tmp_path)
    cached(loss, W, X)

    def missed(*args: Any, **options: Any) -> str:
        caplog.clear()
        with caplog.at_level(logging.INFO, "autoshard"):
            cached(loss, *args, **options)
        (message,) = [r.getMessage() for r in caplog.records if "not in the cache" in r.getMessage()]
        return message.split("changed since the plan most like it: ")[1]

    assert missed(W, X[:16]) == "arguments (x: float32[32, 16] → x: float32[16, 16])"
    assert missed(W, X, mesh={"data": 8}).startswith("mesh (data=2 × model=4 → data=8)")
    assert missed(W, X, pins={"w": P("data")}).startswith("pins and donations")
    assert missed(W, X, rel_gap=0.5) == "rel_gap (0.001 → 0.5)"
    assert len(list(tmp_path.iterdir())) == 5


def test_versions_and_hardware_files_are_part_of_the_key() -> None:
    old = {"program": "a", "hardware file": "1", "version of jax": "0.10.2", "arguments": ["x: float32[1]"]}
    assert changes(old, old) == []
    assert changes(old, {**old, "version of jax": "0.12.0"}) == ["version of jax (0.10.2 → 0.12.0)"]
    assert changes(old, {**old, "program": "b", "hardware file": "2"}) == ["program (a → b)", "hardware file (1 → 2)"]
    two = {**old, "program": "b", "arguments": ["x: float32[1]", "y: float32[1]"]}
    assert changes(old, two) == ["arguments (1 → 2)"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"key": 1, "plan": 2}', '{"key": {}, "plan": "{}"}'])
def test_a_broken_entry_is_planned_again(
    text: str, tmp_path: Path, made: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    plan(loss, W, X, cache=tmp_path)
    (path,) = tmp_path.iterdir()
    whole = path.read_text()
    path.write_text(text)
    plan(loss, W, X, cache=tmp_path)
    assert len(made) == 2
    assert any("planning again" in r.getMessage() and r.levelno == logging.WARNING for r in caplog.records)
    assert path.read_text() == whole
    assert [p.name for p in tmp_path.iterdir()] == [path.name]  # nothing half written is left


def test_a_directory_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    plan(loss, W, X, cache=tmp_path / "file" / "cache")
    assert any("is not cached" in r.getMessage() for r in caplog.records)
    assert cache_at(None) is None
    monkeypatch.setenv("AUTOSHARD_CACHE", "~/plans")
    found = cache_at(None)
    assert found is not None
    assert found.directory == Path.home() / "plans"
    assert cache_at(False) is None


def test_plans_for_a_gradient_come_back_from_the_cache(tmp_path: Path) -> None:
    pins = {"w": P("data", "model")}
    first, second = (plan(loss, W, X, cache=tmp_path, pins=pins, for_grad=True) for _ in range(2))
    assert second.record.gradient_of == first.record.gradient_of == (0,)
    f = autoshard.jit(loss, mesh=MESH, hardware=GPUS, cache=tmp_path, pins={"w": P("data", "model")})
    np.testing.assert_allclose(jax.grad(f)(jnp.asarray(W), X), jax.grad(loss)(W, X), rtol=1e-4, atol=1e-6)
