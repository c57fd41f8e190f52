"""Trees: free nodes with one neighbour answer to it alone, and disappear into it.

A node is free if no hinge and no memory row that can be broken depends on its strategy. Given the strategy
of its neighbour, its cheapest answer is part of an optimum. All its other cells are forbidden, so that the
presolve merges it. Whole trees of free nodes go in this way, from their leaves on (Dechter, "Bucket
elimination", 1999, for width one). A free node without neighbours keeps its cheapest strategy.
"""

from dataclasses import replace

import numpy as np

from autoshard.problem.network import INF, Int, Problem
from autoshard.solver.clock import Clock, endless
from autoshard.solver.kernels import Mask, jit
from autoshard.solver.memory import memory_of
from autoshard.solver.presolve.consistency import settle
from autoshard.solver.presolve.memory_rows import rows_of
from autoshard.solver.program import FORBIDDEN, Flat, Network, cell_ends


def without_leaves(problem: Problem, network: Network, left_s: Clock = endless) -> Network | None:
    """Returns `network`, to which `problem` was reduced, without trees of free nodes; an optimum stays.

    None if no finite choice exists.
    """
    table = network.edge_cost[0].copy()
    alive = answers(network.flat(), network.cost[0], table, free_nodes(problem, network))
    if alive.all() and (table == network.edge_cost[0]).all():
        return network
    edge_cost = np.concatenate([table[None], network.edge_cost[1:]])
    return settle(replace(network, edge_cost=edge_cost), alive, left_s)


def free_nodes(problem: Problem, network: Network) -> Mask:
    """Returns which nodes no row of memory and no hinge depends on."""
    free = np.diff(rows_of(memory_of(problem, network)).items) == 0
    if len(network.cost) > 1:
        owner = np.repeat(np.arange(network.nodes), network.sizes)
        free[owner[(network.cost[1:] != 0).any(axis=0)]] = False
        edge, _, _ = cell_ends(network)
        free[network.edge_nodes[edge[(network.edge_cost[1:] != 0).any(axis=0)]]] = False
    return free


@jit
def answers(flat: Flat, cost: Int, table: Int, free: Mask) -> Mask:
    """Forbids in `table` all but the best answers of leaves; returns which strategies stay.

    `free` marks the nodes that may be leaves. A strategy goes only from a node without neighbours.
    """
    start, edge_nodes, edge_start = flat.start, flat.edge_nodes, flat.edge_start
    near_start, near = flat.near_start, flat.near
    n = len(start) - 1
    total = cost.copy()  # with the answers of the leaves that are done
    degree = near_start[1:] - near_start[:-1]
    done = np.zeros(len(edge_nodes), dtype=np.bool_)
    alive = np.ones(len(cost), dtype=np.bool_)
    queue = np.empty(n, dtype=np.int64)
    count = 0
    for v in range(n):
        if free[v] and degree[v] <= 1:
            queue[count] = v
            count += 1
    head = 0
    while head < count:
        v = queue[head]
        head += 1
        if degree[v] == 0:
            best = start[v]
            for s in range(start[v], start[v + 1]):
                if total[s] < total[best]:
                    best = s
            alive[start[v] : start[v + 1]] = False
            alive[best] = True
            continue
        for at in range(near_start[v], near_start[v + 1]):
            e = near[at]
            if done[e]:
                continue
            done[e] = True
            w = edge_nodes[e, 0] + edge_nodes[e, 1] - v
            kv, kw = start[v + 1] - start[v], start[w + 1] - start[w]
            along, across = (1, kv) if v > w else (kw, 1)  # strides of v's strategies and of w's
            for i in range(kw):
                best, low = 0, FORBIDDEN
                for j in range(kv):
                    cell = edge_start[e] + i * across + j * along
                    if table[cell] < INF and total[start[v] + j] + table[cell] < low:
                        low, best = total[start[v] + j] + table[cell], j
                for j in range(kv):
                    if j != best:
                        table[edge_start[e] + i * across + j * along] = FORBIDDEN
                total[start[w] + i] = FORBIDDEN if low >= INF else min(total[start[w] + i] + low, FORBIDDEN)
            degree[w] -= 1
            if free[w] and degree[w] == 1:  # with none, it is in the queue
                queue[count] = w
                count += 1
    return alive
