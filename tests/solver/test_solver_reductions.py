"""Every reduction and every bound on its own: the optimum is the same before and after."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from autoshard.problem.network import INF, Int, Problem
from autoshard.solver import evaluate, kernels
from autoshard.solver.dual.dual import Dual, shifted
from autoshard.solver.evaluate import usage_profile
from autoshard.solver.exact.bucket_elimination import eliminate_all
from autoshard.solver.exact.mip import solve_program
from autoshard.solver.memory import memory_of
from autoshard.solver.presolve.consistency import load, presolve, rebuild, settle
from autoshard.solver.presolve.elimination import Core, reduce
from autoshard.solver.program import Network, Program, cell_ends
from autoshard.solver.tuning import TUNED
from tests.random_problems import Truth, brute_force, problem_of, random_problem


def problems(count: int, *, hinges: bool = True) -> Iterator[Problem]:
    for seed in range(count):
        yield random_problem(np.random.default_rng(seed), hinges=seed % 3 if hinges else 0)


def every_time(problem: Problem) -> Int:
    return np.arange(problem.use_interval.max(initial=0))


def truth_of(core: Core) -> Truth:
    if not core.feasible:
        return Truth(None, None)
    return brute_force(problem_of(core.program()[0]))


def step_each(core: Core, step: Callable[[Core, int], object]) -> None:
    for v in list(core.cost):
        if core.feasible and v in core.cost and len(core.cost) > 1:
            step(core, v)


def fix_single(core: Core, v: int) -> None:
    if len(core.cost[v]) == 1:
        core.fix(v, 0)


def minimise_free(core: Core, v: int) -> None:
    if core.is_free(v) and len(core.near[v]) <= 2:
        core.minimise_out(v)


def merge_functional(core: Core, v: int) -> None:
    for w in sorted(core.near[v]):
        if ((core.between(w, v) < INF).sum(axis=1) == 1).all():
            core.merge_into(v, w)
            return


def split_around(core: Core, v: int) -> None:
    for w in sorted(core.near[v]):
        core.split(v, w)


STEPS: dict[str, Callable[[Core, int], object]] = {
    "prune": lambda core, v: core.prune(v),
    "fix": fix_single,
    "minimise_out": minimise_free,
    "merge_into": merge_functional,
    "split": split_around,
}


@pytest.mark.parametrize("name", STEPS)
def test_step_keeps_the_optimum(name: str) -> None:
    changed = 0
    for seed, problem in enumerate(problems(400)):
        core = Core(problem, every_time(problem))
        before = truth_of(core)
        if name != "prune":
            core.make_consistent(list(core.cost))  # the steps ask for it
        size = sum(map(len, core.cost.values())) + len(core.table)
        step_each(core, STEPS[name])
        changed += size != sum(map(len, core.cost.values())) + len(core.table)
        assert truth_of(core).objective == before.objective, seed
    assert changed > 50


def test_reduced_core_expands_to_an_optimal_choice() -> None:
    for seed, problem in enumerate(problems(400)):
        core = Core(problem, every_time(problem))
        reduce(core, TUNED.presolve)
        truth = brute_force(problem)
        if not core.feasible:
            assert truth.objective is None
            continue
        program, names = core.program()
        if not names:
            fits = all(row.limit is None or row.constant <= row.limit for row in core.rows)
            assert fits == (truth.objective is not None), seed
            choice = core.expand({})
        else:
            assert brute_force(problem_of(program)).objective == truth.objective, seed
            answer = solve_program(program, time_limit_s=10)
            assert answer.infeasible == (truth.objective is None), seed
            if answer.choice is None:
                continue
            assert truth.objective is not None
            assert answer.bound is not None
            assert answer.bound <= truth.objective
            choice = core.expand(dict(zip(names, answer.choice.tolist(), strict=True)))
        if truth.objective is not None:
            assert evaluate(problem, choice).objective == truth.objective, seed


def test_elimination_is_exact() -> None:
    for seed, problem in enumerate(problems(300, hinges=False)):
        core = Core(problem, np.zeros(0, dtype=np.int64))
        free = brute_force(problem_of(core.program()[0]))
        try:
            position = eliminate_all(core, TUNED.tables)
        except ValueError:
            assert free.objective is None
            continue
        assert position is not None
        assert evaluate(problem, core.expand(position)).objective == free.objective, seed


def test_a_node_with_a_thousand_neighbours_is_eliminated_after_them() -> None:
    """A table over all of them would have 2¹¹⁰⁰ cells, more than a float holds."""
    leaves, random = 1100, np.random.default_rng(0)
    cells = random.integers(1, 100, size=(leaves, 2, 2))
    problem = Problem(
        start=2 * np.arange(leaves + 2),
        cost=np.zeros(2 * leaves + 2, np.int64),
        edge_nodes=np.stack([np.zeros(leaves, np.int64), 1 + np.arange(leaves)], axis=1),
        edge_start=4 * np.arange(leaves + 1),
        edge_cost=cells.ravel(),
        use_node=np.zeros(0, np.int64),
        use_interval=np.zeros((0, 2), np.int64),
        use_start=np.zeros(1, np.int64),
        usage=np.zeros(0, np.int64),
        usage_limit=None,
    )
    core = Core(problem, every_time(problem))
    position = eliminate_all(core, TUNED.tables)
    assert position is not None
    assert evaluate(problem, core.expand(position)).objective == cells.min(axis=2).sum(axis=0).min()


def program_of(problem: Problem, network: Network) -> Program:
    memory = memory_of(problem, network)
    usage = memory.coefficients(np.arange(len(memory.times)))
    return Program(
        network=network,
        usage=usage,
        base=np.zeros(len(usage), dtype=np.int64),
        limit=problem.usage_limit or 0,
        hinge_constant=tuple(hinge.constant for hinge in problem.hinges),
    )


def test_loaded_network_is_the_problem() -> None:
    for seed, problem in enumerate(problems(200)):
        assert brute_force(problem_of(program_of(problem, load(problem)))) == brute_force(problem), seed


def test_arc_consistency_keeps_the_optimum() -> None:
    removed = 0
    for seed, problem in enumerate(problems(400)):
        network = load(problem)
        alive = network.cost[0] < INF
        before = brute_force(problem)
        flat = network.flat()
        if not kernels.make_consistent(flat, network.edge_cost[0], alive):
            assert before.smallest_peak is None, seed
            continue
        removed += int((~alive).sum())
        roots = np.full(network.nodes, -1)
        assert brute_force(problem_of(program_of(problem, rebuild(network, flat, alive, roots)))) == before, seed
    assert removed > 100


def test_presolve_keeps_the_optimum_and_expands() -> None:
    merged = 0
    for seed, problem in enumerate(problems(400)):
        network, truth = presolve(problem), brute_force(problem)
        if network is None:
            assert truth.smallest_peak is None, seed
            continue
        merged += problem.nodes - network.nodes
        assert brute_force(problem_of(program_of(problem, network))) == truth, seed
        choice = np.random.default_rng(seed).integers(0, network.sizes)
        priced = evaluate(problem, network.expand(choice))
        again = evaluate(problem_of(program_of(problem, network)), choice)
        assert (priced.objective, priced.peak_bytes) == (again.objective, again.peak_bytes), seed
    assert merged > 300


def test_separable_and_parallel_edges_go() -> None:
    left, right = np.array([3, 1, 4]), np.array([1, 5])
    table = (left[:, None] + right).reshape(-1)
    odd = np.array([0, 0, 0, 0, 0, 7])
    problem = Problem(
        start=np.array([0, 3, 5]),
        cost=np.array([0, 9, 0, 2, 0]),
        edge_nodes=np.array([[0, 1], [1, 0], [0, 1]]),
        edge_start=np.array([0, 6, 12, 18]),
        edge_cost=np.concatenate([table, odd.reshape(3, 2).T.reshape(-1), -odd]),
        use_node=np.zeros(0, dtype=np.int64),
        use_interval=np.zeros((0, 2), dtype=np.int64),
        use_start=np.zeros(1, dtype=np.int64),
        usage=np.zeros(0, dtype=np.int64),
    )
    network = presolve(problem)
    assert network is not None
    assert len(network.edge_nodes) == 0
    assert network.cost.tolist() == [[4, 11, 5, 2, 4]]


def test_memory_profile_is_the_evaluator_s() -> None:
    for seed, problem in enumerate(problems(200)):
        network = presolve(problem)
        if network is None:
            continue
        memory = memory_of(problem, network)
        choice = np.random.default_rng(seed).integers(0, network.sizes)
        times, usage = usage_profile(problem, network.expand(choice))
        assert np.array_equal(memory.times, times)
        assert np.array_equal(memory.profile(choice), usage)
        rows = memory.coefficients(np.arange(len(times)))
        assert np.array_equal(rows[:, network.start[:-1] + choice].sum(axis=1), usage)


def test_bound_holds_and_moves_change_no_cost() -> None:
    for seed, problem in enumerate(problems(150)):
        network, truth = presolve(problem), brute_force(problem)
        if network is None:
            continue
        constants = tuple(hinge.constant for hinge in problem.hinges)
        network, constants, shift = shifted(network, constants)
        dual = Dual(network, memory_of(problem, network), constants, shift, TUNED.dual)
        choice = np.random.default_rng(seed).integers(0, network.sizes)
        for _ in range(3):
            dual.cycle()
            assert truth.objective is None or dual.bound <= truth.objective, seed
            assert price(dual.residual(), choice) == price(network, choice), seed
        if truth.objective is None:
            continue
        alive = dual.may_improve(truth.objective + 1)
        dead = dual.dead_cells(truth.objective + 1)
        edge_cost = network.edge_cost.copy()
        edge_cost[0, dead] = 2 * INF
        fixed = settle(replace(network, edge_cost=edge_cost), alive)
        assert fixed is not None, seed
        program = replace(program_of(problem, fixed), hinge_constant=constants)
        after = brute_force(problem_of(program)).objective
        assert after is not None
        assert after == truth.objective << shift, seed


def price(network: Network, choice: Int) -> int | None:
    """Returns layer 0 of a choice, None if forbidden."""
    edge, left, right = cell_ends(network)
    chosen = network.start[:-1] + choice
    cells = np.isin(left, chosen) & np.isin(right, chosen)
    assert cells.sum() == len(network.edge_nodes)
    assert len(np.unique(edge[cells])) == len(network.edge_nodes)
    terms = np.concatenate([network.cost[0, chosen], network.edge_cost[0, cells]])
    return None if (terms >= INF).any() else int(terms.sum()) + network.offset
