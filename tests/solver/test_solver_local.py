"""Local search: moves are optimal in their block, sums stay right, the limit holds; the child obeys the clock."""

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autoshard.problem.network import Int, Problem
from autoshard.solver import Status, solve
from autoshard.solver.evaluate import evaluate
from autoshard.solver.exact.mip import solve_program
from autoshard.solver.exact.mip_process import NOTHING, Child, solve_in_time
from autoshard.solver.incumbent import Incumbent
from autoshard.solver.memory import memory_of
from autoshard.solver.presolve.consistency import presolve
from autoshard.solver.presolve.memory_rows import rows_of
from autoshard.solver.primal import block_moves
from autoshard.solver.primal.block_moves import NEVER, Current, Prices
from autoshard.solver.primal.local_search import LocalSearch
from autoshard.solver.program import Network, Program
from autoshard.solver.search import Search
from autoshard.solver.tuning import TUNED, MipProcessTuning
from tests.random_problems import brute_force, random_problem

DATA = Path(__file__).parents[1] / "data"
ARRAYS = {"start", "cost", "edge_nodes", "edge_start", "edge_cost", "root", "follows_start", "follows"}


def search_of(problem: Problem, seed: int) -> tuple[Network, LocalSearch] | None:
    network = presolve(problem)
    if network is None:
        return None
    return network, LocalSearch(network, rows_of(memory_of(problem, network)), seed, TUNED.local_search)


def test_finds_most_optima_and_never_what_does_not_fit() -> None:
    found = fits = 0
    for seed in range(300):
        problem, truth = random_problem(np.random.default_rng(seed)), None
        made = search_of(problem, seed)
        if made is None:
            continue
        network, local = made
        local.go_on_from(np.random.default_rng(seed).integers(0, network.sizes))
        for _ in range(60):
            local.turn()
        truth = brute_force(problem)
        if truth.objective is None:
            assert local.best is None, seed
            continue
        fits += 1
        if local.best is not None:
            priced = evaluate(problem, network.expand(local.best))
            assert priced.feasible, seed
            assert priced.objective == local.best_value + problem.offset, seed
            found += priced.objective == truth.objective
    assert fits > 100
    assert found > 0.8 * fits


def test_a_block_that_is_a_whole_tree_moves_to_the_optimum() -> None:
    """On a tree without memory one move of all nodes is the dynamic program."""
    rng = np.random.default_rng(0)
    n, k = 30, 4
    pairs = np.array([(int(rng.integers(0, v)), v) for v in range(1, n)])
    problem = Problem(
        start=np.arange(n + 1) * k,
        cost=rng.integers(0, 50, n * k),
        edge_nodes=pairs,
        edge_start=np.arange(n) * k * k,
        edge_cost=rng.integers(0, 50, (n - 1) * k * k),
        use_node=np.zeros(0, dtype=np.int64),
        use_interval=np.zeros((0, 2), dtype=np.int64),
        use_start=np.zeros(1, dtype=np.int64),
        usage=np.zeros(0, dtype=np.int64),
    )
    made = search_of(problem, 0)
    assert made is not None
    network, local = made
    local.go_on_from(np.zeros(network.nodes, dtype=np.int64))
    local.turn()
    assert local.best_value == solve(problem).objective


def test_crossing_takes_over_exactly_the_better_parts() -> None:
    """Differences on separate components are judged one by one; sums and profiles stay right."""
    taken = 0
    for seed in range(200):
        problem = random_problem(np.random.default_rng(seed), nodes=8)
        made = search_of(problem, seed)
        if made is None:
            continue
        network, local = made
        rng = np.random.default_rng(seed)
        rows, choice = local.rows, rng.integers(0, network.sizes)
        other = np.where(rng.random(network.nodes) < 0.5, rng.integers(0, network.sizes), choice)
        before, profile = local.value_of(choice), rows.profile(choice)
        if before >= NEVER:
            continue
        limit = int(profile.max(initial=0))
        after: Int = choice.copy()
        prices, current = Prices(local.cost, local.table), Current(after, profile, limit)
        count = block_moves.cross(local.flat, prices, local.items, current, other)
        taken += count
        assert np.array_equal(profile, rows.profile(after)), seed
        assert profile.max(initial=0) <= limit, seed
        value = local.value_of(after)
        assert value < before if count else np.array_equal(after, choice), seed
        assert ((after == other) | (after == choice)).all(), seed
    assert taken > 20


def dense(nodes: int, strategies: int, seed: int = 0) -> Program:
    """Returns a network, on which HiGHS is busy for long if it is large."""
    rng = np.random.default_rng(seed)
    pairs = np.array([(u, v) for u in range(nodes) for v in range(u + 1, nodes)])
    start = np.arange(nodes + 1) * strategies
    network = Network(
        start=start,
        cost=rng.integers(0, 1000, (1, nodes * strategies)),
        edge_nodes=pairs,
        edge_start=np.arange(len(pairs) + 1) * strategies**2,
        edge_cost=rng.integers(0, 1000, (1, len(pairs) * strategies**2)),
        root=np.arange(nodes),
        follows_start=start,
        follows=np.tile(np.arange(strategies), nodes),
    )
    none = np.zeros((0, int(start[-1])), dtype=np.int64)
    return Program(network=network, usage=none, base=np.zeros(0, dtype=np.int64), limit=0, hinge_constant=())


def test_the_child_answers_as_the_engine_does() -> None:
    program = dense(6, 4)
    here = solve_program(program, time_limit_s=60.0)
    there = solve_in_time(program, left_s=60.0, time_limit_s=60.0, tuning=MipProcessTuning())
    assert here.choice is not None
    assert there.choice is not None
    assert np.array_equal(here.choice, there.choice)
    assert here.bound == there.bound
    assert there.finished


def test_a_mip_that_overruns_is_stopped() -> None:
    tuning = MipProcessTuning(overrun_s=0.2)
    begin = time.perf_counter()
    program = dense(40, 30)  # 702,000 cells: reading alone takes longer
    answer = solve_in_time(program, left_s=5.0, time_limit_s=0.3, tuning=tuning)
    assert time.perf_counter() - begin < 5.0
    assert (answer.choice, answer.bound, answer.finished) == (None, None, False)


def test_a_presolve_that_went_round_in_circles_ends() -> None:
    """A restricted program of one layer of Mixtral on 4 x 8 GPUs, which HiGHS undid and redid without end."""
    with np.load(DATA / "doubletons.npz") as parts:
        program = Program(
            network=Network(
                offset=int(parts["offset"]), **{name: parts[name] for name in parts.files if name in ARRAYS}
            ),
            usage=parts["usage"],
            base=parts["base"],
            limit=int(parts["limit"]),
            hinge_constant=tuple(parts["hinge_constant"].tolist()),
        )
    answer = solve_in_time(program, left_s=120.0, time_limit_s=60.0, tuning=TUNED.mip_process, abs_gap=35_190_142_048)
    assert answer.finished
    assert answer.choice is not None
    assert answer.bound == 177_801_555_212_527


def test_small_programs_are_solved_in_a_process_that_can_be_stopped_and_is_used_again() -> None:
    processes: set[int] = set()
    for seed in range(3):
        child = Child(TUNED.mip_process)
        child.submit(dense(4, 3, seed), time_limit_s=60.0)
        assert child.process is not None
        processes.add(child.process.pid)
        answer = None
        while answer is None:
            answer = child.answer(60.0)
        assert answer.finished
        child.close()
    assert len(processes) == 1


def test_a_process_that_is_stopped_is_not_used_again() -> None:
    child = Child(TUNED.mip_process)
    child.submit(dense(40, 30), time_limit_s=60.0)
    stopped = child.process
    child.close()  # while it works
    other = Child(TUNED.mip_process)
    other.start()
    assert stopped is not None
    assert other.process is not stopped
    assert stopped.poll() is not None
    other.close()


def test_a_mip_whose_answer_is_not_wanted_any_more_is_stopped() -> None:
    looked: list[bool] = []

    def enough() -> bool:
        looked.append(len(looked) == 1)
        return looked[-1]

    tuning = MipProcessTuning(look_s=0.01)
    answer = solve_in_time(dense(40, 30), left_s=60.0, time_limit_s=60.0, tuning=tuning, enough=enough)
    assert answer is NOTHING
    assert looked == [False, True]


def test_a_child_that_dies_is_no_answer() -> None:
    helper = Child(TUNED.mip_process)
    helper.submit(dense(40, 20), time_limit_s=60.0)
    assert helper.process is not None
    helper.process.kill()
    answer = helper.answer(30.0)
    assert answer is not None
    assert answer.choice is None
    helper.submit(dense(15, 12), time_limit_s=60.0)  # and a new one starts
    assert helper.busy
    helper.close()


def test_usages_beyond_64_bits_together_are_no_trouble() -> None:
    problem = random_problem(np.random.default_rng(5), nodes=6)
    limit = problem.usage_limit
    assert limit is not None
    huge = replace(problem, usage=np.where(problem.usage > limit // 2, 2**62, problem.usage))
    small = replace(problem, usage=np.where(problem.usage > limit // 2, limit + 1, problem.usage))
    a, b = solve(huge), solve(small)
    assert a.status == b.status
    assert a.objective == b.objective
    assert a.status in (Status.OPTIMAL, Status.INFEASIBLE)


def test_a_new_rounding_takes_turns_to_fit_while_nothing_near_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns: list[int] = []

    def turn(local: LocalSearch) -> bool:
        turns.append(local.age)
        local.age += 1
        return False

    monkeypatch.setattr(LocalSearch, "turn", turn)
    problem = random_problem(np.random.default_rng(5), nodes=8)
    network = presolve(problem)
    assert network is not None
    incumbent = Incumbent(problem=problem, time_limit_s=60.0)
    search = Search(incumbent, network, Child(TUNED.mip_process))
    search.work(0.0)
    assert turns == [*range(TUNED.search.turns)]
    incumbent.objective = round(incumbent.bound * (1 + TUNED.search.far / 2)) + 1
    assert not search.far
    search.work(0.0)
    assert len(turns) == TUNED.search.turns + 1
