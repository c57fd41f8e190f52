"""The solver against enumeration of every choice, and what it promises about its answers."""

import math
import time
from dataclasses import replace

import numpy as np
import pytest

from autoshard.problem.network import INF, Hinge, Problem
from autoshard.solver import Solution, Status, evaluate, solve
from autoshard.solver.clock import effort
from autoshard.solver.incumbent import Incumbent
from autoshard.solver.tuning import EngineTuning, SearchTuning, SolverTuning, StoppingTuning
from benchmarks import solver_enumeration
from tests.random_problems import brute_force, fault, random_problem

CHUNK = 200
SEARCH = SolverTuning(engines=EngineTuning(direct_cells=-1))  # the engine for large problems solves all


@pytest.mark.parametrize("chunk", range(2))
def test_small_problems_match_enumeration(chunk: int) -> None:
    """A hundred thousand of them: `python -m benchmarks.solver_enumeration --problems 100000`."""
    infeasible = 0
    for index in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        kind, engine, truth, why = solver_enumeration.check(0, index)
        assert why is None, (index, kind, engine)
        infeasible += truth.objective is None
    assert 40 < infeasible < 130


def test_faults_are_told() -> None:
    problem = random_problem(np.random.default_rng(2), nodes=4)
    truth, solution = brute_force(problem), solve(problem)
    assert truth.objective is not None
    assert fault(problem, truth, solution) is None
    assert "bound" in (fault(problem, truth, replace(solution, bound=truth.objective - 1)) or "")
    assert "optimum" in (fault(problem, truth, replace(solution, objective=truth.objective + 1)) or "")
    assert "nothing fits" in (fault(problem, replace(truth, objective=None), solution) or "")
    moved = (solution.choice + 1) % np.diff(problem.start)
    assert "told as" in (fault(problem, truth, replace(solution, choice=moved)) or "")


def test_search_matches_enumeration() -> None:
    """The engine for large problems, made to solve small ones."""
    for seed in range(150):
        problem = random_problem(np.random.default_rng(seed), hinges=seed % 3)
        assert fault(problem, brute_force(problem), solve(problem, tuning=SEARCH)) is None, seed


def chain(length: int, seed: int = 0) -> Problem:
    """Returns a chain whose neighbours prefer equal strategies, with skips, memory and a hinge."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 7, length)
    start = np.concatenate([[0], np.cumsum(sizes)])
    cost = rng.integers(0, 10**12, start[-1])
    pairs = [(v - 1, v) for v in range(1, length)] + [(int(rng.integers(0, v)), v) for v in range(5, length, 3)]
    tables = [
        np.where(np.arange(sizes[u])[:, None] == np.arange(sizes[v]), 0, rng.integers(1, 10**12, (sizes[u], sizes[v])))
        for u, v in pairs
    ]
    strategies = np.arange(start[-1])
    return Problem(
        start=start,
        cost=cost,
        edge_nodes=np.array(pairs),
        edge_start=np.concatenate([[0], np.cumsum([t.size for t in tables])]),
        edge_cost=np.concatenate([t.reshape(-1) for t in tables]),
        use_node=np.arange(length),
        use_interval=np.stack([np.arange(length), np.minimum(np.arange(length) + 9, length)], axis=1),
        use_start=start,
        usage=rng.integers(1, 10**9, start[-1]),
        usage_limit=4 * 10**9,
        hinges=(
            Hinge(
                strategy=strategies,
                strategy_coef=rng.integers(-(10**11), 10**11, len(strategies)),
                cell=np.zeros(0, dtype=np.int64),
                cell_coef=np.zeros(0, dtype=np.int64),
            ),
        ),
    )


def test_answers_are_equal_for_equal_inputs() -> None:
    problem = chain(24)
    first, second = solve(problem, seed=3), solve(problem, seed=3)
    assert first.found
    assert np.array_equal(first.choice, second.choice)
    assert (first.objective, first.bound) == (second.objective, second.bound)


def test_a_search_begins_with_what_is_known() -> None:
    problem = chain(24)
    best = solve(problem)
    moved = [
        np.where(np.arange(problem.nodes) == v, k, best.choice)
        for v, size in enumerate(np.diff(problem.start))
        for k in range(size)
    ]
    priced = [(evaluate(problem, choice), choice) for choice in moved]
    objective, worse = max(
        ((p.objective, choice) for p, choice in priced if p.feasible and p.objective is not None),
        key=lambda pair: pair[0],
    )
    assert objective > best.objective
    assert solve(problem, time_limit_s=0.0, known=[worse]).objective == objective
    assert solve(problem, time_limit_s=0.0, known=[worse, best.choice]).objective == best.objective
    assert solve(problem, known=[worse]).objective == best.objective
    cost = problem.cost.copy()
    cost[problem.start[:-1] + worse] = INF
    assert not solve(replace(problem, cost=cost), time_limit_s=0.0, known=[worse]).found


def test_beyond_a_cutoff_nothing_is_improved() -> None:
    problem = chain(24)
    best = solve(problem)
    above = solve(problem, cutoff=lambda: best.objective + 1)
    assert (above.objective, above.bound) == (best.objective, best.bound)
    beaten = solve(problem, cutoff=lambda: 0, settle_s=0.0)  # every choice costs more
    assert beaten.found
    assert beaten.bound <= best.objective <= beaten.objective


def test_a_cutoff_may_fall_while_a_problem_is_solved() -> None:
    answers = iter([math.inf] * 4)
    solution = solve(chain(24), cutoff=lambda: next(answers, 0.0), settle_s=0.0)
    assert next(answers, None) is None  # it was asked until it fell
    assert solution.found
    assert solution.status is Status.FEASIBLE  # and then nothing was improved


def test_an_engine_that_is_waited_for_is_stopped_by_the_clock_once_beaten() -> None:
    now, problem = [0.0], replace(chain(8), hinges=())
    best = solve(problem)
    own = Incumbent(problem=problem, time_limit_s=60.0, settle_s=3.0, cutoff=lambda: 0.0, clock=lambda: now[0])
    own.offer(best.choice)
    own.raise_bound(best.objective // 2)
    assert not own.enough()
    now[0] = 4.0
    assert own.enough()
    assert not own.closed()  # little work was done


@pytest.mark.parametrize("spent_s", [0.0, 2.0])
@pytest.mark.parametrize("beaten", [False, True])
@pytest.mark.parametrize("gap", [0.0, 0.05, 0.5, 0.95])
def test_what_ends_an_engine_that_is_waited_for_ends_the_solve(gap: float, spent_s: float, *, beaten: bool) -> None:
    """Otherwise another one would be begun while it runs."""
    problem = replace(chain(8), hinges=())
    best = solve(problem)
    bound = int(best.objective * (1 - gap))
    cutoff = bound if beaten else math.inf
    own = Incumbent(problem=problem, time_limit_s=60.0, rel_gap=0.01, settle_s=1.0, work_s=9.0, cutoff=lambda: cutoff)
    own.offer(best.choice)
    own.raise_bound(bound)
    effort.spend(seconds=spent_s)
    assert own.beaten == beaten
    assert own.closed() or not own.reached
    assert own.reached == (gap == 0.0 or (beaten and (gap < 0.1 or spent_s > 1.0)))


def test_a_search_goes_on_where_a_cutoff_is_proven_before_a_choice_is_good() -> None:
    solution = solve(dense(60, 6), cutoff=lambda: 1, settle_s=1.0, tuning=SEARCH)
    assert solution.found
    assert solution.bound >= 1


def test_gap_is_tight_on_a_chain_with_memory_and_hinge() -> None:
    problem = chain(60)
    solution = solve(problem)
    priced = evaluate(problem, solution.choice)
    assert priced.feasible
    assert priced.objective == solution.objective
    assert solution.bound <= solution.objective
    assert solution.gap < 1e-8


def test_progress_improves_and_ends_at_the_answer() -> None:
    seen: list[tuple[int | None, int | None]] = []
    solution = solve(chain(60), on_progress=lambda best, bound, _: seen.append((best, bound)))
    bests = [best for best, _ in seen if best is not None]
    bounds = [bound for _, bound in seen if bound is not None]
    assert bests == sorted(bests, reverse=True)
    assert bounds == sorted(bounds)
    assert seen[-1] == (solution.objective, solution.bound)


def test_the_search_repeats_itself_under_a_budget_of_rounds() -> None:
    problem = replace(chain(40), hinges=())
    first, second = (solve(problem, seed=3, rounds=2, time_limit_s=300.0, tuning=SEARCH) for _ in range(2))
    assert first.found
    assert np.array_equal(first.choice, second.choice)
    assert (first.objective, first.bound) == (second.objective, second.bound)


def test_work_decides_what_is_begun_where_what_there_is_would_do() -> None:
    """Ten thousand cells are more work than is left, a thousand are not; the clock says nothing of it."""
    now, problem = [0.0], replace(chain(8), hinges=())
    best = solve(problem)
    own = Incumbent(problem=problem, time_limit_s=60.0, rel_gap=0.1, settle_s=1.0, work_s=9.0, clock=lambda: now[0])
    assert own.limit_s(10_000, 7.0) == 20.0  # there is nothing yet
    assert own.limit_s(10_000, 7.0, spare_s=7.0) == 0.0
    assert own.limit_s(20_000, 7.0) == 0.0
    own.offer(best.choice)
    own.raise_bound(best.objective // 2)
    for now[0] in (0.0, 20.0):
        assert own.limit_s(1_000, 7.0) > 7.0  # only what takes far longer than expected is ended
        assert own.limit_s(10_000, 7.0) == 0.0
    effort.spend(seconds=0.99)
    assert own.limit_s(1_000, 7.0) == 0.0


def test_a_limit_that_cannot_be_met_names_the_smallest_peak() -> None:
    problem = chain(20)
    least = solve(replace(problem, usage_limit=0))
    assert least.status is Status.INFEASIBLE
    assert least.smallest_peak_bytes is not None
    assert evaluate(problem, least.choice).peak_bytes == least.smallest_peak_bytes
    assert solve(replace(problem, usage_limit=least.smallest_peak_bytes)).found
    assert solve(replace(problem, usage_limit=least.smallest_peak_bytes - 1)).status is Status.INFEASIBLE
    assert not least.found
    assert least.gap == np.inf


def dense(nodes: int, strategies: int) -> Problem:
    """Returns a problem that no engine closes soon."""
    rng = np.random.default_rng(0)
    pairs = [(u, v) for u in range(nodes) for v in range(u + 1, nodes) if rng.random() < 0.2]
    return Problem(
        start=np.arange(nodes + 1) * strategies,
        cost=rng.integers(0, 1000, nodes * strategies),
        edge_nodes=np.array(pairs),
        edge_start=np.arange(len(pairs) + 1) * strategies**2,
        edge_cost=rng.integers(0, 1000, len(pairs) * strategies**2),
        use_node=np.arange(nodes),
        use_interval=np.tile([0, 1], (nodes, 1)),
        use_start=np.arange(nodes + 1) * strategies,
        usage=rng.integers(0, 1000, nodes * strategies),
        usage_limit=400 * nodes,
    )


class Ticks:
    """A clock that goes on by a millisecond at every look: what it tells depends on no machine."""

    def __init__(self) -> None:
        self.looks = 0

    def __call__(self) -> float:
        self.looks += 1
        return self.looks / 1000


@pytest.mark.parametrize("limit_s", [0.5, 1.0, 3.0])
def test_nothing_is_begun_once_the_time_is_over(limit_s: float) -> None:
    """Whoever works then looks at the clock once more, and stops."""
    solution = solve(dense(60, 30), time_limit_s=limit_s, clock=Ticks())
    assert solution.status is Status.FEASIBLE
    assert 0 < solution.gap < 1
    assert limit_s < solution.wall_s < limit_s + 0.05


@pytest.mark.parametrize("kind", ["plain", "hinged"])
def test_work_ends_what_no_engine_closes_whatever_the_clock_says(kind: str) -> None:
    """By a clock of other speed the choice and the bound are the same, although nothing settles."""
    problem = dense(30, 10)
    if kind == "hinged":
        strategy = np.arange(len(problem.cost))
        hinge = Hinge(
            strategy=strategy,
            strategy_coef=np.random.default_rng(1).integers(-500, 500, len(strategy)),
            cell=strategy[:0],
            cell_coef=strategy[:0],
            constant=0,
        )
        problem = replace(problem, hinges=(hinge,))
    small = SearchTuning(first_cells_of_work=200, least_cells=150, growth=1.0)
    brief = SolverTuning(stopping=StoppingTuning(work=0.01), search=small)

    def solved(looks_per_s: int) -> Solution:
        ticks = Ticks()
        return solve(problem, time_limit_s=20.0, settle_s=0.1, clock=lambda: ticks() * 1e3 / looks_per_s, tuning=brief)

    slow, fast = solved(2_000), solved(700)
    assert slow.gap > 0
    assert slow.wall_s < fast.wall_s < 20
    assert (slow.objective, slow.bound) == (fast.objective, fast.bound)
    assert np.array_equal(slow.choice, fast.choice)


@pytest.mark.slow
def test_a_time_limit_is_kept_within_five_percent() -> None:
    """On the clock of this process's work, which other processes slow down by their use of memory alone."""
    problem = dense(60, 30)
    solve(problem, time_limit_s=0.5, rounds=1)  # compiles what this machine has not compiled yet
    for limit_s in (0.5, 1.0, 3.0):
        solutions = [solve(problem, time_limit_s=limit_s, clock=time.process_time) for _ in range(3)]
        assert all(solution.status is Status.FEASIBLE for solution in solutions)
        assert min(solution.wall_s for solution in solutions) < 1.05 * limit_s


@pytest.mark.parametrize("choice", [[0], [0, 0, 9]])
def test_evaluate_refuses_what_is_no_choice(choice: list[int]) -> None:
    problem = chain(3)
    with pytest.raises(ValueError, match="choice"):
        evaluate(problem, np.array(choice))
