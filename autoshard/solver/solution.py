"""Solution: a choice per node, its objective, and a proven bound on any choice."""

import math
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray


class Status(StrEnum):
    """How a solve ended."""

    OPTIMAL = "optimal"  # objective == bound, exactly
    FEASIBLE = "feasible"  # within the limits; bound below
    INFEASIBLE = "infeasible"  # proven: no choice fits
    UNKNOWN = "unknown"  # out of time with nothing found


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """What the solver found.

    `choice[v]` is the strategy of node v (empty if nothing was found); `objective` is its
    exact cost, `bound` a proven lower bound, both in the problem's unit.
    """

    choice: NDArray[np.int64]
    objective: int
    bound: int
    status: Status
    wall_s: float
    solver: str
    forbidden: bool = False  # proven, of what is infeasible: costs alone forbid every choice, whatever the memory
    # Set when infeasible by memory; `choice` is then the choice of the smallest peak found.
    smallest_peak_bytes: int | None = None
    peak_bound_bytes: int | None = None  # no choice has a smaller peak
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
        """The same proof of another choice within the limits."""
        status = Status.OPTIMAL if objective == self.bound else Status.FEASIBLE
        return replace(self, choice=choice, objective=objective, status=status)
