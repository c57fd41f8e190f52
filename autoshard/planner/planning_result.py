"""Planning result: a plan's record with everything that led to it.

The solver's limit is of what lives at once. Where the gaps that a compiler leaves between the buffers of its heap come
on top (`costs.heap`), a plan that fits by the first alone is solved again, under a limit that is lower by what it takes
too much.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from autoshard.errors import InfeasibleError
from autoshard.ir.trace import Traced
from autoshard.planner.record import PlanRecord
from autoshard.planner.search_space import SearchSpace
from autoshard.problem.assignment import Assignment
from autoshard.problem.formulation import UNIT_S, Formulation
from autoshard.solver.solution import Solution, Status

ATTEMPTS = 3  # at a plan that fits with gaps


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanningResult:
    """A record with everything that led to it, for explanations and further questions."""

    record: PlanRecord
    space: SearchSpace
    formulation: Formulation
    solution: Solution
    assignment: Assignment
    seconds: Mapping[str, float]  # wall-clock per stage

    @property
    def traced(self) -> Traced:
        """The program that was asked about."""
        return self.space.traced


def fitting(
    solve: Callable[[int], PlanningResult], limit: int, refused: Callable[[PlanningResult], InfeasibleError]
) -> PlanningResult:
    """The best plan that was found to fit, gaps included.

    Args:
      solve: the best plan of which no more lives at once than some bytes per device.
      limit: bytes per device.
      refused: the error where no plan fits with gaps; of that with the smallest peak.

    Raises:
      InfeasibleError: no plan fits, or none that was found does with the gaps.
    """
    lower, tried = limit, [solve(limit)]
    while (over := tried[-1].record.memory.peak_bytes - limit) > 0:
        lower -= over
        if len(tried) > ATTEMPTS or lower <= 0:
            break
        try:
            tried.append(solve(lower))
        except InfeasibleError:
            break
    if over > 0:
        raise refused(min(tried, key=lambda found: found.record.memory.peak_bytes))
    return tried[0] if len(tried) == 1 else _bounded(tried[-1], tried[0])


def _bounded(found: PlanningResult, first: PlanningResult) -> PlanningResult:
    """A plan with the bound of the first one, below which none is that fits: gaps only take memory away."""
    bound, certificate = min(found.solution.bound, first.solution.bound), found.record.certificate
    objective = found.solution.objective
    status = Status.OPTIMAL if objective == bound else Status.FEASIBLE
    solution = replace(found.solution, bound=bound, status=status)
    proof = replace(certificate, status=str(status), bound_s=bound * UNIT_S, gap=solution.gap)
    return replace(found, solution=solution, record=replace(found.record, certificate=proof))
