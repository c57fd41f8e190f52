"""Refine: the compiler in the loop. Several near-optimal plans are compiled, the shortest schedule wins.

Candidates are the optimum, the plans that are best without one of its choices (the layout
of one large input), the best plans on other meshes, and layouts that the user enters, such
as hand-written ones. They are compiled for the plan's hardware and their schedules priced
by the plan's own cost model (`timeline`). A candidate that the compiler gives more memory
than the device has drops out. The winner is compiled again with other flags of the
compiler's own scheduler. Its notes say what changed the order.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import numpy as np
from jax.sharding import PartitionSpec

from autoshard.api.evaluation import Evaluation
from autoshard.api.plan import Plan, ProgramPlan
from autoshard.api.solved_plan import SolvedPlan
from autoshard.backends.known_compilers import CALLED, named
from autoshard.costs.strategies import layout_of
from autoshard.errors import CompilerFlagError, PlanMismatchError, SpecError
from autoshard.explain.asked import solved
from autoshard.ir.layout import Layout
from autoshard.ir.trace import Traced
from autoshard.ir.transfer import transferred
from autoshard.planner.pipeline import assign
from autoshard.planner.planning_result import PlanningResult
from autoshard.planner.request import PlanRequest
from autoshard.problem.assignment import Assignment
from autoshard.problem.formulation import UNIT_S
from autoshard.problem.network import INF
from autoshard.report.tables import bytes_text, time_text
from autoshard.verification.result import Verification

TRIED = 2  # inputs whose layout is forbidden, per candidate that is wanted: some lead to the same plan

Inputs = Mapping[int, PartitionSpec]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """A plan and its compiled program; `name` if it is neither the optimum nor near it on its mesh."""

    plan: SolvedPlan
    found: Verification
    name: str = ""

    @property
    def schedule_s(self) -> float:
        """Seconds of the compiled schedule, priced."""
        assert self.found.timeline is not None  # a compiler's program has a schedule
        return self.found.timeline.step_s

    @property
    def fits(self) -> bool:
        """Whether the compiled program's peak is within the plan's limit."""
        compiled = self.found.memory.compiled
        return compiled is None or compiled.peak <= self.plan.record.memory.limit_bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entered:
    """The plans that may enter.

    Attributes:
      first: the optimum.
      again: plans its request with these layouts of inputs.
      elsewhere: the best plans on other meshes.
      also: the user's, by name.
    """

    first: SolvedPlan
    again: Callable[[Inputs], SolvedPlan]
    elsewhere: Sequence[SolvedPlan]
    also: Mapping[str, SolvedPlan]

    def best(self, count: int) -> list[tuple[str, SolvedPlan]]:
        """The optimum and the next of ours, the least predicted step first, then the user's; their names."""
        near = [(cost_s, "", inputs) for cost_s, inputs in alternatives(self.first.planned, count - 1)]
        elsewhere = [(made.cost, f"on {made.record.mesh}", made) for made in self.elsewhere]
        ours = sorted([*near, *elsewhere], key=lambda entry: entry[0])[: count - 1]
        plans = [(name, made if isinstance(made, SolvedPlan) else self.again(made)) for _, name, made in ours]
        return [("", self.first), *plans, *self.also.items()]


def refined(entered: Entered, *, compiler: str, count: int) -> SolvedPlan:
    """The plan whose compiled schedule is shortest, with a note on the comparison.

    Args:
      entered: the plans to choose among.
      compiler: "gpu", "tpu" or "cpu".
      count: how many of ours to compile, the optimum included.

    Raises:
      SpecError: fewer than two candidates, or no such compiler.
      CompilerMissingError: that compiler is not installed.
    """
    if count < 1 or count + len(entered.also) < 2 or compiler not in CALLED:
        raise SpecError(
            f"refine={compiler!r} with candidates={count}: compile two plans or more, by 'gpu', 'tpu' or 'cpu'"
        )
    tried = [
        Candidate(plan=plan, found=plan.verify(compiler, compiler_options={}), name=name)
        for name, plan in entered.best(count)
    ]
    fitting = [x for x in tried if x.fits] or tried
    best = min(fitting, key=lambda x: x.schedule_s)
    refined_plan = best.plan.noted(describe_refinement(tried, best))
    flagged = [(_under(best, compiler, flags), flags) for flags in named(compiler).scheduling_flags]
    shorter = [(x.schedule_s, flags) for x, flags in flagged if x and x.fits and x.schedule_s < best.schedule_s]
    if not shorter:
        return refined_plan
    schedule_s, flags = min(shorter, key=lambda item: item[0])
    written = ", ".join(f"{name}={value}" for name, value in flags.items())
    note = f"with {written} the schedule takes {time_text(schedule_s)}: a compiler option of the plan"
    return refined_plan.noted(note, compiler_options=flags)


def _under(candidate: Candidate, compiler: str, flags: Mapping[str, Any]) -> Candidate | None:
    """A candidate compiled with more flags; None where the compiler does not have them."""
    try:
        return replace(candidate, found=candidate.plan.verify(compiler, compiler_options=flags))
    except CompilerFlagError:
        return None


def adopted(name: str, layout: Plan | Evaluation, questions: Sequence[PlanRequest]) -> SolvedPlan:
    """A user's layout as a plan of one of the requests.

    Raises:
      SpecError: it is of another mesh, hardware or program, donates other arguments, or contradicts the request.
    """
    record = layout.record
    question = next((q for q in questions if q.target.axes == record.mesh), None)
    if question is None:
        known = ", ".join(str(q.target.axes) for q in questions)
        raise SpecError(f"also={name!r} is laid out on the mesh {record.mesh}; planned for is {known}")
    source = _program(layout)
    if source is None or question.gradient_of or record.gradient_of:
        raise SpecError(f"also={name!r}: layouts of whole programs can enter, not plan files or functions for_grad")
    if record.hardware != question.target.hardware.name or frozenset(record.donated) != question.shardings.donated:
        raise SpecError(
            f"also={name!r} is for {record.hardware} and donates {list(record.donated)}; planned for is "
            f"{question.target.hardware.name}, donating {sorted(question.shardings.donated)}: give both the same "
            "options"
        )
    for i, spec in question.shardings.inputs.items():
        leaf = record.inputs[i]
        if not _keeps(leaf.spec, spec, len(leaf.shape)):
            raise SpecError(f"also={name!r} lays {leaf.path} out as {leaf.spec}; asked for is {spec}")
    parts = question.shardings.host_parts
    for leaf in () if parts is None else parts.strays(record.inputs):
        raise SpecError(f"also={name!r} lays {leaf.path} out as {leaf.spec}, across hosts; see host_local=")
    question = question.in_microbatches(record.microbatches or 1) if question.counts else question
    return SolvedPlan(
        replace(
            record,
            name=question.name,
            digest=question.digest,
            microbatches=question.microbatches,
            asked=question.asked,
            pins=transferred(record.pins, source.jaxpr, question.traced.jaxpr),
            memory=replace(record.memory, limit_bytes=question.memory_bytes),
        ),
        place=question.target,
        traced=question.traced,
        planned=layout.planned if isinstance(layout, SolvedPlan) else partial(_no_alternatives, name),
    )


def _program(layout: Plan | Evaluation) -> Traced | None:
    """The program that a layout is of; None of a plan file that is not bound to it."""
    if isinstance(layout, Evaluation):
        return layout.space.traced
    return layout.traced if isinstance(layout, ProgramPlan) else None


def _no_alternatives(name: str) -> NoReturn:
    raise PlanMismatchError(f"the plan is the layout also={name!r}, which holds no alternatives: plan without also=")


def _keeps(spec: PartitionSpec, asked: PartitionSpec, ndim: int) -> bool:
    """Whether a layout is the requested one, in the dimensions that are not left open."""
    entries = [None if entry is PartitionSpec.UNCONSTRAINED else entry for entry in asked]
    pairs = zip(Layout.from_spec(spec, ndim).dims, Layout.from_spec(PartitionSpec(*entries), ndim).dims, strict=True)
    free = {d for d, entry in enumerate(asked) if entry is PartitionSpec.UNCONSTRAINED}
    return all(d in free or one == other for d, (one, other) in enumerate(pairs))


def alternatives(planned: PlanningResult, count: int) -> list[tuple[float, Inputs]]:
    """Predicted seconds and input layouts of other plans: each is best without one choice of the optimum."""
    problem, d = planned.formulation.problem, planned.assignment.decisions
    nbytes: dict[int, int] = {}
    for position, v in enumerate(d.graph.inputs):
        c = int(planned.formulation.folding.class_of[d.inputs[position]])
        nbytes[c] = nbytes.get(c, 0) + d.graph.avals[v].nbytes
    largest = sorted(nbytes, key=lambda c: -nbytes[c])[: TRIED * count]
    seen = [_inputs(planned.assignment)]
    found: list[tuple[float, Inputs]] = []
    for c in largest:
        cost = problem.cost.copy()
        cost[problem.start[c] + planned.solution.choice[c]] = INF
        if np.all(cost[problem.start[c] : problem.start[c + 1]] >= INF):
            continue
        solution = solved(planned, replace(problem, cost=cost))
        if not solution.found:
            continue
        inputs = _inputs(assign(planned.formulation, solution))
        if inputs not in seen:
            seen.append(inputs)
            found.append((solution.objective * UNIT_S, inputs))
    return sorted(found, key=lambda item: item[0])[:count]


def describe_refinement(tried: Sequence[Candidate], best: Candidate) -> str:
    """Describes the comparison, and the reason if it changed the order."""
    ranks = sorted(range(len(tried)), key=lambda i: tried[i].schedule_s)
    listed = ", ".join(
        f"{time_text(tried[i].schedule_s)} (predicted {time_text(tried[i].plan.cost)}"
        + (f", {tried[i].name})" if tried[i].name else ")")
        + ("" if tried[i].fits else ", does not fit")
        for i in ranks
    )
    head = f"refined by {best.found.compiler}: the schedules of {len(tried)} plans take {listed}"
    first = tried[0]
    if best is first:
        return f"{head}; the predicted optimum stays"
    if not first.fits:
        assert first.found.memory.compiled is not None  # else it would fit
        peak = bytes_text(first.found.memory.compiled.peak)
        return f"{head}; the predicted optimum does not fit: the compiler needs {peak} for it"
    one, other = first.found.timeline, best.found.timeline
    assert one is not None
    assert other is not None
    parts = [
        ("compute", one.compute_s - other.compute_s, first.plan.record.cost.compute_s, one.compute_s),
        ("exposed communication", one.exposed_s - other.exposed_s, first.plan.record.cost.exposed_s, one.exposed_s),
    ]
    why, _, predicted_s, compiled_s = max(parts, key=lambda part: part[1])
    return (
        f"{head}; the order changed by {why}: the predicted optimum has {time_text(compiled_s)} of it as compiled, "
        f"{time_text(predicted_s)} as predicted"
    )


def _inputs(assignment: Assignment) -> dict[int, PartitionSpec]:
    d = assignment.decisions
    return {
        i: layout_of(assignment.input_code(i), d.graph.avals[v].ndim, d.mesh).spec()
        for i, v in enumerate(d.graph.inputs)
    }
