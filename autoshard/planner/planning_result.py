"""Planning result: a plan's record with everything that led to it."""

from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.ir.trace import Traced
from autoshard.planner.record import PlanRecord
from autoshard.planner.search_space import SearchSpace
from autoshard.problem.assignment import Assignment
from autoshard.problem.formulation import Formulation
from autoshard.solver.solution import Solution


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
