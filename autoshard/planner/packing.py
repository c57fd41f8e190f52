"""Packing: plans that fit with the gaps that a compiler leaves between the buffers of its heap.

The solver's limit is of what lives at once. Where gaps come on top (`costs.heap`), a plan that fits by the first alone
is solved again, under a limit that is lower by what it takes too much.
"""

from collections.abc import Callable
from dataclasses import replace

from autoshard.errors import InfeasibleError
from autoshard.planner.infeasible import with_gaps
from autoshard.planner.planning_result import PlanningResult
from autoshard.planner.search_space import SearchSpace
from autoshard.problem.formulation import UNIT_S
from autoshard.solver import Status

ATTEMPTS = 3


def fitting(solve: Callable[[int], PlanningResult], space: SearchSpace) -> PlanningResult:
    """The best plan that was found to fit, gaps included.

    Args:
      solve: the best plan of which no more lives at once than some bytes per device.
      space: the search space of all of them.

    Raises:
      InfeasibleError: no plan fits, or none that was found does with the gaps.
    """
    limit = lower = space.request.memory_bytes
    found = first = solve(limit)
    for _ in range(ATTEMPTS):
        over = found.record.memory.peak_bytes - limit
        if over <= 0:
            break
        lower -= over
        try:
            found = solve(lower)
        except InfeasibleError:
            break
    if found.record.memory.peak_bytes > limit:
        raise with_gaps(found.record, space)
    return found if found is first else _bounded(found, first)


def _bounded(found: PlanningResult, first: PlanningResult) -> PlanningResult:
    """A plan with the bound of the first one, below which none is that fits: gaps only take memory away."""
    bound, certificate = min(found.solution.bound, first.solution.bound), found.record.certificate
    objective = found.solution.objective
    status = Status.OPTIMAL if objective == bound else Status.FEASIBLE
    solution = replace(found.solution, bound=bound, status=status)
    proof = replace(certificate, status=str(status), bound_s=bound * UNIT_S, gap=solution.gap)
    return replace(found, solution=solution, record=replace(found.record, certificate=proof))
