"""What is given to a plan is compared with what was planned; two processes give each its part of a batch."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard.errors import PlanMismatchError
from tests.api.test_processes import free_port

ROOT = Path(__file__).parents[2]

# One of two processes with four devices each, and its half of every batch; prints what it found as JSON.
WORKER = """
import json, os, sys, traceback
process, address = int(sys.argv[1]), sys.argv[2]
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, 2, process, initialization_timeout=60)
import numpy as np, jax.numpy as jnp, autoshard
from jax.sharding import Mesh, PartitionSpec as P
from tests.api.test_placing import batch, init, train_step

half = jax.tree.map(lambda a: a if a.ndim == 0 else np.split(a, 2)[process], batch())
devices = np.array(jax.devices())
orders = {
    "by process": devices.reshape(2, 4),
    "model over processes": devices.reshape(4, 2).T.reshape(4, 2).T,
    "interleaved": devices.reshape(2, 4).T.reshape(2, 4),
}
layouts = {
    "whole": {"x": P(), "y": P()},
    "whole and columns": {"x": P(), "y": P(None, "model")},
    "rows": {"x": P("data"), "y": P("data")},
    "rows and columns": {"x": P("data"), "y": P(None, ("data", "model"))},
    "rows of all": {"x": P(("data", "model")), "y": P("model", "data")},
}
found = {}
try:
    for order, grid in orders.items():
        mesh = Mesh(grid, ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        for layout, specs in layouts.items():
            if order != "by process" and layout != "rows":
                continue
            step = autoshard.jit(train_step, mesh=mesh, pins={f"batch.{name}": spec for name, spec in specs.items()})
            plan = step.plan(jax.eval_shape(init), batch())
            state = plan.init(init, arg="state")
            losses = []
            for _ in range(3):
                placed = plan.put_local(half, arg="batch")
                state, loss = step(state, placed)
                losses.append(float(loss))
            assert {k: v.sharding.spec for k, v in placed.items() if k in specs} == specs, placed
            assert placed["x"].shape == (16, 32)
            found[f"{order}, {layout}"] = losses
    step = autoshard.jit(train_step, mesh=Mesh(devices.reshape(2, 4).T, ("data", "model")), host_local="batch")
    plan = step.plan(jax.eval_shape(init), batch())
    assert plan.specs[1]["x"][0] == plan.specs[1]["y"][0] == "model", plan.specs[1]  # the axis between processes
    state, losses = plan.init(init, arg="state"), []
    for _ in range(3):
        state, loss = step(state, plan.put_local(half, arg="batch"))
        losses.append(float(loss))
    found["host_local"] = losses
    for name, wrong in {"of a half": half, "of thirds": jax.tree.map(lambda a: a[:3] if a.ndim else a, half)}.items():
        like = half if name == "of a half" else batch()
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), like)
        try:
            autoshard.jit(train_step, mesh=mesh).plan(jax.eval_shape(init), shapes).put_local(wrong, arg="batch")
        except autoshard.PlanMismatchError as error:
            found[name] = str(error)
except Exception as error:
    traceback.print_exc()
    found["error"] = repr(error)
print("FOUND" + json.dumps(found), flush=True)
from autoshard import _jax
store = _jax.process_store()
store.key_value_set(f"done/{process}", "")
store.blocking_key_value_get(f"done/{1 - process}", 120_000)
if process == 1:
    store.key_value_set("left/1", "")
else:
    store.blocking_key_value_get("left/1", 120_000)
os._exit(0)
"""


def batch() -> dict[str, Any]:
    random = np.random.default_rng(0)
    x, y = random.normal(size=(16, 32)).astype("f4"), random.normal(size=(16, 8)).astype("f4")
    return {"x": x, "y": y, "scale": np.float32(0.5)}


def init() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0))
    return {"up": jax.random.normal(keys[0], (32, 64)) / 8, "down": jax.random.normal(keys[1], (64, 8)) / 8}


def train_step(state: Any, batch: Any) -> Any:
    def loss(state: Any) -> Any:
        return jnp.mean((jnp.tanh(batch["x"] @ state["up"]) @ state["down"] - batch["y"]) ** 2) * batch["scale"]

    value, slope = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, d: p - 0.1 * d, state, slope), value


def test_each_of_two_processes_gives_its_part_whatever_the_layout() -> None:
    """As one process with all of it does, step by step; what is no part is refused in both."""
    address = f"127.0.0.1:{free_port()}"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(i), address],
            env=env,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        wrote = [process.communicate(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    for out, _ in wrote:
        assert "FOUND" in out, "\n".join(err[-3000:] for _, err in wrote)
    first, second = (json.loads(out.split("FOUND")[1]) for out, _ in wrote)
    assert "error" not in first, "\n".join(err[-3000:] for _, err in wrote)
    assert first == second
    assert "not the same values: it was planned for one process's part" in first.pop("of a half")
    assert "batch.x is float32[16, 32] in the plan, got [3, 32] of it here" in first.pop("of thirds")
    state, want = init(), []
    for _ in range(3):
        state, loss = train_step(state, batch())
        want.append(float(loss))
    assert len(first) == 8
    for layout, losses in first.items():
        assert losses == pytest.approx(want, rel=1e-5), layout


def planned() -> autoshard.SolvedPlan:
    return autoshard.jit(train_step, mesh={"data": 2, "model": 4}, hardware="cpu:8").plan(init(), batch())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": np.zeros((8, 32), "f4")}, r"batch.x is float32\[16, 32\] in the plan, got float32\[8, 32\]"),
        ({"x": np.zeros((16, 32), "i4")}, r"batch.x is float32\[16, 32\] in the plan, got int32\[16, 32\]"),
        ({"scale": None}, "2 leaves given; the plan's 'batch' has 3; it has batch.scale, which was not given"),
        ({"z": 1.0}, "4 leaves given; the plan's 'batch' has 3; batch.z was given, which it does not have"),
        ({"scale": None, "z": 1.0}, "it has batch.scale, which was not given; batch.z was given"),
    ],
    ids=["shape", "dtype", "less", "more", "other"],
)
def test_what_is_put_is_what_was_planned(change: Any, words: str) -> None:
    plan = planned()
    given = {**batch(), **change}
    for put in (plan.put, plan.put_local):
        with pytest.raises(PlanMismatchError, match=words):
            put(given, arg="batch")
    with pytest.raises(PlanMismatchError, match=words):
        plan.init(lambda: jax.tree.map(jnp.asarray, given), arg="batch")


def test_other_leaves_of_equal_number_are_refused() -> None:
    plan = planned()
    swapped = {"up": np.zeros((64, 8), "f4"), "down": np.zeros((32, 64), "f4")}
    with pytest.raises(PlanMismatchError, match=r"state.down is float32\[64, 8\] in the plan, got float32\[32, 64\]"):
        plan.put(swapped, "state")
    renamed = {"w": init()["up"], "v": init()["down"]}
    with pytest.raises(PlanMismatchError, match=r"it has state\.down, which was not given; state\.v was given"):
        plan.init(lambda: renamed, arg="state")


def test_float64_and_python_numbers_are_what_jax_makes_of_them() -> None:
    plan = planned()
    placed = plan.put({**batch(), "x": batch()["x"].astype("f8"), "scale": 0.5}, "batch")
    assert placed["x"].dtype == jnp.float32
    assert placed["scale"].dtype == jnp.float32
