"""Findings of layouts: what devices compute, hold or update alike although an axis divides it."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from math import prod

from autoshard.costs.prices import PS_PER_S
from autoshard.diagnosis.evidence import Evidence
from autoshard.diagnosis.finding import Finding
from autoshard.ir.layout import Layout
from autoshard.planner.record import Leaf
from autoshard.problem.assignment import Assignment
from autoshard.problem.decisions import Input
from autoshard.report.tables import bytes_text
from autoshard.verification.verify import local_bytes

_TIMES = 1.5  # as much as the plan computes: less is another way to write the same, not a whole value


def repeated_products(evidence: Evidence) -> Iterator[Finding]:
    """The lines whose matrix products the best plan divides among devices that compute them alike here."""
    for where, times, saved_s in _beyond_the_plan(evidence, products=True):
        yield Finding(
            kind="repeated on devices",
            seconds=saved_s,
            where=where,
            cause=f"Each part of a product is computed by up to {times:.0f} devices at once: its operands are whole "
            "although a mesh axis divides them",
            change="Constrain an operand to be split over an axis that it does not use yet, or split the batch over it",
        )


def whole_values(evidence: Evidence) -> Iterator[Finding]:
    """The lines whose values lie whole, and are read and written whole, where the best plan divides them."""
    for where, times, saved_s in _beyond_the_plan(evidence, products=False):
        yield Finding(
            kind="whole on every device",
            seconds=saved_s,
            where=where,
            cause=f"Values are made, read and written by up to {times:.0f} devices alike, although a mesh axis divides "
            "them",
            change="Constrain them where they are made to be split over that axis, as what takes them is",
        )


def whole_states(evidence: Evidence) -> Iterator[Finding]:
    """The optimizer's state, where devices hold and update the same part of it although an axis divides it."""
    if evidence.source is None:
        return
    record, decisions = evidence.source.hand, evidence.source.assignment.decisions
    nbytes, saved, example = 0, 0, ""
    for leaf, node in zip(record.inputs, decisions.inputs, strict=True):
        decision = decisions.nodes[node]
        if not isinstance(decision, Input) or decision.holds != "optimizer":
            continue
        ways = _unused_ways(leaf, record.mesh.shape, Layout.from_spec(leaf.spec, len(leaf.shape)), evidence)
        if ways > 1:
            here = local_bytes(leaf, record)
            nbytes, saved, example = nbytes + here, saved + here - here // ways, example or leaf.path
    if nbytes:
        yield Finding(
            kind="optimizer state whole",
            seconds=float(evidence.machine.hbm_s(2 * saved)),
            where=example,
            bytes=saved,
            cause=f"{bytes_text(nbytes)} of optimizer state lie on every device alike, {bytes_text(saved)} more than "
            "need be, and every device updates all of it",
            change="Split each leaf over an axis that divides it (ZeRO): the gradient is then scattered to it, and the "
            "new parameters are gathered",
        )


def _unused_ways(leaf: Leaf, sizes: Mapping[str, int], layout: Layout, evidence: Evidence) -> int:
    """In how many parts the axes that a leaf does not use divide it further."""
    used = {axis for dim in layout.dims for axis in dim}
    local = layout.local_shape(leaf.shape, evidence.mesh)
    return prod(
        size
        for axis, size in sizes.items()
        if axis not in used and any(dim % size == 0 and dim >= size for dim in local)
    )


def _beyond_the_plan(evidence: Evidence, *, products: bool) -> Iterator[tuple[str, float, float]]:
    """Lines on which a device computes more than in the best plan: (line, how many times as much, seconds more)."""
    if evidence.source is None:
        return
    theirs = _seconds(evidence.source.assignment, products=products)
    ours = _seconds(evidence.source.best_assignment, products=products)
    for where, here_s in theirs.items():
        there_s = ours.get(where, 0.0)
        if there_s and here_s > _TIMES * there_s:
            yield where, here_s / there_s, here_s - there_s


def _seconds(assignment: Assignment, *, products: bool) -> Mapping[str, float]:
    """Seconds by source line of matrix products, or of everything else but updates of what the program is given.

    Those are the optimizer's (`whole_states`).
    """
    decisions = assignment.decisions
    given = {
        value
        for value, node in zip(decisions.graph.inputs, decisions.inputs, strict=True)
        if isinstance(decision := decisions.nodes[node], Input) and decision.holds != "arguments"
    }
    found: dict[str, float] = defaultdict(float)
    for node, pick in zip(decisions.nodes, assignment.choice, strict=True):
        updates = any(value in given for e in node.equations for value in decisions.graph.operands[e])
        if bool(node.flops.any()) is products and (products or not updates):
            found[node.where] += float(node.cost_ps[pick]) / PS_PER_S
    return found
