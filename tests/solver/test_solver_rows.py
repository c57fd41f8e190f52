"""Rows, memory consistency and dominance keep the optimum; tables of least values are right."""

from dataclasses import replace

import numpy as np

from autoshard.problem.network import INF, Problem
from autoshard.solver.memory import memory_of
from autoshard.solver.presolve.consistency import load, presolve
from autoshard.solver.presolve.dominance import without_dominated
from autoshard.solver.presolve.memory_rows import Rows, least_between, rows_of, within_memory
from autoshard.solver.program import Network, Program
from autoshard.solver.tuning import TUNED
from tests.random_problems import brute_force, problem_of, random_problem


def program_of(network: Network, rows: Rows) -> Program:
    """Returns the network with `rows` written out."""
    usage = np.zeros((rows.count, int(network.start[-1])), dtype=np.int64)
    for v in range(network.nodes):
        for i in range(rows.items[v], rows.items[v + 1]):
            size = int(network.sizes[v])
            at = slice(int(network.start[v]), int(network.start[v]) + size)
            usage[rows.begin[i] : rows.end[i], at] += rows.usage[rows.first[i] : rows.first[i] + size]
    return Program(network=network, usage=usage, base=rows.base, limit=rows.limit, hinge_constant=())


def problems(count: int) -> list[Problem]:
    return [random_problem(np.random.default_rng(seed)) for seed in range(count)]


def test_rows_keep_the_choices_that_fit() -> None:
    dropped = merged = 0
    for seed, problem in enumerate(problems(400)):
        network = load(problem)
        whole = memory_of(problem, network)
        rows = rows_of(whole)
        dropped += len(whole.times) - rows.count
        merged += len(whole.root) - len(rows.begin)
        after = brute_force(problem_of(program_of(network, rows)))
        assert after.objective == brute_force(problem).objective, seed
        for _ in range(5):
            choice = np.random.default_rng(seed).integers(0, network.sizes)
            profile = whole.profile(choice)
            assert np.array_equal(rows.profile(choice), profile[rows.events]), seed
            assert (profile.max(initial=0) <= rows.limit) == (rows.profile(choice).max(initial=0) <= rows.limit), seed
    assert dropped > 400
    assert merged > 400


def test_memory_consistency_keeps_the_optimum() -> None:
    gone = refused = 0
    for seed, problem in enumerate(problems(500)):
        network, truth = presolve(problem), brute_force(problem)
        if network is None:
            continue
        left = within_memory(problem, network)
        if left is None:
            refused += 1
            assert truth.objective is None, seed
            continue
        gone += int(network.start[-1] - left.start[-1])
        assert (
            brute_force(problem_of(program_of(left, rows_of(memory_of(problem, left))))).objective == truth.objective
        ), seed
    assert gone > 50
    assert refused > 10


def test_dominance_keeps_the_optimum() -> None:
    gone = 0
    for seed in range(500):
        problem = random_problem(np.random.default_rng(seed), hinges=seed % 2)
        # few distinct numbers, so that strategies often dominate one another
        few = replace(
            problem,
            cost=np.where(problem.cost >= INF, INF, problem.cost // 12),
            edge_cost=np.where(problem.edge_cost >= INF, INF, problem.edge_cost // 20),
            usage=problem.usage // 8,
            usage_limit=(problem.usage_limit or 0) // 8,
        )
        network, truth = presolve(few), brute_force(few)
        if network is None:
            continue
        left = without_dominated(few, network, TUNED.presolve)
        if left is None:
            assert truth.smallest_peak is None, seed
            continue
        gone += int(network.start[-1] - left.start[-1])
        constants = tuple(hinge.constant for hinge in few.hinges)
        program = replace(program_of(left, rows_of(memory_of(few, left))), hinge_constant=constants)
        assert brute_force(problem_of(program)).objective == truth.objective, seed
    assert gone > 500


def test_least_between_is_the_least_between() -> None:
    rng = np.random.default_rng(0)
    for size in (1, 2, 7, 64, 100):
        values = rng.integers(-50, 50, size)
        begin = rng.integers(0, size, 40)
        end = begin + 1 + rng.integers(0, size - begin)
        expected = [values[a:b].min() for a, b in zip(begin, end, strict=True)]
        assert least_between(values, begin, end).tolist() == expected
