"""Files: written whole or not at all, where they are said to be; read, or refused by an error of ours."""

import json
import logging
import os
import stat
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard import PlanFileError, SpecError, files
from autoshard.planner.record import parse
from autoshard.planner.store import Lock
from benchmarks import damaged_files

W, X = np.ones((16, 32), np.float32), np.ones((32, 16), np.float32)


def loss(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ w) ** 2)


plan = partial(autoshard.plan, loss, W, X, mesh={"data": 8}, hardware="cpu:8", for_grad=False)


@pytest.fixture(scope="module")
def made() -> autoshard.SolvedPlan:
    return plan(cache=False)


@pytest.fixture(autouse=True)
def _outside_of_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("AUTOSHARD_CACHE", raising=False)


# --- Writing -----------------------------------------------------------------------------


def test_what_is_no_regular_file_is_written_to_and_stays(tmp_path: Path, made: autoshard.SolvedPlan) -> None:
    made.save("/dev/null")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    pipe, read = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    made.save(pipe)
    reader.join(10)
    assert read == [made.record.dumps()]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_links_are_followed(tmp_path: Path, made: autoshard.SolvedPlan) -> None:
    (tmp_path / "there").mkdir()
    target, link, more = tmp_path / "there" / "plan.json", tmp_path / "link.json", tmp_path / "more.json"
    link.symlink_to("there/plan.json")
    more.symlink_to(link)
    for _ in range(2):  # dangling, then not
        made.save(more)
        assert link.is_symlink()
        assert more.is_symlink()
        assert target.read_text() == made.record.dumps()
        target.write_text("old")
    around = tmp_path / "around.json"
    around.symlink_to(around)
    with pytest.raises(PlanFileError, match="around"):
        made.save(around)


def test_modes_are_those_of_the_umask_or_of_the_old_file(tmp_path: Path, made: autoshard.SolvedPlan) -> None:
    path = tmp_path / "plan.json"
    before = os.umask(0o027)
    try:
        made.save(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o604)
        made.save(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o604
    finally:
        os.umask(before)


def test_nothing_is_left_behind_of_a_write_that_failed(tmp_path: Path, made: autoshard.SolvedPlan) -> None:
    (tmp_path / "plan.json").mkdir()
    for path in (tmp_path / "plan.json", tmp_path / "none" / "plan.json", tmp_path / ("x" * 300), tmp_path / "a\0b"):
        with pytest.raises(PlanFileError, match="cannot write"):
            made.save(path)
    with pytest.raises(PlanFileError, match="no text"):
        files.write_whole(tmp_path / "new", "\ud800")
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_the_old_text_stays_if_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(PlanFileError, match="No space left"):
        files.write_whole(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


KILLED = """
import os, signal, sys
from pathlib import Path
from autoshard import files
Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
files.write_whole(sys.argv[1], "never")
"""


def test_what_a_killed_writer_left_is_swept(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert len(list(tmp_path.iterdir())) == 1
    files.write_whole(path, "text")
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


# --- The store ---------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [True, 5, "", "a\0b", b"bytes"])
@pytest.mark.parametrize("option", ["cache", "lock"])
def test_what_is_no_path_is_refused_before_planning(option: str, wrong: Any) -> None:
    with pytest.raises(SpecError, match=f"{option}="):
        plan(**{option: wrong})


def test_a_plan_outlives_a_cache_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, logger="autoshard"):
        found = plan(cache=tmp_path / "file")
    assert found.record.name == "loss"
    assert "not cached" in caplog.text


def test_a_lock_that_cannot_be_written_is_an_error_before_planning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with monkeypatch.context() as patched:
        patched.setattr("autoshard.api.planning.plan_request", lambda *_, **__: pytest.fail("planned"))
        with pytest.raises(PlanFileError, match=r"loss: the plan cannot be locked: .*file.*lock="):
            plan(lock=tmp_path / "file" / "plan.json")

    def full(*_: Any) -> None:
        raise PlanFileError("no space left on device")

    monkeypatch.setattr("autoshard.planner.store.write_plan_file", full)
    with pytest.raises(PlanFileError, match="cannot be locked: no space left"):
        plan(lock=tmp_path / "plan.json")


def test_a_function_of_a_long_name_is_cached(tmp_path: Path) -> None:
    def long(w: Any, x: Any) -> Any:
        return loss(w, x)

    long.__name__ = "näme" * 100
    for _ in range(2):
        found = autoshard.plan(long, W, X, mesh={"data": 8}, hardware="cpu:8", for_grad=False, cache=tmp_path)
        assert found.record.name == long.__name__
    assert len(list(tmp_path.iterdir())) == 1


def test_a_cached_plan_of_another_program_is_a_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And its digest, which may be a path, names no file."""
    first = plan(cache=tmp_path)
    (entry,) = tmp_path.iterdir()
    for key, value in (("digest", "../../x"), ("inputs", []), ("outputs", []), ("donated", [0]), ("name", "other")):
        document = json.loads(first.record.dumps()) | {key: value}
        entry.write_text(json.dumps(json.loads(entry.read_text()) | {"plan": json.dumps(document)}))
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="autoshard"):
            found = plan(cache=tmp_path)
        np.testing.assert_allclose(found.jit()(W, X), loss(W, X), rtol=1e-5)
        assert ("damaged" in caplog.text) == (key != "name")
    with pytest.raises(PlanFileError, match="no digest"):
        Lock(tmp_path / "{digest}.json").of("../../../../x")


def test_a_neighbour_s_file_does_not_hinder(tmp_path: Path) -> None:
    for i, text in enumerate(('{"key": {"arguments": 5}, "plan": ""}', "[" * 10**5, "\udcff")):
        path = tmp_path / f"loss-{i:032}.json"
        path.write_bytes(text.encode(errors="surrogateescape"))
    os.mkfifo(tmp_path / f"loss-{'f' * 32}.json")
    assert plan(cache=tmp_path).record.name == "loss"


# --- Reading -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("xla_dump_to", "/tmp/x", "xla_dump_to"),
        ("xla_gpu_cuda_data_dir", "/tmp/x", "xla_gpu_cuda_data_dir"),
        ("xla_gpu_enable_latency_hiding_scheduler", "/tmp/x", "true or false"),
        ("xla_gpu_reduce_scatter_combine_threshold_bytes", -1, "whole number"),
        ("xla_gpu_reduce_scatter_combine_threshold_bytes", True, "whole number"),
    ],
)
def test_a_file_sets_no_flag_but_the_known_ones(made: autoshard.SolvedPlan, flag: str, value: Any, words: str) -> None:
    document = json.loads(made.record.dumps())
    with pytest.raises(PlanFileError, match=words):
        parse(json.dumps(document | {"compiler_options": {flag: value}}), "the file")


def test_the_flags_that_plans_need_are_known() -> None:
    """As `description` writes them, of a program with a loop, and as `refine` adds to them."""

    def step(w: Any, x: Any) -> Any:
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0].sum()

    w, x = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4, 512, 512), (512, 512)))
    found = autoshard.plan(step, w, x, mesh={"data": 8}, hardware="h100:1x8", cache=False)
    assert found.compiler_options
    flags = {"xla_gpu_experimental_parallel_collective_overlap_limit": 4, "xla_gpu_enable_pipelined_all_gather": True}
    for record in (found.record, found.noted("refined", compiler_options=flags).record):
        assert parse(record.dumps(), "the file") == record


def test_an_axis_called_as_the_mark_of_an_open_dimension_is_refused(made: autoshard.SolvedPlan) -> None:
    text = made.record.dumps().replace('"data"', '"?"')
    with pytest.raises(PlanFileError, match=r"\?"):
        parse(text, "the file")


@pytest.mark.parametrize("kind", damaged_files.KINDS)
def test_damaged_files_are_refused_by_errors_of_ours(kind: str) -> None:
    """A few of those that `python -m benchmarks.damaged_files` tries."""
    found = [damaged_files.tried(kind, seed) for seed in range(40)]
    wrong = [one for one in found if not isinstance(one, str)]
    assert not wrong
    assert len(set(found)) > 1 or kind == "cache"  # a miss is no error
