"""Trial: one candidate planned; what does not depend on the mesh is made once per program."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import jax
import numpy as np

from autoshard import _jax
from autoshard.backends import devices
from autoshard.errors import InfeasibleError, MeshError, SpecError
from autoshard.explore.builder import load_target
from autoshard.explore.candidates import Candidate
from autoshard.explore.ranking import LeftOut, RankedPlan
from autoshard.ir import arguments, trace
from autoshard.ir import flops as useful
from autoshard.ir.gradient import gradient_arguments
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import MeshAxes
from autoshard.ir.op_traits import CONSTRAINT
from autoshard.ir.paths import dotted
from autoshard.ir.trace import Traced
from autoshard.planner import pipeline
from autoshard.planner.pipeline import Budget, PlanningResult
from autoshard.planner.requested_shardings import AUTO, read_shardings
from autoshard.planner.search_space import build_search_space, ties
from autoshard.problem.warm_start import PortableChoice, chosen
from autoshard.solver.incumbent import Cutoff, no_cutoff

DTYPE = "bfloat16"  # whose peak the utilizations of a program without matmuls refer to


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is planned, and how: all that another process needs.

    `target` is a builder, as text (`"models:gpt2_xl"`) or a function of the varied
    arguments; or None, and `fn` and `args` are given. `donate` None donates the arguments
    that outputs replace leaf by leaf, as a training step's state.
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
    time_limit_s: float = 20.0
    rel_gap: float = 2e-3

    def build(self, choice: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]]:
        """The function and its arguments for one choice of the varied arguments.

        Raises:
          TargetError: the target is no builder of them.
        """
        if self.target is None:
            return self.fn, self.args
        return load_target(self.target, {**self.keywords, **choice})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """A traced program and what no mesh changes."""

    name: str
    bound: arguments.Binding
    traced: Traced
    constrained: bool  # by the user: those constraints name mesh axes
    flops: float
    tokens: int
    parameters: int
    state_bytes: int  # donated arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """What the search knows of others: a step of `cutoff_s()` or more is not improved for long."""

    cutoff_s: Cutoff = no_cutoff  # may fall while a candidate is tried
    known: Sequence[PortableChoice] = ()  # on coarser meshes of the same devices


NO_HINTS = Hints()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What became of a candidate, and what was chosen, for other meshes."""

    answer: RankedPlan | LeftOut
    chosen: PortableChoice | None = None


class Trials:
    """Plans candidates of one task, one after the other."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._programs: dict[Any, Program] = {}
        self._graphs: dict[tuple[int, str], Graph] = {}  # by program (kept above) and platform

    def run(self, candidate: Candidate, hints: Hints = NO_HINTS) -> Tried:
        """The best plan of a candidate, or why there is none.

        Raises:
          SpecError: what is asked for is no good, whatever the mesh.
        """
        try:
            self.program(candidate)
        except MeshError as error:  # the program's own constraints name other axes
            return _left_out(candidate, error)
        try:
            planned = self.planned(candidate, hints)
        except (InfeasibleError, SpecError, MeshError) as error:
            return _left_out(candidate, error)
        decisions, choice = planned.assignment.decisions, planned.assignment.choice
        return Tried(answer=self._row(candidate, planned), chosen=chosen(decisions, choice))

    def program(self, candidate: Candidate) -> Program:
        """The candidate's program, traced when first needed."""
        key: Any = candidate.choice
        if key not in self._programs:
            self._programs[key] = self._trace(candidate)
        if self._programs[key].constrained:
            key = (candidate.choice, candidate.mesh)
            if key not in self._programs:
                self._programs[key] = self._trace(candidate)
        return self._programs[key]

    def _trace(self, candidate: Candidate) -> Program:
        task = self._task
        fn, args = task.build(dict(candidate.choice))
        bound = arguments.bind(
            fn,
            args,
            {},
            donate_argnums=[d for d in task.donate or () if isinstance(d, int)] or None,
            donate_argnames=[d for d in task.donate or () if isinstance(d, str)] or None,
        )
        traced = trace.trace(bound.fn, bound.values, bound.names, MeshAxes.of(candidate.shape))
        if task.donate is None:
            bound = replace(bound, donated=_replaced(traced))
        leaves = list(zip(traced.in_paths, traced.in_avals, strict=True))
        return Program(
            name=getattr(fn, "__name__", type(fn).__name__),
            bound=bound,
            traced=traced,
            constrained=_constrained(traced.jaxpr),
            flops=useful.flops(traced.jaxpr),
            tokens=task.tokens if task.tokens is not None else _tokens(leaves),
            parameters=_parameters(leaves),
            state_bytes=sum(
                prod(a.shape) * _jax.itemsize(a.dtype)
                for (_, a), argument in zip(leaves, traced.argument_of, strict=True)
                if argument in bound.donated
            ),
        )

    def planned(self, candidate: Candidate, hints: Hints = NO_HINTS) -> PlanningResult:
        """The best plan of a candidate, with its problem.

        Raises:
          InfeasibleError: it does not fit.
          SpecError: a pin cannot be kept on its mesh.
          MissingRuleError: a primitive without a rule.
        """
        task, program = self._task, self.program(candidate)
        place = devices.place(candidate.shape, candidate.hardware)
        limit = place.hardware.usable_memory_bytes if task.memory is None else task.memory
        if program.state_bytes > limit * place.axes.size:
            raise InfeasibleError(
                f"the donated arguments alone are {program.state_bytes / 1e9:,.0f} GB; "
                f"{place.axes.size} devices hold {limit * place.axes.size / 1e9:,.0f} GB"
            )
        asked = read_shardings(program.traced, AUTO, AUTO, task.pins, program.bound.donated)
        platform = place.compiler.platform
        setting = build_search_space(
            program.traced,
            place.axes,
            place.machine,
            asked,
            gradient_of=gradient_arguments(program.traced, for_grad=task.for_grad),
            unknown=task.unknown,
            compiler=place.compiler,
            graph=self._graphs.get((id(program), platform)),
        )
        if setting.gradient is None:
            self._graphs[id(program), platform] = setting.decisions.graph
        return pipeline.solve_request(
            setting,
            name=program.name,
            mesh=place.axes,
            hardware=place.hardware,
            machine=place.machine,
            wanted=asked,
            budget=Budget(
                memory_bytes=limit, time_limit_s=task.time_limit_s, rel_gap=task.rel_gap, cutoff_s=hints.cutoff_s
            ),
            known=[choice for known in hints.known if (choice := known.on(setting.decisions)) is not None],
            notes=place.notes,
            constraints="all",  # which of them the compiler needs is asked for the one that is used
        )

    def _row(self, candidate: Candidate, planned: PlanningResult) -> RankedPlan:
        program = self.program(candidate)
        gradient = planned.setting.gradient
        machine = devices.place(candidate.shape, candidate.hardware).machine
        return RankedPlan(
            candidate=candidate,
            record=planned.record,
            flops=program.flops if gradient is None else useful.flops(gradient.traced.jaxpr),
            device_flops=planned.assignment.flops(),
            peak_flops_per_s=planned.assignment.peak_flops_per_s(machine.peak_flops_per_s)
            or machine.peak_flops_per_s(DTYPE),
            tokens=program.tokens,
            parameters=program.parameters,
        )


def _left_out(candidate: Candidate, error: Exception) -> Tried:
    return Tried(answer=LeftOut(candidate, str(error).split("\n")[0]))


def _replaced(traced: Traced) -> frozenset[int]:
    """Arguments every leaf of which an output replaces."""
    tied = set(ties(traced, frozenset(range(len(traced.in_avals)))).values())
    every = set(traced.argument_of)
    return frozenset(every - {a for i, a in enumerate(traced.argument_of) if i not in tied})


def _constrained(jaxpr: Any) -> bool:
    """Whether the program has sharding constraints of its own."""
    return any(
        eqn.primitive.name == CONSTRAINT or any(map(_constrained, _jax.sub_jaxprs(eqn.params)))
        for eqn in _jax.open_jaxpr(jaxpr).eqns
    )


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
