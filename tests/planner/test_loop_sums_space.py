"""Sums over loops' trips are finished once, after the loop, where that is faster: the compiled loop sums nothing."""

from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard import deadline
from autoshard.api.options import Options
from autoshard.api.planning import requests_of
from autoshard.api.solved_plan import SolvedPlan
from autoshard.backends.hlo import collectives, read
from autoshard.errors import PlanFileError
from autoshard.ir.mesh import MeshAxes
from autoshard.planner import pipeline
from autoshard.planner import record as records
from autoshard.planner.loop_sums_space import splittable, summing_once
from autoshard.planner.search_space import build_search_space
from autoshard.planner.stages import observed
from tests import random_loop_sums as drawn
from tests.programs import GPUS, relative_error

MESH = {"data": 8}
LAYERS, WIDTH, MICRO, ROWS, STEPS = 2, 16, 4, 4096, 6
RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32) / 4


def own_accumulation(weights: Any, batch: Any) -> Any:
    """A user's loop over micro-batches, around one over layers; the loss is summed, too."""

    def loss(weights: Any, x: Any) -> Any:
        x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, weights)
        return jnp.mean(x * x)

    def add(total: Any, x: Any) -> Any:
        return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(weights, x)), None

    return jax.lax.scan(add, (jnp.zeros(()), jnp.zeros_like(weights)), batch)[0]


def state_space(weights: Any, x: Any) -> Any:
    """Steps of time that share two weights; their gradients."""

    def loss(weights: Any, x: Any) -> Any:
        decay, out = weights

        def step(h: Any, u: Any) -> Any:
            h = jnp.exp(-jnp.exp(decay)) * h + jnp.tanh(u)
            return h, jnp.sum(jnp.square(h @ out), -1)

        return jnp.mean(jax.lax.scan(step, jnp.zeros((ROWS, WIDTH)), x)[1])

    return jax.value_and_grad(loss)(weights, x)


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "accumulation": (own_accumulation, (normal(LAYERS, WIDTH, WIDTH), normal(MICRO, ROWS, WIDTH))),
    "state space": (state_space, ((normal(WIDTH), normal(WIDTH, WIDTH)), normal(STEPS, ROWS, WIDTH))),
}


@pytest.fixture(scope="module", params=PROGRAMS)
def planned(request: pytest.FixtureRequest) -> tuple[Any, Callable[..., Any], tuple[Any, ...]]:
    fn, args = PROGRAMS[request.param]
    batch = "batch" if fn is own_accumulation else "x"
    return autoshard.plan(fn, *args, mesh=MESH, hardware=GPUS, pins={batch: P(None, "data")}), fn, args


def test_the_compiled_loops_sum_nothing(planned: Any) -> None:
    plan, _, args = planned
    assert plan.loop_sums
    found = collectives(read(plan.jit().lower(*args).compile().as_text()), MeshAxes.of(MESH))
    assert [str(c) for c in found if c.trips > 1 and c.kind in ("all-reduce", "reduce-scatter")] == []
    assert any(c.kind in ("all-reduce", "reduce-scatter") for c in found)


def test_the_numbers_are_the_same_as_without_a_plan(planned: Any, tmp_path: Path) -> None:
    plan, fn, args = planned
    want = fn(*args)
    path = tmp_path / "plan.json"
    plan.save(path)
    loaded = autoshard.load(path)
    assert loaded.record == plan.record
    for made in (plan.jit(), loaded.jit(fn)):
        for a, b in zip(jax.tree.leaves(made(*args)), jax.tree.leaves(want), strict=True):
            assert relative_error(a, b) < 1e-5


def check_split(seeds: range) -> int:
    """Runs random loops on eight devices, all of their sums in parts, in the layouts that are then best; how many."""
    found = 0
    for seed in seeds:
        fn, args = drawn.program(seed), drawn.inputs(seed)
        options = Options(mesh=MESH, hardware=GPUS, pins={"x": P(None, "data"), "y": P(None, "data")})
        (request,) = requests_of(fn, args, {}, options)
        sums = splittable(request)
        if not sums:
            continue
        found += len(sums)
        planned = pipeline.solve_space(build_search_space(summing_once(request, sums)))
        made = SolvedPlan(planned.record, place=request.target, traced=planned.traced, planned=planned)
        for a, b in zip(jax.tree.leaves(made.jit()(*args)), jax.tree.leaves(fn(*args)), strict=True):
            np.testing.assert_array_equal(a, b)
    return found


def test_random_loops_compute_the_same_on_several_devices() -> None:
    assert check_split(range(4)) > 1


@pytest.mark.slow
def test_many_random_loops_compute_the_same_on_several_devices() -> None:
    assert check_split(range(4, 44)) > 20


@pytest.mark.parametrize("kept", ["cache", "lock"])
def test_a_plan_is_found_again(planned: Any, tmp_path: Path, kept: str) -> None:
    _, fn, args = planned
    batch = "batch" if fn is own_accumulation else "x"
    where: Any = {kept: tmp_path / "kept"}
    first, again = (
        autoshard.plan(fn, *args, mesh=MESH, hardware=GPUS, pins={batch: P(None, "data")}, **where) for _ in range(2)
    )
    assert again.record == first.record
    assert again.loop_sums
    for a, b in zip(jax.tree.leaves(again.jit()(*args)), jax.tree.leaves(fn(*args)), strict=True):
        assert relative_error(a, b) < 1e-5
    assert again.planned.record.loop_sums == first.loop_sums  # planned again, where that is asked for


def test_what_is_kept_and_what_is_summed_once_are_chosen_together() -> None:
    fn, args = PROGRAMS["state space"]
    plan = autoshard.plan(fn, *args, mesh=MESH, hardware=GPUS, pins={"x": P(None, "data")}, remat="add")
    assert plan.loop_sums
    for a, b in zip(jax.tree.leaves(plan.jit()(*args)), jax.tree.leaves(fn(*args)), strict=True):
        assert relative_error(a, b) < 1e-5


def test_a_place_that_the_program_does_not_have_is_refused(planned: Any, tmp_path: Path) -> None:
    plan, fn, args = planned
    path = tmp_path / "plan.json"
    path.write_text(plan.record.dumps().replace(plan.loop_sums[0].place, "9999:0"))
    with pytest.raises(PlanFileError, match="no sum over a loop's trips at 9999:0"):
        autoshard.load(path).bind(fn, *args)


def test_the_summary_says_which_sums_wait(planned: Any) -> None:
    plan, _, _ = planned
    assert f"{records.AFTER_LOOPS} {len(plan.record.loop_sums)} sums over loops' trips" in " ".join(
        plan.summary().split()
    )


def test_a_loop_that_sums_in_every_trip_says_so() -> None:
    """The carried value is clipped, so it has to be whole in every trip."""

    def clipped(w: Any, x: Any) -> Any:
        def add(total: Any, rows: Any) -> Any:
            return jnp.clip(total + rows.T @ jnp.tanh(rows @ w), -1, 1), None

        return jax.lax.scan(add, jnp.zeros_like(w), x)[0]

    w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 64), (MICRO, 2**18, 64)))
    plan = autoshard.plan(clipped, w, x, mesh=MESH, hardware=GPUS, pins={"x": P(None, "data")})
    assert plan.record.loop_sums == ()
    assert "finish sums in every trip" in " ".join(plan.summary().split())


def test_a_file_of_a_program_without_such_loops_is_as_it_was() -> None:
    w, x = normal(WIDTH, WIDTH), normal(ROWS, WIDTH)
    plan = autoshard.plan(lambda w, x: jnp.sum(x @ w), w, x, mesh=MESH, hardware=GPUS)
    assert '"schema": 1' in plan.record.dumps()
    assert '"loop_sums"' not in plan.record.dumps()


def test_time_that_ends_behind_the_plan_with_sums_leaves_that_plan() -> None:
    fn, args = PROGRAMS["state space"]
    done: list[str] = []
    ends = deadline.within(1.0, clock=lambda: inf if "record" in done else 0.0)
    with ends, observed(lambda stage: done.append(stage.name)):
        plan = autoshard.plan(fn, *args, mesh=MESH, hardware=GPUS, pins={"x": P(None, "data")})
    assert any("whether sums are better finished in every trip of a loop" in note for note in plan.record.notes)
    assert plan.record.loop_sums
