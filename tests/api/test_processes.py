"""Several processes run one plan, or say within half a minute why not."""

import json
import os
import pty
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autoshard.api.multihost import Peers, peers_of
from autoshard.errors import InfeasibleError, ProcessError, StageRunError

ROOT = Path(__file__).parents[2]

# One of two processes with four devices each; prints what it found as JSON, an error too.
WORKER = """
import json, sys, time, traceback
options = json.loads(sys.argv[1])
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(options["address"], 2, options["process"], initialization_timeout=60)
import functools, numpy as np, jax.numpy as jnp, autoshard
from jax.ad_checkpoint import checkpoint_name
jax.devices()  # jax itself waits here for the other process
time.sleep(options["sleep_s"])
width = options["width"]

@functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("a", "b", "c", "d"))
def hidden(w, x):
    return checkpoint_name(jnp.tanh(checkpoint_name(x @ w["up"], "a")), "b")

def loss(w, x):
    return jnp.mean(hidden(w, x) @ w["down"])

def train_step(state, x):
    value, g = jax.value_and_grad(loss)(state, x)
    return jax.tree.map(lambda p, d: p - 0.1 * d, state, g), value

def init():
    ks = jax.random.split(jax.random.key(0))
    return {"up": jax.random.normal(ks[0], (16, width)), "down": jax.random.normal(ks[1], (width, 8))}

begin = time.monotonic()
try:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    step = autoshard.jit(
        train_step, mesh=mesh, donate_argnums=0,
        wait_s=options["wait_s"], memory=options["memory"], lock=options["lock"],
    )
    x = np.linspace(-1, 1, 32 * 16, dtype=np.float32).reshape(32, 16)
    plan = step.plan(jax.eval_shape(init), x)
    state = plan.init(init, arg="state")
    text = step.lower(state, x).as_text()
    for _ in range(3):
        state, value = step(state, x)
    jax.block_until_ready(state)
    found = {"plan": plan.record.dumps(), "value": float(value), "lowered": "sdy.sharding" in text}
    found["terminal"], found["seed"] = sys.stdout.isatty(), sys.flags.hash_randomization and hash("a")
    found["others"] = {}
    me, here = options["process"], {"mesh": {"data": 2, "model": 4}, "hardware": "h100:1x8"}
    constant = np.full(32, me, np.float32)
    attempts = {
        "constant": lambda: autoshard.plan(lambda x: jax.jit(lambda y: y + constant[:, None])(x), x, **here),
        "hardware": lambda: autoshard.plan(jnp.tanh, x, mesh=here["mesh"], hardware=["h100:1x8", "a100:1x8"][me]),
        "mesh": lambda: autoshard.plan(
            jnp.tanh, x, mesh={"data": [2, 4][me], "model": [4, 2][me]}, hardware="h100:1x8"
        ),
        "same": lambda: autoshard.plan(jnp.tanh, x, **here),
        "alone": lambda: me or autoshard.plan(jnp.tanh, x, **here, wait_s=0),
        "elsewhere": lambda: me or autoshard.plan(jnp.tanh, x, mesh={"data": 16}, hardware="h100:2x8"),
    }
    for name, attempt in attempts.items() if options["others"] else ():
        try:
            attempt()
        except autoshard.AutoshardError as error:
            found["others"][name] = f"{type(error).__name__}: {error}"
except Exception as error:  # of any kind: one that is raised here waits for the other in JAX's barrier
    traceback.print_exc()
    found = {"error": type(error).__name__, "text": str(error)}
print("FOUND" + json.dumps({**found, "s": time.monotonic() - begin}), flush=True)
# Nobody leaves before both are done: who leaves closes sockets that the other's collectives may still
# read. Process 0 keeps the store: it leaves last. No process waits in JAX's own barrier at exit.
from autoshard import _jax
store = _jax.process_store()
me, other = options["process"], 1 - options["process"]
store.key_value_set(f"done/{me}", "")
store.blocking_key_value_get(f"done/{other}", 120_000)
if me == 1:
    store.key_value_set("left/1", "")
else:
    store.blocking_key_value_get("left/1", 120_000)
import os; os._exit(0)
"""


def reading(screen: int) -> Callable[[], str]:
    """Reads a terminal while processes write to it; what is returned says what they wrote."""
    found: list[bytes] = []

    def read() -> None:
        with suppress(OSError):  # so ends a terminal that nobody writes to any more
            while text := os.read(screen, 4096):
                found.append(text)
        os.close(screen)

    thread = threading.Thread(target=read)
    thread.start()

    def text() -> str:
        thread.join(timeout=20)
        return b"".join(found).decode()

    return text


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run(*processes: dict[str, Any], on_terminal: int | None = None) -> list[dict[str, Any]]:
    """Runs one worker per dict of options, and returns what each found; one may write to a terminal."""
    base = {
        "width": 32,
        "sleep_s": 0.0,
        "wait_s": 25.0,
        "memory": None,
        "lock": None,
        "others": False,
    }
    return launched(WORKER, [{**base, **options} for options in processes], devices=4, on_terminal=on_terminal)


def launched(
    worker: str, processes: Sequence[dict[str, Any]], *, devices: int, on_terminal: int | None = None
) -> list[dict[str, Any]]:
    """Runs a program in several processes of so many devices, and returns what each found.

    Args:
      worker: the program: it reads its options, "address" and "process" among them, as JSON in its first argument, and
        prints what it found after "FOUND".
      processes: the options of each.
      devices: of each.
      on_terminal: the process that writes to a terminal.
    """
    address = f"127.0.0.1:{free_port()}"
    flags = f"--xla_force_host_platform_device_count={devices}"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    env.pop("CI", None)  # where a lock that is not there yet is an error, instead of written
    screen, terminal = pty.openpty()
    started = [
        subprocess.Popen(
            [sys.executable, "-c", worker, json.dumps({**options, "address": address, "process": i})],
            env={**env, "PYTHONHASHSEED": str(i + 1)},
            cwd=ROOT,
            stdout=terminal if i == on_terminal else subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i, options in enumerate(processes)
    ]
    os.close(terminal)
    shown = reading(screen)
    try:
        wrote = [process.communicate(timeout=180) for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    wrote = [(shown() if i == on_terminal else out, err) for i, (out, err) in enumerate(wrote)]
    for out, _ in wrote:
        assert "FOUND" in out, "\n".join(f"{err[:4000]}\n…\n{err[-2000:]}" for _, err in wrote)
    return [json.loads(out.split("FOUND")[1]) for out, _ in wrote]


def single_process_value() -> float:
    import jax
    import jax.numpy as jnp

    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(x @ w["up"]) @ w["down"])

    keys = jax.random.split(jax.random.key(0))
    state = {"up": jax.random.normal(keys[0], (16, 32)), "down": jax.random.normal(keys[1], (32, 8))}
    x = np.linspace(-1, 1, 32 * 16, dtype=np.float32).reshape(32, 16)
    value = None
    for _ in range(3):
        value, g = jax.value_and_grad(loss)(state, x)
        state = jax.tree.map(lambda p, d: p - 0.1 * d, state, g)
    return float(value)  # pyright: ignore[reportArgumentType]


def test_two_processes_run_one_plan_though_one_is_slow(tmp_path: Path) -> None:
    """Process 0 alone reads and writes the lock; both get its plan and the numbers of one process.

    Though one writes to a terminal and their hash seeds differ. What does differ (a constant of an inner call, the
    mesh, the hardware) is an error in both; a plan for devices elsewhere, or with `wait_s=0`, asks nobody.
    """
    lock = tmp_path / "step.json"
    first, second = run(
        {"lock": str(lock), "others": True},
        {"sleep_s": 4.0, "lock": str(tmp_path / "elsewhere" / "step.json"), "others": True},
        on_terminal=0,
    )
    assert "error" not in first, first
    assert "error" not in second, second
    assert first["plan"] == second["plan"] == lock.read_text()
    assert [p.name for p in tmp_path.iterdir()] == ["step.json"]
    assert json.loads(first["plan"])["mesh"] == {"data": 2, "model": 4}
    assert first["lowered"]
    assert second["lowered"]
    assert (first["terminal"], second["terminal"]) == (True, False)
    assert first["seed"] != second["seed"]
    for found in (first, second):
        assert sorted(found["others"]) == ["constant", "hardware", "mesh"]
        assert all(text.startswith("ProcessError") for text in found["others"].values()), found["others"]
        assert "h100:1x8" in found["others"]["hardware"]
        assert found["value"] == pytest.approx(single_process_value(), rel=1e-5)


@pytest.mark.slow
def test_another_program_is_named() -> None:
    found = run({}, {"width": 64})
    for each in found:
        assert each["error"] == "ProcessError", each
        assert "process 1 has program" in each["text"]
        assert "instead of" in each["text"]
        assert "state['up']: float32[16, 64]" in each["text"]
        assert each["s"] < 30


@pytest.mark.slow
def test_a_process_that_does_not_come_is_named() -> None:
    first, second = run({"wait_s": 3.0}, {"sleep_s": 15.0, "wait_s": 3.0})
    assert "process 1 of 2 did not come to plan it within 3 s" in first["text"]
    assert second["text"] == first["text"]
    assert first["s"] < 15


@pytest.mark.slow
def test_what_process_0_cannot_plan_no_process_can() -> None:
    first, second = run({"memory": 100}, {"memory": 100})
    assert first["error"] == second["error"] == "InfeasibleError"
    assert second["text"] == f"process 0 could not plan: {first['text']}"


# --- The protocol alone, against a store in memory ---------------------------------------


class Store:
    """What `jax.distributed`'s store does, for threads of one process."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def key_value_increment(self, key: str, by: int) -> int:
        self.values[key] = str(int(self.values.get(key, "0")) + by)
        return int(self.values[key])

    def key_value_set(self, key: str, value: str, *, allow_overwrite: bool = False) -> None:
        assert allow_overwrite or key not in self.values
        self.values[key] = value

    def key_value_delete(self, key: str) -> None:
        for name in [name for name in self.values if name.startswith(key)]:
            del self.values[name]

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        return [(name, value) for name, value in list(self.values.items()) if name.startswith(key)]

    def blocking_key_value_get(self, key: str, timeout_ms: int) -> str:
        import jax

        end = time.monotonic() + timeout_ms / 1000
        while key not in self.values:
            if time.monotonic() > end:
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: nobody set it")
            time.sleep(0.005)
        return self.values[key]


def in_threads(process: Callable[[int], Any], processes: Sequence[int], count: int) -> list[Any]:
    """What each of so many processes, threads of this one, returns or raises; None of those that do not come."""
    results: list[Any] = [None] * count

    def one(i: int) -> None:
        try:
            results[i] = process(i)
        except (ProcessError, InfeasibleError, StageRunError, ZeroDivisionError) as error:
            results[i] = error

    threads = [threading.Thread(target=one, args=(i,)) for i in processes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive()
    return results


def agree(*programs: Any, decide: Any = lambda: "the plan", wait_s: float = 0.3) -> list[Any]:
    """What each process gets or raises; None stands for a process that does not come."""
    store, count = Store(), len(programs)

    def process(i: int) -> str:
        return Peers(store=store, index=i, count=count, wait_s=wait_s).agree("step", programs[i], decide)

    return in_threads(process, [i for i, program in enumerate(programs) if program is not None], count)


def test_all_get_the_plan_of_process_0() -> None:
    program = {"program": "abc", "shapes": (1, 2)}
    assert agree(program, program, program) == ["the plan"] * 3
    calls: list[int] = []
    agree(program, program, decide=lambda: calls.append(1) or "plan")
    assert calls == [1]


def test_planning_may_take_longer_than_the_wait_for_others() -> None:
    assert agree({}, {}, decide=lambda: time.sleep(2.5) or "late", wait_s=1.5) == ["late"] * 2


def test_different_programs_are_named_everywhere() -> None:
    results = agree({"program": "a", "jax": "1"}, {"program": "a", "jax": "1"}, {"program": "b", "jax": "1"})
    for result in results:
        assert isinstance(result, ProcessError)
        assert "process 2 has program b instead of a" in str(result)
        assert "process 1" not in str(result)
        assert "jax" not in str(result)


def test_missing_processes_are_named() -> None:
    results = agree({}, {}, None)
    assert "process 2 of 3 did not come" in str(results[0])
    assert "process 2 of 3 did not come" in str(results[1])
    assert "process 0 did not come to plan it" in str(agree(None, {})[1])


def test_errors_of_process_0_reach_the_others() -> None:
    def infeasible() -> str:
        raise InfeasibleError("nothing fits", peak_bytes=3)

    first, second = agree({}, {}, decide=infeasible)
    assert first.peak_bytes == 3
    assert isinstance(second, InfeasibleError)
    assert str(second) == "process 0 could not plan: nothing fits"
    broken = agree({}, {}, decide=lambda: 1 // 0)
    assert isinstance(broken[0], ZeroDivisionError)
    assert isinstance(broken[1], ProcessError)
    assert "by zero" in str(broken[1])


class Lost(Store):
    """A store whose process is gone."""

    def key_value_delete(self, key: str) -> None:
        for name in [name for name in self.values if name.startswith(key)]:
            del self.values[name]

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        return [(name, value) for name, value in list(self.values.items()) if name.startswith(key)]

    def blocking_key_value_get(self, key: str, timeout_ms: int) -> str:
        import jax

        raise jax.errors.JaxRuntimeError("UNAVAILABLE: Socket closed\nAdditional information")


def test_a_process_0_that_is_gone_is_said() -> None:
    with pytest.raises(ProcessError, match=r"^step: process 0, .* is gone or .*: UNAVAILABLE: Socket closed;"):
        Peers(store=Lost(), index=1, count=2, wait_s=0.3).agree("step", {}, lambda: "the plan")


def test_a_process_0_that_stops_to_plan_is_said() -> None:
    store = Store()
    store.key_value_set("autoshard/1/pulse", "7")
    with pytest.raises(ProcessError, match=r"^step: process 0 stopped planning it: nothing was heard for 0.3 s"):
        Peers(store=store, index=1, count=2, wait_s=0.3).agree("step", {}, lambda: "the plan")


def test_a_mesh_is_of_one_process_or_of_all() -> None:
    class Device:
        def __init__(self, process: int) -> None:
            self.process_index = process

    assert peers_of([Device(1), Device(1)], 1.0) is None
    with pytest.raises(ProcessError, match=r"devices of processes \[0, 1\] of 1"):
        peers_of([Device(0), Device(1)], 1.0)
