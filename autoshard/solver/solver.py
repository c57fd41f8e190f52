"""Solve a problem: exact reduction first, then elimination or a MIP, memory rows as they bind.

Memory rows are added lazily. Without them the problem is a relaxation, and its optimum, if it
fits, is the optimum; if not, the time points that overflow become rows and the loop repeats, so
every bound on the way is a bound on the problem.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autoshard.problem.network import Int, Problem
from autoshard.solver.buckets import eliminate_all
from autoshard.solver.core import Core, reduce
from autoshard.solver.evaluate import evaluate, usage_profile
from autoshard.solver.exact import solve_core
from autoshard.solver.solution import Solution, Status

NEW_ROWS = 8  # memory rows added per round at most: the worst of each stretch that overflows
Progress = Callable[[int | None, int | None, float], None]  # best, bound, elapsed_s
NO_BOUND = -(10**30)


@dataclass(slots=True)
class Search:
    """The best choice and bound so far."""

    problem: Problem
    deadline: float
    begin: float
    rel_gap: float
    seed: int
    on_progress: Progress | None
    best: Int | None = None
    objective: int | None = None
    bound: int = NO_BOUND

    def left_s(self) -> float:
        return self.deadline - time.perf_counter()

    def offer(self, choice: Int) -> bool:
        """Keeps `choice` if it is feasible and better; returns whether it is feasible."""
        priced = evaluate(self.problem, choice)
        if not priced.feasible or priced.objective is None:
            return False
        if self.objective is None or priced.objective < self.objective:
            self.best, self.objective = choice, priced.objective
            self.report()
        return True

    def raise_bound(self, bound: int) -> None:
        if bound > self.bound:
            self.bound = bound
            self.report()

    def report(self) -> None:
        if self.on_progress is not None:
            bound = None if self.bound == NO_BOUND else self.bound
            self.on_progress(self.objective, bound, time.perf_counter() - self.begin)

    def closed(self) -> bool:
        if self.objective is None:
            return False
        return self.objective - self.bound <= self.rel_gap * abs(self.objective)


def solve(
    problem: Problem,
    *,
    time_limit_s: float = 60.0,
    rel_gap: float = 0.0,
    seed: int = 0,
    on_progress: Progress | None = None,
) -> Solution:
    """Returns the best choice within the time, with a proven bound.

    Args:
      problem: the network.
      time_limit_s: wall-clock seconds.
      rel_gap: stop once (objective − bound) / objective is at most this.
      seed: of the engines; equal seeds give equal answers where time does not cut them off.
      on_progress: called with (best, bound, elapsed seconds) whenever either improves.
    """
    begin = time.perf_counter()
    search = Search(problem, begin + time_limit_s, begin, rel_gap, seed, on_progress)
    times = np.zeros(0, dtype=np.int64)
    while True:
        core = Core(problem, times)
        reduce(core)
        if not core.feasible:
            return infeasible(search, "arc consistency")
        choice, solver = optimum(core, search)
        if solver == "infeasible":
            return infeasible(search, "highs")
        if choice is None or search.offer(choice) or search.left_s() <= 0:
            break
        times = np.union1d(times, overflowing(problem, choice))
    status = Status.UNKNOWN
    if search.objective is not None:
        status = Status.OPTIMAL if search.objective == search.bound else Status.FEASIBLE
    return Solution(
        choice=np.zeros(0, dtype=np.int64) if search.best is None else search.best,
        objective=0 if search.objective is None else search.objective,
        bound=search.bound,
        status=status,
        wall_s=time.perf_counter() - begin,
        solver=solver,
    )


def optimum(core: Core, search: Search) -> tuple[Int | None, str]:
    """Solves one relaxation; raises the search's bound; returns a choice and the engine's name."""
    if all(not row.node and not row.edge for row in core.rows):
        if any(row.limit is not None and row.constant > row.limit for row in core.rows):
            return None, "infeasible"
        try:
            position = eliminate_all(core)
        except ValueError:
            return None, "infeasible"
        if position is not None:
            choice = core.expand(position)
            exact = evaluate(search.problem, choice).objective
            if exact is not None:
                search.raise_bound(exact)
            return choice, "elimination"
    answer = solve_core(core, time_limit_s=search.left_s(), rel_gap=search.rel_gap, seed=search.seed)
    if answer.infeasible:
        return None, "infeasible"
    if answer.bound is not None:
        search.raise_bound(answer.bound)
    return None if answer.position is None else core.expand(answer.position), "highs"


def overflowing(problem: Problem, choice: Int) -> Int:
    """Returns the worst time point of each stretch over the limit, the worst stretches first."""
    assert problem.usage_limit is not None
    times, usage = usage_profile(problem, choice)
    over = usage > problem.usage_limit
    edges = np.flatnonzero(np.diff(np.concatenate([[False], over, [False]]).astype(np.int8)))
    worst = [int(a + usage[a:b].argmax()) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    worst.sort(key=lambda at: -int(usage[at]))
    return times[worst[:NEW_ROWS]]


def infeasible(search: Search, solver: str) -> Solution:
    """Finds the smallest peak of a problem that no choice satisfies."""
    problem = search.problem
    times = np.zeros(0, dtype=np.int64)
    best, smallest = np.zeros(0, dtype=np.int64), None
    while problem.usage_limit is not None:
        core = Core(problem, times)
        core.make_consistent(list(core.cost))
        if not core.feasible:
            break
        answer = solve_core(core, time_limit_s=search.left_s(), rel_gap=0.0, seed=search.seed, minimise_peak=True)
        if answer.position is None:
            break
        choice = core.expand(answer.position)
        peak = evaluate(problem, choice)
        if smallest is None or peak.peak_bytes < smallest:
            best, smallest = choice, peak.peak_bytes
        if peak.peak_at is None or peak.peak_at in times or search.left_s() <= 0:
            break
        times = np.union1d(times, [peak.peak_at])
    return Solution(
        choice=best,
        objective=0,
        bound=0,
        status=Status.INFEASIBLE,
        wall_s=time.perf_counter() - search.begin,
        solver=solver,
        smallest_peak_bytes=smallest,
    )
