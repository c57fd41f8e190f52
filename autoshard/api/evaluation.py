"""Evaluation: a hand-written layout as the planner sees it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from autoshard.backends.shardy.propagation import Annotations, annotated
from autoshard.planner import summary
from autoshard.planner.record import PlanRecord
from autoshard.planner.search_space import SearchSpace
from autoshard.problem.assignment import Assignment
from autoshard.report.notebook import Shown
from autoshard.verification.result import Verification
from autoshard.verification.verify import TOLERANCE, Known, verify

Completion = Literal["shardy", "best"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluation(Shown):
    """A hand-written layout as the planner sees it: its price, collectives and memory.

    `assignment` holds the layout of every value; `annotations` are what the compiler is
    given in `verify`.
    """

    record: PlanRecord
    completion: Completion
    assignment: Assignment
    annotations: Annotations
    space: SearchSpace

    def __repr__(self) -> str:
        r = self.record
        fits = "" if self.fits else ", does not fit"
        return f"<Evaluation of {r.name} on {r.mesh} ({r.hardware}): {self.cost * 1e3:.3g} ms, {self.completion}{fits}>"

    def __str__(self) -> str:
        return summary.summary(self.record)

    @property
    def cost(self) -> float:
        """Predicted seconds of a step."""
        return self.record.cost.step_s

    @property
    def fits(self) -> bool:
        """Whether the predicted peak is within the memory of a device."""
        return self.record.memory.peak_bytes <= self.record.memory.limit_bytes

    def verify(
        self,
        compiler: str | None = None,
        *,
        topology: str | None = None,
        tolerance: float = TOLERANCE,
        compiler_options: Mapping[str, Any] | None = None,
    ) -> Verification:
        """Compiles the annotated program for its hardware, without a device, and compares.

        With completion "shardy" the annotations are the hand-written ones alone; with
        "best" they hold every value in its layout, as a plan's do.

        Args:
          compiler: "gpu", "tpu" or "cpu"; None takes the hardware's own.
          topology: another topology to compile for, such as "cpu:8".
          tolerance: relative difference in bytes that still counts as a match.
          compiler_options: as in `Plan.verify`.

        Raises:
          CompilerMissingError: that compiler is not installed.
        """
        traced = annotated(self.space.priced, self.record.mesh, self.annotations)
        return verify(
            traced,
            self.record,
            compiler=compiler,
            topology=topology,
            tolerance=tolerance,
            compiler_options=compiler_options,
            known=Known(graph=self.space.decisions.graph, assignment=self.assignment),
        )
