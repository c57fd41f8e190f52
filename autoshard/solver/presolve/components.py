"""Components: parts of a network that no edge and no memory row joins, each a problem of its own.

The optima of the parts together are an optimum of the whole, and their bounds add up to its bound. A network
with hinges counts as one part, as hinges join most of it.
"""

from dataclasses import dataclass

import numpy as np

from autoshard.problem.network import INF, Int, Problem
from autoshard.solver.kernels import jit
from autoshard.solver.presolve.memory_rows import MemoryItems, Rows, stacked
from autoshard.solver.program import Network


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """Some nodes of a network, in its order, and their problem."""

    nodes: Int
    problem: Problem


def components(network: Network, rows: Rows) -> list[Component]:
    """Returns the parts of a network without hinges, smallest (in cells) first.

    Together they cost what the network costs, less its offset. Rows without items, which no choice
    changes, belong to no part.
    """
    label = labels(network.nodes, network.edge_nodes, rows.memory_items)
    of_item = np.repeat(label, np.diff(rows.items))
    parts = int(label.max(initial=-1)) + 1
    nodes, edges, items = (
        np.split(np.argsort(of, kind="stable"), np.cumsum(np.bincount(of, minlength=parts))[:-1])
        for of in (label, label[network.edge_nodes[:, 0]], of_item)
    )
    owner = np.repeat(np.arange(network.nodes), np.diff(rows.items))
    found = [
        Component(nodes=own, problem=problem_of(network, rows, own, own_edges, own_items, owner[own_items]))
        for own, own_edges, own_items in zip(nodes, edges, items, strict=True)
    ]
    return sorted(found, key=lambda component: len(component.problem.edge_cost))


def problem_of(network: Network, rows: Rows, nodes: Int, edges: Int, items: Int, owner: Int) -> Problem:
    """Returns the problem of some nodes, their edges and their items (of the nodes `owner`).

    Its time points are the rows that the items cover; what those use whatever the choice is an item of
    the first node.
    """
    size, sizes = network.sizes[nodes], network.sizes
    start = offsets(size)
    ends = np.searchsorted(nodes, network.edge_nodes[edges])
    begin, end = rows.begin[items], rows.end[items]
    first = int(begin.min(initial=rows.count))
    alive = stacked(begin - first, end - first, np.ones(len(items), dtype=np.int64), rows.count - first)
    covered = first + np.flatnonzero(alive)
    begin, end = np.searchsorted(covered, begin), np.searchsorted(covered, end)
    every = np.arange(len(covered))
    constant = np.repeat(rows.base[covered], size[0])
    cost, edge_cost = network.cost[0], network.edge_cost[0]
    return Problem(
        start=start,
        cost=np.minimum(cost[spread(network.start[nodes], size)], INF),
        edge_nodes=ends,
        edge_start=offsets(np.diff(network.edge_start)[edges]),
        edge_cost=np.minimum(edge_cost[spread(network.edge_start[edges], np.diff(network.edge_start)[edges])], INF),
        use_node=np.concatenate([np.searchsorted(nodes, owner), np.zeros(len(covered), dtype=np.int64)]),
        use_interval=np.stack([np.concatenate([begin, every]), np.concatenate([end, every + 1])], axis=1),
        use_start=offsets(np.concatenate([sizes[owner], np.full(len(covered), size[0])])),
        usage=np.concatenate([rows.usage[spread(rows.first[items], sizes[owner])], constant]),
        usage_limit=rows.limit if len(covered) else None,
    )


def offsets(sizes: Int) -> Int:
    """Returns where each of consecutive spans begins, and the end."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def spread(first: Int, sizes: Int) -> Int:
    """Returns the numbers of all spans `first[i], …, first[i] + sizes[i] − 1`, one after another."""
    start = offsets(sizes)
    return np.arange(start[-1]) + np.repeat(first - start[:-1], sizes)


@jit
def labels(count: int, edge_nodes: Int, items: MemoryItems) -> Int:
    """Returns a number per node, the same for nodes that edges or rows join, from 0 without gaps."""
    begin, end = items.begin, items.end
    parent = np.arange(count)
    for e in range(len(edge_nodes)):
        _join(parent, int(edge_nodes[e, 0]), int(edge_nodes[e, 1]))
    owner = np.empty(len(begin), dtype=np.int64)
    for v in range(count):
        owner[items.start[v] : items.start[v + 1]] = v
    order = np.argsort(begin)
    last = -1  # the item of a run of overlapping intervals that ends last
    for at in range(len(order)):
        i = order[at]
        if last >= 0 and begin[i] < end[last]:
            _join(parent, int(owner[i]), int(owner[last]))
        if last < 0 or end[i] > end[last]:
            last = i
    label = np.full(count, -1, dtype=np.int64)
    found = 0
    out = np.empty(count, dtype=np.int64)
    for v in range(count):
        root = _root(parent, v)
        if label[root] < 0:
            label[root] = found
            found += 1
        out[v] = label[root]
    return out


@jit
def _root(parent: Int, v: int) -> int:
    """Returns the number that stands for v's part (union–find with path halving: Tarjan & van Leeuwen 1984)."""
    while parent[v] != v:
        parent[v] = parent[parent[v]]
        v = parent[v]
    return v


@jit
def _join(parent: Int, v: int, w: int) -> None:
    parent[_root(parent, v)] = _root(parent, w)
