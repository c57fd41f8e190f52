"""Doctor: what a program that is sharded by hand loses where, what for, and what to change; the dearest first.

It stands on `audit`: the program is compiled with its own annotations, and planned without them. A finding is a
pattern in the two that costs seconds of every step. Its price is that of the cost model if nothing hides: the most
that the change could gain.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, Unpack

from autoshard.api.audit import Asked, Audit, AuditOptions, audit
from autoshard.backends import hlo
from autoshard.costs.prices import PS_PER_S
from autoshard.ir.graph import Graph
from autoshard.ir.layout import Layout
from autoshard.ir.op_traits import DOT_GENERAL, LOOP_CARRY, LOOP_RESULT, REDUCE_SUM, SCATTER_ADD
from autoshard.problem.decisions import Input
from autoshard.report.notebook import Shown
from autoshard.report.tables import bytes_text, columns, fields, paragraph, render, short_place, time_text
from autoshard.verification.verify import argument_of, local_bytes, path_of

LEAST = 1e-3  # of a step: what costs less is no finding

_REDUCES = frozenset({"all-reduce", "reduce-scatter"})
_SUMS = frozenset({DOT_GENERAL, REDUCE_SUM, SCATTER_ADD})


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that a step waits for, or does more often than it need.

    Attributes:
      kind: its name, for scripts: "sums in every trip", "gathered wide", "unasked", "repeated on devices",
        "optimizer state whole".
      seconds: of a step, on each device, if nothing hides.
      where: the user's `file:line (function)`, or the path of an argument.
      cause: what happens.
      change: what to do about it.
    """

    kind: str
    seconds: float
    where: str
    cause: str
    change: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Diagnosis(Shown):
    """The findings of a program, the dearest first, and the audit that they come from."""

    audit: Audit
    findings: tuple[Finding, ...]

    @property
    def step_s(self) -> float:
        """Seconds of a step of the program as it is sharded, by the cost model."""
        return self.audit.hand.cost

    @property
    def worst(self) -> float:
        """The dearest finding as a share of the step; 0 without any."""
        return max((one.seconds for one in self.findings), default=0.0) / self.step_s if self.step_s else 0.0

    def to_json(self) -> dict[str, Any]:
        """The findings and both steps, as JSON."""
        return {
            "step_s": self.step_s,
            "best_s": self.audit.best.cost,
            "findings": [{**asdict(one), "share": one.seconds / self.step_s} for one in self.findings],
        }

    def __str__(self) -> str:
        """The findings for a terminal."""
        width = columns()
        best = self.audit.best
        said = [
            ("step", f"{time_text(self.step_s)} as it is sharded; the best plan {time_text(best.cost)}"),
            ("distance", f"{self.audit.gap:+.1%}: `autoshard plan` writes that plan"),
            ("findings", f"{len(self.findings)}; each with its seconds of a step if nothing hides"),
        ]
        parts: list[Any] = [fields(said, width)]
        for number, one in enumerate(self.findings, 1):
            head = f"{number}. {one.kind}: {time_text(one.seconds)} ({one.seconds / self.step_s:.1%} of the step)"
            texts = (f"{head}, at {short_place(one.where)}", f"{one.cause}.", f"{one.change}.")
            parts += ["", *(paragraph(text, width) for text in texts)]
        return render(*parts, width=width)


def doctor(fn: Callable[..., Any], *args: Any, hardware: str, **options: Unpack[AuditOptions]) -> Diagnosis:
    """Finds what the layouts of a program cost, and what to change.

    Args:
      fn: the function, or the result of `jax.jit`, with the annotations of a hand.
      args: pytrees of arrays or ShapeDtypeStructs; their NamedShardings count as annotations.
      hardware: chip and topology, such as "h100:1x8"; it need not be here.
      options: as `audit` takes them: compiler, donate_argnums, rel_gap, time_limit_s.

    Raises:
      MeshError: no annotation names a mesh.
      CompilerMissingError: the compiler is not installed.
    """
    return diagnosed(audit(fn, *args, hardware=hardware, **options))


def diagnosed(found: Audit) -> Diagnosis:
    """The findings of an audit."""
    findings = [*_of_collectives(found), *_repeated_products(found), *_whole_states(found)]
    worth = [one for one in findings if one.seconds >= LEAST * found.hand.cost]
    return Diagnosis(audit=found, findings=tuple(sorted(worth, key=lambda one: (-one.seconds, one.kind, one.where))))


def _of_collectives(found: Audit) -> Iterator[Finding]:
    """The findings among the compiled program's collectives: of a kind and a source line, one."""
    space = found.hand.space
    graph, machine, mesh = space.decisions.graph, space.request.target.machine, space.request.target.axes
    equation = {spots[0][0]: e for e, spots in enumerate(graph.makes)}
    asked, added = Asked(graph), _added_in_trips(graph)
    groups: dict[tuple[str, str], list[tuple[hlo.Collective, float]]] = {}
    for one in found.verification.emitted:
        if one.axes is None or not set(one.axes) <= set(mesh.names) or one.kind == "collective-broadcast":
            continue
        kind: Any = one.kind
        seconds = float(machine.collective_s(kind, one.axes, one.nbytes)) * one.trips
        argument = argument_of(one)  # whose gather it is, where it has an argument's name
        inputs = graph.inputs[argument : argument + 1] if argument is not None else ()
        uses = [use for value in inputs for use in graph.consumers.get(value, ())]
        e = equation.get(path_of(one.op_name), uses[0][0] if uses else None)
        if one.kind in _REDUCES:
            if one.trips > 1 and e in added:
                groups.setdefault(("sums in every trip", one.where), []).append((one, seconds))
        elif narrower := _narrower(graph, e, one):
            groups.setdefault(("gathered wide", one.where), []).append((one, seconds * (1 - narrower)))
        elif not asked(one):
            groups.setdefault(("unasked", one.where), []).append((one, seconds))
    for (kind, where), members in groups.items():
        count = sum(one.trips for one, _ in members)
        nbytes = bytes_text(sum(one.nbytes * one.trips for one, _ in members))
        kinds = " and ".join(sorted({one.kind for one, _ in members}))
        cause, change = _TOLD[kind]
        yield Finding(
            kind=kind,
            seconds=sum(seconds for _, seconds in members),
            where=where,
            cause=f"{cause}: {kinds}, {count:,} times, {nbytes}",
            change=change,
        )


_TOLD: Mapping[str, tuple[str, str]] = {
    "sums in every trip": (
        "A loop adds to a value that it carries round, and finishes the sum over devices in every trip",
        "Keep one partial sum per device until the loop is over: autoshard.accumulate does for micro-batches, and "
        "autoshard.plan for any loop",
    ),
    "gathered wide": (
        "A value is gathered before it is cast to a narrower type",
        "Cast it first, and constrain the cast value to the layout that it was stored in: the gather then moves less",
    ),
    "unasked": (
        "A value moves between two layouts that no annotation connects",
        "Constrain it where it is made to the layout in which it is taken, or change one of the two",
    ),
}


def _added_in_trips(graph: Graph) -> frozenset[int]:
    """The equations between a sum and the addition of it to what a loop carries round, both included."""
    carried = {graph.results[e][0] for e, eqn in enumerate(graph.eqns) if eqn.primitive == LOOP_CARRY}
    returned = {v for e, eqn in enumerate(graph.eqns) if eqn.primitive == LOOP_RESULT for v in graph.operands[e]}
    found: set[int] = set()
    for e, eqn in enumerate(graph.eqns):
        terms = set(graph.operands[e])
        if not eqn.traits.addition or not terms & carried or graph.results[e][0] not in returned:
            continue
        left = list(terms - carried)
        found.add(e)
        while left:
            maker, _ = graph.producers.get(left.pop(), (-1, 0))
            if maker < 0 or maker in found:
                continue
            traits = graph.eqns[maker].traits
            if graph.eqns[maker].primitive in _SUMS or traits.addition:
                found.add(maker)
            if traits.same_values or traits.reshapes or traits.addition or traits.scale or traits.copy:
                found.add(maker)
                left += graph.operands[maker]
            elif graph.eqns[maker].primitive == REDUCE_SUM:
                left += graph.operands[maker]
    return frozenset(found)


def _narrower(graph: Graph, e: int | None, one: hlo.Collective) -> float:
    """What of a gather's bytes the casts behind it keep; 0 if anything else takes it, or they are not narrower."""
    if e is None or one.kind != "all-gather":
        return 0.0
    uses = graph.consumers.get(graph.results[e][0], ())
    casts = [graph.eqns[use] for use in ([e] if graph.eqns[e].traits.cast else [use for use, _ in uses])]
    size = hlo.Shape(dtype=one.dtype, dims=()).nbytes
    if not casts or any(not eqn.traits.cast or eqn.operands[0].itemsize != size for eqn in casts):
        return 0.0
    kept = max(eqn.results[0].itemsize for eqn in casts) / size
    return kept if kept < 1 else 0.0


def _repeated_products(found: Audit) -> Iterator[Finding]:
    """The matrix products of which several devices compute the same part, although an axis divides them."""
    hand = found.hand
    groups: dict[str, list[tuple[float, float]]] = {}
    for node, pick in zip(hand.space.decisions.nodes, hand.assignment.choice, strict=True):
        least = int(node.flops.argmin())
        if node.flops[pick] > node.flops[least]:
            saved_s = (int(node.cost_ps[pick]) - int(node.cost_ps[least])) / PS_PER_S
            groups.setdefault(node.where, []).append((float(node.flops[pick] / node.flops[least]), saved_s))
    for where, members in groups.items():
        times = max(times for times, _ in members)
        yield Finding(
            kind="repeated on devices",
            seconds=sum(max(0.0, saved_s) for _, saved_s in members),
            where=where,
            cause=f"Each part of a product is computed by up to {times:.0f} devices at once: its operands are whole "
            "although a mesh axis divides them",
            change="Constrain an operand to be split over an axis that it does not use yet, or split the batch over it",
        )


def _whole_states(found: Audit) -> Iterator[Finding]:
    """The optimizer's state, where devices hold and update the same part of it although an axis divides it."""
    hand = found.hand
    space, record = hand.space, hand.record
    decisions, machine = space.decisions, space.request.target.machine
    nbytes, saved, example = 0, 0, ""
    for leaf, node in zip(record.inputs, decisions.inputs, strict=True):
        decision = decisions.nodes[node]
        if not isinstance(decision, Input) or decision.holds != "optimizer":
            continue
        used = {axis for dim in Layout.from_spec(leaf.spec, len(leaf.shape)).dims for axis in dim}
        local = Layout.from_spec(leaf.spec, len(leaf.shape)).local_shape(leaf.shape, record.mesh)
        ways = prod(
            size
            for axis, size in record.mesh.shape.items()
            if axis not in used and any(dim % size == 0 and dim >= size for dim in local)
        )
        if ways > 1:
            here = local_bytes(leaf, record)
            nbytes, saved, example = nbytes + here, saved + here - here // ways, example or leaf.path
    if nbytes:
        yield Finding(
            kind="optimizer state whole",
            seconds=float(machine.hbm_s(2 * saved)),
            where=example,
            cause=f"{bytes_text(nbytes)} of optimizer state lie on every device alike, {bytes_text(saved)} more than "
            "need be, and every device updates all of it",
            change="Split each leaf over an axis that divides it (ZeRO): the gradient is then scattered to it, and the "
            "new parameters are gathered",
        )
