"""Trial: one candidate planned; a program is traced and measured once for all meshes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import jax
import numpy as np

from autoshard import _jax
from autoshard.errors import InfeasibleError, MeshError, SpecError
from autoshard.explore.builder import load_target
from autoshard.explore.candidates import Candidate
from autoshard.explore.ranking import LeftOut, RankedPlan
from autoshard.ir import flops as useful
from autoshard.ir.accumulation import AUTO, Steps
from autoshard.ir.mesh import MeshAxes
from autoshard.ir.paths import dotted
from autoshard.ir.recomputation import ADD, NO_OFFLOAD, Offload, Remat
from autoshard.ir.ties import ties
from autoshard.ir.trace import Traced
from autoshard.planner import pipeline
from autoshard.planner.budget import TIME_LIMIT_S, Budget
from autoshard.planner.decided_program import decided_by
from autoshard.planner.microbatches import fastest_count
from autoshard.planner.planning_result import PlanningResult
from autoshard.planner.program import Call, Program, bind
from autoshard.planner.record import PlanRecord
from autoshard.planner.request import PlanRequest, RequestOptions, requests_of
from autoshard.planner.stage_choice import stage_choice
from autoshard.problem import bill
from autoshard.problem.warm_start import PortableChoice, chosen
from autoshard.solver.incumbent import Cutoff, no_cutoff

SEARCH_REL_GAP = 2e-3  # twice a plan's own: candidates differ by more, and there are hundreds of them
DTYPE = "bfloat16"  # whose peak the utilizations of a program without matmuls refer to


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A program and its options: all that another process needs to plan candidates.

    `target` is a builder, as text (`"models:gpt2_xl"`) or a function of the varied
    arguments; or None, and `fn` and `args` are given. `donate` None donates the arguments
    that outputs replace leaf by leaf, as a training step's state. With `microbatches` the
    program has to leave their number open.
    """

    target: Any = None
    keywords: Mapping[str, Any] = field(default_factory=dict[str, Any])
    fn: Any = None
    args: tuple[Any, ...] = ()
    pins: Mapping[str, Any] = field(default_factory=dict[str, Any])
    donate: tuple[int | str, ...] | None = None
    for_grad: Any = None
    memory: int | None = None
    tokens: int | None = None
    unknown: str = "error"
    microbatches: Steps | None = None
    remat: Remat = ADD
    offload: Offload = NO_OFFLOAD
    time_limit_s: float = TIME_LIMIT_S
    rel_gap: float = SEARCH_REL_GAP

    def build(self, choice: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]]:
        """The function and its arguments for one choice of the varied arguments.

        Raises:
          TargetError: the target is no builder of them.
        """
        if self.target is None:
            return self.fn, self.args
        return load_target(self.target, {**self.keywords, **choice})


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The work of a program in one step, on any mesh."""

    flops: float
    tokens: int
    parameters: int
    state_bytes: int  # donated arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """Results of other candidates: a step of `cutoff_s()` or more is not improved for long.

    `record` is the candidate's own, if it was planned before: what it decided of the program stays.
    """

    cutoff_s: Cutoff = no_cutoff  # may fall while a candidate is tried
    known: Sequence[PortableChoice] = ()  # on coarser meshes of the same devices
    record: PlanRecord | None = None


NO_HINTS = Hints()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """The outcome of a candidate, and its choice, for other meshes."""

    answer: RankedPlan | LeftOut
    chosen: PortableChoice | None = None


class Trials:
    """Plans candidates of one task, one after the other."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._calls: dict[Any, Call] = {}
        self._workloads: dict[Program, Workload] = {}

    def run(self, candidate: Candidate, hints: Hints = NO_HINTS) -> Tried:
        """The best plan of a candidate, or why there is none.

        Raises:
          SpecError: the options are invalid on every mesh.
        """
        try:
            self._program(candidate)
        except MeshError as error:  # the program's own constraints name other axes
            return _left_out(candidate, error)
        try:
            planned = self.planned(candidate, hints)
        except (InfeasibleError, SpecError, MeshError) as error:
            return _left_out(candidate, error)
        decisions, choice = planned.assignment.decisions, planned.assignment.choice
        return Tried(answer=self._row(candidate, planned), chosen=chosen(decisions, choice))

    def planned(self, candidate: Candidate, hints: Hints = NO_HINTS) -> PlanningResult:
        """The best plan of a candidate, with its problem: of those in one stage and in stages, where that is open.

        Raises:
          InfeasibleError: it does not fit.
          SpecError: a pin cannot be kept on its mesh.
          MissingRuleError: a primitive without a rule.
        """
        every = self._requests(candidate)
        first = next(every)
        state_bytes = self.workload(first).state_bytes
        devices, limit = first.target.axes.size, first.memory_bytes
        if state_bytes > limit * devices:
            raise InfeasibleError(
                f"the donated arguments alone are {state_bytes / 1e9:,.0f} GB; "
                f"{devices} devices hold {limit * devices / 1e9:,.0f} GB"
            )
        asked = self._task.microbatches
        if asked == AUTO and not first.counts:
            raise SpecError(
                f"{first.name} has no micro-batches to choose: write accumulate(loss, steps={AUTO!r}) in it, or give "
                "its builder an argument value_and_grad, which then does so"
            )
        requests = [first, *every]
        if hints.record is not None:
            own = [one for one in requests if one.traced.is_digest(hints.record.digest)] or requests[:1]
            requests = [decided_by(hints.record, one) for one in own]
        elif not (asked is None or asked == AUTO):
            requests = [one.in_microbatches(asked) if one.counts or one is first else one for one in requests]
        plans: dict[int, PlanningResult] = {}
        errors: list[InfeasibleError] = []
        for i, one in enumerate(requests):
            try:
                plans[i] = self._solved(one, hints)
            except InfeasibleError as error:
                errors.append(error)
        if not plans:
            raise errors[0]
        costs = {i: found.record.cost.step_s for i, found in plans.items()}
        at = min(costs, key=lambda i: (costs[i], i))
        staged = stage_choice(at, costs, requests)
        record = plans[at].record
        return replace(plans[at], record=replace(record, notes=(*record.notes, staged))) if staged else plans[at]

    def _solved(self, request: PlanRequest, hints: Hints) -> PlanningResult:
        """The best plan of a request."""
        budget = Budget(time_limit_s=self._task.time_limit_s, rel_gap=self._task.rel_gap, cutoff_s=hints.cutoff_s)
        # which of all constraints the compiler needs is asked for the plan that is used
        solver = partial(pipeline.solve_request, known=hints.known, constraints="all")
        return fastest_count(request, budget, solver) if request.counts else solver(request, budget)

    def _call(self, candidate: Candidate) -> Call:
        """The candidate's program and its arguments, with the donated ones."""
        task, key = self._task, candidate.choice
        if key not in self._calls:
            fn, args = task.build(dict(key))
            call = bind(
                fn,
                args,
                {},
                donate_argnums=[d for d in task.donate or () if isinstance(d, int)] or None,
                donate_argnames=[d for d in task.donate or () if isinstance(d, str)] or None,
            )
            if task.donate is None:
                call = call.donating(_replaced(call.program(MeshAxes.of(candidate.shape)).traced))
            self._calls[key] = call
        return self._calls[key]

    def _program(self, candidate: Candidate) -> Program:
        """The candidate's program, traced when first needed."""
        return self._call(candidate).program(MeshAxes.of(candidate.shape))

    def request(self, candidate: Candidate) -> PlanRequest:
        """The request of a candidate, in one stage.

        Raises:
          SpecError: a pin cannot be kept on its mesh.
        """
        return next(self._requests(candidate))

    def _requests(self, candidate: Candidate) -> Iterator[PlanRequest]:
        """The request of a candidate, then those in stages over each of its axes, where that is left open."""
        task = self._task
        options = RequestOptions(
            pins=task.pins,
            memory_bytes=task.memory,
            for_grad=task.for_grad,
            unknown=task.unknown,
            remat=task.remat,
            offload=task.offload,
        )
        call, target = self._call(candidate), options.target(candidate.shape, candidate.hardware)
        return requests_of(call, target, options, in_parts=False)

    def workload(self, request: PlanRequest) -> Workload:
        """The work of its program in one step; counted once per program."""
        program, donated = request.program, request.shardings.donated
        if program not in self._workloads:
            leaves = list(zip(program.traced.in_paths, program.traced.in_avals, strict=True))
            self._workloads[program] = Workload(
                flops=useful.flops(program.traced.jaxpr),
                tokens=self._task.tokens if self._task.tokens is not None else _tokens(leaves),
                parameters=_parameters(leaves),
                state_bytes=sum(
                    prod(a.shape) * _jax.itemsize(a.dtype) for i, (_, a) in enumerate(leaves) if i in donated
                ),
            )
        return self._workloads[program]

    def _row(self, candidate: Candidate, planned: PlanningResult) -> RankedPlan:
        request, gradient = planned.space.request, planned.space.gradient
        workload, machine = self.workload(self.request(candidate)), request.target.machine
        return RankedPlan(
            candidate=candidate,
            record=planned.record,
            flops=workload.flops if gradient is None else useful.flops(gradient.traced.jaxpr),
            device_flops=bill.flops(planned.assignment),
            peak_flops_per_s=bill.peak_flops_per_s(planned.assignment, machine.peak_flops_per_s)
            or machine.peak_flops_per_s(DTYPE),
            tokens=workload.tokens,
            parameters=workload.parameters,
            stages=request.program.stages,
        )


def _left_out(candidate: Candidate, error: Exception) -> Tried:
    return Tried(answer=LeftOut(candidate, str(error).split("\n")[0]))


def _replaced(traced: Traced) -> frozenset[int]:
    """Arguments whose leaves are all replaced by outputs."""
    tied = set(ties(traced, frozenset(range(len(traced.in_avals)))).values())
    every = set(traced.argument_of)
    return frozenset(every - {a for i, a in enumerate(traced.argument_of) if i not in tied})


def _tokens(leaves: list[tuple[str, jax.ShapeDtypeStruct]]) -> int:
    """Elements of the largest integer input: a batch of token ids, [B, S], or in decoding [B]."""
    ids = [a for _, a in leaves if a.shape and np.issubdtype(a.dtype, np.integer)]
    return max((prod(a.shape) for a in ids), default=0)


def _parameters(leaves: list[tuple[str, jax.ShapeDtypeStruct]]) -> int:
    """Elements of the leaves below `params`, the optimizer's moments of them left out."""
    segments = [(dotted(path).split("."), prod(a.shape)) for path, a in leaves]
    at = [(path.index("params"), size) for path, size in segments if "params" in path]
    shallowest = min((depth for depth, _ in at), default=0)
    return sum(size for depth, size in at if depth == shallowest)
