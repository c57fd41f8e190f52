"""A time limit holds in every stage of a call, and changes nothing where it does not end."""

import logging
import time
from collections.abc import Callable
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard import deadline
from autoshard.api.compare import Hand, Template
from autoshard.diagnosis.flags import tried
from autoshard.planner.stages import Stage, observed
from autoshard.solver.clock import Compilation

S = jax.ShapeDtypeStruct
ARGS = (S((512, 1024), "float32"), S((1024, 4096), "float32"), S((4096, 1024), "float32"))
MESH = {"data": 2, "model": 4}


def loss(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return (jnp.maximum(x @ up, 0) @ down).sum()


def plan_until(stage: str) -> autoshard.SolvedPlan:
    """The plan of a call whose time ends when a stage is done."""
    now = [0.0]

    def watch(done: Stage) -> None:
        now[0] = inf if done.name == stage else now[0]

    with deadline.within(1.0, clock=lambda: now[0]), observed(watch):
        return autoshard.plan(loss, *ARGS, mesh=MESH, hardware="h100:1x8")


STAGES = {
    "trace": "reading the program",
    "graph": "listing and pricing its splits",
    "strategies": "pricing its moves",
}


@pytest.mark.parametrize("stage", STAGES)
def test_time_ends_before_there_is_a_plan(stage: str) -> None:
    with pytest.raises(autoshard.TimeLimitError, match=STAGES[stage]) as caught:
        plan_until(stage)
    assert caught.value.limit_s == 1.0


def test_time_that_ends_behind_the_solver_leaves_all_constraints() -> None:
    late, usual = plan_until("solve"), plan_until("none")
    assert late.cost == usual.cost
    assert any("all constraints are emitted" in note for note in late.record.notes)
    assert len(late.record.pins.made) > len(usual.record.pins.made)


def step(state: Any, x: jax.Array) -> Any:
    """A plan of it is bettered by what its backward pass repeats, and by what lies in the host's memory."""

    def loss(weights: Any) -> jax.Array:
        return jax.lax.scan(lambda h, w: (jax.nn.silu(h @ w) + h, None), x, weights)[0].sum()

    moved = jax.tree.map(lambda m, g: 0.9 * m + g, state["moved"], jax.grad(loss)(state["weights"]))
    return {"weights": state["weights"] - moved, "moved": moved}


AMPLE, SCARCE, TIGHT = 45_000_000, 28_000_000, 26_000_000


def step_until(end: float, **options: Any) -> tuple[autoshard.SolvedPlan, list[str]]:
    """The plan of a call whose time ends when so many stages are done, and the stages."""
    done: list[str] = []
    weights = S((8, 512, 512), "float32")
    state, x = {"weights": weights, "moved": weights}, S((4096, 512), "float32")
    target: dict[str, Any] = {"mesh": {"data": 8}, "hardware": "h100:1x8", "memory": AMPLE}
    ends = deadline.within(1.0, clock=lambda: inf if len(done) >= end else 0.0)
    with ends, observed(lambda stage: done.append(stage.name)):
        return autoshard.plan(step, state, x, **(target | options), donate_argnums=0, constraints="all"), done


@pytest.mark.parametrize(
    ("options", "plans", "said"),
    [
        ({}, 1, "before it was known what is better repeated than kept"),
        ({"offload": "residuals", "memory": TIGHT}, 1, "before it was known what is better kept in the host's memory"),
        (
            {"offload": "state", "memory": SCARCE},
            3,
            "before it was known whether more of the state is better kept in the host's memory",
        ),
    ],
)
def test_a_plan_is_kept_whenever_time_ends_that_was_to_better_it(
    options: dict[str, Any], plans: int, said: str
) -> None:
    """After any stage behind the first plans; the more time, the better it is."""
    usual, stages = step_until(inf, **options)
    made = [at for at, name in enumerate(stages) if name == "record"]
    found = [step_until(end, **options)[0] for end in range(made[plans - 1] + 1, made[plans] + 2)]
    costs = [plan.cost for plan in found]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == usual.cost
    assert any(said in note for note in found[0].record.notes)
    assert not any(said in note for note in (*found[-1].record.notes, *usual.record.notes))


def test_a_limit_that_does_not_end_changes_nothing() -> None:
    made = [autoshard.plan(loss, *ARGS, mesh=MESH, hardware="h100:1x8", time_limit_s=t) for t in (None, 20.0, 10_000.0)]
    assert len({plan.record.dumps() for plan in made[:2]}) == 1
    assert made[2].record.pins == made[0].record.pins


def test_compiling_the_solver_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call after an installation compiles the solver: its plan is that of every later call."""
    now = [0.0]
    compiled, watch = Compilation(), [*STAGES]

    def compile_after(done: Stage) -> None:
        if done.name in watch:
            with monkeypatch.context() as patched:
                patched.setattr(time, "perf_counter", lambda: now[0])
                compiled.begin()
                now[0] += 100.0
                compiled.end()

    with deadline.within(300.0, clock=lambda: now[0]), deadline.within(1.0, clock=lambda: now[0]):
        with observed(compile_after):
            first = autoshard.plan(loss, *ARGS, mesh=MESH, hardware="h100:1x8")
        assert deadline.left_s(1.0) == 1.0
    assert first.record.dumps() == autoshard.plan(loss, *ARGS, mesh=MESH, hardware="h100:1x8").record.dumps()


def test_a_mesh_of_many_axes_is_given_up_in_time() -> None:
    with pytest.raises(autoshard.TimeLimitError, match="raise time_limit_s"):
        autoshard.plan(loss, *ARGS, mesh={f"a{i}": 2 for i in range(5)}, hardware="h100:4x8", time_limit_s=0.3)


# --- Asked to end -------------------------------------------------------------------------


def asked_after(stage: str, times: int = 1) -> tuple[Callable[[], bool], Callable[[Stage], None]]:
    """Whether a call is asked to end, and what asks it: when a stage is done so many times."""
    seen: list[str] = []

    def watch(done: Stage) -> None:
        seen.append(done.name)

    return lambda: seen.count(stage) >= times, watch


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_asked_to_end_has_no_plan_yet(stage: str) -> None:
    stop, watch = asked_after(stage)
    with (
        deadline.until(stop),
        observed(watch),
        pytest.raises(autoshard.StoppedError, match=f"interrupted while {STAGES[stage]}"),
    ):
        autoshard.plan(loss, *ARGS, mesh=MESH, hardware="h100:1x8")


def test_the_best_of_the_meshes_so_far_is_kept(tmp_path: Path) -> None:
    meshes = [{"data": 8}, MESH, {"data": 4, "model": 2}]
    cache, lock = tmp_path / "cache", tmp_path / "lock.json"
    stop, watch = asked_after("solve", times=2)
    with deadline.until(stop), observed(watch):
        made = autoshard.plan(loss, *ARGS, mesh=meshes, hardware="h100:1x8", cache=cache, lock=lock)
    usual = autoshard.plan(loss, *ARGS, mesh=meshes[:2], hardware="h100:1x8")
    assert made.cost == usual.cost
    assert "interrupted: 2 of 3 meshes were planned" in made.record.notes
    assert not lock.exists()
    assert len([*cache.rglob("*.json")]) == 1  # the first mesh's, which was planned to its end


def test_the_solver_ends_with_its_best_so_far(caplog: pytest.LogCaptureFixture) -> None:
    """Asked to end as soon as the solver tells of a first choice; before that, there is no plan."""
    caplog.set_level(logging.DEBUG, "autoshard")
    with deadline.until(lambda: "of the optimum, after" in caplog.text):
        made = autoshard.plan(loss, *ARGS, mesh=MESH, hardware="h100:1x8")
    assert made.cost >= autoshard.plan(loss, *ARGS, mesh=MESH, hardware="h100:1x8").cost
    stop, watch = asked_after("price")
    with (
        deadline.until(stop),
        observed(watch),
        pytest.raises(autoshard.StoppedError, match="interrupted while solving"),
    ):
        autoshard.plan(loss, *ARGS, mesh=MESH, hardware="h100:1x8")


def test_flags_that_were_tried_are_kept() -> None:
    tried_: list[Any] = []

    def compiled_with(flags: Any) -> Any:
        tried_.append(flags)
        return SimpleNamespace(memory=SimpleNamespace(compiled=None), timeline=None)

    source = SimpleNamespace(verification=SimpleNamespace(compiler="gpu"), compiled_with=compiled_with)
    evidence: Any = SimpleNamespace(source=source)
    every = len(tried(evidence))
    tried_.clear()
    with deadline.until(lambda: len(tried_) == 2):
        assert len(tried(evidence)) == 2 < every


def test_layouts_that_were_not_priced_are_named() -> None:
    stop, watch = asked_after("solve")

    def rows(_: Any) -> Hand:
        return Hand(in_specs=(P("data"), P(), P()))

    with deadline.until(stop), observed(watch):
        found = autoshard.compare(
            loss, *ARGS, hardware="h100:1x8", mesh={"data": 8}, layouts={"rows": Template(axes=("data",), write=rows)}
        )
    assert found.ours.record.mesh.shape == {"data": 8}
    assert found.left_out == {"rows": "interrupted before it was priced"}
