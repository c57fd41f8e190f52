"""Plan files: the same input gives the same bytes, and what is read is what was written."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import autoshard
import models
from autoshard.backends.hlo.text import UNKNOWN
from autoshard.errors import PlanMismatchError
from autoshard.planner.record import read_plan_file, schema
from autoshard.problem import iopddl
from autoshard.problem.decisions import place_of
from autoshard.solver import clock, solve
from tests.programs import GPUS, MESH

P = PartitionSpec
W = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)
X = np.random.default_rng(1).normal(size=(32, 16)).astype(np.float32)

# A program whose plan has collectives, chains of constraints and donated state; also run by
# another process, so it imports all that it needs.
PROGRAM = """
import jax, jax.numpy as jnp, autoshard

def train(state, x):
    def loss(p):
        h = jax.nn.gelu(x @ p["up"].astype(x.dtype)) @ p["down"].astype(x.dtype)
        return jnp.mean(jnp.square(h.astype(jnp.float32)))
    value, gradients = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 1e-3 * g, state, gradients), value

def make():
    state = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in (("up", (4096, 8192)), ("down", (8192, 4096)))}
    x = jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16)
    mesh = {"data": 2, "model": 4}
    return autoshard.plan(train, state, x, mesh=mesh, hardware="h100:1x8", donate_argnums=0, rel_gap=0)
"""


def made() -> autoshard.SolvedPlan:
    scope: dict[str, Any] = {}
    exec(compile(PROGRAM, "program.py", "exec"), scope)  # as the other process reads it
    return scope["make"]()


def loss(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def test_equal_inputs_give_equal_files(tmp_path: Path) -> None:
    """In this process, again in this process, and in another one with another hash seed."""
    text = made().record.dumps()
    assert made().record.dumps() == text
    assert len(json.loads(text)["constraints"]) > 0
    assert len(json.loads(text)["collectives"]) > 0
    script = (
        f"source = {PROGRAM!r}\nscope = {{}}\nexec(compile(source, 'program.py', 'exec'), scope)\n"
        "import sys\nscope['make']().save(sys.argv[1])\n"
    )
    for seed in ("1", "77"):
        path = tmp_path / f"{seed}.json"
        env = {**os.environ, "PYTHONHASHSEED": seed}
        subprocess.run([sys.executable, "-c", script, str(path)], check=True, env=env, cwd=Path(__file__).parents[2])
        assert path.read_text(encoding="utf-8") == text


@pytest.mark.slow
def test_a_slow_machine_settles_for_the_same_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """One on which every clock runs four times as far meanwhile; the plan is not proven to 0.1 % at once."""
    fn, args = models.build("gpt2-small", batch=8, layers=1)

    def planned() -> Any:
        return autoshard.plan(fn, *args, mesh=MESH, hardware=GPUS, donate_argnums=0, for_grad=False, time_limit_s=160.0)

    plan = planned()
    assert plan.record.certificate.gap > 0
    slow = SimpleNamespace(perf_counter=lambda: 4 * time.perf_counter(), thread_time=lambda: 4 * time.thread_time())
    monkeypatch.setattr(clock, "time", slow)
    assert planned().record.dumps() == plan.record.dumps()


def test_a_saved_plan_is_read_as_it_was(tmp_path: Path) -> None:
    plan, path = made(), tmp_path / "plan.json"
    plan.save(path)
    assert read_plan_file(path) == plan.record
    assert read_plan_file(path).dumps() == path.read_text(encoding="utf-8")
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    loaded = autoshard.load(path)
    state, x = plan.specs
    assert loaded.specs == {"state['down']": state["down"], "state['up']": state["up"], "x": x}
    assert loaded.compiler_options == plan.compiler_options
    assert repr(loaded) == repr(plan)


def test_files_follow_the_published_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())
    jsonschema.validate(json.loads(made().record.dumps()), schema())


def test_a_loaded_plan_runs(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan = autoshard.plan(loss, W, X, mesh=MESH, hardware=GPUS, pins={"w": P("data", "model")})
    plan.save(path)
    want = loss(W, X)
    for jitted in (autoshard.load(path).jit(loss), autoshard.load(path).bind(loss, W, X).jit(), plan.jit()):
        for _ in range(2):
            np.testing.assert_allclose(jitted(W, X), want, rtol=1e-5)
    bound = autoshard.load(path).bind(loss, W, X)
    assert bound.specs == plan.specs
    assert bound.put(W, "w").sharding == plan.put(W, "w").sharding
    lowered = autoshard.load(path).jit(loss).lower(W, X)
    assert lowered.as_text() == plan.jit().lower(W, X).as_text()


def test_source_lines_do_not_belong_to_a_program() -> None:
    """The same function further down in its file is the same program; another constant is not."""

    def record(source: str) -> Any:
        scope: dict[str, Any] = {"jnp": jnp}
        exec(compile(source, "program.py", "exec"), scope)
        return autoshard.plan(scope["f"], W, mesh=MESH, hardware=GPUS).record

    one = record("def f(w):\n    return jnp.sum(w * 2)\n")
    assert record("\n\n\ndef f(w):\n    return jnp.sum(w * 2)\n").digest == one.digest
    assert record("def f(w):\n    return jnp.sum(w * 3)\n").digest != one.digest
    assert record("def f(v):\n    return jnp.sum(v * 2)\n").digest != one.digest  # paths are part of a plan


def test_closed_over_arrays_belong_to_a_program() -> None:
    one, same, other = (
        autoshard.plan(lambda x, c=c: x @ c, X, mesh=MESH, hardware=GPUS).record.digest for c in (W, W.copy(), 2 * W)
    )
    assert one == same != other


def test_costs_add_up() -> None:
    cost, certificate = made().record.cost, made().record.certificate
    assert cost.step_s == certificate.objective_s
    assert certificate.bound_s <= certificate.objective_s
    assert cost.compute_s > 0
    assert cost.hidden_s >= 0
    np.testing.assert_allclose(cost.compute_s + cost.exposed_s, cost.step_s, rtol=1e-9)


def test_the_summary_names_what_matters() -> None:
    plan = made()
    text = plan.summary()
    for word in ("h100:1x8", "data=2", "state", plan.record.certificate.status):
        assert word in text
    assert jax.tree.structure(plan.in_shardings(), is_leaf=lambda x: hasattr(x, "spec")) == jax.tree.structure(
        ({"up": 0, "down": 0}, 0)
    )


def test_a_plan_s_problem_is_solved_on_its_own(tmp_path: Path) -> None:
    plan = autoshard.plan(lambda w, x: w @ x, W, X, mesh=MESH, hardware=GPUS, for_grad=False)
    plan.problem.dump(tmp_path / "problem.json.gz")
    read_back = iopddl.read(tmp_path / "problem.json.gz")
    assert solve(read_back, time_limit_s=20, rel_gap=1e-3).objective * read_back.unit_s == pytest.approx(
        plan.cost, rel=2e-3
    )
    plan.save(tmp_path / "plan.json")
    with pytest.raises(PlanMismatchError, match="plan again"):
        _ = autoshard.load(tmp_path / "plan.json").problem  # pyright: ignore[reportAttributeAccessIssue]


def test_a_moment_without_a_source_line_is_told_by_the_last_one_before() -> None:
    eqns = [
        SimpleNamespace(primitive="dot_general", where="model.py:3 (f)"),
        SimpleNamespace(primitive="gather", where=UNKNOWN),
    ]
    decisions: Any = SimpleNamespace(graph=SimpleNamespace(eqns=eqns))
    assert place_of(decisions, 0) == "dot_general at model.py:3 (f)"
    assert place_of(decisions, 1) == "gather after model.py:3 (f)"
    assert place_of(decisions, 2) == "the end of the program"
    decisions.graph.eqns = eqns[1:]
    assert place_of(decisions, 0) == f"gather at {UNKNOWN}"


def test_an_older_plan_that_leaves_a_convolution_to_the_partitioner_is_refused(tmp_path: Path) -> None:
    """Its file has no layouts for what runs on each device's part today; XLA alone would compute it wrongly."""
    x, k = jnp.ones((8, 6, 4)), jnp.ones((3, 1, 4))

    def depthwise(x: jax.Array, k: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x, k, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=4
        )

    path = tmp_path / "plan.json"
    plan = autoshard.plan(depthwise, x, k, mesh={"a": 4})
    plan.save(path)
    assert autoshard.load(path).bind(depthwise, x, k).specs == plan.specs
    data = json.loads(path.read_text())
    del data["emitted"]
    data["constraints"] = [entry for entry in data["constraints"] if entry["at"] != "kernel"]
    path.write_text(json.dumps(data))
    with pytest.raises(PlanMismatchError, match=r"older autoshard, which left conv_general_dilated at .*plan again"):
        autoshard.load(path).bind(depthwise, x, k)
