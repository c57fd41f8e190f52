"""Processes of our own: a file of the working directory takes no module of Python's from them, nor dies unheard."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autoshard import _children
from autoshard.errors import SolverError
from autoshard.solver.exact import mip_process
from autoshard.solver.exact.mip_process import solve_in_time
from autoshard.solver.tuning import MipProcessTuning
from tests.solver.test_solver_local import dense

ROOT = Path(__file__).parents[2]

# A program of its own in a folder whose `string.py` must not be read.
HERE = """
import json, sys
sys.path.insert(0, {root!r})
from autoshard.explore import workers
from autoshard.explore.candidates import Candidate
from autoshard.solver.exact import mip_process as child
from autoshard.solver.tuning import MipProcessTuning
from autoshard.explore.trial import Task
from autoshard.explore.workers import Order
from tests.solver.test_solver_local import dense

found = child.solve_in_time(dense(6, 4), left_s=60.0, time_limit_s=60.0, tuning=MipProcessTuning())
worker = workers.start(Task(target="own:builder", keywords={{}}))
worker.tell(Order(candidate=Candidate(hardware="cpu:8", chips=8, mesh=(("a", 8),)), known=()))
tried = worker.answer()
worker.kill()
worker.close()
print("FOUND" + json.dumps([found.finished, type(getattr(tried, "answer", tried)).__name__]))
"""
OWN = """
import jax, jax.numpy as jnp
def builder():
    return (lambda w, x: (w - x @ w, w.sum())), (jax.ShapeDtypeStruct((8, 8), jnp.float32),) * 2
"""


def test_a_string_py_in_the_working_directory_is_not_read(tmp_path: Path) -> None:
    for name in ("string", "pickle", "signal", "tempfile", "colorsys"):
        (tmp_path / f"{name}.py").write_text("open('read', 'w').close(); raise SystemExit('the wrong file')")
    (tmp_path / "own.py").write_text(OWN)
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    env.pop("PYTHONPATH", None)
    command = [sys.executable, "-P", "-c", HERE.format(root=str(ROOT))]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert "FOUND" in done.stdout, done.stderr[-2000:]
    assert json.loads(done.stdout.split("FOUND")[1]) == [True, "RankedPlan"]
    assert not (tmp_path / "read").exists()


def test_modules_of_python_come_first_and_others_in_their_order() -> None:
    standard = str(Path(os.__file__).parent)
    paths = _children.standard_first(["/own", "", standard, "/site-packages", standard + "/lib-dynload", "/own"])
    assert paths == [standard, standard + "/lib-dynload", "/own", str(Path.cwd()), "/site-packages"]


def test_an_engine_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mip_process, "idle_processes", {})
    monkeypatch.setattr(_children, "command", lambda module: [sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(SolverError, match="ended with code 3"):
        solve_in_time(dense(6, 4), left_s=60.0, time_limit_s=60.0, tuning=MipProcessTuning())


def test_an_engine_that_was_killed_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(mip_process, "idle_processes", {})
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    monkeypatch.setattr(_children, "command", lambda module: [sys.executable, "-c", killed])
    answer = solve_in_time(dense(6, 4), left_s=60.0, time_limit_s=60.0, tuning=MipProcessTuning())
    assert answer.choice is None
    assert "killed by signal 9" in caplog.text
