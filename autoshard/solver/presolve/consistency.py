r"""Presolve: shrink a network by steps that keep its optimum, whatever the memory limit.

A pass begins with arc consistency (Mackworth 1977): strategies without a finite partner on some edge go.
Then it *merges*: where every strategy of w allows exactly one of v, v follows w and disappears into it; nodes of a
single strategy are the simplest case. Parallel edges add up. A separable edge, whose cells are a part of u
plus a part of v, moves into the two nodes. Passes repeat until nothing merges.

Every node of the problem ends as a function of one node that is left, its root, and so does its usage:
memory rows stay exact without any table of usages.
"""

import numpy as np

from autoshard.problem.network import INF, Int, Problem
from autoshard.solver import kernels
from autoshard.solver.clock import Clock, effort, endless
from autoshard.solver.kernels import Groups, Layers, Mask
from autoshard.solver.program import FORBIDDEN, Flat, Network


def load(problem: Problem) -> Network:
    """Returns the problem as a network, unreduced: edges may be parallel, in any order of ends, or loops."""
    layers = 1 + len(problem.hinges)
    cost = np.zeros((layers, len(problem.cost)), dtype=np.int64)
    edge_cost = np.zeros((layers, len(problem.edge_cost)), dtype=np.int64)
    cost[0] = np.where(problem.cost >= INF, FORBIDDEN, problem.cost)
    edge_cost[0] = np.where(problem.edge_cost >= INF, FORBIDDEN, problem.edge_cost)
    for h, hinge in enumerate(problem.hinges, start=1):
        cost[h, hinge.strategy] = hinge.strategy_coef
        edge_cost[h, hinge.cell] = hinge.cell_coef
    sizes = np.diff(problem.start)
    return Network(
        start=problem.start.astype(np.int64),
        cost=cost,
        edge_nodes=problem.edge_nodes.astype(np.int64).reshape(-1, 2),
        edge_start=problem.edge_start.astype(np.int64),
        edge_cost=edge_cost,
        root=np.arange(problem.nodes),
        follows_start=problem.start.astype(np.int64),
        follows=np.arange(len(problem.cost)) - np.repeat(problem.start[:-1], sizes),
        offset=problem.offset,
    )


def presolve(problem: Problem, left_s: Clock = endless) -> Network | None:
    """Returns the reduced network; None if no finite choice exists."""
    return settle(load(problem), left_s=left_s)


def settle(network: Network, alive: Mask | None = None, left_s: Clock = endless) -> Network | None:
    """Returns `network` reduced until no step applies; None if no finite choice exists.

    `alive` marks the strategies to keep, all if None. Once `left_s()` is not positive nothing is merged
    any more, but the network is still made consistent, as message passing needs it.
    """
    mask = network.cost[0] < INF if alive is None else alive & (network.cost[0] < INF)
    rebuilt = False
    while True:
        effort.spend(steps=20, cells=4 * network.edge_cost.size)
        flat = network.flat()
        if not kernels.make_consistent(flat, network.edge_cost[0], mask):
            return None
        if left_s() > 0:
            parent = kernels.choose_parents(flat, network.edge_cost[0], mask)
        else:
            parent = np.full(network.nodes, -1)
        if rebuilt and mask.all() and (parent < 0).all():
            return network  # as the last pass left it
        merged, rebuilt = rebuild(network, flat, mask, parent), True
        if merged.nodes == network.nodes and len(merged.edge_nodes) == len(network.edge_nodes):
            return merged
        network = merged
        mask = np.ones(network.cost.shape[1], dtype=bool)


def rebuild(network: Network, flat: Flat, mask: Mask, parent: Int) -> Network:
    """Returns the network of alive strategies with each node merged into its parent.

    `parent[v]` is the edge over which v follows, or −1 for a root.
    """
    merge = kernels.follow(flat, network.edge_cost[0], mask, parent)
    is_root = parent < 0
    number = np.cumsum(is_root) - 1  # each root's number in the new network
    sizes = np.diff(merge.map_start)[is_root]
    start = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    new = number[merge.root]
    merge = merge._replace(root=new)

    ends = np.sort(new[network.edge_nodes], axis=1) if len(network.edge_nodes) else network.edge_nodes
    key = ends[:, 0] * (len(sizes) + 1) + ends[:, 1]
    order = np.argsort(key, kind="stable")
    first = np.flatnonzero(np.diff(key[order], prepend=-1) != 0)
    group_start = np.concatenate([first, [len(order)]]).astype(np.int64)
    group_ends = ends[order[first]]
    loops = group_ends[:, 0] == group_ends[:, 1]
    cells = np.where(loops, 0, sizes[group_ends[:, 0]] * sizes[group_ends[:, 1]])
    edge_start = np.concatenate([[0], np.cumsum(cells)]).astype(np.int64)

    layers = len(network.cost)
    cost = np.zeros((layers, start[-1]), dtype=np.int64)
    edge_cost = np.zeros((layers, edge_start[-1]), dtype=np.int64)
    entries = Layers(start=start, cost=cost, edge_start=edge_start, edge_cost=edge_cost)
    kernels.add_nodes(network.start, network.cost, merge, entries)
    groups = Groups(order=order, start=group_start, ends=group_ends)
    kernels.add_edges(flat, network.edge_cost, merge, groups, entries)
    separable = kernels.separate(group_ends, entries)
    keep = np.flatnonzero(~separable & ~loops)
    kept_cells = np.repeat(~separable & ~loops, np.diff(edge_start))

    # compose the maps of the problem's nodes
    sizes_of = sizes[new[network.root]]
    follows_start = np.concatenate([[0], np.cumsum(sizes_of)]).astype(np.int64)
    follows = kernels.compose(network.root, network.follows_start, network.follows, merge, follows_start)
    return Network(
        start=start,
        cost=cost,
        edge_nodes=group_ends[keep],
        edge_start=np.concatenate([[0], np.cumsum(cells[keep])]).astype(np.int64),
        edge_cost=np.ascontiguousarray(edge_cost[:, kept_cells]) if not kept_cells.all() else edge_cost,
        root=new[network.root],
        follows_start=follows_start,
        follows=follows,
        offset=network.offset,
    )
