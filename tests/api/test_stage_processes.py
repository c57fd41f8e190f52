"""Stages of several processes: the numbers of one, and an error of one is that of all, at once."""

import json
import threading
import time
from functools import partial
from typing import Any

import jax
import pytest

import models
from autoshard.api import shared_steps
from autoshard.api.multihost import Peers
from autoshard.api.shared_steps import SharedStep
from autoshard.errors import ProcessError, StageRunError
from tests.api.test_own_stages import LEARNING_RATE, steps_of
from tests.api.test_processes import Store, in_threads, launched
from tests.end_to_end.test_numerics import TOLERANCE
from tests.pipeline_parallel.test_in_stages import SMALL

# One of several processes; prints the loss of every step, or its error and after how long, as JSON.
WORKER = """
import hashlib, json, os, sys, time, traceback
options = json.loads(sys.argv[1])
me = options["process"]
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(options["address"], options["count"], me, initialization_timeout=60)
from functools import partial
import numpy as np, optax, autoshard, models
from autoshard.pipeline_parallel.own_stages.run import Run
from models.training import adamw
from tests.pipeline_parallel.test_in_stages import SMALL

module, config = models.find(options["model"], **SMALL)
params = jax.tree.map(np.asarray, jax.jit(partial(module.init, config))(jax.random.key(1)).params)
batch = jax.tree.map(np.asarray, module.example_batch(config, batch=16))
value_and_grad = autoshard.in_own_stages(
    partial(module.loss, config), stages="stage", steps=4, hardware=f"cpu:{jax.device_count()}", wait_s=8.0,
    **options["how"],
)
tx = optax.chain(optax.clip_by_global_norm(1.0), adamw(options["learning_rate"]))

@jax.jit
def update(params, state, gradients):
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state

start = Run._start

def broken(self, task, own):
    if task.microbatch == 2 and task.chunk:
        raise RuntimeError("no room on the device")
    return start(self, task, own)

found = {"steps": [], "errors": {}, "plans": [], "s": {}}
try:
    pipeline = value_and_grad.plan(params, batch)
    found["plans"] = [hashlib.sha256(chunk.whole.record.dumps().encode()).hexdigest() for chunk in pipeline.plans]
    state = tx.init(params)
    for step in range(options["rounds"]):
        what = options["wrong"].get(str(step)) if me == options["who"] else None
        if what == "dies":
            print("FOUND" + json.dumps(found), flush=True)
            os._exit(0)
        Run._start = broken if what == "fails" else start
        given = {name: x + 1 for name, x in batch.items()} if what == "other batch" else batch
        begin = time.monotonic()
        try:
            value, gradients = value_and_grad(params, given)
        except autoshard.AutoshardError as error:
            found["errors"][step] = f"{type(error).__name__}: {error}"
        else:
            params, state = update(params, state, gradients)
            found["steps"].append(float(value))
        found["s"][step] = time.monotonic() - begin
except Exception as error:
    traceback.print_exc()
    found["errors"]["none"] = str(error)
print("FOUND" + json.dumps(found), flush=True)
# Who leaves closes sockets that others may read, and process 0 keeps the store (as in test_processes.py).
from autoshard import _jax
store = _jax.process_store()
try:
    for word, of in (("done", range(options["count"])), ("left", range(1, options["count"]))):
        store.key_value_set(f"{word}/{me}", "")
        for other in of if word == "done" or not me else ():
            store.blocking_key_value_get(f"{word}/{other}", 5_000)
finally:
    os._exit(0)
"""


def stage_processes(
    count: int,
    how: dict[str, Any],
    *,
    model: str = "tiny-llama",
    devices: int = 1,
    wrong: dict[int, str] | None = None,
    rounds: int = 3,
    who: int = 1,
) -> list[dict[str, Any]]:
    """What the processes found in rounds, in some of which a process goes wrong in some way."""
    options = {
        "count": count,
        "how": how,
        "model": model,
        "learning_rate": LEARNING_RATE,
        "rounds": rounds,
        "wrong": wrong or {},
        "who": who,
    }
    return launched(WORKER, [options] * count, devices=devices)


def single_process(model: str) -> list[float]:
    """The losses of three steps on one device."""
    module, config = models.find(model, **SMALL)
    params = jax.jit(partial(module.init, config))(jax.random.key(1)).params
    batch = module.example_batch(config, batch=16)
    _, values = steps_of(jax.jit(jax.value_and_grad(partial(module.loss, config))), params, batch)
    return [float(value) for value in values]


def check_equal(found: list[dict[str, Any]], model: str = "tiny-llama") -> None:
    for each in found:
        assert each["plans"] == found[0]["plans"]
        assert each["steps"] == pytest.approx(single_process(model), rel=TOLERANCE)


def test_two_processes_have_the_steps_of_one_and_an_error_of_one_is_that_of_both() -> None:
    """The step that fails, and the one of other examples, change nothing: those after them are as without."""
    found = stage_processes(2, {"mesh": {"stage": 2}}, wrong={1: "fails", 2: "other batch"}, rounds=5)
    check_equal(found)
    for each in found:
        assert sorted(each["errors"]) == ["1", "2"], each["errors"]
        assert each["errors"]["1"].startswith(
            "StageRunError: stage 1 failed in the forward pass of micro-batch 2 (chunk 1 of the layers): no room"
        )
        assert "process 1 did not end the step: its arguments are not those of process 0" in each["errors"]["2"]
        assert max(each["s"]["1"], each["s"]["2"]) < 10


CASES: dict[str, tuple[int, int, str, dict[str, Any]]] = {  # processes, devices of each, the model, how
    "a stage of two processes": (4, 1, "tiny-gpt2", {"mesh": {"stage": 2, "data": 2}}),
    "two stages of a process": (2, 2, "tiny-mixtral", {"mesh": {"stage": 4}, "schedule": "GPipe"}),
    "zero-bubble": (2, 2, "tiny-llama", {"mesh": {"stage": 2, "model": 2}, "schedule": "zero-bubble"}),
    "interleaved": (2, 1, "tiny-llama", {"mesh": {"stage": 2}, "schedule": "interleaved", "repeats": 2}),
    "uneven": (2, 1, "tiny-gpt2", {"mesh": {"stage": 2}, "layers": (1, 3)}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_schedules_of_several_processes_have_the_steps_of_one(case: str) -> None:
    count, devices, model, how = CASES[case]
    found = stage_processes(count, how, model=model, devices=devices)
    assert not any(each["errors"] for each in found), found[0]["errors"]
    check_equal(found, model)


@pytest.mark.slow
def test_a_failure_in_one_of_a_stages_processes_is_that_of_all_at_once() -> None:
    found = stage_processes(4, {"mesh": {"stage": 2, "data": 2}}, wrong={1: "fails"}, rounds=2, who=3)
    for each in found:
        assert list(each["errors"]) == ["1"]
        assert "stage 1 failed in the forward pass of micro-batch 2" in each["errors"]["1"]
        assert each["s"]["1"] < 10


@pytest.mark.slow
def test_a_process_that_dies_is_named() -> None:
    survivor, dead = stage_processes(2, {"mesh": {"stage": 2}}, wrong={1: "dies"}, rounds=2)
    assert "process 1 did not end the step: nothing was heard of it for 8 s" in survivor["errors"]["1"]
    assert survivor["s"]["1"] < 20
    assert not dead["errors"]


# --- The protocol alone, against a store in memory ---------------------------------------


class Values:
    """Values that are on no device, after a while."""

    def __init__(self, ready: threading.Event) -> None:
        self._ready = ready

    def is_ready(self) -> bool:
        """Whether they are."""
        return self._ready.is_set()

    def block_until_ready(self) -> None:
        """Waits for them."""
        self._ready.wait()


def together(*parts: Any, wait_s: float = 5.0) -> list[Any]:
    """What each process that runs `part(step)` returns or raises; None stands for one that does not come."""
    store, count = Store(), len(parts)

    def process(i: int) -> Any:
        with SharedStep(Peers(store=store, index=i, count=count, wait_s=wait_s)) as step:
            return parts[i](step)

    results = in_threads(process, [i for i, part in enumerate(parts) if part is not None], count)
    for key in [key for key in shared_steps._alive if key[0] == id(store)]:
        shared_steps._alive.pop(key).end()
    return results


def whole(step: SharedStep) -> str:
    """A step without failures."""
    step.compare([1.0])
    step.start(None)
    step.finish([])
    return "done"


def test_a_step_ends_where_all_have_come_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = time.monotonic()

    def late(step: SharedStep) -> str:
        time.sleep(2.0)
        return whole(step)

    assert together(whole, late, whole) == ["done"] * 3
    assert time.monotonic() - begin >= 2.0
    monkeypatch.setattr(shared_steps, "_SIGNS", 0)
    assert together(whole, late, wait_s=1.5) == ["done"] * 2  # a late one is not a silent one


def test_a_failure_reaches_those_that_wait_for_a_device() -> None:
    never = threading.Event()

    def waits(step: SharedStep) -> Any:
        step.compare([])
        step.start(None)
        return step.finish([Values(never)])

    def fails(step: SharedStep) -> Any:
        step.compare([])
        step.start(None)
        return 1 // 0

    first, second, third = together(waits, fails, waits)
    assert isinstance(second, ZeroDivisionError)
    for error in (first, third):
        assert isinstance(error, ProcessError)
        assert "process 1 did not end the step: ZeroDivisionError" in str(error)


def test_a_stage_that_fails_is_the_error_of_all() -> None:
    failure = StageRunError(1, 3, 2, "backward", "no room")

    def fails(step: SharedStep) -> Any:
        step.compare([])
        return step.start(failure)

    def others(step: SharedStep) -> Any:
        step.compare([])
        return step.start(None)

    first, second = together(others, fails)
    assert second is failure
    assert isinstance(first, StageRunError)
    assert str(first) == str(failure)


def test_other_arguments_and_silence_are_named() -> None:
    def other(step: SharedStep) -> Any:
        return step.compare([2.0])

    for error in together(whole, other):
        assert "process 1 did not end the step: its arguments are not those of process 0" in str(error)
    begin = time.monotonic()
    error, _ = together(whole, None, wait_s=1.0)
    assert "process 1 did not end the step: nothing was heard of it for 3 s" in str(error)
    _, error = together(None, whole, wait_s=1.0)
    assert "process 0 did not end the step: nothing was heard of it for 3 s" in str(error)
    assert time.monotonic() - begin < 10


def test_what_was_said_of_old_steps_is_forgotten() -> None:
    store = Store()
    peers = Peers(store=store, index=0, count=1, wait_s=1.0)
    for _ in range(5):
        with SharedStep(peers) as step:
            whole(step)
    shared_steps._alive.pop((id(store), 0)).end()
    assert {key.split("/")[2] for key in store.values if key.startswith("autoshard/steps/")} == {"count", "4", "5"}
    assert json.loads(store.values["autoshard/steps/5/finish-answer"]) == {}
