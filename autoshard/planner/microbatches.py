"""Micro-batches: in how many a program takes its batch, where it leaves that open, chosen by planning it in each.

More micro-batches hold less of what passes through, and gather split weights more often: where memory is no limit, they
do not make a step shorter. So the numbers are tried from below. That ends with the first one that memory does not hold
back, or when two in a row are no faster than the best; of micro-batches that go through stages, with the latter alone.
A number in which the program cannot fit is passed over: every layout of a program in k·n micro-batches is one of the
program in n, where it takes at most k times as much memory.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil, inf

from autoshard.errors import InfeasibleError
from autoshard.ir.recomputation import WRITTEN
from autoshard.planner import pipeline
from autoshard.planner.budget import USUAL_BUDGET, Budget
from autoshard.planner.cost_of_keeping import is_held_back
from autoshard.planner.planning_result import PlanningResult
from autoshard.planner.record import ACCUMULATED
from autoshard.planner.request import PlanRequest

Solver = Callable[[PlanRequest, Budget], PlanningResult]

PATIENCE = 2  # numbers in a row that are no faster than the best


@dataclass(slots=True)
class _Attempts:
    """What became of each number that was tried; `unfit` maps those that do not fit to the peak they need at least."""

    plans: dict[int, PlanningResult] = field(default_factory=dict[int, PlanningResult])
    errors: list[InfeasibleError] = field(default_factory=list[InfeasibleError])
    unfit: dict[int, int] = field(default_factory=dict[int, int])
    free: bool = False  # memory does not hold the last one back

    @property
    def best(self) -> int | None:
        """The number with the fastest plan, the smallest of equals; None while there is no plan."""
        return min(self.plans, key=lambda n: (self.plans[n].solution.objective, n), default=None)

    def least_s(self) -> float:
        """Seconds of the fastest plan so far."""
        best = self.best
        return inf if best is None else self.plans[best].record.cost.step_s

    def least_peak(self, count: int) -> int:
        """Bytes that no plan in so many micro-batches goes below, as far as fewer say."""
        return max((ceil(peak * n / count) for n, peak in self.unfit.items() if count % n == 0), default=0)

    def is_over(self) -> bool:
        """Whether more micro-batches would gain nothing."""
        return self.free or (self.best is not None and [*self.plans].index(self.best) + PATIENCE < len(self.plans))


def solve_counts(
    request: PlanRequest, budget: Budget = USUAL_BUDGET, *, constraints: pipeline.ConstraintPolicy = "needed"
) -> PlanningResult:
    """The best plan of a request that leaves its micro-batches open; as `pipeline.solve_request`.

    Raises:
      InfeasibleError: none fits; the error is that of the smallest peak.
      SpecError: the number would decide the shape of a result.
    """
    found = fastest_count(request, budget, partial(pipeline.solve_request, constraints="all"))
    return found if constraints == "all" else pipeline.thinned(found)


def fastest_count(request: PlanRequest, budget: Budget, solver: Solver) -> PlanningResult:
    """The best plan of a request among the numbers of micro-batches that it leaves open.

    Args:
      request: with `counts`.
      budget: how far to solve in each number.
      solver: plans a request for the program in one of them.

    Raises:
      InfeasibleError: none fits; the error is that of the smallest peak.
      SpecError: the number would decide the shape of a result.
    """
    begin = time.perf_counter()
    made = _Attempts()
    staged = request.program.open_count is not None and request.program.open_count.staged
    within = replace(budget, cutoff_s=lambda: min(budget.cutoff_s(), made.least_s()))
    for count in request.counts:
        if made.least_peak(count) > request.memory_bytes:
            made.unfit[count] = made.least_peak(count)
            continue
        try:
            made.plans[count] = solver(request.in_microbatches(count), within)
        except InfeasibleError as error:
            made.errors.append(error)
            proven = request.remat == WRITTEN and error.bound_bytes is not None
            made.unfit[count] = error.bound_bytes or 0 if proven else 0
            continue
        made.free = not staged and not _held_back(made.plans[count], budget)
        if made.is_over():
            break
    best = made.best
    if best is None:
        raise _unfit(min(made.errors, key=lambda e: inf if e.peak_bytes is None else e.peak_bytes), request.counts)
    return _chosen(made, best, request.counts, time.perf_counter() - begin)


def _unfit(error: InfeasibleError, counts: Sequence[int]) -> InfeasibleError:
    """The error of a program that fits in none of its numbers of micro-batches; it was that of the smallest peak."""
    first, *rest = str(error).splitlines()
    return InfeasibleError(
        "\n".join([f"{first}; none of {', '.join(map(str, counts))} micro-batches fits", *rest]),
        peak_bytes=error.peak_bytes,
        bound_bytes=error.bound_bytes,
        limit_bytes=error.limit_bytes,
        where=error.where,
        kinds=error.kinds,
    )


def _held_back(planned: PlanningResult, budget: Budget) -> bool:
    """Whether the plan may be slower than one without a limit of memory."""
    repeats = planned.record.recomputation is not None
    return repeats or is_held_back(planned.formulation, planned.solution, budget, budget.rel_gap)


def _chosen(made: _Attempts, best: int, counts: Sequence[int], elapsed_s: float) -> PlanningResult:
    """The plan in the chosen number, with the certificate of all that were planned."""
    found = made.plans[best]
    certificate = found.record.certificate
    bound_s = min(plan.record.certificate.bound_s for plan in made.plans.values())
    said = _said(made, best, counts)
    larger = replace(
        certificate,
        bound_s=bound_s,
        gap=(certificate.objective_s - bound_s) / certificate.objective_s if certificate.objective_s else 0.0,
        space=f"{certificate.space}; {said}",
    )
    record = replace(found.record, certificate=larger, notes=(*found.record.notes, said))
    rest_s = elapsed_s - sum(s for stage, s in found.seconds.items() if stage != "trace")
    others = {"other micro-batches": rest_s} if len(made.plans) + len(made.errors) > 1 else {}
    return replace(found, record=record, seconds={**found.seconds, **others})


def _said(made: _Attempts, best: int, counts: Sequence[int]) -> str:
    """The choice and its alternatives, in words."""
    least_s = made.plans[best].record.cost.step_s or 1.0
    others = [
        f"{n} would take {plan.record.cost.step_s / least_s:.3g} times as long"
        for n, plan in made.plans.items()
        if n != best
    ]
    unfit = [str(n) for n in sorted(made.unfit)]
    others += [f"{', '.join(unfit)} did not fit"] if unfit else []
    last = max(made.plans)
    if last < counts[-1]:
        why = "memory holds nothing back" if made.free else f"{PATIENCE} in a row were no faster"
        others.append(f"more than {last} were not planned: {why}")
    return f"{ACCUMULATED} {best} micro-batch{'es' if best > 1 else ''} of {', '.join(map(str, counts))}" + (
        f" ({'; '.join(others)})" if others else ""
    )
