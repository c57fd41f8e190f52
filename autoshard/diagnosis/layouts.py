"""Findings of layouts: what devices compute, hold or update alike although an axis divides it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from autoshard.backends.hlo.text import UNKNOWN
from autoshard.costs.prices import PS_PER_S
from autoshard.diagnosis.evidence import Evidence, Source
from autoshard.diagnosis.finding import Finding
from autoshard.errors import AutoshardError
from autoshard.ir.layout import Layout
from autoshard.ir.mesh import MeshAxes
from autoshard.planner.record import Leaf
from autoshard.problem.assignment import Assignment
from autoshard.problem.decisions import Decision, Decisions, Input
from autoshard.report.tables import bytes_text
from autoshard.verification.verify import local_bytes

_TIMES = 1.5  # as much as the plan computes: less is another way to write the same, not a whole value


@dataclass(frozen=True, slots=True, kw_only=True)
class Alike:
    """A kind of work that devices do alike: its finding's words; `products`: matrix products, else everything else."""

    kind: str
    products: bool
    cause: str
    change: str


ALIKE: tuple[Alike, ...] = (
    Alike(
        kind="repeated on devices",
        products=True,
        cause="Each part of a product is computed by up to {} devices at once: its operands are whole although a mesh "
        "axis divides them",
        change="Constrain an operand to be split over an axis that it does not use yet, or split the batch over it",
    ),
    Alike(
        kind="whole on every device",
        products=False,
        cause="Values are made, read and written by up to {} devices alike, although a mesh axis divides them; what "
        "it costs to move them is not in the price",
        change="Constrain them where they are made to be split over that axis, by their first dimension if it can be: "
        "what is gathered by another one is copied, too",
    ),
)


def done_alike(evidence: Evidence) -> Iterator[Finding]:
    """The lines at which devices compute, or read and write, alike what the best plan divides among them."""
    for one in ALIKE:
        for where, times, saved_s in _beyond_the_plan(evidence, products=one.products):
            cause = one.cause.format(f"{times:.0f}")
            yield Finding(kind=one.kind, seconds=saved_s, where=where, cause=cause, change=one.change)


def whole_states(evidence: Evidence) -> Iterator[Finding]:
    """The optimizer's state, where devices hold and update the same part of it although an axis divides it.

    Its price is tried where the cost model promises one: the program is compiled with the state split.
    """
    source = evidence.source
    if source is None:
        return
    record, decisions = source.hand, source.assignment.decisions
    nbytes, saved, example = 0, 0, ""
    specs: list[PartitionSpec | None] = [None] * len(record.inputs)
    for i, (leaf, node) in enumerate(zip(record.inputs, decisions.inputs, strict=True)):
        decision = decisions.nodes[node]
        if not isinstance(decision, Input) or decision.holds != "optimizer":
            continue
        layout, ways = _split_further(leaf, evidence.mesh)
        if ways > 1:
            here = local_bytes(leaf, record)
            nbytes, saved, example = nbytes + here, saved + here - here // ways, example or leaf.path
            specs[i] = layout.spec()
    if nbytes:
        yield Finding(
            kind="optimizer state whole",
            seconds=_saved_by(evidence, source, specs),
            where=example,
            bytes=saved,
            cause=f"{bytes_text(nbytes)} of optimizer state lie on every device alike, {bytes_text(saved)} more than "
            "need be, and every device updates all of it",
            change="Split each leaf over an axis that divides it (ZeRO): the gradient is then scattered to it, and the "
            "new parameters are gathered",
        )


def _saved_by(evidence: Evidence, source: Source, specs: list[PartitionSpec | None]) -> float:
    """How much sooner the compiled schedule ends with other specs of some inputs.

    0 where the cost model says that it does not, which a compilation of as long as the program's own would confirm;
    and where that does not compile.
    """
    try:
        if source.priced_with(specs).cost.step_s >= source.hand.cost.step_s:
            return 0.0
        made = source.compiled_in(specs)
    except AutoshardError:
        return 0.0
    return 0.0 if made.timeline is None else max(0.0, evidence.timeline.step_s - made.timeline.step_s)


def _split_further(leaf: Leaf, mesh: MeshAxes) -> tuple[Layout, int]:
    """A leaf's layout with every axis that it does not use on its largest dimension that this divides; in how many."""
    dims = [list(dim) for dim in Layout.from_spec(leaf.spec, len(leaf.shape)).dims]
    local = [*Layout.from_spec(leaf.spec, len(leaf.shape)).local_shape(leaf.shape, mesh)]
    used, ways = {axis for dim in dims for axis in dim}, 1
    for axis, size in mesh.shape.items():
        fits = [d for d, n in enumerate(local) if n % size == 0 and n >= size]
        if axis not in used and fits:
            largest = max(fits, key=lambda d: local[d])
            dims[largest].append(axis)
            local[largest] //= size
            ways *= size
    order = mesh.names.index
    return Layout(tuple(tuple(sorted(dim, key=order)) for dim in dims)), ways


def _beyond_the_plan(evidence: Evidence, *, products: bool) -> Iterator[tuple[str, float, float]]:
    """Lines on which a device computes more than in the best plan: (line, how many times as much, seconds more).

    No more than another layout of the same line would save: a plan that keeps or repeats other values differs, too.
    """
    if evidence.source is None:
        return
    theirs = _seconds(evidence.source.assignment, products=products)
    ours = _seconds(evidence.source.best_assignment, products=products)
    for where, (here_s, least_s) in theirs.items():
        there_s = max(least_s, ours.get(where, (0.0, 0.0))[0])
        if there_s and here_s > _TIMES * there_s:
            yield where, here_s / there_s, here_s - there_s


def _seconds(assignment: Assignment, *, products: bool) -> Mapping[str, tuple[float, float]]:
    """Seconds by source line, and the least in any layout, of matrix products, or of everything else.

    Updates of what the program is given are left out: they are the optimizer's (`whole_states`).
    """
    decisions = assignment.decisions
    given = {
        value
        for value, node in zip(decisions.graph.inputs, decisions.inputs, strict=True)
        if isinstance(decision := decisions.nodes[node], Input) and decision.holds != "arguments"
    }
    found: dict[str, tuple[float, float]] = {}
    for node, pick in zip(decisions.nodes, assignment.choice, strict=True):
        updates = any(value in given for e in node.equations for value in decisions.graph.operands[e])
        if bool(node.flops.any()) is products and (products or not updates):
            line = _line(decisions, node)
            here_s, least_s = found.get(line, (0.0, 0.0))
            found[line] = here_s + float(node.cost_ps[pick]) / PS_PER_S, least_s + float(node.cost_ps.min()) / PS_PER_S
    return found


def _line(decisions: Decisions, node: Decision) -> str:
    """The source line of a decision; of code that JAX does not name, the last known line before it."""
    eqns = decisions.graph.eqns
    before = (eqns[e].where for e in range(node.equations[0], -1, -1)) if node.equations else ()
    return next((where for where in (node.where, *before) if where != UNKNOWN), UNKNOWN)
