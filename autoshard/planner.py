"""Planner: the pipeline from a traced program to a plan record.

trace → graph → decisions → problem → solution → assignment → record.
"""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from autoshard import graph as graphs
from autoshard import minimal, opaque
from autoshard import trace as traces
from autoshard.completion import Annotations
from autoshard.errors import InfeasibleError, SpecError
from autoshard.gradient import GradientProgram, emitted, gradient_program, marks
from autoshard.layout import Layout
from autoshard.mesh import MeshAxes
from autoshard.pins import Pins, Specs, spec_of
from autoshard.problem.assignment import Assignment
from autoshard.problem.decide import decide
from autoshard.problem.decisions import Decisions
from autoshard.problem.formulation import UNIT_S, Formulation, exposed_ps, formulate
from autoshard.record import Certificate, Cost, Leaf, Memory, PlanRecord
from autoshard.resharding import BUCKET_BYTES, Resharder
from autoshard.rules.control_flow import HOST_CALLS
from autoshard.rules.kernels import CUDNN_BACKWARD, CUDNN_FORWARD
from autoshard.solver import Solution, Status, solve
from autoshard.strategies import Codes, layout_of, matching
from autoshard.trace import Traced
from cost_models import Hardware, Machine

log = logging.getLogger("autoshard")

# AdamW's two moments in float32: what an optimizer holds per parameter, where the
# program itself does not show it (Kingma & Ba 2015).
OPTIMIZER_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the user asked of the layouts, leaf by leaf: specs of inputs and outputs to keep."""

    inputs: Mapping[int, PartitionSpec]
    outputs: Mapping[int, PartitionSpec]
    donated: frozenset[int]


Constraints = Literal["needed", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of the search."""

    memory_bytes: int
    time_limit_s: float
    rel_gap: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Setting:
    """A program, ready to be planned or priced: its decisions and the way back to its source."""

    traced: Traced
    gradient: GradientProgram | None
    tied: Mapping[int, int]  # output position of the priced program → the input that it shares its layout with
    decisions: Decisions
    resharder: Resharder
    seconds: Mapping[str, float]

    @property
    def priced(self) -> Traced:
        return self.traced if self.gradient is None else self.gradient.traced


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Planned:
    """A record with everything that led to it, for explanations and further questions."""

    record: PlanRecord
    traced: Traced
    setting: Setting
    formulation: Formulation
    solution: Solution
    assignment: Assignment
    seconds: Mapping[str, float]  # wall-clock per stage


class _Clock:
    """Seconds per stage; each is logged when it is done."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        log.debug("%s: %.3f s", stage, now - self._last, extra={"stage": stage})
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now


def _log_progress(best: int | None, bound: int | None, elapsed_s: float) -> None:
    """Logs the solver's best objective so far and what it has proven of it."""
    if best is not None and bound is not None:
        gap = (best - bound) / best if best else 0.0
        now = f"solve: {best * UNIT_S * 1e3:.4g} ms, within {gap:.1%} of the optimum, after {elapsed_s:.0f} s"
        log.debug("%s", now, extra={"now": now})


def prepare(
    traced: Traced,
    mesh: MeshAxes,
    machine: Machine,
    wanted: Wanted,
    *,
    gradient_of: Sequence[int],
    unknown: str,
    platform: str = "cpu",
    trace_s: float = 0.0,
    graph: graphs.Graph | None = None,
) -> Setting:
    """Builds the decisions of a traced program.

    Args:
      traced: the program.
      mesh: its logical mesh; axes of size 1 decide nothing.
      machine: the cost model with that mesh placed on it.
      wanted: the user's specs and donations.
      gradient_of: argument positions to differentiate for, or empty to plan the program as it is.
      unknown: "error" or "replicate".
      platform: what `platform_index` resolves to: "cpu", "cuda" or "tpu".
      trace_s: seconds that tracing took, for the stages' times.
      graph: of the traced program on this platform, if it was built before (no mesh changes
        it); not used with `gradient_of`.

    Raises:
      MissingRuleError: a primitive without a rule, if `unknown` is "error".
      SpecError: a pin that cannot be kept.
    """
    if unknown not in ("error", "replicate"):
        raise SpecError(f"unknown={unknown!r} is neither 'error' nor 'replicate'")
    clock = _Clock()
    clock.seconds["trace"] = trace_s
    real = MeshAxes.of({n: s for n, s in mesh.shape.items() if s > 1})
    gradient = gradient_program(traced, gradient_of, mesh) if gradient_of else None
    priced = traced if gradient is None else gradient.traced
    clock.lap("trace")
    if graph is None or gradient is not None:
        graph = graphs.build(priced.jaxpr, platform)
    clock.lap("graph")
    held: dict[int, int] = {}
    if gradient is None:
        tied = ties(traced, wanted.donated)
    else:
        tied = {gradient.first_gradient + k: i for k, i in enumerate(gradient.gradient_of)}
        held = dict.fromkeys(gradient.gradient_of, OPTIMIZER_BYTES)
    input_pins = {
        i: _pinned(s, priced.in_avals[i].shape, mesh, real, traced.in_paths[i]) for i, s in wanted.inputs.items()
    }
    output_pins = {
        i: _pinned(s, priced.out_avals[i].shape, mesh, real, f"output {priced.out_paths[i]}")
        for i, s in wanted.outputs.items()
    }
    for output, position in tied.items():
        if position in input_pins and output in output_pins:
            input_pins[position] = np.intersect1d(input_pins[position], output_pins[output])
            if not len(input_pins[position]):
                raise SpecError(
                    f"{traced.in_paths[position]}: asked for in {wanted.inputs[position]}, "
                    f"but the output that replaces it in {wanted.outputs[output]}"
                )
    resharder = Resharder(real, machine)
    decisions = decide(
        graph,
        real,
        machine,
        tied=tied,
        donated=wanted.donated,
        input_pins=input_pins,
        output_pins=output_pins,
        equation_pins=_own_constraints(graph, mesh, real),
        held_bytes=held,
        unknown=unknown,
        platform=platform,
    )
    clock.lap("strategies")
    return Setting(
        traced=traced, gradient=gradient, tied=tied, decisions=decisions, resharder=resharder, seconds=clock.seconds
    )


def make(
    setting: Setting,
    *,
    name: str,
    mesh: MeshAxes,
    hardware: Hardware,
    machine: Machine,
    wanted: Wanted,
    budget: Budget,
    notes: Sequence[str],
    constraints: Constraints = "needed",
    platform: str = "cpu",
) -> Planned:
    """Solves a setting and reads the solution as a plan.

    Args:
      setting: the program's decisions.
      name: the function's.
      mesh: its logical mesh.
      hardware: what is planned for.
      machine: the mesh placed on it.
      wanted: the user's specs and donations.
      budget: limits of memory and search.
      notes: for the plan, such as what was assumed for the user.
      constraints: "needed" asks Shardy which constraints its own propagation reaches
        anyway and leaves those out; "all" emits every one.
      platform: JAX's name of the platform that is planned for.

    Raises:
      InfeasibleError: no plan fits in memory, or the pins exclude each other.
    """
    clock = _Clock()
    formulation = formulate(setting.decisions, setting.resharder, memory_bytes=budget.memory_bytes)
    clock.lap("price")
    solution = solve(
        formulation.problem, time_limit_s=budget.time_limit_s, rel_gap=budget.rel_gap, on_progress=_log_progress
    )
    clock.lap("solve")
    if solution.status in (Status.INFEASIBLE, Status.UNKNOWN):
        raise _infeasible(setting, formulation, solution, budget, mesh)
    assignment = Assignment(
        decisions=setting.decisions, resharder=setting.resharder, choice=formulation.read(solution.choice)
    )
    record = describe(
        setting,
        assignment,
        exposed=exposed_ps(formulation.problem, solution.choice),
        certificate=_certificate(formulation, solution, hardware),
        name=name,
        mesh=mesh,
        hardware=hardware,
        machine=machine,
        wanted=wanted,
        memory_bytes=budget.memory_bytes,
        notes=notes,
    )
    probed = setting.gradient is None and setting.decisions.mesh.ndim and not _needs_devices(setting)
    if constraints == "needed" and probed:
        record = replace(record, pins=_needed(record, setting, formulation, platform))
        clock.lap("constraints")
    seconds = {**setting.seconds, **clock.seconds}
    return Planned(
        record=record,
        traced=setting.traced,
        setting=setting,
        formulation=formulation,
        solution=solution,
        assignment=assignment,
        seconds=seconds,
    )


def _needed(record: PlanRecord, setting: Setting, formulation: Formulation, platform: str) -> Pins:
    annotations = Annotations(
        inputs={i: leaf.spec for i, leaf in enumerate(record.inputs)},
        outputs={i: leaf.spec for i, leaf in enumerate(record.outputs)},
        pins=record.pins,
        donated=frozenset(),
    )
    return minimal.needed(setting.traced, setting.decisions, formulation.folding, record.mesh, annotations, platform)


def describe(
    setting: Setting,
    assignment: Assignment,
    *,
    exposed: Mapping[int, tuple[int, int, int]],
    certificate: Certificate,
    name: str,
    mesh: MeshAxes,
    hardware: Hardware,
    machine: Machine,
    wanted: Wanted,
    memory_bytes: int,
    notes: Sequence[str],
) -> PlanRecord:
    """Reads one assignment of a setting as a plan record."""
    d, traced = assignment.decisions, setting.traced
    collectives = tuple(sorted(assignment.collectives(), key=lambda c: (c.kind, c.axes, -c.nbytes, c.where, c.value)))
    step_s = certificate.objective_s
    compute_s = assignment.compute_s()
    hidden_s = sum(hideable - left for hideable, _, left in exposed.values()) * UNIT_S
    peak, at, kinds = assignment.peak()

    def spec(code: int, ndim: int) -> PartitionSpec:
        return layout_of(code, ndim, d.mesh).spec()

    return PlanRecord(
        name=name,
        digest=traces.digest(traced),
        mesh=mesh,
        device_order=tuple(int(i) for i in np.asarray(machine.device_order).ravel()),
        hardware=hardware.name,
        hardware_digest=hardware.digest,
        versions={"autoshard": metadata.version("autoshard"), "jax": jax.__version__},
        inputs=tuple(
            Leaf(path=p, shape=a.shape, dtype=str(a.dtype), spec=spec(assignment.input_code(i), len(a.shape)))
            for i, (p, a) in enumerate(zip(traced.in_paths, traced.in_avals, strict=True))
        ),
        outputs=tuple(
            Leaf(path=p, shape=a.shape, dtype=str(a.dtype), spec=spec(assignment.output_code(i), len(a.shape)))
            for i, (p, a) in enumerate(zip(traced.out_paths, traced.out_avals, strict=True))
        ),
        donated=tuple(sorted(wanted.donated)),
        pins=forward_pins(setting, assignment) if setting.gradient else program_pins(assignment),
        collectives=collectives,
        cost=Cost(
            step_s=step_s,
            compute_s=compute_s,
            communication_s=step_s - compute_s + hidden_s,
            hidden_s=hidden_s,
        ),
        memory=Memory(peak_bytes=peak, limit_bytes=memory_bytes, at=_where(d, at), kinds=kinds),
        certificate=certificate,
        compiler_options=_compiler_options(hardware, mesh, memory_bytes - peak),
        notes=tuple(notes),
    )


def traced_gradient(planned: Planned, mesh: Any) -> Any:
    """The gradient of a planned forward function, jitted on a mesh in the planned layouts and traced.

    Its arguments are flat: the function's leaves, then the cotangents of outputs that are no scalars.
    """
    setting, assignment = planned.setting, planned.assignment
    assert setting.gradient is not None  # asked only of plans for a gradient
    priced, axes = setting.priced, setting.decisions.mesh

    def shardings(codes: Iterable[int], avals: Sequence[Any]) -> list[NamedSharding]:
        return [NamedSharding(mesh, layout_of(c, len(a.shape), axes).spec()) for c, a in zip(codes, avals, strict=True)]

    jitted = jax.jit(
        emitted(setting.traced, setting.gradient, planned.record.pins, mesh),
        in_shardings=tuple(shardings(map(assignment.input_code, range(len(priced.in_avals))), priced.in_avals)),
        out_shardings=shardings(map(assignment.output_code, range(len(priced.out_avals))), priced.out_avals),
    )
    return jitted.trace(*priced.in_avals)


def program_pins(assignment: Assignment) -> Pins:
    """The constraints of an assignment: where values are made, and where they are taken."""
    d = assignment.decisions
    graph = d.graph
    crossing = {edge.value for edge in d.edges}

    def specs(codes: Sequence[int], value: int) -> Specs:
        ndim = graph.avals[value].ndim
        return tuple(layout_of(c, ndim, d.mesh).spec() for c in codes) if ndim else ()

    made = {
        graph.makes[e][i]: specs(assignment.after_made(v), v)
        for e, values in enumerate(graph.results)
        for i, v in enumerate(values)
        if v in crossing
    }
    again = {graph.takes[e][i]: specs(codes, graph.operands[e][i]) for (e, i), codes in assignment.again().items()}
    taken = {
        graph.takes[e][i]: specs(assignment.before_taken(e, i), v)
        for e, values in enumerate(graph.operands)
        for i, v in enumerate(values)
        if v in crossing and graph.takes[e][i] not in again
    }
    inputs = {p: specs(assignment.after_made(v)[1:], v) for p, v in enumerate(graph.inputs) if v in crossing}
    outputs = {p: specs(assignment.before_output(p), v) for p, v in enumerate(graph.outputs) if v in crossing}
    return Pins(
        made={k: v for k, v in made.items() if v},
        taken={k: v for k, v in taken.items() if v},
        inputs={k: v for k, v in inputs.items() if v},
        outputs={k: v for k, v in outputs.items() if v},
        again={k: v for k, v in again.items() if v},
        kernels=dict(_kernel_layouts(assignment)),
    )


NEED_DEVICES = frozenset({*HOST_CALLS, CUDNN_FORWARD, CUDNN_BACKWARD})


def _needs_devices(setting: Setting) -> bool:
    """Whether JAX lowers a program for real devices alone (it calls the host, or cuDNN): no probing."""
    return any(eqn.primitive in NEED_DEVICES for eqn in setting.decisions.graph.eqns)


def _kernel_layouts(assignment: Assignment) -> Iterable[tuple[tuple[graphs.Path, int], Specs]]:
    """The one layout of every operand and result of each opaque kernel; whole where nothing decides."""
    d = assignment.decisions
    graph = d.graph
    for e, eqn in enumerate(graph.eqns):
        if eqn.primitive != opaque.PALLAS:
            continue
        path = graph.makes[e][0][0]
        codes = [assignment.taken(e, i) for i in range(len(eqn.operands))]
        codes += [assignment.made(v) for v in graph.results[e]]
        for i, (code, aval) in enumerate(zip(codes, (*eqn.operands, *eqn.results), strict=True)):
            whole = PartitionSpec()
            yield (path, i), (whole if code is None else layout_of(code, aval.ndim, d.mesh).spec(),)


def forward_pins(setting: Setting, assignment: Assignment) -> Pins:
    """The constraints of a forward function that was planned for its gradient: on its own values alone."""
    d = assignment.decisions
    crossing = {edge.value for edge in d.edges}
    made: dict[tuple[graphs.Path, int], Specs] = {}
    for key, value in marks(d.graph.named).items():
        if value in crossing:
            ndim = d.graph.avals[value].ndim
            specs = tuple(layout_of(c, ndim, d.mesh).spec() for c in assignment.after_made(value))
            if specs:
                made[key] = specs
    return Pins(made=made, taken={}, inputs={}, outputs={})


def ties(traced: Traced, donated: frozenset[int]) -> dict[int, int]:
    """Output → the donated input that it replaces: same aval, and its path ends in the input's.

    A donated leaf whose path no output has is not tied. Of several outputs the one with the
    shortest path is taken: `[0]['w']` before `[0].mu['w']`.
    """
    alike: dict[tuple[Any, ...], list[int]] = {}  # shape, dtype and last part of the path → outputs
    for o, (out, path) in enumerate(zip(traced.out_avals, traced.out_paths, strict=True)):
        for last in (_last(path), ""):
            alike.setdefault((out.shape, out.dtype, last), []).append(o)
    tied: dict[int, int] = {}
    for i in sorted(donated):
        aval, path = traced.in_avals[i], traced.in_paths[i]
        begin = min((path.find(c) for c in "[." if c in path), default=len(path))
        suffix = path[begin:]
        fits = [
            o
            for o in alike.get((aval.shape, aval.dtype, _last(suffix)), ())
            if o not in tied and traced.out_paths[o].endswith(suffix)
        ]
        if fits:
            tied[min(fits, key=lambda o: (len(traced.out_paths[o]), o))] = i
    return tied


def _last(path: str) -> str:
    """The last part of a path: `['w']` of `[0]['layers'][3]['w']`."""
    return path[max(path.rfind("["), path.rfind("."), 0) :]


def _pinned(spec: PartitionSpec, shape: tuple[int, ...], mesh: MeshAxes, real: MeshAxes, what: str) -> Codes:
    """The codes that a spec allows; `P.UNCONSTRAINED` frees a dimension."""
    free = frozenset(d for d, entry in enumerate(spec) if entry is PartitionSpec.UNCONSTRAINED)
    entries = [None if d in free else entry for d, entry in enumerate(spec)]
    layout = Layout.from_spec(PartitionSpec(*entries), len(shape))
    for axis in (axis for dim in layout.dims for axis in dim):
        if axis not in mesh.names:
            raise SpecError(f"{what}: {spec} names the axis `{axis}`; the mesh has {', '.join(mesh.names) or 'none'}")
    for dim, axes in zip(shape, layout.dims, strict=True):
        pieces = int(np.prod([mesh.shape[a] for a in axes], dtype=np.int64))
        if dim % pieces:
            raise SpecError(f"{what}: a dimension of {dim} does not divide into {pieces} ({'·'.join(axes)}) in {spec}")
    codes = matching(shape, real, layout, free)
    if not len(codes):
        raise SpecError(f"{what}: {spec} puts axes in another order than the mesh ({', '.join(mesh.names)})")
    return codes


def _own_constraints(graph: graphs.Graph, mesh: MeshAxes, real: MeshAxes) -> dict[int, Codes]:
    """The user's `with_sharding_constraint`s: equation → allowed codes."""
    return {
        e: _pinned(spec_of(eqn), eqn.results[0].shape, mesh, real, f"with_sharding_constraint at {eqn.where}")
        for e, eqn in enumerate(graph.eqns)
        if eqn.primitive == "sharding_constraint"
    }


def _certificate(formulation: Formulation, solution: Solution, hardware: Hardware) -> Certificate:
    nodes, classes = len(formulation.decisions.nodes), formulation.folding.classes
    return Certificate(
        status=str(solution.status),
        objective_s=solution.objective * UNIT_S,
        bound_s=solution.bound * UNIT_S,
        gap=solution.gap,
        solver=f"{solution.solver}, ortools {metadata.version('ortools')}",
        space=(
            f"every evenly dividing layout of {nodes} decisions ({classes} after decisions in equal places share one), "
            "element-wise chains in one layout, one shared copy per value; priced by autoshard's model of "
            f"{hardware.name}"
        ),
    )


def _compiler_options(hardware: Hardware, mesh: MeshAxes, spare_bytes: int) -> dict[str, Any]:
    """The flags that the plan's overlap and memory need.

    XLA:GPU merges reduce-scatters up to a size of their results; what they reduce, as many
    times as large as there are devices, is alive until then. Where memory is short, they
    are merged less.
    """
    if hardware.name.startswith(("tpu", "cpu")):
        return {}
    options: dict[str, Any] = {"xla_gpu_enable_latency_hiding_scheduler": True}
    merged = spare_bytes // mesh.size
    if merged < BUCKET_BYTES:
        options["xla_gpu_reduce_scatter_combine_threshold_bytes"] = max(1, merged)
    return options


def _where(decisions: Decisions, at: int) -> str:
    eqns = decisions.graph.eqns
    return f"{eqns[at].primitive} at {eqns[at].where}" if at < len(eqns) else "the end of the program"


def _infeasible(
    setting: Setting, formulation: Formulation, solution: Solution, budget: Budget, mesh: MeshAxes
) -> InfeasibleError:
    limit = budget.memory_bytes
    if solution.status is Status.UNKNOWN:
        return InfeasibleError(
            f"no plan was found within {budget.time_limit_s:g} s (limit {_gb(limit)} per device on {mesh}); "
            "raise time_limit_s, or the memory limit",
            limit_bytes=limit,
        )
    found = solution.smallest_peak_bytes
    if found is None or found <= limit:
        return InfeasibleError(
            "the pins exclude each other: no layout satisfies all of them; loosen one", limit_bytes=limit
        )
    decisions = setting.decisions
    choice = formulation.read(solution.choice)
    peak, at, kinds = Assignment(decisions=decisions, resharder=setting.resharder, choice=choice).peak()
    bound = min(solution.peak_bound_bytes or 0, peak)
    proven = "" if bound >= peak else f" (none has less than {_gb(bound)})" if bound else ""
    parts = " + ".join(f"{kind} {_gb(n)}" for kind, n in sorted(kinds.items(), key=lambda item: -item[1]) if n)
    return InfeasibleError(
        f"no plan fits {_gb(limit)} per device on {mesh}; the smallest peak found is {_gb(peak)}{proven}\n"
        f"  at {_where(decisions, at)}: {parts}\n"
        f"  {_way_out(setting, kinds)}",
        peak_bytes=peak,
        bound_bytes=bound,
        limit_bytes=limit,
        where=_where(decisions, at),
        kinds=kinds,
    )


def _way_out(setting: Setting, kinds: Mapping[str, int]) -> str:
    """What would help most, of what makes up a peak."""
    ways: list[str] = []
    state = sum(kinds.get(kind, 0) for kind in ("parameters", "optimizer", "arguments"))
    passing = sum(kinds.get(kind, 0) for kind in ("activations", "copies"))
    if not setting.tied:
        ways.append("donate the state (donate_argnums=), so that the new one takes its place")
    if passing >= state:
        ways.append("a smaller batch (autoshard.accumulate splits it), jax.checkpoint around a layer")
    ways.append("more devices, or mesh axes that divide more dimensions")
    return "what helps: " + "; ".join(ways) + "; or raise memory="


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.3g} GB"
