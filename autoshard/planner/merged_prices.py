"""Merged prices: a search space → its best plan, at the prices of what that plan's program merges.

Decisions are priced as if every small collective shared its latency with a bucket of others. Of a plan that merges
less, they are priced again at what it merges, and decided again (`problem.filled_buckets`).
"""

from collections.abc import Callable
from dataclasses import replace

from autoshard.errors import TimeLimitError
from autoshard.planner.planning_result import PlanningResult
from autoshard.planner.search_space import SearchSpace
from autoshard.problem.filled_buckets import refilled, unpaid_s
from autoshard.problem.formulation import UNIT_S
from autoshard.problem.warm_start import PortableChoice, chosen

UNPAID = 5e-3  # of a step, what merged collectives may take beyond their price
ATTEMPTS = 3  # at prices under which the best plan merges what they say


def as_merged(
    solve: Callable[[SearchSpace, tuple[PortableChoice, ...]], PlanningResult], space: SearchSpace
) -> PlanningResult:
    """The best plan of those that were found, each priced at what it merges.

    Args:
      solve: the best plan of a space; the search begins with some choices.
      space: with buckets that are taken for full.
    """
    best = found = solve(space, ())
    best_s, seconds = _step_s(best), dict(best.seconds)
    for _ in range(ATTEMPTS):
        if _step_s(found) <= (1 + UNPAID) * found.solution.objective * UNIT_S:
            break
        space = replace(space, decisions=refilled(found.assignment), seconds={})
        try:
            found = solve(space, (chosen(space.decisions, found.assignment.choice),))
        except TimeLimitError:
            break
        seconds = {
            stage: seconds.get(stage, 0.0) + found.seconds.get(stage, 0.0) for stage in {**seconds, **found.seconds}
        }
        if _step_s(found) < best_s:
            best, best_s = found, _step_s(found)
    return replace(best, seconds=seconds)


def _step_s(found: PlanningResult) -> float:
    """Seconds of a step in which small collectives are merged with what the plan moves, and no more."""
    return found.solution.objective * UNIT_S + unpaid_s(found.assignment)
