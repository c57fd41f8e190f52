"""Lighter: of equally fast choices, one that holds less memory for a shorter time.

The objective is seconds alone, so that a partial sum may be reduced where it is made or
where it is last read at the same price. The compilers reduce as early as they can, and
nobody wants the memory: each node moves to the strategy that keeps the objective and
has the least bytes × equations, until none does.
"""

import numpy as np
from numpy.typing import NDArray

from autoshard.problem.formulation import chosen_cells
from autoshard.problem.network import INF, Problem
from autoshard.solver.evaluate import evaluate, hinge_values

Int = NDArray[np.int64]

_SWEEPS = 8


def lighter(problem: Problem, choice: Int) -> Int:
    """A choice that costs what `choice` costs, and whose peak is no higher.

    Args:
      problem: the network.
      choice: one strategy per node, with a finite objective.
    """
    weight = _weights(problem)
    around: list[list[int]] = [[] for _ in range(problem.nodes)]
    for e, (u, v) in enumerate(problem.edge_nodes):
        around[u].append(e)
        around[v].append(e)
    found = choice.copy()
    value = hinge_values(problem, problem.start[:-1] + choice, chosen_cells(problem, choice))
    for _ in range(_SWEEPS):
        moved = False
        for v in range(problem.nodes):
            first, last = int(problem.start[v]), int(problem.start[v + 1])
            now = int(found[v])
            held = weight[first:last]
            if last - first == 1 or held[now] == held.min():
                continue
            cells = [_cells(problem, e, v, found) for e in around[v]]
            seconds = problem.cost[first:last].copy()
            for at in cells:
                seconds = np.minimum(seconds + problem.edge_cost[at], INF)
            change = [_hinge_terms(problem, h, np.arange(first, last), cells) for h in range(len(problem.hinges))]
            change = [terms - terms[now] for terms in change]
            exposed = sum((np.maximum(x + c, 0) for x, c in zip(value, change, strict=True)), np.zeros_like(seconds))
            total = np.minimum(seconds + exposed, INF)
            best = int(np.where(total == total[now], held, np.iinfo(np.int64).max).argmin())
            if held[best] < held[now]:
                found[v], moved = best, True
                value = [x + int(c[best]) for x, c in zip(value, change, strict=True)]
        if not moved:
            break
    return found if evaluate(problem, found).peak_bytes <= evaluate(problem, choice).peak_bytes else choice


def _weights(problem: Problem) -> Int:
    """Bytes × equations of every strategy."""
    weight = np.zeros(len(problem.cost), np.int64)
    for i, v in enumerate(problem.use_node):
        begin, end = problem.use_interval[i]
        usage = problem.usage[problem.use_start[i] : problem.use_start[i + 1]]
        weight[problem.start[v] : problem.start[v + 1]] += usage * (end - begin)
    return weight


def _cells(problem: Problem, e: int, v: int, choice: Int) -> Int:
    """The cells of edge e for every strategy of its end v."""
    u, w = problem.edge_nodes[e]
    rows, columns = (int(problem.start[n + 1] - problem.start[n]) for n in (u, w))
    first = int(problem.edge_start[e])
    if v == u:
        return first + np.arange(rows) * columns + int(choice[w])
    return first + int(choice[u]) * columns + np.arange(columns)


def _hinge_terms(problem: Problem, h: int, strategies: Int, cells: list[Int]) -> Int:
    """What a node's strategies, with the cells that they pick, add to hinge h."""
    hinge = problem.hinges[h]
    found = _picked(hinge.strategy, hinge.strategy_coef, strategies)
    for at in cells:
        found = found + _picked(hinge.cell, hinge.cell_coef, at)
    return found


def _picked(keys: Int, coef: Int, at: Int) -> Int:
    """The coefficient at each key, 0 where there is none; `keys` is sorted."""
    if not len(keys):
        return np.zeros(len(at), np.int64)
    i = np.minimum(np.searchsorted(keys, at), len(keys) - 1)
    return np.where(keys[i] == at, coef[i], 0)
