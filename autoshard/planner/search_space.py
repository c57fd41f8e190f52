"""Search space: a request → every layout that its plan may have, priced."""

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import numpy as np
from jax.sharding import PartitionSpec
from numpy.typing import NDArray

from autoshard.backends.devices import Target
from autoshard.backends.model import CompilerModel
from autoshard.costs.overlap import hidden_shares
from autoshard.costs.resharding import Resharder
from autoshard.costs.search_mesh import search_mesh
from autoshard.costs.strategies import Codes, layout_of, layouts, matching
from autoshard.errors import SpecError, refusing_depth
from autoshard.garbage import collected_rarely
from autoshard.ir import graph as graphs
from autoshard.ir.constraints import spec_of
from autoshard.ir.gradient import GradientProgram, gradient_program
from autoshard.ir.graph import Graph
from autoshard.ir.layout import Layout
from autoshard.ir.mesh import MeshAxes
from autoshard.ir.op_traits import CONSTRAINT, SHARD_MAP
from autoshard.ir.paths import dotted
from autoshard.ir.ties import ties
from autoshard.ir.trace import Traced
from autoshard.planner.request import OPTIMIZER_BYTES, PlanRequest
from autoshard.planner.requested_shardings import RequestedShardings
from autoshard.planner.stages import Stages
from autoshard.problem.decision_builders.decide import decide
from autoshard.problem.decision_builders.facts import Requirements, facts_of
from autoshard.problem.decisions import Decisions
from autoshard.rules import rules_of
from cost_models import Machine


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SearchSpace:
    """A request, ready to be planned or priced.

    Attributes:
      request: the program, its target and the requested layouts.
      gradient: the program that is priced in place of the function, if the request is for its gradient.
      tied: output position of the priced program → the input that it shares its layout with.
      decisions: the decisions, every choice priced.
      required: what is fixed of them beforehand.
      resharder: prices of moving a value from one layout to another.
      seconds: wall-clock per stage.
    """

    request: PlanRequest
    gradient: GradientProgram | None
    tied: Mapping[int, int]
    decisions: Decisions
    required: Requirements
    resharder: Resharder
    seconds: Mapping[str, float]

    @property
    def traced(self) -> Traced:
        """The program that was asked about."""
        return self.request.program.traced

    @property
    def priced(self) -> Traced:
        """The program that is priced: the gradient program, if the request is for the gradient."""
        return self.traced if self.gradient is None else self.gradient.traced

    @property
    def compiler(self) -> CompilerModel:
        """The compiler of the target."""
        return self.request.target.compiler

    def within(self, memory_bytes: int) -> "SearchSpace":
        """The same space with another limit of memory."""
        return replace(self, request=replace(self.request, memory_bytes=memory_bytes))

    def repriced(self, machine: Machine) -> "SearchSpace":
        """The same space at the prices of another machine, on which the mesh is placed."""
        request = replace(self.request, target=replace(self.request.target, machine=machine))
        return _priced(request, self.gradient, self.decisions.graph, Stages(f"{request.title}, repriced"))


_shared_prices: ContextVar[list[Resharder] | None] = ContextVar("shared_prices", default=None)


@contextmanager
def shared_prices() -> Generator[None]:
    """A context in which all programs for the same machine share the prices of moving a value, made once per shape."""
    token = _shared_prices.set([])
    try:
        yield
    finally:
        _shared_prices.reset(token)


@collected_rarely()
@refusing_depth
def build_search_space(request: PlanRequest, prices: Resharder | None = None) -> SearchSpace:
    """Builds the decisions of a request, every choice priced.

    Args:
      request: the program, its target and the requested layouts.
      prices: those of another program on the same target, which has many of the same moves.

    Raises:
      MissingRuleError: a primitive without a rule, if `unknown` is "error".
      SpecError: a pin that cannot be kept.
    """
    if request.unknown not in ("error", "replicate"):
        raise SpecError(f"unknown={request.unknown!r} is neither 'error' nor 'replicate'")
    program, target = request.program, request.target
    stages = Stages(request.title)
    gradient = gradient_program(program.traced, request.gradient_of, target.axes) if request.gradient_of else None
    stages.done("trace", program.traced if gradient is None else gradient.traced, also_s=program.trace_s)
    of_gradient = None if gradient is None else graphs.build(gradient.traced.jaxpr, target.compiler.platform)
    graph = stages.done("graph", of_gradient or program.graph(target.compiler.platform))
    return _priced(request, gradient, graph, stages, prices)


def _priced(
    request: PlanRequest,
    gradient: GradientProgram | None,
    graph: Graph,
    stages: Stages,
    prices: Resharder | None = None,
) -> SearchSpace:
    """Prices every choice of a graph's decisions on the request's target."""
    traced, shardings, target = request.program.traced, request.shardings, request.target
    priced = traced if gradient is None else gradient.traced
    mesh = target.axes
    real = MeshAxes.of({n: s for n, s in mesh.shape.items() if s > 1})  # axes of size 1 decide nothing
    rules = rules_of(graph.eqns, unknown=request.unknown)
    real = search_mesh(graph, rules, real, _asked(graph, shardings, priced))
    held: dict[int, int] = {}
    if gradient is None:
        tied = ties(traced, shardings.donated)
    else:
        tied = {gradient.first_gradient + k: i for k, i in enumerate(gradient.gradient_of)}
        held = dict.fromkeys(gradient.gradient_of, OPTIMIZER_BYTES)
    input_pins = {
        i: _pinned(s, priced.in_avals[i].shape, mesh, real, traced.in_paths[i]) for i, s in shardings.inputs.items()
    }
    for i in () if shardings.host_parts is None else shardings.host_parts.dimensions:
        input_pins[i] = _host_local(i, input_pins.get(i), priced, shardings, real)
    output_pins = {
        i: _pinned(s, priced.out_avals[i].shape, mesh, real, f"output {priced.out_paths[i]}")
        for i, s in shardings.outputs.items()
    }
    for output, position in tied.items():
        if position in input_pins and output in output_pins:
            input_pins[position] = np.intersect1d(input_pins[position], output_pins[output])
            if not len(input_pins[position]):
                raise SpecError(
                    f"{traced.in_paths[position]}: asked for in {shardings.inputs[position]}, "
                    f"but the output that replaces it in {shardings.outputs[output]}"
                )
    resharder = prices
    if resharder is None or resharder.mesh != real:
        resharder = _prices(target, real)
    required = Requirements(
        tied=tied,
        donated=shardings.donated,
        inputs=input_pins,
        outputs=output_pins,
        equations=_own_constraints(graph, mesh, real),
        held_bytes=held,
    )
    decisions = decide(graph, real, target.machine, target.compiler, required, unknown=request.unknown)
    stages.done("strategies", decisions)
    return SearchSpace(
        request=request,
        gradient=gradient,
        tied=tied,
        decisions=decisions,
        required=required,
        resharder=resharder,
        seconds=stages.seconds,
    )


def _prices(target: Target, mesh: MeshAxes) -> Resharder:
    """Prices of moves on a mesh; in a context that shares them, those of other programs for this machine."""
    shared, outermost = _shared_prices.get(), target.compiler.collectives_along_outermost_only
    shares = hidden_shares(target.machine, target.compiler)
    for one in shared or ():
        if (one.mesh, one.outermost, one.shares) == (mesh, outermost, shares) and one.machine is target.machine:
            return one
    made = Resharder(mesh, target.machine, outermost=outermost, shares=shares)
    if shared is not None:
        shared.append(made)
    return made


def decide_anew(space: SearchSpace, graph: Graph) -> Decisions:
    """The decisions of another graph of the same inputs and outputs, with what was asked of the space's own."""
    target, required = space.request.target, _required_of(space, graph)
    mesh, unknown = space.decisions.mesh, space.request.unknown
    return decide(graph, mesh, target.machine, target.compiler, required, unknown=unknown)


def held(space: SearchSpace, graph: Graph) -> NDArray[np.bool_]:
    """Whether a value lies in memory, of every one of another graph of the same inputs and outputs."""
    target, required = space.request.target, _required_of(space, graph)
    mesh, unknown = space.decisions.mesh, space.request.unknown
    return facts_of(graph, mesh, target.machine, target.compiler, required, unknown=unknown).held


def _required_of(space: SearchSpace, graph: Graph) -> Requirements:
    equations = _own_constraints(graph, space.request.target.axes, space.decisions.mesh)
    return replace(space.required, equations=equations)


def _pinned(spec: PartitionSpec, shape: tuple[int, ...], mesh: MeshAxes, real: MeshAxes, what: str) -> Codes:
    """The codes that a spec allows; `P.UNCONSTRAINED` frees a dimension."""
    free = frozenset(d for d, entry in enumerate(spec) if entry is PartitionSpec.UNCONSTRAINED)
    layout = _fixed(spec, len(shape))
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


def _host_local(i: int, pinned: Codes | None, priced: Traced, shardings: RequestedShardings, real: MeshAxes) -> Codes:
    """The codes, among those that a pin allows, in which each host's part of input `i` stays on its devices."""
    shape, parts = priced.in_avals[i].shape, shardings.host_parts
    assert parts is not None
    codes = layouts(shape, real, unreduced=False) if pinned is None else pinned
    kept = [c for c in codes.tolist() if parts.keeps(layout_of(c, len(shape), real), parts.dimensions[i])]
    if not kept:
        least = parts.least(i, shape, dotted(priced.in_paths[i]))
        raise SpecError(
            f"{dotted(priced.in_paths[i])}: asked for in {shardings.inputs[i]}, but each host loads its part of "
            f"dimension {parts.dimensions[i]}, which is to lie over {least}"
        )
    return np.array(kept, np.int64)


def _asked(graph: Graph, shardings: RequestedShardings, priced: Traced) -> Iterator[Layout]:
    """The layouts that the user asks for, or has written into a `shard_map`."""
    for i, spec in shardings.inputs.items():
        yield _fixed(spec, len(priced.in_avals[i].shape))
    if shardings.host_parts is not None:
        for i in shardings.host_parts.dimensions:
            yield shardings.host_parts.least(i, priced.in_avals[i].shape, dotted(priced.in_paths[i]))
    for o, spec in shardings.outputs.items():
        yield _fixed(spec, len(priced.out_avals[o].shape))
    for eqn in graph.eqns:
        if eqn.primitive == CONSTRAINT:
            yield _fixed(spec_of(eqn), eqn.results[0].ndim)
        elif eqn.primitive == SHARD_MAP:
            for spec, aval in zip(
                (*eqn.params["in_specs"], *eqn.params["out_specs"]), (*eqn.operands, *eqn.results), strict=True
            ):
                yield Layout.from_spec(spec, aval.ndim)


def _fixed(spec: PartitionSpec, ndim: int) -> Layout:
    """The layout that a spec fixes; free dimensions are whole."""
    entries = [None if entry is PartitionSpec.UNCONSTRAINED else entry for entry in spec]
    return Layout.from_spec(PartitionSpec(*entries), ndim)


def _own_constraints(graph: Graph, mesh: MeshAxes, real: MeshAxes) -> dict[int, Codes]:
    """The user's `with_sharding_constraint`s: equation → allowed codes."""
    return {
        e: _pinned(spec_of(eqn), eqn.results[0].shape, mesh, real, f"with_sharding_constraint at {eqn.where}")
        for e, eqn in enumerate(graph.eqns)
        if eqn.primitive == CONSTRAINT
    }
