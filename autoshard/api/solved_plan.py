"""Solved plans: found in this process, with everything that led to them."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, final

from autoshard.api.loaded_plan import LoadedPlan, read_back
from autoshard.api.plan import Plan, ProgramPlan, Provenance
from autoshard.backends import devices as meshes
from autoshard.backends.devices import Target
from autoshard.backends.model import CompilerModel
from autoshard.errors import PlanMismatchError
from autoshard.explain import runner_up
from autoshard.explain import text as explanation
from autoshard.explain.recalls import recalls
from autoshard.explain.sensitivity import turning_points
from autoshard.ir.constraints import Constraints
from autoshard.ir.trace import Traced
from autoshard.planner import pipeline, view
from autoshard.planner.planning_result import PlanningResult
from autoshard.planner.record import PlanRecord
from autoshard.problem import Problem
from autoshard.report import page
from autoshard.report.notebook import Text
from autoshard.verification.layouts import LayoutCheck, honoured


@final
class SolvedPlan(ProgramPlan):
    """A plan that was found in this process, or found again in a cache, a lock or another process.

    Args:
      record: the decided layouts and their promises.
      place: the mesh on its hardware.
      traced: the program.
      planned: the planning result, or a function that finds it on first use.
    """

    def __init__(
        self,
        record: PlanRecord,
        *,
        place: Target,
        traced: Traced,
        planned: PlanningResult | Callable[[], PlanningResult],
    ) -> None:
        super().__init__(record, traced=traced)
        self._place = place
        self._planned = planned

    def __reduce__(self) -> tuple[Callable[[str], LoadedPlan], tuple[str]]:
        return read_back, (self.record.dumps(),)

    # The same plan with another record.

    def noted(self, note: str, *, compiler_options: Mapping[str, Any] | None = None) -> "SolvedPlan":
        """The same plan with one more note, and more compiler flags, if any."""
        options = {**self.record.compiler_options, **(compiler_options or {})}
        return self._with(replace(self.record, notes=(*self.record.notes, note), compiler_options=options))

    def pinned(self, pins: Constraints) -> "SolvedPlan":
        """The same plan with other constraints emitted."""
        return self._with(replace(self.record, pins=pins))

    def emitting(self, constraints: str) -> "SolvedPlan":
        """The same plan with a record of the requested constraints."""
        return self._with(replace(self.record, emitted=constraints))

    def _with(self, record: PlanRecord) -> "SolvedPlan":
        return SolvedPlan(record, place=self._place, traced=self.traced, planned=self._planned)

    def took(self, seconds: Mapping[str, float]) -> "SolvedPlan":
        """The same plan, whose summary counts more of the call that made it; as it is where it was not planned now."""
        known = self._at_hand
        if known is None:
            return self
        planned = replace(known, seconds={**known.seconds, **seconds})
        return SolvedPlan(self.record, place=self._place, traced=self.traced, planned=planned)

    # What led to it.

    @property
    def planned(self) -> PlanningResult:
        """The planning result; a plan from a cache or another process is planned again for it.

        Raises:
          PlanMismatchError: it is a hand-written layout, or a plan file's, that won under `refine`.
        """
        if callable(self._planned):
            self._planned = self._planned()
        return self._planned

    @property
    def _at_hand(self) -> PlanningResult | None:
        return None if callable(self._planned) else self._planned

    @property
    def problem(self) -> Problem:
        """What the solver was given, as arrays; `plan.problem.dump("plan.json.gz")` writes it as IOPDDL JSON."""
        return self.planned.formulation.problem

    @property
    def _provenance(self) -> Provenance:
        known, place = self._at_hand, self._place
        if known is None:
            return Provenance(own_mesh=place.own, machine=place.machine)
        return Provenance(own_mesh=place.own, machine=place.machine, assignment=known.assignment, seconds=known.seconds)

    # What only these can do.

    def explain(
        self,
        pattern: str | None = None,
        *,
        at: str | None = None,
        flips: bool = False,
        vary: Mapping[str, tuple[int, Callable[[int], "Plan"]]] | None = None,
    ) -> str:
        """Explains the layout of inputs, or of values at a source line, by the runner-up and its cost, as text.

        Args:
          pattern: a pattern of inputs' paths, such as `"**.wq"`.
          at: or a source line, such as `"model.py:61"`.
          flips: whether to look for the link rates and the memory that turn the decision, too.
          vary: sizes to look for besides: name → its present value, and a function that plans
            the program at another, such as `{"batch": (32, lambda n: autoshard.plan(step,
            state, batches(n), mesh=mesh))}`. A plan alone does not know how its arguments
            follow from a size.

        Raises:
          SpecError: nothing is found there.
        """
        planned = self.planned
        varied = {name: (now, _planned_by(plan_at)) for name, (now, plan_at) in (vary or {}).items()}
        turned = ()
        if flips or varied:
            turned = turning_points(planned, self._place.hardware, pattern, at=at, varied=varied)
        undivided = runner_up.blocked(self.record.inputs, self.record.mesh)
        found = runner_up.explain(planned, pattern, at=at)
        more = runner_up.unexplained(planned, pattern, at=at)
        read = () if at is None else recalls(planned, at)
        return Text(explanation.text(found, turned, undivided, read, unexplained=more))

    def to_html(self) -> str:
        """A page that opens offline: layouts as tiles, timeline, memory, roofline, collectives, sources."""
        return page.page(plan=view.of_plan(self.planned, self._place.hardware))

    def honoured(self, compiler: str | None = None) -> LayoutCheck:
        """Reads the layout of every value back and lists those that the partitioner did not keep.

        Args:
          compiler: "gpu", "tpu" or "cpu" to read that compiler's own dump; None asks Shardy in-process.

        Raises:
          VerifyError: it is the plan of a forward function for its gradient.
        """
        return honoured(self.planned, compiler=compiler)

    @property
    def _compiler(self) -> CompilerModel:
        return self._place.compiler

    def _gradient_to_compile(self) -> Any:
        planned = replace(self.planned, record=self.record)
        return pipeline.traced_gradient(planned, meshes.abstract(self.record.mesh))


def _planned_by(plan_at: Callable[[int], Plan]) -> Callable[[int], PlanningResult]:
    """The problem behind a user's plans at other sizes."""

    def planned_at(size: int) -> PlanningResult:
        made = plan_at(size)
        if not isinstance(made, SolvedPlan):
            raise PlanMismatchError("vary= takes functions that plan; a plan file holds no alternatives")
        return made.planned

    return planned_at
