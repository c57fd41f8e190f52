"""Leaves, components, coarse costs and closing keep the optimum; clocks end every step."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from autoshard.problem.network import INF, Int, Problem
from autoshard.solver import Solution, Status, evaluate, solve
from autoshard.solver.dual.dual import shifted
from autoshard.solver.exact.rounding_gap import close
from autoshard.solver.incumbent import Incumbent
from autoshard.solver.memory import memory_of
from autoshard.solver.presolve.components import components
from autoshard.solver.presolve.consistency import load, presolve
from autoshard.solver.presolve.memory_rows import rows_of
from autoshard.solver.presolve.reduction import reduced
from autoshard.solver.presolve.trees import free_nodes, without_leaves
from autoshard.solver.program import Network, Program
from autoshard.solver.scaling import coarsened, coarsening, least
from autoshard.solver.tuning import TUNED, EngineTuning, SolverTuning
from tests.random_problems import Truth, brute_force, problem_of, random_problem


def scattered(seed: int, *, hinges: int = 0) -> Problem:
    """Returns a random problem of few edges, with usage at few of its nodes, so that it falls apart."""
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, nodes=6, strategies=3, hinges=hinges)
    kept = rng.random(problem.edges) < 0.6
    table = np.where(np.repeat(kept, np.diff(problem.edge_start)), problem.edge_cost, 0)
    items = np.flatnonzero(problem.use_node < rng.integers(1, 6))
    usage = [problem.usage[problem.use_start[i] : problem.use_start[i + 1]] for i in items]
    return replace(
        problem,
        edge_cost=table,
        use_node=problem.use_node[items],
        use_interval=problem.use_interval[items],
        use_start=np.concatenate([[0], np.cumsum([len(u) for u in usage])]).astype(np.int64),
        usage=np.concatenate([*usage, np.zeros(0, dtype=np.int64)]),
    )


def optimum_of(problem: Problem, network: Network) -> int | None:
    """Returns the optimum of a network to which a problem was reduced."""
    memory = memory_of(problem, network)
    usage = memory.coefficients(np.arange(len(memory.times)))
    program = Program(
        network=network,
        usage=usage,
        base=np.zeros(len(usage), dtype=np.int64),
        limit=memory.limit,
        hinge_constant=tuple(hinge.constant for hinge in problem.hinges),
    )
    return brute_force(problem_of(program)).objective


def test_leaves_keep_the_optimum() -> None:
    gone = 0
    for seed in range(250):
        problem = scattered(seed, hinges=seed % 2)
        network = presolve(problem)
        if network is None:
            continue
        left = without_leaves(problem, network)
        if left is None:
            assert brute_force(problem).smallest_peak is None, seed
            continue
        gone += int(network.start[-1] - left.start[-1])
        assert optimum_of(problem, left) == brute_force(problem).objective, seed
    assert gone > 200


def test_a_tree_without_memory_is_one_node() -> None:
    rng = np.random.default_rng(0)
    n, k = 40, 5
    pairs = np.array([(int(rng.integers(0, v)), v) for v in range(1, n)])
    problem = replace(
        empty(n, k),
        cost=rng.integers(0, 50, n * k),
        edge_nodes=pairs,
        edge_start=np.arange(n) * k * k,
        edge_cost=rng.integers(0, 50, (n - 1) * k * k),
    )
    network = load(problem)
    assert free_nodes(problem, network).all()
    left = without_leaves(problem, network)
    assert left is not None
    assert left.nodes == 1
    assert left.start[-1] == 1
    priced = evaluate(problem, left.expand(np.zeros(1, dtype=np.int64)))
    assert priced.objective == left.cost[0, 0] + left.offset == solve(problem).objective


def test_components_together_are_the_whole() -> None:
    several = joined_by_rows = 0
    for seed in range(200):
        problem = scattered(seed)
        network = presolve(problem)
        if network is None:
            continue
        rows = rows_of(memory_of(problem, network))
        parts = components(network, rows)
        several += len(parts) > 1
        joined_by_rows += any(len(part.nodes) > 1 and part.problem.edges == 0 for part in parts)
        assert sorted(np.concatenate([part.nodes for part in parts]).tolist()) == list(range(network.nodes)), seed
        truths = [brute_force(part.problem) for part in parts]
        truth = brute_force(problem)
        if (rows.base > rows.limit).any() or any(of.objective is None for of in truths):
            assert truth.objective is None, seed
        else:
            assert truth.objective == network.offset + sum(of.objective or 0 for of in truths), seed
    assert several > 70
    assert joined_by_rows > 1


def test_problems_in_parts_match_enumeration() -> None:
    """The search for large problems, made to take small ones apart."""
    search = SolverTuning(engines=EngineTuning(direct_cells=-1))
    for seed in range(150):
        problem = scattered(seed)
        agrees(solve(problem, tuning=search), brute_force(problem), seed)


def agrees(solution: Solution, truth: Truth, seed: int) -> None:
    if truth.objective is None:
        assert solution.status is Status.INFEASIBLE, seed
    else:
        assert (solution.status, solution.objective) == (Status.OPTIMAL, truth.objective), seed
        assert solution.bound == truth.objective, seed


def large(problem: Problem, factor: int, seed: int) -> Problem:
    """Returns the problem with costs of the size of `factor`, all digits in use."""
    rng = np.random.default_rng(seed)

    def grown(cost: Int) -> Int:
        return np.where(cost >= INF, INF, cost * factor + rng.integers(0, factor, len(cost)))

    hinges = tuple(
        replace(h, strategy_coef=h.strategy_coef * factor, cell_coef=h.cell_coef * factor, constant=h.constant * factor)
        for h in problem.hinges
    )
    return replace(problem, cost=grown(problem.cost), edge_cost=grown(problem.edge_cost), hinges=hinges)


@pytest.mark.parametrize("factor", [10**6, 10**12])
def test_optima_are_proven_to_the_last_digit(factor: int) -> None:
    """A MIP's tolerance is 1e-7 of its largest cost; what it leaves open is closed in integers."""
    for seed in range(80):
        problem = large(random_problem(np.random.default_rng(seed), nodes=5, hinges=seed % 2), factor, seed)
        agrees(solve(problem), brute_force(problem), seed)


def test_costs_near_10_18_are_bounded_and_priced_exactly() -> None:
    seen: Counter[str] = Counter()
    for seed in range(60):
        small = random_problem(np.random.default_rng(seed), nodes=4, strategies=3)
        problem = large(small, 2 * 10**16, seed)
        shift = coarsening(problem)
        best = exact_optimum(problem)
        solution = solve(problem)
        seen[solution.status] += 1
        if best is None:
            assert solution.status is Status.INFEASIBLE, seed
            continue
        seen["coarse"] += shift > 0
        assert least(problem) <= solution.bound <= best <= solution.objective, seed
        assert solution.objective - solution.bound <= 1e-14 * best, seed
        assert (solution.status is Status.OPTIMAL) == (solution.bound == solution.objective), seed
        assert (brute_force(coarsened(problem, shift + 8)).objective or 0) << (shift + 8) <= best, seed
    assert seen["coarse"] > 10
    assert seen[Status.INFEASIBLE] > 3


def exact_optimum(problem: Problem) -> int | None:
    """Returns the optimum by pricing every choice alone, in Python's integers."""
    sizes = tuple(np.diff(problem.start).tolist())
    priced = (evaluate(problem, np.array(choice)) for choice in np.ndindex(sizes))
    return min((p.objective for p in priced if p.feasible and p.objective is not None), default=None)


def test_closing_proves_or_finds_the_optimum() -> None:
    proven = 0
    for seed in range(200):
        problem = random_problem(np.random.default_rng(seed), hinges=seed % 3)
        truth, network = brute_force(problem), presolve(problem)
        if truth.objective is None or network is None:
            continue
        incumbent = Incumbent(problem=problem, time_limit_s=60.0)
        for choice in np.random.default_rng(seed).integers(0, np.diff(problem.start), (20, problem.nodes)):
            incumbent.offer(choice)
        if incumbent.objective is None:
            continue
        moved, constants, shift = shifted(network, tuple(hinge.constant for hinge in problem.hinges))
        close(incumbent, moved, constants, shift, np.zeros(0, dtype=np.int64))
        assert incumbent.bound <= truth.objective, seed
        if incumbent.bound > -(2**61):
            assert incumbent.objective == incumbent.bound == truth.objective, seed
            proven += 1
    assert proven > 50


def empty(nodes: int, strategies: int) -> Problem:
    """Returns a problem of no costs, edges or usage."""
    none = np.zeros(0, dtype=np.int64)
    return Problem(
        start=np.arange(nodes + 1) * strategies,
        cost=np.zeros(nodes * strategies, dtype=np.int64),
        edge_nodes=none.reshape(0, 2),
        edge_start=np.zeros(1, dtype=np.int64),
        edge_cost=none,
        use_node=none,
        use_interval=none.reshape(0, 2),
        use_start=np.zeros(1, dtype=np.int64),
        usage=none,
    )


def test_reduction_without_time_is_still_the_problem() -> None:
    """Whatever a clock cuts short, what is left has the same optimum, and is arc consistent."""
    for seed in range(200):
        problem = random_problem(np.random.default_rng(seed))
        network, truth = reduced(problem, TUNED.presolve, lambda: 0.0), brute_force(problem)
        if network is None:
            assert truth.smallest_peak is None, seed
            continue
        assert optimum_of(problem, network) == truth.objective, seed
        assert (network.cost[0] < INF).all(), seed
        for e, (u, w) in enumerate(network.edge_nodes.tolist()):
            cells = network.edge_cost[0, network.edge_start[e] : network.edge_start[e + 1]] < INF
            cells = cells.reshape(network.sizes[u], network.sizes[w])
            assert cells.any(axis=0).all(), seed
            assert cells.any(axis=1).all(), seed
