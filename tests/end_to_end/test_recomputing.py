"""Plans that recompute: they compute what the program does, and hold what their files say."""

import random
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import autoshard
from autoshard.api.options import Options
from autoshard.api.planning import plan_request, requests_of
from autoshard.ir.recomputation import Recomputation, Remat
from autoshard.ir.recomputed import recomputation_of, savable
from autoshard.ir.saved_values import SavedValues
from autoshard.planner.recomputation_space import keeping
from autoshard.planner.request import PlanRequest
from tests.ir.test_recompute import PROGRAMS, drawn

Program = tuple[Callable[..., Any], tuple[Any, ...]]

SPLIT = {"data": 2, "model": 2}
ROWS = 128  # times as many as in the programs of one page: activations are most of what lies in memory


def wide(program: Program) -> Program:
    fn, (params, x, *rest) = program
    return fn, (params, np.tile(x, (ROWS, 1)), *rest)


def question(program: Program, **options: Any) -> tuple[PlanRequest, Options]:
    asked = Options(**{"mesh": SPLIT, "hardware": "cpu:4", "rel_gap": 1e-2, **options})
    return requests_of(program[0], program[1], {}, asked)[0], asked


def planned(program: Program, chosen: Recomputation | None) -> autoshard.SolvedPlan:
    """The plan of a program that keeps these values."""
    asked, options = question(program)
    return plan_request(asked if chosen is None else keeping(asked, chosen), options)


def assert_same(got: Any, expected: Any, rel: float = 1e-5) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max() <= rel * np.abs(b).max()


def random_kept(saved: SavedValues, remat: Remat, seed: str) -> Recomputation:
    return recomputation_of(saved, drawn(saved, random.Random(seed)), remat)


CASES: list[tuple[str, Remat]] = [*((name, "add") for name in PROGRAMS), ("checkpointed", "free")]


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 20))])
@pytest.mark.parametrize(("name", "remat"), CASES)
def test_plans_of_random_kept_values_compute_the_same(name: str, remat: Remat, seed: int) -> None:
    program = PROGRAMS[name]()
    asked, _ = question(program)
    chosen = random_kept(savable(asked.traced, remat), remat, f"{name} {remat} {seed}")
    plan = planned(program, chosen)
    assert plan.record.recomputation == chosen
    assert_same(plan.jit()(*program[1]), jax.jit(program[0])(*program[1]))


@pytest.mark.parametrize("name", ["scanned", "accumulated"])
def test_plans_under_tight_memory_compute_the_same(name: str) -> None:
    program = wide(PROGRAMS[name]())
    written = autoshard.plan(*flat(program), mesh={"data": 4}, hardware="cpu:4", remat="written")
    limit = int(0.7 * written.record.memory.peak_bytes)
    plan = autoshard.plan(*flat(program), mesh={"data": 4}, hardware="cpu:4", memory=limit, rel_gap=1e-2)
    assert plan.record.recomputation is not None
    assert plan.record.memory.peak_bytes <= limit
    assert_same(plan.jit()(*program[1]), jax.jit(program[0])(*program[1]))


def flat(program: Program) -> tuple[Any, ...]:
    return program[0], *program[1]
