"""A job of four processes with two devices each, started as SLURM starts it, ends with the numbers or a clear error.

The files are those of `docs/guides/clusters.md`. Minutes as a whole:
`python -m pytest -m slow tests/end_to_end/test_cluster_rehearsal.py`.
"""

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.end_to_end.code_blocks import blocks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("orbax") is None, reason="orbax is one of the dev extras"),
    pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for srun is a shell script"),
]

ROOT = Path(__file__).parents[2]
FAULTS = ROOT / "tests" / "cluster_fault.py"
JAX_SAYS = "This most likely indicates that another task died"  # it ends a process whose coordinator is gone
END_S = 30.0  # from a fault to the end of the last process


@dataclass(frozen=True, slots=True)
class Ended:
    """A job that is over.

    Attributes:
      code: exit code of the launcher; -15 where it was preempted.
      out: what the processes wrote.
      said: what they wrote to standard error.
      after_s: seconds from the fault, or the preemption, to the end of the last process.
    """

    code: int
    out: str
    said: str
    after_s: float

    @property
    def losses(self) -> dict[int, float]:
        return {int(i): float(loss) for i, loss in re.findall(r"step (\d+): loss ([\d.]+)", self.out)}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A folder with the files of the page."""
    page = (ROOT / "docs" / "guides" / "clusters.md").read_text()
    for block in blocks(page):
        if block.title is not None:
            (tmp_path / block.title).write_text(block.body)
    (tmp_path / "srun").chmod(0o755)
    return tmp_path


def run(job: Path, *, tasks: int = 4, steps: int = 5, fault: str = "", process: int = 2, preempt: int = -1) -> Ended:
    """Runs `resumable.py` until its last process is gone; `preempt` is the step after which SIGTERM comes."""
    environment = {
        **{name: value for name, value in os.environ.items() if name not in {"XLA_FLAGS", "JAX_PLATFORMS", "CI"}},
        "PYTHONPATH": str(ROOT),
        "REHEARSAL": "1",
        "TASKS": str(tasks),
        "STEPS": str(steps),
        "FAULT": fault,
        "MISBEHAVING": str(process) if fault else "",
    }
    log = job / "standard_error"
    out, begin = "", time.monotonic()
    with (
        log.open("w") as error,
        subprocess.Popen(
            ["./srun", sys.executable, str(FAULTS), "resumable.py"],
            cwd=job,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=error,
            text=True,
            start_new_session=True,
        ) as started,
        subprocess.Popen(  # a job that hangs is ended, and seen by its exit code
            [sys.executable, "-c", f"import os, time; time.sleep(120); os.killpg({started.pid}, 9)"]
        ) as watchdog,
    ):
        assert started.stdout is not None
        for line in started.stdout:  # ends with the last process
            out += line
            if "fault" in line or line.startswith(f"step {preempt}:"):
                begin = time.monotonic()
            if line.startswith(f"step {preempt}:"):
                os.killpg(started.pid, signal.SIGTERM)
        watchdog.kill()
        code, after_s = started.wait(), time.monotonic() - begin
    return Ended(code, out, log.read_text(), after_s)


def test_four_processes_run_one_plan_whose_lock_one_of_them_writes(job: Path) -> None:
    first = run(job, fault="late")
    assert first.code == 0, first.said
    assert sorted(first.losses) == [0, 1, 2, 3, 4]
    assert [path.name for path in (job / "plans").iterdir()] == ["8-devices.json"]
    written = (job / "plans" / "8-devices.json").read_bytes()
    again = run(job)
    assert again.losses == first.losses
    assert (job / "plans" / "8-devices.json").read_bytes() == written


def test_a_process_that_does_not_come_is_named(job: Path) -> None:
    ended = run(job, fault="absent")
    assert ended.code != 0
    assert "process 2 of 4 did not come to plan it within 20 s" in ended.said
    assert ended.after_s < END_S
    assert not ended.losses


def test_a_process_with_other_code_is_named(job: Path) -> None:
    ended = run(job, fault="code")
    assert ended.code != 0
    assert "process 2 has program" in ended.said
    # JAX ends a process that has not said it yet when process 0, its coordinator, is gone
    assert "ProcessError: train_step: the processes do not have the same program as process 0" in ended.said
    assert ended.after_s < END_S
    assert not ended.losses


@pytest.mark.parametrize("process", [0, 3])
def test_a_process_that_dies_in_training_ends_the_others(job: Path, process: int) -> None:
    ended = run(job, steps=1000, fault="training", process=process)
    assert ended.code != 0
    assert ended.after_s < END_S
    assert "Connection closed by peer" in ended.said or JAX_SAYS in ended.said
    assert max(ended.losses, default=0) <= 2


def test_process_0_that_dies_while_it_plans_ends_the_others(job: Path) -> None:
    ended = run(job, fault="planning", process=0)
    assert ended.code != 0
    assert "ProcessError: train_step: process 0, which plans it, is gone" in ended.said or JAX_SAYS in ended.said
    assert ended.after_s < END_S
    assert not ended.losses


def test_what_is_preempted_goes_on_with_another_number_of_hosts(job: Path) -> None:
    apart = job.parent / "whole"
    shutil.copytree(job, apart)
    preempted = run(job, steps=10_000, preempt=2)
    assert preempted.after_s < END_S
    done = int(next((job / "checkpoints").iterdir()).name)
    assert max(preempted.losses) == done - 1
    resumed = run(job, tasks=2, steps=done + 10)
    assert resumed.code == 0, resumed.said
    assert sorted(resumed.losses) == list(range(done, done + 10))
    assert {path.name for path in (job / "plans").iterdir()} == {"8-devices.json", "4-devices.json"}
    whole = run(apart, steps=done + 10)
    assert whole.code == 0
    for i, loss in (preempted.losses | resumed.losses).items():
        assert loss == pytest.approx(whole.losses[i], rel=1e-4)
