"""Repeated: what an assignment runs once more for its backward passes.

That is what a plan recomputes, and what the program's own `jax.checkpoint`s do. Element-wise equations share a
decision with their neighbours; where only some of them are repeated, so is that share of its seconds.
"""

from collections import defaultdict
from dataclasses import dataclass

from autoshard.problem import bill
from autoshard.problem.assignment import Assignment
from autoshard.problem.decisions import Decisions, Equation


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedLine:
    """The contractions of one source line that run once more: how often per step, and their FLOPs on one device."""

    where: str
    primitive: str
    count: int
    flops: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedWork:
    """What runs once more, per device and step.

    Attributes:
      equations: how many equations.
      lines: the contractions among them, by source line, the largest first.
      flops: of these contractions.
      share: the part of all contractions' FLOPs that these are.
      compute_s: seconds of all of them, without communication.
      waited_s: seconds that the step waits for their operands to be gathered once more.
    """

    equations: int
    lines: tuple[RepeatedLine, ...]
    flops: float
    share: float
    compute_s: float
    waited_s: float

    @property
    def contractions(self) -> int:
        """How many of the equations multiply, loops counted once."""
        return sum(line.count for line in self.lines)

    @property
    def seconds(self) -> float:
        """What the step takes longer for it."""
        return self.compute_s + self.waited_s


def repeated_share(decisions: Decisions, n: int) -> float:
    """The part of the equations that decision n decides which run once more."""
    equations = decisions.nodes[n].equations
    return sum(e in decisions.graph.repeated for e in equations) / len(equations) if equations else 0.0


def repeated_work(assignment: Assignment) -> RepeatedWork | None:
    """What an assignment runs once more; None if it repeats nothing."""
    d = assignment.decisions
    if not d.graph.repeated:
        return None
    lines: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    compute_s = 0.0
    for n, (node, pick) in enumerate(zip(d.nodes, assignment.choice, strict=True)):
        share = repeated_share(d, n)
        if not share:
            continue
        compute_s += share * bill.node_s(assignment, n)
        if isinstance(node, Equation) and node.flops[pick]:
            line = lines[node.where, node.name]
            line[0] += 1
            line[1] += float(node.flops[pick])
    moved = zip(bill.transfers(assignment), bill.waits(assignment), strict=False)  # inner collectives come after these
    total = bill.flops(assignment)
    found = [
        RepeatedLine(where=where, primitive=primitive, count=int(count), flops=flops)
        for (where, primitive), (count, flops) in lines.items()
    ]
    flops = sum((line.flops for line in found), 0.0)
    return RepeatedWork(
        equations=sum(not d.graph.eqns[e].traits.link for e in d.graph.repeated),
        lines=tuple(sorted(found, key=lambda line: (-line.flops, line.where))),
        flops=flops,
        share=flops / total if total else 0.0,
        compute_s=compute_s,
        waited_s=sum(repeated_share(d, edge.v) * waited_s for (edge, _), (_, waited_s) in moved),
    )
