"""Solve a problem: small ones directly, large ones by search."""

import math
from dataclasses import replace

from autoshard.problem.network import Problem
from autoshard.solver.direct import smallest_peak, solve_directly
from autoshard.solver.evaluate import saturated
from autoshard.solver.incumbent import Incumbent, Progress
from autoshard.solver.solution import Solution

HINGED_CELLS = 5_000  # smaller problems with hinges are solved directly
DIRECT_CELLS = 400_000  # larger problems go to the search at once
PATIENCE_S = 10.0  # for the MIP of a small problem, before the search tries


def solve(
    problem: Problem,
    *,
    time_limit_s: float = 60.0,
    rel_gap: float = 0.0,
    seed: int = 0,
    rounds: int | None = None,
    settle_s: float = math.inf,
    on_progress: Progress | None = None,
) -> Solution:
    """Returns the best choice within the time, with a proven bound.

    Args:
      problem: the network.
      time_limit_s: wall-clock seconds.
      rel_gap: stop once (objective − bound) / objective is at most this.
      seed: of the engines; equal seeds and `rounds` give equal answers where no time limit bites.
      rounds: the most rounds of the search; None for as many as time allows.
      settle_s: after so many seconds, stop at ten times `rel_gap`.
      on_progress: called with (best, bound, elapsed seconds) whenever either improves.
    """
    problem = replace(problem, usage=saturated(problem.usage, problem.usage_limit))
    incumbent = Incumbent(
        problem=problem,
        time_limit_s=time_limit_s,
        rel_gap=rel_gap,
        seed=seed,
        rounds=rounds,
        settle_s=settle_s,
        on_progress=on_progress,
    )
    solver = None
    # numba takes its time to load, and small problems do without it
    if problem.hinges and len(problem.edge_cost) > HINGED_CELLS:
        from autoshard.solver.hinged import solve_hinged

        solver = solve_hinged(incumbent, patience_s=PATIENCE_S)
    if solver is None and not incumbent.closed() and len(problem.edge_cost) <= DIRECT_CELLS:
        solver = solve_directly(incumbent, patience_s=PATIENCE_S)
    if solver is None and not incumbent.closed():
        from autoshard.solver.search import solve_by_search

        solver = solve_by_search(incumbent)
    if incumbent.infeasible and problem.usage_limit is not None:
        from autoshard.solver.peak import approximate_peak

        found = approximate_peak(incumbent)
        if found is not None:
            incumbent.offer_peak(found.choice, found.bound_bytes)
        if (found is None or found.peak_bytes > found.bound_bytes) and incumbent.left_s() > 0:
            smallest_peak(incumbent)
    return incumbent.solution(solver or "search")
