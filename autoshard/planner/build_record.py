"""Build a record: one assignment of a search space → the record of a plan, and the constraints that it emits."""

from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any

import jax
from jax.sharding import PartitionSpec

from autoshard.backends.devices import Target
from autoshard.costs.buckets import BUCKET_BYTES
from autoshard.costs.strategies import layout_of
from autoshard.ir import graph as graphs
from autoshard.ir import manual_calls
from autoshard.ir.constraints import Constraints, Specs
from autoshard.ir.gradient import marks
from autoshard.ir.op_traits import PALLAS
from autoshard.ir.rewrite import FORWARD
from autoshard.planner.record import Certificate, Cost, Leaf, Memory, PlanRecord
from autoshard.planner.search_space import SearchSpace
from autoshard.problem import bill, memory_profile, routes
from autoshard.problem.assignment import Assignment
from autoshard.problem.decisions import Decisions, place_of
from autoshard.problem.unpriced import unpriced
from autoshard.rules.rule import kept_whole


def describe(
    space: SearchSpace, assignment: Assignment, certificate: Certificate, *, also: Sequence[str] = ()
) -> PlanRecord:
    """Reads one assignment of a search space as a plan record; `also` are further notes."""
    d, traced, request = assignment.decisions, space.traced, space.request
    target, hardware, limit = request.target, request.target.hardware, request.memory_bytes
    collectives = tuple(
        sorted(bill.collectives(assignment), key=lambda c: (c.kind, c.axes, -c.nbytes, c.where, c.value))
    )
    step_s = certificate.objective_s
    compute_s = bill.compute_s(assignment)
    hidden_s = sum(max(0.0, row.seconds * row.trips - waited_s) for row, waited_s in bill.waits(assignment))
    hidden_s += sum(copy.seconds - copy.waited_s for copy in bill.host_copies(assignment))
    peak, at, kinds = memory_profile.peak(d, assignment.choice)
    there = frozenset(request.host_state)
    replaced = frozenset(o for o, i in space.tied.items() if i in there)

    def spec(code: int, ndim: int) -> PartitionSpec:
        return layout_of(code, ndim, d.mesh).spec()

    def leaf(path: str, aval: Any, code: int, *, on_host: bool) -> Leaf:
        return Leaf(
            path=path, shape=aval.shape, dtype=str(aval.dtype), spec=spec(code, len(aval.shape)), on_host=on_host
        )

    return PlanRecord(
        name=request.name,
        digest=traced.digest,
        recomputation=space.request.recomputation,
        microbatches=space.request.microbatches,
        loop_sums=space.request.loop_sums,
        mesh=target.axes,
        device_order=target.device_order,
        hardware=hardware.name,
        hardware_digest=hardware.digest,
        versions={"autoshard": metadata.version("autoshard"), "jax": jax.__version__},
        inputs=tuple(
            leaf(p, a, assignment.input_code(i), on_host=i in there)
            for i, (p, a) in enumerate(zip(traced.in_paths, traced.in_avals, strict=True))
        ),
        outputs=tuple(
            leaf(p, a, assignment.output_code(i), on_host=i in replaced)
            for i, (p, a) in enumerate(zip(traced.out_paths, traced.out_avals, strict=True))
        ),
        donated=tuple(sorted(request.shardings.donated)),
        pins=forward_pins(space, assignment) if space.gradient else program_pins(assignment),
        collectives=collectives,
        cost=Cost(
            step_s=step_s,
            compute_s=compute_s,
            communication_s=max(0.0, step_s - compute_s) + hidden_s,  # exposed seconds below this are rounding errors
            hidden_s=hidden_s,
        ),
        memory=Memory(peak_bytes=peak, limit_bytes=limit, at=place_of(d, at), kinds=kinds),
        certificate=certificate,
        compiler_options=_compiler_options(target, limit - peak, loops=_estimates(d.graph)),
        notes=(*request.notes, *also, *_kernel_notes(d), *(f"not priced: {what}" for what in unpriced(d))),
    )


def _kernel_notes(decisions: Decisions) -> Iterable[str]:
    """Notes on dimensions that kernels keep whole although their rules let them pass; once per equal kernel."""
    kernels = (eqn for eqn in decisions.graph.eqns if eqn.primitive == PALLAS)
    return dict.fromkeys(filter(None, map(kept_whole, kernels)))


def program_pins(assignment: Assignment) -> Constraints:
    """The constraints of an assignment: where values are made, and where they are taken."""
    d = assignment.decisions
    graph = d.graph
    crossing = {edge.value for edge in d.edges}

    def specs(codes: Sequence[int], value: int) -> Specs:
        ndim = graph.avals[value].ndim
        return tuple(layout_of(c, ndim, d.mesh).spec() for c in codes) if ndim else ()

    made = {
        graph.makes[e][i]: specs(routes.after_made(assignment, v), v)
        for e, values in enumerate(graph.results)
        for i, v in enumerate(values)
        if v in crossing
    }
    again = {
        graph.takes[e][i]: specs(codes, graph.operands[e][i])
        for (e, i), codes in routes.moved_again(assignment).items()
    }
    taken = {
        graph.takes[e][i]: specs(routes.before_taken(assignment, e, i), v)
        for e, values in enumerate(graph.operands)
        for i, v in enumerate(values)
        if v in crossing and graph.takes[e][i] not in again
    }
    regathered = {graph.takes[e][i]: group for (e, i), group in routes.regathered(assignment).items()}
    inputs = {p: specs(routes.after_made(assignment, v)[1:], v) for p, v in enumerate(graph.inputs) if v in crossing}
    outputs = {p: specs(routes.before_output(assignment, p), v) for p, v in enumerate(graph.outputs) if v in crossing}
    return Constraints(
        made={k: v for k, v in made.items() if v},
        taken={k: v for k, v in taken.items() if v},
        inputs={k: v for k, v in inputs.items() if v},
        outputs={k: v for k, v in outputs.items() if v},
        again={k: v for k, v in again.items() if v},
        kernels=dict(_kernel_layouts(assignment)),
        regathered={k: group for k, group in regathered.items() if taken.get(k)},
    )


def _kernel_layouts(assignment: Assignment) -> Iterable[tuple[tuple[graphs.Path, int], Specs]]:
    """The one layout of every operand and result of each opaque kernel; whole where nothing decides."""
    d = assignment.decisions
    graph = d.graph
    for e, eqn in enumerate(graph.eqns):
        if not manual_calls.is_opaque(eqn.primitive, eqn.params):
            continue
        path = graph.makes[e][0][0]
        yield from (((path, i), specs) for i, specs in enumerate(_kernel_specs(assignment, e)))


def _kernel_specs(assignment: Assignment, e: int) -> list[Specs]:
    """One per operand and result of an opaque kernel."""
    d = assignment.decisions
    eqn = d.graph.eqns[e]
    codes = [assignment.taken(e, i) for i in range(len(eqn.operands))]
    codes += [assignment.made(v) for v in d.graph.results[e]]
    return [
        (PartitionSpec() if code is None else layout_of(code, aval.ndim, d.mesh).spec(),)
        for code, aval in zip(codes, (*eqn.operands, *eqn.results), strict=True)
    ]


def forward_pins(space: SearchSpace, assignment: Assignment) -> Constraints:
    """The constraints of a forward function that was planned for its gradient: on its own values alone.

    And the layouts of its kernels, those in the rules of a `custom_vjp` included.
    """
    d = assignment.decisions
    crossing = {edge.value for edge in d.edges}
    producers = d.graph.producers
    made: dict[tuple[graphs.Path, int], Specs] = {}
    at: dict[int, graphs.Path] = {}  # kernel → its own path: the longest, others are of calls around it
    for key, value in marks(d.graph.named).items():
        path = key[0]
        if value in producers:
            eqn = d.graph.eqns[e := producers[value][0]]
            if manual_calls.is_opaque(eqn.primitive, eqn.params):
                at[e] = max(at.get(e, ()), path, key=len)
        if value in crossing and min(path, default=0) >= 0:
            ndim = d.graph.avals[value].ndim
            specs = tuple(layout_of(c, ndim, d.mesh).spec() for c in routes.after_made(assignment, value, takers=False))
            if specs:
                made[key] = specs
    of_rules = {path: _kernel_specs(assignment, e) for e, path in sorted(at.items())}
    laid_out = {**of_rules, **_undifferentiated(space, of_rules)} if of_rules else {}
    kernels = {(path, i): specs for path, found in laid_out.items() for i, specs in enumerate(found)}
    return Constraints(made=made, taken={}, inputs={}, outputs={}, kernels=kernels)


def _undifferentiated(
    space: SearchSpace, of_rules: Mapping[graphs.Path, list[Specs]]
) -> dict[graphs.Path, list[Specs]]:
    """The kernels of a `custom_vjp` that is not differentiated lie as those of its forward rule, in order.

    The forward rule's may have further results, for the backward rule.
    """
    forward = space.request.program.graph(space.compiler.platform)
    found: dict[graphs.Path, list[Specs]] = {}
    met: dict[graphs.Path, int] = {}
    for e, eqn in enumerate(forward.eqns):
        path = forward.makes[e][0][0]
        if not manual_calls.is_opaque(eqn.primitive, eqn.params) or path in of_rules:
            continue
        for cut in range(len(path) - 1, -1, -1):
            rule = (*path[:cut], FORWARD)
            kernels = [specs for other, specs in of_rules.items() if other[: cut + 1] == rule]
            if kernels:
                position = met[rule] = met.get(rule, -1) + 1
                count = len(eqn.operands) + len(eqn.results)
                if position < len(kernels) and len(kernels[position]) >= count:
                    found[path] = kernels[position][:count]
                break
    return found


def _estimates(graph: graphs.Graph) -> bool:
    """Whether a program has loops whose copies XLA:GPU's estimates know: of slices in the host's memory they die."""
    return bool(graph.loops) and not graph.on_host


def _compiler_options(target: Target, spare_bytes: int, *, loops: bool) -> dict[str, Any]:
    """The flags that the plan's overlap and memory need.

    XLA:GPU merges reduce-scatters up to a size of their *results*. Their operands, larger by the
    number of devices, live until then, and the gradients of a whole loop body are reduced after
    its last one. The flags merge them up to a bucket of operand bytes, as they are priced, and less
    if memory is short. In loops, the scheduler's analytical estimates hide each gather behind the
    compute before its use (the default estimator takes any two matmuls to be equally long), if the
    estimates work; else, and in programs without loops, two collectives may be under way at once between nodes: a
    gather need not wait for one that is used late.
    """
    compiler, mesh = target.compiler, target.axes
    options = dict(compiler.scheduler_flags)
    if compiler.scatter_bucket_flag is not None:
        options[compiler.scatter_bucket_flag] = max(1, min(BUCKET_BYTES, spare_bytes) // mesh.size)
    placed = [axis for axis in mesh.names if axis in target.machine.mesh]  # one device of a stage has no others
    between_nodes = len(target.machine.crossings(placed)) > 1
    if loops:
        options |= compiler.scheduler_flags_in_loops
    if between_nodes:
        among = compiler.scheduler_flags_in_loops_between_nodes if loops else compiler.scheduler_flags_between_nodes
        options |= among
    return options
