"""Lighter: of equally fast choices, one with fewer reshardings that holds less memory."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard.planner import pipeline
from autoshard.problem.network import INF, Moves, Problem, chosen_cells
from autoshard.solver import solve
from autoshard.solver.evaluate import evaluate, usage_profile
from autoshard.solver.second_objective import break_ties, make_alike
from autoshard.solver.tuning import TUNED
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
    for seed in range(150):
        problem = coarse(random_problem(np.random.default_rng(seed), hinges=hinges))
        solution = solve(problem, time_limit_s=10)
        if not solution.found:
            continue
        found = break_ties(problem, solution.choice)
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
    assert moved >= 3


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
    assert (break_ties(problem, one * 0) == 0).all()
    assert (break_ties(problem, one) == 1).all()


def nearly_tied(seed: int) -> tuple[Problem, Moves]:
    """A problem whose edges cost a millionth of its nodes, and which cells of them move something."""
    rng = np.random.default_rng(seed)
    problem = random_problem(rng)
    moved = rng.integers(0, 2, len(problem.edge_cost))
    nearly = replace(
        problem,
        cost=np.where(problem.cost < INF, 10**7, INF),
        edge_cost=np.where(problem.edge_cost < INF, problem.edge_cost % 20, INF),
    )
    return nearly, Moves(own=np.zeros(len(problem.cost), np.int64), cells=moved)


def test_a_resharding_that_saves_next_to_nothing_is_left_out() -> None:
    fewer = 0
    for seed in range(150):
        problem, moves = nearly_tied(seed)
        solution = solve(problem, time_limit_s=10)
        if not solution.found:
            continue
        found = break_ties(problem, solution.choice, moves)
        before, after = (int(moves.cells[chosen_cells(problem, x)].sum()) for x in (solution.choice, found))
        objective = evaluate(problem, found).objective
        assert objective is not None
        assert objective <= solution.objective + round(TUNED.ties.worth * solution.objective) * (before - after)
        assert evaluate(problem, found).peak_bytes <= evaluate(problem, solution.choice).peak_bytes
        fewer += after < before
    assert fewer >= 5


def test_both_ends_of_a_resharding_move_together() -> None:
    """Alone, each of them would add one to its other neighbour."""
    same, other = 0, 1
    agree = np.array([0, 1, 1, 0])  # moved where the layouts differ
    dear, cheap = 10**9 * agree, agree
    problem = Problem(
        start=np.array([0, 1, 3, 5, 6]),
        cost=np.array([10**7, 10, 0, 10, 0, 10**7]),
        edge_nodes=np.array([[0, 1], [1, 2], [2, 3]]),
        edge_start=np.array([0, 2, 6, 8]),
        edge_cost=np.concatenate([cheap[:2], dear, cheap[[0, 2]]]),
        use_node=np.zeros(0, np.int64),
        use_interval=np.zeros((0, 2), np.int64),
        use_start=np.zeros(1, np.int64),
        usage=np.zeros(0, np.int64),
    )
    moves = Moves(own=np.zeros(6, np.int64), cells=np.concatenate([agree[:2], agree, agree[[0, 2]]]))
    choice = np.array([0, other, other, 0])
    assert solve(problem, time_limit_s=10).objective == evaluate(problem, choice).objective
    assert (break_ties(problem, choice) == choice).all()
    assert (break_ties(problem, choice, moves) == [0, same, same, 0]).all()


def equal_pairs(parts: int, dearer: int, usage: int = 0) -> tuple[Problem, np.ndarray, np.ndarray]:
    """Parts of two nodes that must choose alike, the last part the other strategy; in the first it costs more there.

    Returns the problem, the choice, and the nodes by part and place.
    """
    nodes = 2 * parts
    first = np.zeros((nodes, 2), np.int64)
    first[:, 0] = 10**7
    first[:, 1] = 10**7
    first[-2, 0] += dearer
    problem = Problem(
        start=2 * np.arange(nodes + 1),
        cost=first.ravel(),
        edge_nodes=np.arange(nodes).reshape(-1, 2),
        edge_start=4 * np.arange(parts + 1),
        edge_cost=np.tile([0, INF, INF, 0], parts),
        use_node=np.array([nodes - 1]),
        use_interval=np.array([[0, 1]]),
        use_start=np.array([0, 2]),
        usage=np.array([usage, 0]),
    )
    choice = np.zeros(nodes, np.int64)
    choice[-2:] = 1
    return problem, choice, np.arange(nodes).reshape(-1, 2)


def test_a_part_takes_the_choices_of_its_like_where_that_costs_next_to_nothing() -> None:
    worth = round(TUNED.ties.alike * 8 * 10**7)
    for dearer, usage, moves in ((0, 0, True), (worth, 0, True), (worth + 1, 0, False), (0, 1, False)):
        problem, choice, like = equal_pairs(4, dearer, usage)
        found = make_alike(problem, choice, [like])
        assert (found == 0).all() == moves, (dearer, usage)
        assert moves or (found == choice).all()


def test_a_place_that_a_part_does_not_have_stays() -> None:
    problem, choice, like = equal_pairs(4, 0)
    like[-1] = -1
    assert (make_alike(problem, choice, [like]) == choice).all()


def test_all_parts_together_cost_next_to_nothing() -> None:
    """Each may cost its share; the last ones stay as they are."""
    parts = 100
    cost = np.full((parts, 2), 10**6, np.int64)
    cost[51:] = [10**6 + 400, 10**6]  # 4e-6 of the objective each
    problem = Problem(
        start=2 * np.arange(parts + 1),
        cost=cost.ravel(),
        edge_nodes=np.zeros((0, 2), np.int64),
        edge_start=np.zeros(1, np.int64),
        edge_cost=np.zeros(0, np.int64),
        use_node=np.zeros(0, np.int64),
        use_interval=np.zeros((0, 2), np.int64),
        use_start=np.zeros(1, np.int64),
        usage=np.zeros(0, np.int64),
    )
    choice = np.repeat([0, 1], [51, 49])
    found = make_alike(problem, choice, [np.arange(parts)[:, None]])
    assert int((found == 0).sum()) == 51 + int(TUNED.ties.all_alike / 4e-6)


def test_what_is_proven_is_of_the_choice_that_is_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice that costs more than the solver's says so."""

    def other(problem: Problem, choice: np.ndarray, moves: Moves) -> np.ndarray:
        assert len(moves.cells) == len(problem.edge_cost)
        best = evaluate(problem, choice).objective
        for v, first in enumerate(problem.start[:-1]):
            for k in range(int(problem.start[v + 1] - first)):
                found = choice.copy()
                found[v] = k
                if evaluate(problem, found).feasible and evaluate(problem, found).objective != best:
                    return found
        raise AssertionError("no other choice")

    monkeypatch.setattr(pipeline, "break_ties", other)
    plan = autoshard.plan(
        lambda x, w: jnp.tanh(jnp.tanh(x @ w) @ w.T).sum(),
        jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16),
        jax.ShapeDtypeStruct((1024, 4096), jnp.bfloat16),
        mesh={"data": 4, "model": 2},
        hardware="h100:1x8",
    )
    solution, problem = plan.planned.solution, plan.planned.formulation.problem
    assert evaluate(problem, solution.choice).objective == solution.objective > solution.bound
    assert plan.record.certificate.status == "feasible"
    assert plan.record.certificate.gap > 0
