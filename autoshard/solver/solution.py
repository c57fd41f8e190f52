"""Solution: a choice per node, its objective, and a proven bound on any choice."""

import math
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray


class Status(StrEnum):
    """How a solve ended."""

    OPTIMAL = "optimal"  # the objective equals the bound, exactly
    FEASIBLE = "feasible"  # the choice keeps the limit; the bound is below its objective
    INFEASIBLE = "infeasible"  # it is proven that no choice is allowed and fits
    UNKNOWN = "unknown"  # the time ended before a choice or a proof was found


class Engine(StrEnum):
    """What gave the last word on a problem."""

    KNOWN = "known choices"
    CONSISTENCY = "arc consistency"
    PRESOLVE = "presolve"
    ELIMINATION = "elimination"
    MIP = "highs"
    MULTIPLIERS = "multipliers"
    LABELS = "multipliers and labels"
    SEARCH = "search"


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """What the solver found.

    `choice[v]` is the strategy of node v; the array is empty if nothing was found. `objective` is the
    exact cost of the choice, `bound` a proven lower bound on every choice, both in the problem's unit.
    """

    choice: NDArray[np.int64]
    objective: int
    bound: int
    status: Status
    wall_s: float
    solver: Engine
    forbidden: bool = False  # where infeasible: it is proven that costs alone forbid every choice
    # Where memory is the reason, `choice` is the choice of the smallest peak found.
    smallest_peak_bytes: int | None = None
    peak_bound_bytes: int | None = None  # it is proven that no choice has a smaller peak
    peak_at: int | None = None  # the time point of the smallest peak; see `evaluate.users_at`

    @property
    def found(self) -> bool:
        """Whether `choice` satisfies the problem; if not, `objective` means nothing."""
        return self.status in (Status.OPTIMAL, Status.FEASIBLE)

    @property
    def gap(self) -> float:
        """(objective − bound) / objective; 0 when proven optimal, infinite when nothing was found."""
        if not self.found:
            return math.inf
        if self.status is Status.OPTIMAL or self.objective == self.bound:
            return 0.0
        return (self.objective - self.bound) / max(abs(self.objective), 1)

    def instead(self, choice: NDArray[np.int64], objective: int) -> "Solution":
        """Returns the solution with another choice within the limit; the bound holds for it, too."""
        status = Status.OPTIMAL if objective == self.bound else Status.FEASIBLE
        return replace(self, choice=choice, objective=objective, status=status)
