"""Union: problems of several programs, some of whose nodes choose the same, as one problem.

Nodes that choose the same are tied by an edge without cost on equal choices, and
forbidden elsewhere; the solver's presolve contracts it. Every part keeps a stretch of
time of its own, so that memory is counted for one program at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.problem.network import INF, Hinge, Int, Problem


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """A problem whose costs count `weight` times."""

    problem: Problem
    weight: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tie:
    """Two nodes (part, node) with the same choice: choices i and j agree if `left_codes[i] == right_codes[j]`."""

    left: tuple[int, int]
    right: tuple[int, int]
    left_codes: Int
    right_codes: Int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ResidentBytes:
    """Bytes per choice of a node that stay in memory while another part runs."""

    node: tuple[int, int]  # (part, node)
    during: int  # the other part
    usage: Int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JointProblem:
    """The one problem, and where each part's nodes begin in it."""

    problem: Problem
    first: Int

    def split(self, choice: Int) -> list[Int]:
        """The choice of each part."""
        return np.split(choice, self.first[1:-1])


def union(
    parts: Sequence[Part], ties: Sequence[Tie], held: Sequence[ResidentBytes], *, usage_limit: int | None
) -> JointProblem:
    """Joins problems that measure cost in one unit; the parts' own memory limits are not used."""
    problems = [part.problem for part in parts]
    first = _offsets([p.nodes for p in problems])
    cost_first = _offsets([len(p.cost) for p in problems])
    cell_first = _offsets([len(p.edge_cost) for p in problems])
    time_first = _offsets([int(p.use_interval.max(initial=0)) for p in problems])
    bonds = [_bond(tie) for tie in ties]
    edge_nodes = [p.edge_nodes + f for p, f in zip(problems, first, strict=False)]
    edge_nodes += [np.array([[first[k] + v for k, v in (tie.left, tie.right)]], np.int64) for tie in ties]
    use_node = [p.use_node + f for p, f in zip(problems, first, strict=False)]
    use_node += [np.array([first[h.node[0]] + h.node[1]], np.int64) for h in held]
    intervals = [p.use_interval + f for p, f in zip(problems, time_first, strict=False)]
    intervals += [time_first[None, h.during : h.during + 2] for h in held]
    usages = [np.diff(p.use_start) for p in problems] + [np.array([len(h.usage)]) for h in held]
    cells = [np.diff(p.edge_start) for p in problems] + [np.array([bond.size]) for bond in bonds]
    joined = Problem(
        start=_offsets(np.concatenate([np.diff(p.start) for p in problems])),
        cost=np.concatenate([_times(p.problem.cost, p.weight) for p in parts]),
        edge_nodes=np.concatenate(edge_nodes),
        edge_start=_offsets(np.concatenate(cells)),
        edge_cost=np.concatenate([_times(p.problem.edge_cost, p.weight) for p in parts] + [b.ravel() for b in bonds]),
        use_node=np.concatenate(use_node),
        use_interval=np.concatenate(intervals),
        use_start=_offsets(np.concatenate(usages)),
        usage=np.concatenate([p.usage for p in problems] + [h.usage for h in held]),
        usage_limit=usage_limit,
        hinges=tuple(
            _hinge(hinge, part.weight, int(cost_first[k]), int(cell_first[k]))
            for k, part in enumerate(parts)
            for hinge in part.problem.hinges
        ),
        offset=sum(part.problem.offset * part.weight for part in parts),
        unit_s=problems[0].unit_s,
        names=tuple(name for p in problems for name in (p.names or ("",) * p.nodes)),
    )
    return JointProblem(problem=joined, first=first)


def _offsets(counts: Sequence[int] | Int) -> Int:
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int64)


def _times(cost: Int, weight: int) -> Int:
    return np.where(cost >= INF, INF, cost * weight)


def _bond(tie: Tie) -> Int:
    """Free where both choose the same, forbidden elsewhere."""
    return np.where(tie.left_codes[:, None] == tie.right_codes[None, :], 0, INF)


def _hinge(hinge: Hinge, weight: int, strategy: int, cell: int) -> Hinge:
    return Hinge(
        strategy=hinge.strategy + strategy,
        strategy_coef=hinge.strategy_coef * weight,
        cell=hinge.cell + cell,
        cell_coef=hinge.cell_coef * weight,
        constant=hinge.constant * weight,
    )
