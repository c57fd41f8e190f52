"""Dominance: a strategy goes if another strategy of its node is at least as good in every way.

The other must cost no more by itself and with every strategy of every neighbour, add no more to any hinge,
and use no more in any memory row. Of equals the first stays.
"""

import numpy as np

from autoshard.problem.network import INF, Int, Problem
from autoshard.solver.clock import Clock, endless
from autoshard.solver.kernels import Mask, jit
from autoshard.solver.memory import memory_of
from autoshard.solver.presolve.consistency import settle
from autoshard.solver.presolve.memory_rows import MemoryItems, rows_of
from autoshard.solver.program import Flat, Network
from autoshard.solver.tuning import PresolveTuning


def without_dominated(
    problem: Problem, network: Network, tuning: PresolveTuning, left_s: Clock = endless
) -> Network | None:
    """Returns `network`, to which `problem` was reduced, without dominated strategies; an optimum stays.

    None if no finite choice exists. Stops once `left_s()` is not positive.
    """
    while left_s() > 0:
        rows = rows_of(memory_of(problem, network))
        alive, flat = np.ones(network.start[-1], dtype=bool), network.flat()
        for begin in range(0, network.nodes, tuning.nodes_at_once):
            if left_s() <= 0:
                break
            end = min(begin + tuning.nodes_at_once, network.nodes)
            clear_dominated(begin, end, alive, flat, network.cost, network.edge_cost, rows.memory_items)
        if alive.all():
            return network
        settled = settle(network, alive, left_s)
        if settled is None:
            return None
        network = settled
    return network


@jit
def clear_dominated(
    begin: int, end: int, alive: Mask, flat: Flat, cost: Int, edge_cost: Int, items: MemoryItems
) -> None:
    """Clears `alive` of the strategies of nodes in [begin, end) that another strategy of their node dominates."""
    start = flat.start
    for v in range(begin, end):
        k = start[v + 1] - start[v]
        for j in range(k):
            for i in range(k):
                if i == j or not alive[start[v] + i] or not alive[start[v] + j]:
                    continue
                if _dominates(v, i, j, flat, cost, edge_cost, items):
                    alive[start[v] + j] = False


@jit
def _dominates(v: int, i: int, j: int, flat: Flat, cost: Int, edge_cost: Int, items: MemoryItems) -> bool:
    """Whether strategy i of node v is at least as good as j in every way, and comes first if as good."""
    start, edge_nodes, edge_start = flat.start, flat.edge_nodes, flat.edge_start
    near_start, near = flat.near_start, flat.near
    first, usage = items.first, items.usage
    better = i < j
    for layer in range(len(cost)):
        a, b = cost[layer, start[v] + i], cost[layer, start[v] + j]
        if a > b:
            return False
        better |= a < b
    for at in range(items.start[v], items.start[v + 1]):
        a, b = usage[first[at] + i], usage[first[at] + j]
        if a > b:
            return False
        better |= a < b
    for at in range(near_start[v], near_start[v + 1]):
        e = near[at]
        u, w = edge_nodes[e, 0], edge_nodes[e, 1]
        kw = start[w + 1] - start[w]
        others = kw if v == u else start[u + 1] - start[u]
        for layer in range(len(cost)):
            for x in range(others):
                if v == u:
                    a, b = edge_cost[layer, edge_start[e] + i * kw + x], edge_cost[layer, edge_start[e] + j * kw + x]
                else:
                    a, b = edge_cost[layer, edge_start[e] + x * kw + i], edge_cost[layer, edge_start[e] + x * kw + j]
                if layer == 0 and b >= INF:
                    better |= a < INF
                    continue
                if a > b:
                    return False
                better |= a < b
    return bool(better)
