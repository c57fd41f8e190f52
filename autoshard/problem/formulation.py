"""Formulation: decisions → Problem arrays, and a solution → a choice per decision.

The objective in integer picoseconds is the sum of every decision's own seconds, of
every edge's resharding that cannot hide, and the exposed seconds of each window. With
the window's hideable communication h, the compute c beside it, and the machine's
`overlap` (the share that does hide while there is compute to hide it behind):

    exposed = (1 − overlap)·h + max(0, overlap·h − overlap·c)

A link to the host's memory is such a window: its copies hide behind all compute of the trip, at no tax.

Communication may hide in several windows, whole or by shares (`costs.overlap`); the exposed
seconds of all its windows add up. Outside of loops, where both a part and its whole window are
exposed, the real step is a little shorter.

A class of equal decisions is one node of the problem: its costs count once per
member, an edge inside the class becomes part of the node's own costs.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard import deadline
from autoshard.costs.resharding import Resharder
from autoshard.problem.decisions import Decisions, Edge, hidden_ps, reshard_ps, work_ps
from autoshard.problem.decisions import times as prices_times
from autoshard.problem.network import INF, Hinge, Moves, Problem
from autoshard.problem.symmetry import Folding, fold

UNIT_S = 1e-12

Int = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Formulation:
    """A problem, the decisions it stands for, and the way back."""

    decisions: Decisions
    resharder: Resharder
    folding: Folding
    problem: Problem

    def read(self, choice: Int) -> Int:
        """The choice per decision that a choice per problem node stands for."""
        return choice[self.folding.class_of]

    def write(self, choice: Int) -> Int:
        """The choice per problem node that is nearest to a choice per decision: that of one decision of each."""
        return choice[[members[0] for members in self.folding.members]]

    def moves(self) -> Moves:
        """Where values are resharded."""
        problem, class_of = self.problem, self.folding.class_of
        position = {(u, v): e for e, (u, v) in enumerate(problem.edge_nodes.tolist())}
        found = Moves(own=np.zeros(len(problem.cost), np.int64), cells=np.zeros(len(problem.edge_cost), np.int64))
        for edge in self.decisions.edges:
            a, b = int(class_of[edge.u]), int(class_of[edge.v])
            moved = (edge.source[:, None] != edge.target).astype(np.int64)
            if edge.waived is not None:
                moved[:, edge.waived] = 0
            if a == b:
                found.own[problem.start[a] : problem.start[a + 1]] += np.diagonal(moved)
                continue
            e = position[min(a, b), max(a, b)]
            found.cells[problem.edge_start[e] : problem.edge_start[e + 1]] += (moved if a < b else moved.T).ravel()
        return found


def formulate(
    decisions: Decisions, resharder: Resharder, *, memory_bytes: int | None, folding: Folding | None = None
) -> Formulation:
    """Builds the problem of a decision network.

    Args:
      decisions: the network.
      resharder: prices of resharding on the same mesh.
      memory_bytes: per-device limit, or None for no limit.
      folding: which decisions share a variable; by default those in equal places.
    """
    folding = fold(decisions) if folding is None else folding
    matrices = _ClassMatrices(decisions, resharder, folding)
    sizes = np.array([len(decisions.nodes[m[0]]) for m in folding.members], np.int64)
    start = np.concatenate(([0], np.cumsum(sizes)))
    cost = np.empty(start[-1], np.int64)
    covers: list[dict[int, Int]] = [{} for _ in range(decisions.windows.count)]
    for c, members in enumerate(folding.members):
        node, times = decisions.nodes[members[0]], len(members)
        own = prices_times(node.cost_ps, times)
        if c in matrices.own:
            own = own + matrices.own[c]
        cost[start[c] : start[c + 1]] = np.minimum(own, INF)
        if node.cover_ps.any():
            for window, share in decisions.windows.covers[node.window]:
                covers[window][c] = -np.rint(share * node.cover_ps).astype(np.int64) * times
    for (c, window), hidden in matrices.own_hidden.items():
        covers[window][c] = covers[window].get(c, np.zeros(sizes[c], np.int64)) + hidden

    pairs = sorted(matrices.between)
    cells = [matrices.between[pair].ravel() for pair in pairs]
    edge_start = np.concatenate(([0], np.cumsum([len(cell) for cell in cells]))).astype(np.int64)
    hinges: list[Hinge] = []
    for window in range(decisions.windows.count):
        strategy = {int(start[c]) + i: int(x) for c, xs in covers[window].items() for i, x in enumerate(xs) if x}
        hide: list[tuple[Int, Int]] = []
        for position, pair in enumerate(pairs):
            if (pair, window) in matrices.hidden:
                matrix = matrices.hidden[pair, window].ravel()
                nonzero = np.flatnonzero(matrix)
                hide.append((edge_start[position] + nonzero, matrix[nonzero]))
        if not hide and not any(x > 0 for x in strategy.values()):
            continue
        empty = np.zeros(0, np.int64)
        keys = np.array(sorted(strategy), np.int64)
        hinges.append(
            Hinge(
                strategy=keys,
                strategy_coef=np.array([strategy[int(k)] for k in keys], np.int64),
                cell=np.concatenate([h[0] for h in hide]) if hide else empty,
                cell_coef=np.concatenate([h[1] for h in hide]) if hide else empty,
            )
        )
    hinges += _links(decisions, folding, start)
    use_node, use_interval, usage = _usages(decisions, folding)
    problem = Problem(
        start=start,
        cost=cost,
        edge_nodes=np.array(pairs, np.int64).reshape(-1, 2),
        edge_start=edge_start,
        edge_cost=np.concatenate(cells) if cells else np.zeros(0, np.int64),
        use_node=use_node,
        use_interval=use_interval,
        use_start=np.concatenate(([0], np.cumsum([len(u) for u in usage]))).astype(np.int64),
        usage=np.concatenate(usage) if usage else np.zeros(0, np.int64),
        usage_limit=memory_bytes,
        hinges=tuple(hinges),
        unit_s=UNIT_S,
        names=tuple(decisions.nodes[m[0]].name for m in folding.members),
    )
    return Formulation(decisions=decisions, resharder=resharder, folding=folding, problem=problem)


def edge_cells(decisions: Decisions, folding: Folding) -> int:
    """The cells of the edges' tables of a problem, before it is priced."""
    pairs = {(int(folding.class_of[edge.u]), int(folding.class_of[edge.v])) for edge in decisions.edges}
    size = [len(decisions.nodes[members[0]]) for members in folding.members]
    return sum(size[a] * size[b] for a, b in {(min(pair), max(pair)) for pair in pairs} if a != b)


def _links(decisions: Decisions, folding: Folding, start: Int) -> Iterator[Hinge]:
    """The exposed seconds of every link to the host's memory: members of a class are all on a link, or none."""
    empty, first = np.zeros(0, np.int64), [members[0] for members in folding.members]
    for link in decisions.links:
        terms: dict[int, Int] = {}
        for n in {*link.hidden_ps, *link.beside}:
            c = int(folding.class_of[n])
            if n == first[c]:
                node = decisions.nodes[n]
                hidden_ps = link.hidden_ps.get(n, np.zeros(len(node), np.int64))
                terms[c] = (hidden_ps - (node.cost_ps if n in link.beside else 0)) * len(folding.members[c])
        keys = np.concatenate([start[c] + np.arange(len(terms[c])) for c in sorted(terms)])
        values = np.concatenate([terms[c] for c in sorted(terms)])
        used = values != 0
        yield Hinge(strategy=keys[used], strategy_coef=values[used], cell=empty, cell_coef=empty)


class _ClassMatrices:
    """Edge costs between classes: `between[a, b]` with a < b, and those inside a class."""

    def __init__(self, decisions: Decisions, resharder: Resharder, folding: Folding) -> None:
        self.between: dict[tuple[int, int], Int] = {}
        self.hidden: dict[tuple[tuple[int, int], int], Int] = {}
        self.own: dict[int, Int] = {}
        self.own_hidden: dict[tuple[int, int], Int] = {}
        counted: dict[tuple[object, ...], tuple[Edge, int]] = {}
        for edge in decisions.edges:
            a, b = int(folding.class_of[edge.u]), int(folding.class_of[edge.v])
            mask = None if edge.forbidden is None else edge.forbidden.tobytes()
            key = (
                a,
                b,
                edge.moved.shape,
                edge.moved.itemsize,
                edge.source.tobytes(),
                edge.target.tobytes(),
                edge.window,
                edge.hides,
                edge.bucket,
                edge.strides,
                edge.trips * edge.times,
                edge.total and (edge.total[0].itemsize, edge.total[1]),
                edge.pending and edge.pending.itemsize,
                mask,
                None if edge.waived is None else edge.waived.tobytes(),
                edge.unfused,
                None if edge.cut_bytes is None else edge.cut_bytes.tobytes(),
                edge.carried,
            )
            counted[key] = (edge, counted[key][1] + 1 if key in counted else 1)
        for key, (edge, times) in counted.items():
            a, b = int(key[0]), int(key[1])  # pyright: ignore[reportArgumentType]
            deadline.check("pricing its moves")
            matrix = reshard_ps(edge, resharder)
            forbidden = matrix >= INF
            work = np.where(forbidden, 0, work_ps(edge, resharder)) * times
            seconds = np.where(forbidden, 0, matrix) * times - work
            hides = () if edge.window is None else decisions.windows.hides[edge.window]
            if resharder.shares:
                hidden = np.where(forbidden, 0, hidden_ps(edge, resharder)) * times
                taxed = seconds - np.rint(hidden * edge.hides).astype(np.int64)
            else:
                taxed = np.rint(seconds * (1.0 - edge.hides)).astype(np.int64)
            base, seconds = np.where(forbidden, INF, taxed + work), seconds - taxed
            if a == b:
                self.own[a] = _saturated(self.own.get(a), np.diagonal(base))
                for window, share in hides:
                    hidden = np.rint(share * np.diagonal(seconds)).astype(np.int64)
                    self.own_hidden[a, window] = self.own_hidden.get((a, window), 0) + hidden
                continue
            pair = (a, b) if a < b else (b, a)
            if a > b:
                base, seconds = base.T, seconds.T
            self.between[pair] = _saturated(self.between.get(pair), base)
            for window, share in hides if seconds.any() else ():
                hidden = np.rint(share * seconds).astype(np.int64)
                self.hidden[pair, window] = self.hidden.get((pair, window), 0) + hidden


def _saturated(total: Int | None, more: Int) -> Int:
    return np.minimum(more if total is None else total + more, INF)


def _usages(decisions: Decisions, folding: Folding) -> tuple[Int, Int, list[Int]]:
    merged: dict[tuple[int, int, int], Int] = {}
    for use in decisions.usages:
        if use.end <= use.start or not use.nbytes.any():
            continue
        key = (int(folding.class_of[use.node]), use.start, use.end)
        merged[key] = merged[key] + use.nbytes if key in merged else use.nbytes
    keys = sorted(merged)
    nodes = np.array([k[0] for k in keys], np.int64)
    intervals = np.array([k[1:] for k in keys], np.int64).reshape(-1, 2)
    return nodes, intervals, [merged[k] for k in keys]
