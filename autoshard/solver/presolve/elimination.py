r"""Elimination: nodes are removed from a problem one by one, exactly; what is left is its core.

Beside the costs a core has *rows*: linear forms of the choice, $r(x) = k + \sum_v a_v(x_v) +
\sum_{uv} A_{uv}(x_u, x_v)$. A memory row demands $r(x) \le$ limit at one time point; a hinge row
adds $\max(0, r(x))$ to the objective. A node on which no row depends may be minimised out (its
best answer to every choice of its neighbours is remembered); any node may be merged into a
neighbour that leaves it no choice.

`Core.expand` turns a choice of the nodes that remain into a choice of all.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from autoshard.problem.network import INF, Int, Problem
from autoshard.solver.clock import Clock, effort, endless
from autoshard.solver.program import FORBIDDEN, Network, Program
from autoshard.solver.tuning import PresolveTuning

Edge = tuple[int, int]  # (smaller node, larger node)


@dataclass(slots=True)
class LinearForm:
    """A linear form of the choice. A hinge, which costs max(0, form), has no limit."""

    constant: int
    limit: int | None
    node: dict[int, Int] = field(default_factory=dict)  # a coefficient per strategy
    edge: dict[Edge, Int] = field(default_factory=dict)  # per strategy of the smaller node × of the larger


def join(a: Int, b: Int) -> Int:
    """Returns a + b, where a forbidden part makes the sum forbidden."""
    total = a + b
    total[total >= INF] = FORBIDDEN
    return total


class Core:
    """A cost-function network that shrinks; its nodes keep the numbers that they have in the problem."""

    def __init__(self, problem: Problem, times: Int) -> None:
        """Copies `problem` with memory rows at the given time points only, which relaxes it."""
        effort.spend(steps=problem.nodes + len(problem.edge_nodes), cells=2 * len(problem.edge_cost))
        self.offset = problem.offset
        self.size = problem.nodes
        self.limit = problem.usage_limit
        self.cost: dict[int, Int] = {}
        self.table: dict[Edge, Int] = {}
        self.near: dict[int, set[int]] = {v: set() for v in range(problem.nodes)}
        self.rows: list[LinearForm] = []
        self.kept: dict[int, Int] = {}  # per node, the numbers in the problem of its strategies
        self.answers: list[Callable[[Int], None]] = []  # each writes choice[v] of an eliminated node v
        self.feasible = True
        for v in range(problem.nodes):
            cost = problem.cost[problem.start[v] : problem.start[v + 1]]
            self.cost[v] = np.where(cost >= INF, FORBIDDEN, cost)
            self.kept[v] = np.arange(len(cost))
        self._load_hinges(problem)
        self._load_memory(problem, times)
        self._load_edges(problem)

    def _load_hinges(self, problem: Problem) -> None:
        sizes = np.diff(problem.start)
        for hinge in problem.hinges:
            row = LinearForm(hinge.constant, None)
            owner = np.searchsorted(problem.start, hinge.strategy, side="right") - 1
            for v in np.unique(owner).tolist():
                coef = np.zeros(sizes[v], dtype=np.int64)
                mine = owner == v
                coef[hinge.strategy[mine] - problem.start[v]] = hinge.strategy_coef[mine]
                self._add_node_coef(row, v, coef)
            owner = np.searchsorted(problem.edge_start, hinge.cell, side="right") - 1
            for e in np.unique(owner).tolist():
                u, v = problem.edge_nodes[e].tolist()
                mine = owner == e
                coef = np.zeros((sizes[u], sizes[v]), dtype=np.int64)
                coef.reshape(-1)[hinge.cell[mine] - problem.edge_start[e]] = hinge.cell_coef[mine]
                if u == v:
                    self._add_node_coef(row, u, np.diagonal(coef).copy())
                else:
                    self._add_edge_coef(row, u, v, coef)
            self.rows.append(row)

    def _load_memory(self, problem: Problem, times: Int) -> None:
        if problem.usage_limit is None:
            return
        for t in times.tolist():
            row = LinearForm(0, problem.usage_limit)
            alive = (problem.use_interval[:, 0] <= t) & (t < problem.use_interval[:, 1])
            for i in np.flatnonzero(alive).tolist():
                usage = problem.usage[problem.use_start[i] : problem.use_start[i + 1]]
                self._add_node_coef(row, int(problem.use_node[i]), usage)
            self.rows.append(row)

    def _load_edges(self, problem: Problem) -> None:
        for e, (u, v) in enumerate(problem.edge_nodes.tolist()):
            shape = (len(self.cost[u]), len(self.cost[v]))
            cells = problem.edge_cost[problem.edge_start[e] : problem.edge_start[e + 1]].reshape(shape)
            cells = np.where(cells >= INF, FORBIDDEN, cells)
            if u == v:
                self.cost[u] = join(self.cost[u], np.diagonal(cells))
            else:
                self.add_table(u, v, cells)

    # ── parts ────────────────────────────────────────────────────────────────

    def between(self, u: int, v: int) -> Int:
        """Returns the table of edge uv with u's strategies as rows (a view)."""
        return self.table[u, v] if u < v else self.table[v, u].T

    def add_table(self, u: int, v: int, cells: Int) -> None:
        """Adds `cells` (u's strategies × v's) to edge uv, which need not exist."""
        key, cells = ((u, v), cells) if u < v else ((v, u), cells.T)
        if key in self.table:
            self.table[key] = join(self.table[key], cells)
        else:
            self.table[key] = np.ascontiguousarray(cells)
            self.near[u].add(v)
            self.near[v].add(u)

    def drop_table(self, u: int, v: int) -> None:
        """Removes edge uv."""
        del self.table[min(u, v), max(u, v)]
        self.near[u].discard(v)
        self.near[v].discard(u)

    def _add_node_coef(self, row: LinearForm, v: int, coef: Int) -> None:
        total = row.node.pop(v, 0) + coef
        low = int(total.min())
        row.constant += low
        if total.max() > low:
            row.node[v] = total - low

    def _add_edge_coef(self, row: LinearForm, u: int, v: int, coef: Int) -> None:
        key, coef = ((u, v), coef) if u < v else ((v, u), coef.T)
        row.edge[key] = row.edge.get(key, 0) + coef

    def is_free(self, v: int) -> bool:
        """Whether no row depends on v's strategy."""
        return not any(
            v in row.node or any((min(v, w), max(v, w)) in row.edge for w in self.near[v]) for row in self.rows
        )

    def has_edge_rows(self, u: int, v: int) -> bool:
        """Whether some row depends on the cell of edge uv."""
        key = (min(u, v), max(u, v))
        return any(key in row.edge for row in self.rows)

    # ── steps ────────────────────────────────────────────────────────────────

    def restrict(self, v: int, keep: Int) -> None:
        """Keeps only the strategies of v at the positions `keep`."""
        self.cost[v] = self.cost[v][keep]
        self.kept[v] = self.kept[v][keep]
        for w in self.near[v]:
            key = (min(v, w), max(v, w))
            self.table[key] = self.table[key][keep] if v < w else self.table[key][:, keep]
        for row in self.rows:
            if v in row.node:
                self._add_node_coef(row, v, row.node.pop(v)[keep])
            for key in [k for k in ((min(v, w), max(v, w)) for w in self.near[v]) if k in row.edge]:
                row.edge[key] = row.edge[key][keep] if key[0] == v else row.edge[key][:, keep]

    def prune(self, v: int) -> bool:
        """Removes strategies of v that are forbidden, or without a partner at some neighbour; returns whether any."""
        effort.spend(steps=1 + len(self.near[v]), cells=4 * sum(self.between(v, w).size for w in self.near[v]))
        good = self.cost[v] < INF
        for w in self.near[v]:
            good &= (join(self.between(v, w), self.cost[w][None, :]) < INF).any(axis=1)
        if not good.any():
            self.feasible = False
        elif not good.all():
            self.restrict(v, np.flatnonzero(good))
            return True
        return False

    def make_consistent(self, nodes: Iterable[int]) -> set[int]:
        """Makes the core arc-consistent from `nodes` on; returns the nodes that lost strategies."""
        queue, changed = list(nodes), set[int]()
        waiting = set(queue)
        while queue and self.feasible:
            v = queue.pop()
            waiting.discard(v)
            if v in self.cost and self.prune(v):
                changed.add(v)
                for w in self.near[v] - waiting:
                    waiting.add(w)
                    queue.append(w)
        return changed

    def remove(self, v: int, answer: Callable[[Int], None]) -> None:
        """Removes a node without edges; `answer` writes its strategy into a choice of the others."""
        del self.cost[v], self.near[v]
        self.answers.append(answer)

    def fix(self, v: int, i: int) -> None:
        """Gives v its strategy at position i: costs and rows move to its neighbours."""
        if len(self.cost[v]) > 1:
            self.restrict(v, np.array([i]))
        self.offset += int(self.cost[v][0])
        for w in list(self.near[v]):
            self.cost[w] = join(self.cost[w], self.between(v, w)[0])
            key = (min(v, w), max(v, w))
            for row in self.rows:
                if key in row.edge:
                    self._add_node_coef(row, w, row.edge.pop(key).reshape(-1))
            self.drop_table(v, w)
        number = int(self.kept[v][0])

        def answer(choice: Int) -> None:
            choice[v] = number

        self.remove(v, answer)

    def minimise_out(self, v: int) -> None:
        """Removes a free node of at most two neighbours: its least cost stays, per choice of them."""
        around = sorted(self.near[v])
        total = self.cost[v]
        kept = self.kept[v]
        shape = (len(total), *(len(self.cost[w]) for w in around))
        for axis, w in enumerate(around, start=1):
            spread = [1] * axis + [shape[axis]] + [1] * (len(around) - axis)
            spread[0] = shape[0]
            total = join(
                total.reshape(total.shape + (1,) * (len(spread) - total.ndim)), self.between(v, w).reshape(spread)
            )
        effort.spend(steps=4, cells=(2 + len(around)) * total.size)
        best = total.argmin(axis=0)
        least = np.take_along_axis(total, best[None], axis=0)[0]
        for w in around:
            self.drop_table(v, w)
        if not around:
            self.offset += int(least)
        elif len(around) == 1:
            self.cost[around[0]] = join(self.cost[around[0]], least)
        else:
            self.add_table(around[0], around[1], least)
        positions = [self.kept[w] for w in around]

        def answer(choice: Int) -> None:
            at = tuple(int(np.searchsorted(p, choice[w])) for p, w in zip(positions, around, strict=True))
            choice[v] = kept[best[at]]

        self.remove(v, answer)

    def merge_into(self, v: int, w: int) -> None:
        """Removes v, whose strategy follows from w's: each of w's allows exactly one."""
        cells = self.between(w, v)
        follows = (cells < INF).argmax(axis=1)
        every = np.arange(len(follows))
        self.cost[w] = join(join(self.cost[w], self.cost[v][follows]), cells[every, follows])
        key = (min(v, w), max(v, w))
        for row in self.rows:
            if key in row.edge:
                coef = row.edge.pop(key) if w < v else row.edge.pop(key).T
                self._add_node_coef(row, w, coef[every, follows])
            if v in row.node:
                self._add_node_coef(row, w, row.node.pop(v)[follows])
        for x in list(self.near[v] - {w}):
            old = (min(v, x), max(v, x))
            for row in self.rows:
                if old in row.edge:
                    coef = row.edge.pop(old) if v < x else row.edge.pop(old).T
                    self._add_edge_coef(row, w, x, coef[follows])
            cells = self.between(v, x)[follows]
            self.drop_table(v, x)
            self.add_table(w, x, cells)
        self.drop_table(v, w)
        number, of_w = self.kept[v][follows], self.kept[w]

        def answer(choice: Int) -> None:
            choice[v] = number[np.searchsorted(of_w, choice[w])]

        self.remove(v, answer)

    def split(self, u: int, v: int) -> bool:
        """Removes edge uv if its cells are a part of u plus a part of v, which join the nodes' costs."""
        cells = self.between(u, v)
        effort.spend(steps=1, cells=4 * cells.size)
        if self.has_edge_rows(u, v) or (cells >= INF).any():
            return False
        if not (cells - cells[:1] == (cells[:, :1] - cells[0, 0])).all():
            return False
        self.cost[u] = join(self.cost[u], cells[:, 0])
        self.cost[v] = join(self.cost[v], cells[0] - cells[0, 0])
        self.drop_table(u, v)
        return True

    def program(self) -> tuple[Program, list[int]]:
        """Returns the core as a program, and the number in the problem of each node of the program."""
        names = sorted(self.cost)
        number = {v: k for k, v in enumerate(names)}
        start = np.concatenate([[0], np.cumsum([len(self.cost[v]) for v in names])]).astype(np.int64)
        edges = sorted(self.table)
        hinges = [row for row in self.rows if row.limit is None]
        memory = [row for row in self.rows if row.limit is not None]

        def of_nodes(coef: dict[int, Int]) -> Int:
            flat = np.zeros(start[-1], dtype=np.int64)
            for v, values in coef.items():
                flat[start[number[v]] : start[number[v] + 1]] = values
            return flat

        def of_edges(coef: dict[Edge, Int]) -> Int:
            parts = [coef.get(edge, np.zeros_like(self.table[edge])).reshape(-1) for edge in edges]
            return np.concatenate([np.zeros(0, dtype=np.int64), *parts])

        cells = [self.table[edge].size for edge in edges]
        network = Network(
            start=start,
            cost=np.stack([of_nodes(self.cost), *(of_nodes(row.node) for row in hinges)]),
            edge_nodes=np.array([(number[u], number[v]) for u, v in edges], dtype=np.int64).reshape(-1, 2),
            edge_start=np.concatenate([[0], np.cumsum(cells)]).astype(np.int64),
            edge_cost=np.stack([of_edges(self.table), *(of_edges(row.edge) for row in hinges)]),
            root=np.arange(len(names)),
            follows_start=start,
            follows=np.arange(start[-1]) - np.repeat(start[:-1], np.diff(start)),
            offset=self.offset,
        )
        usage = np.zeros((len(memory), int(start[-1])), dtype=np.int64)
        for r, row in enumerate(memory):
            usage[r] = of_nodes(row.node)
        return Program(
            network=network,
            usage=usage,
            base=np.array([row.constant for row in memory], dtype=np.int64),
            limit=self.limit or 0,
            hinge_constant=tuple(row.constant for row in hinges),
        ), names

    def expand(self, choice: dict[int, int]) -> Int:
        """Returns a choice for all nodes from positions for the nodes that remain."""
        full = np.zeros(self.size, dtype=np.int64)
        for v, i in choice.items():
            full[v] = self.kept[v][i]
        for answer in reversed(self.answers):
            answer(full)
        return full


def reduce(core: Core, tuning: PresolveTuning, left_s: Clock = endless) -> None:
    """Applies every exact step until none applies, or time is over."""
    core.make_consistent(list(core.cost))
    for u, v in list(core.table):
        core.split(u, v)
    queue = sorted(core.cost, key=lambda v: (len(core.near[v]), v), reverse=True)
    waiting = set(queue)
    while queue and core.feasible and left_s() > 0:
        v = queue.pop()
        waiting.discard(v)
        if v not in core.cost:
            continue
        around = set(core.near[v])
        if not step(core, v, tuning.elimination_cells):
            continue
        around |= core.make_consistent([w for w in around if w in core.cost])
        for w in sorted(around - waiting, reverse=True):
            waiting.add(w)
            queue.append(w)


def step(core: Core, v: int, most_cells: int) -> bool:
    """Tries to remove node v, or one edge of it; returns whether anything changed.

    A node is minimised out of a table of at most so many cells.
    """
    if len(core.cost[v]) == 1:
        core.fix(v, 0)
        return True
    for w in sorted(core.near[v]):
        if core.split(v, w):
            return True
    for w in sorted(core.near[v]):
        if ((core.between(w, v) < INF).sum(axis=1) == 1).all():
            core.merge_into(v, w)
            return True
    if len(core.near[v]) <= 2:
        work = len(core.cost[v]) * int(np.prod([len(core.cost[w]) for w in core.near[v]]))
        if work <= most_cells and core.is_free(v):
            core.minimise_out(v)
            return True
    return False
