"""Runs a program of a cluster, one of whose processes misbehaves: `python cluster_fault.py resumable.py`.

The variable FAULT says how, and MISBEHAVING in which process:
- `absent`: dies before it plans.
- `planning`: process 0 dies once it has heard of the others, before it answers.
- `late`: comes to plan some seconds after the others.
- `code`: its training step is another.
- `training`: dies in the third step.
Each says "fault" on standard output when it happens.
"""

import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax

from autoshard.api import placing
from autoshard.api.multihost import Peers

LATE_S = 6


def fault() -> None:
    """Says that it happens now."""
    sys.stdout.write("fault\n")
    sys.stdout.flush()


def die(*_: Any, **__: Any) -> Any:
    """Ends this process as a machine that fails."""
    fault()
    os.kill(os.getpid(), signal.SIGKILL)


def prepare(kind: str) -> None:
    """Sees to it that this process misbehaves."""
    made, put, batches = jax.make_mesh, placing.put_local, 0

    def saying(*args: Any, **kwargs: Any) -> Any:
        fault()
        return made(*args, **kwargs)

    def late(*args: Any, **kwargs: Any) -> Any:
        time.sleep(LATE_S)
        return saying(*args, **kwargs)

    def third(*args: Any, **kwargs: Any) -> Any:
        nonlocal batches
        batches += 1
        return die() if batches == 3 else put(*args, **kwargs)

    if kind == "absent":
        jax.make_mesh = die
    elif kind == "planning":
        Peers._compare = die
    elif kind == "late":
        jax.make_mesh = late
    elif kind == "training":
        placing.put_local = third
    elif kind == "code":
        other = Path("other")
        other.mkdir(exist_ok=True)
        (other / "job.py").write_text(Path("job.py").read_text().replace("p - 0.1 * g", "p - 0.2 * g"))
        sys.path.insert(0, str(other))
        jax.make_mesh = saying


if __name__ == "__main__":
    sys.path[0] = str(Path.cwd())
    if os.environ["SLURM_PROCID"] == os.environ.get("MISBEHAVING"):
        prepare(os.environ["FAULT"])
    runpy.run_path(sys.argv[1], run_name="__main__")
