"""The second objective: of choices that cost the same, one with fewer reshardings, then one that holds less memory.

The objective is cost alone. But every resharding is a constraint in the program and a collective in the
timeline, so that one that saves less than `TieTuning.worth` of the objective, far below what any price is
right to, is left out. And a partial sum may be reduced where it is made or where it is last read, at the
same price: the compilers reduce as early as they can, and what is reduced early holds less memory.

So each node moves to the strategy of least cost, reshardings included, and of equal ones to that of least
bytes × equations. Both ends of an edge beside which something is resharded also move together. This repeats
until none moves. The peak gets no higher.

Parts that are equal, such as the layers of a model, may still have other choices, as the ends of a program hide less
than its middle. Where they could have the same ones for next to nothing they get them (`make_alike`), so that a reader
finds one layer many times, and not many layers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.problem.network import INF, Moves, Problem, chosen_cells
from autoshard.solver.evaluate import evaluate, hinge_values, saturated
from autoshard.solver.tuning import TUNED, TieTuning

Int = NDArray[np.int64]


def break_ties(problem: Problem, choice: Int, moves: Moves | None = None, tuning: TieTuning = TUNED.ties) -> Int:
    """Returns a choice that costs what `choice` costs, but for what saved reshardings are worth, of no higher peak.

    Args:
      problem: the network.
      choice: one strategy per node, with a finite objective.
      moves: where values are resharded; None counts no reshardings.
      tuning: what a resharding is worth.
    """
    objective = evaluate(problem, choice).objective
    assert objective is not None
    descent = _Descent(problem, choice, moves, 0 if moves is None else round(tuning.worth * objective))
    descent.run(tuning.sweeps)
    return descent.choice


def make_alike(problem: Problem, choice: Int, like: Sequence[Int], tuning: TieTuning = TUNED.ties) -> Int:
    """Returns a choice in which equal parts have the same choices where that costs next to nothing; of no higher peak.

    The part with which most others agree is the model. Of another part the nodes that differ from it fall into groups
    that edges join, and each group moves as a whole.

    Args:
      problem: the network.
      choice: one strategy per node, with a finite objective.
      like: for each kind of equal parts the nodes in equal places, which have the same strategies: (parts, places).
        A part that has no node in a place has -1 there.
      tuning: what it may cost.
    """
    now = evaluate(problem, choice)
    assert now.objective is not None
    worth, most = (round(share * now.objective) for share in (tuning.alike, tuning.all_alike))
    most += now.objective
    for moves in _towards_models(problem, choice, like, tuning.groups):
        moved = choice.copy()
        moved[list(moves)] = list(moves.values())
        then = evaluate(problem, moved)
        if then.objective is None or then.peak_bytes > now.peak_bytes:
            continue
        assert now.objective is not None
        if then.objective <= min(now.objective + worth, most):
            choice, now = moved, then
    return choice


def _towards_models(problem: Problem, choice: Int, like: Sequence[Int], most: int) -> Iterator[dict[int, int]]:
    """Yields the groups of nodes that differ from the model of their part, each node with the model's strategy."""
    count = 0
    for nodes in like:
        here = np.where(nodes >= 0, choice[nodes], -1)
        agreed = [int(((here == own) & (own >= 0)).sum()) for own in here]
        model = int(np.argmax(agreed))
        for part in range(len(nodes)):
            differs = (here[part] != here[model]) & (here[part] >= 0) & (here[model] >= 0)
            targets = dict(zip(nodes[part][differs].tolist(), here[model][differs].tolist(), strict=True))
            for group in _joined(problem, targets):
                if count == most:
                    return
                count += 1
                yield {v: targets[v] for v in group}


def _joined(problem: Problem, nodes: Mapping[int, int]) -> list[list[int]]:
    """Returns the groups of some nodes that are joined by edges between them."""
    root = {v: v for v in nodes}

    def find(v: int) -> int:
        while root[v] != v:
            root[v] = root[root[v]]
            v = root[v]
        return v

    inside = np.isin(problem.edge_nodes, list(nodes)).all(axis=1)
    for u, v in problem.edge_nodes[inside].tolist():
        root[find(u)] = find(v)
    groups: dict[int, list[int]] = {}
    for v in nodes:
        groups.setdefault(find(v), []).append(v)
    return list(groups.values())


@dataclass(slots=True, eq=False)
class _Terms:
    """What each strategy of a node, or pair of two nodes' strategies, costs with all other nodes as they are."""

    cost: Int
    hinges: list[Int]  # what each adds to every hinge

    def total(self, value: list[int]) -> Int:
        """Returns the objective but for a constant; `value` is that of each hinge where nothing is added."""
        exposed = (np.maximum(v + gain, 0) for v, gain in zip(value, self.hinges, strict=True))
        return np.minimum(self.cost + sum(exposed, np.zeros_like(self.cost)), INF)


class _Descent:
    """A choice that moves by single nodes and by pairs, and what it costs."""

    def __init__(self, problem: Problem, choice: Int, moves: Moves | None, worth: int) -> None:
        self._problem = problem
        self._cost, self._edge_cost, self._moved = problem.cost, problem.edge_cost, None
        if moves is not None and worth:
            self._cost = np.minimum(problem.cost + worth * moves.own, INF)
            self._edge_cost = np.minimum(problem.edge_cost + worth * moves.cells, INF)
            self._moved = moves.cells
        self._weight = _weights(problem)
        self._around: list[list[int]] = [[] for _ in range(problem.nodes)]
        for e, (u, v) in enumerate(problem.edge_nodes):
            self._around[u].append(e)
            self._around[v].append(e)
        self.choice = choice.copy()
        self._value = list(hinge_values(problem, problem.start[:-1] + choice, chosen_cells(problem, choice)))
        self._memory = _Memory(problem, choice)

    def run(self, sweeps: int) -> None:
        """Moves nodes and pairs, sweep after sweep, until none moves."""
        problem = self._problem
        for _ in range(sweeps):
            nodes = [v for v in range(problem.nodes) if self._single(v)]
            edges = [e for e in range(len(problem.edge_nodes)) if self._beside_moved(e) and self._pair(e)]
            if not nodes and not edges:
                break

    def _single(self, v: int) -> bool:
        """Moves one node; returns whether it did."""
        first, last = int(self._problem.start[v]), int(self._problem.start[v + 1])
        now, held = int(self.choice[v]), self._weight[first:last]
        if last - first == 1 or (self._moved is None and held[now] == held.min()):
            return False
        terms = self._terms(v)
        gains = _Terms(terms.cost, [x - x[now] for x in terms.hinges])
        total = gains.total(self._value)
        best = int(np.lexsort((held, total))[0])
        if (total[best], held[best]) >= (total[now], held[now]) or not self._memory.moved({v: (now, best)}):
            return False
        self.choice[v] = best
        self._value = [x + int(gain[best]) for x, gain in zip(self._value, gains.hinges, strict=True)]
        return True

    def _beside_moved(self, e: int) -> bool:
        """Whether something is resharded at an end of an edge."""
        if self._moved is None:
            return False
        around = np.array([other for n in self._problem.edge_nodes[e] for other in self._around[n]])
        return bool(self._moved[chosen_cells(self._problem, self.choice, around)].any())

    def _pair(self, e: int) -> bool:
        """Moves both ends of an edge together, if no other edge joins them; returns whether it did."""
        problem = self._problem
        u, v = (int(n) for n in problem.edge_nodes[e])
        if u == v or set(self._around[u]) & set(self._around[v]) != {e}:
            return False
        first, last = int(problem.edge_start[e]), int(problem.edge_start[e + 1])
        shape = int(problem.start[u + 1] - problem.start[u]), int(problem.start[v + 1] - problem.start[v])
        now = int(self.choice[u]), int(self.choice[v])
        here, there = self._terms(u, without=e), self._terms(v, without=e)
        cost = np.minimum(here.cost[:, None] + there.cost + self._edge_cost[first:last].reshape(shape), INF)
        gains: list[Int] = []
        for h, hinge in enumerate(problem.hinges):
            own = _picked(hinge.cell, hinge.cell_coef, np.arange(first, last)).reshape(shape)
            gain = here.hinges[h][:, None] + there.hinges[h] + own
            gains.append(gain - gain[now])
        total = _Terms(cost, gains).total(self._value)
        i, j = (int(k) for k in np.unravel_index(int(total.argmin()), shape))
        if total[i, j] >= total[now] or not self._memory.moved({u: (now[0], i), v: (now[1], j)}):
            return False
        self.choice[u], self.choice[v] = i, j
        self._value = [x + int(gain[i, j]) for x, gain in zip(self._value, gains, strict=True)]
        return True

    def _terms(self, v: int, without: int = -1) -> _Terms:
        """Returns what the strategies of a node cost, with the cells of all its edges but one."""
        problem, first, last = self._problem, int(self._problem.start[v]), int(self._problem.start[v + 1])
        cells = [_cells(problem, e, v, self.choice) for e in self._around[v] if e != without]
        cost = self._cost[first:last].copy()
        for at in cells:
            cost = np.minimum(cost + self._edge_cost[at], INF)
        strategies = np.arange(first, last)
        return _Terms(cost, [_hinge_terms(problem, h, strategies, cells) for h in range(len(problem.hinges))])


class _Memory:
    """The bytes that are held at every time point at which they may change. Their peak never rises."""

    def __init__(self, problem: Problem, choice: Int) -> None:
        self._start = problem.use_start
        self._usage = saturated(problem.usage, problem.usage_limit)
        times, at = np.unique(problem.use_interval, return_inverse=True)
        self._interval = at.reshape(-1, 2)
        self._uses: dict[int, list[int]] = {}
        self._held = np.zeros(len(times), np.int64)
        for i, v in enumerate(problem.use_node.tolist()):
            self._uses.setdefault(v, []).append(i)
            self._add(self._held, i, int(choice[v]))
        self._peak = self._held.max(initial=0)

    def _add(self, held: Int, i: int, k: int, sign: int = 1) -> None:
        """Adds use i under strategy k of its node."""
        begin, end = self._interval[i]
        held[begin:end] += sign * self._usage[self._start[i] + k]

    def moved(self, nodes: Mapping[int, tuple[int, int]]) -> bool:
        """Moves nodes from one strategy to another, unless the peak would be higher; returns whether it did."""
        held = self._held.copy()
        for v, (now, then) in nodes.items():
            for i in self._uses.get(v, ()):
                self._add(held, i, now, -1)
                self._add(held, i, then)
        fits = held.max(initial=0) <= self._peak
        if fits:
            self._held = held
        return bool(fits)


def _weights(problem: Problem) -> Int:
    """Returns the bytes × equations that every strategy holds."""
    weight = np.zeros(len(problem.cost), np.int64)
    for i, v in enumerate(problem.use_node):
        begin, end = problem.use_interval[i]
        usage = problem.usage[problem.use_start[i] : problem.use_start[i + 1]]
        weight[problem.start[v] : problem.start[v + 1]] += usage * (end - begin)
    return weight


def _cells(problem: Problem, e: int, v: int, choice: Int) -> Int:
    """Returns the cells of edge e, one for every strategy of its end v."""
    u, w = problem.edge_nodes[e]
    rows, columns = (int(problem.start[n + 1] - problem.start[n]) for n in (u, w))
    first = int(problem.edge_start[e])
    if v == u:
        return first + np.arange(rows) * columns + int(choice[w])
    return first + int(choice[u]) * columns + np.arange(columns)


def _hinge_terms(problem: Problem, h: int, strategies: Int, cells: list[Int]) -> Int:
    """Returns what each strategy of a node adds to hinge h, with the cells that it picks."""
    hinge = problem.hinges[h]
    found = _picked(hinge.strategy, hinge.strategy_coef, strategies)
    for at in cells:
        found = found + _picked(hinge.cell, hinge.cell_coef, at)
    return found


def _picked(keys: Int, coef: Int, at: Int) -> Int:
    """Returns the coefficient at each index in `at`, 0 where `keys`, which is sorted, does not hold it."""
    if not len(keys):
        return np.zeros(len(at), np.int64)
    i = np.minimum(np.searchsorted(keys, at), len(keys) - 1)
    return np.where(keys[i] == at, coef[i], 0)
