"""The smallest peak of problems that nothing satisfies, and the parts that the search frees."""

from dataclasses import replace

import numpy as np
import pytest

from autoshard.solver import Status, evaluate, solve, users_at
from autoshard.solver.evaluate import usage_profile
from autoshard.solver.incumbent import Incumbent
from autoshard.solver.presolve.consistency import presolve
from autoshard.solver.primal.smallest_peak import approximate_peak
from autoshard.solver.search import surroundings, window
from tests.random_problems import brute_force, random_problem


def test_approximate_peak_encloses_the_smallest() -> None:
    exact = count = 0
    for seed in range(200):
        problem = random_problem(np.random.default_rng(seed))
        truth = brute_force(problem).smallest_peak
        peak = approximate_peak(Incumbent(problem=problem, time_limit_s=10))
        if truth is None:
            assert peak is None, seed
            continue
        assert peak is not None, seed
        assert peak.bound_bytes <= truth <= peak.peak_bytes, seed
        assert evaluate(problem, peak.choice).peak_bytes == peak.peak_bytes, seed
        count += 1
        exact += truth == peak.peak_bytes
    assert exact > 0.8 * count


def test_infeasible_answers_say_where_and_who() -> None:
    seen = 0
    for seed in range(60):
        problem = replace(random_problem(np.random.default_rng(seed)), usage_limit=0)
        solution = solve(problem)
        if solution.status is not Status.INFEASIBLE or not solution.smallest_peak_bytes:
            continue
        assert solution.peak_at is not None
        assert solution.peak_bound_bytes == solution.smallest_peak_bytes
        users = users_at(problem, solution.choice, solution.peak_at)
        assert sum(used for _, used in users) == solution.smallest_peak_bytes
        assert [used for _, used in users] == sorted((used for _, used in users), reverse=True)
        times, usage = usage_profile(problem, solution.choice)
        assert usage[times == solution.peak_at] == solution.smallest_peak_bytes
        seen += 1
    assert seen > 10


def test_parts_grow_from_their_first_node() -> None:
    for seed in range(30):
        network = presolve(random_problem(np.random.default_rng(seed)))
        if network is None:
            continue
        for order in (window(network, 0), surroundings(network, 0)):
            assert order[0] == 0
            assert sorted(order.tolist()) == list(range(network.nodes))


@pytest.mark.parametrize("passing", ["rounds", "finds nothing"])
def test_what_nothing_satisfies_is_for_want_of_memory_unless_costs_alone_forbid_it(
    passing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where what message passing rounds to is never allowed, as of deep models."""
    if passing == "finds nothing":
        monkeypatch.setattr("autoshard.solver.primal.smallest_peak.approximate_peak", lambda incumbent: None)
    memory = forbidden = 0
    for seed in range(120):
        problem = random_problem(np.random.default_rng(seed))
        truth = brute_force(problem).smallest_peak
        for limit in (None, 0):
            solution = solve(replace(problem, usage_limit=limit))
            if solution.status is not Status.INFEASIBLE:
                assert not solution.forbidden
                continue
            assert solution.forbidden == (truth is None), seed
            assert (solution.smallest_peak_bytes is None) == (truth is None), seed
            memory += truth is not None
            forbidden += truth is None
    assert memory > 30
    assert forbidden > 5
