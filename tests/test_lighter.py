"""Lighter: of equally fast choices, one that holds less memory."""

from dataclasses import replace

import numpy as np
import pytest

from autoshard.lighter import lighter
from autoshard.problem.network import INF, Problem
from autoshard.solver import solve
from autoshard.solver.evaluate import evaluate, usage_profile
from tests.random_problems import random_problem


def coarse(problem: Problem) -> Problem:
    """The problem with prices so coarse that many choices cost the same."""
    return replace(
        problem,
        cost=np.where(problem.cost < INF, problem.cost // 20, INF),
        edge_cost=np.where(problem.edge_cost < INF, problem.edge_cost // 20, INF),
    )


def held(problem: Problem, choice: np.ndarray) -> int:
    """Bytes × time points."""
    times, usage = usage_profile(problem, choice)
    return int((usage[:-1] * np.diff(times)).sum())


@pytest.mark.parametrize("hinges", [0, 2])
def test_as_fast_and_no_single_move_is_lighter(hinges: int) -> None:
    moved = 0
    for seed in range(60):
        problem = coarse(random_problem(np.random.default_rng(seed), hinges=hinges))
        solution = solve(problem, time_limit_s=10)
        if not solution.found:
            continue
        found = lighter(problem, solution.choice)
        assert evaluate(problem, found).objective == solution.objective
        assert evaluate(problem, found).peak_bytes <= evaluate(problem, solution.choice).peak_bytes
        if (found == solution.choice).all():
            continue
        moved += 1
        assert held(problem, found) < held(problem, solution.choice)
        for v in range(problem.nodes):
            for k in range(int(problem.start[v + 1] - problem.start[v])):
                other = found.copy()
                other[v] = k
                same = evaluate(problem, other).objective == solution.objective
                assert not (same and held(problem, other) < held(problem, found))
    assert moved >= 5


def test_a_peak_that_would_grow_is_not_taken() -> None:
    """The second strategy holds less for longer in all, but all of it at once."""
    one = np.ones(1, np.int64)
    problem = Problem(
        start=np.array([0, 2]),
        cost=np.array([5, 5]),
        edge_nodes=np.zeros((0, 2), np.int64),
        edge_start=np.zeros(1, np.int64),
        edge_cost=np.zeros(0, np.int64),
        use_node=np.zeros(2, np.int64),
        use_interval=np.array([[0, 10], [0, 1]]),
        use_start=np.array([0, 2, 4]),
        usage=np.array([10, 0, 0, 50]),
    )
    assert (lighter(problem, one * 0) == 0).all()
    assert (lighter(problem, one) == 1).all()
