"""Networks as flat arrays, and programs: a network with the memory rows and the hinges to respect."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autoshard.problem.network import INF, Int

FORBIDDEN = 2 * INF  # any sum that holds one of these, less finite parts, stays at least INF


class Flat(NamedTuple):
    """The shape of a network as compiled loops take it: its first three arrays, and the edges of every node.

    The edges at node v are `near[near_start[v]:near_start[v + 1]]`.
    """

    start: Int  # nodes + 1
    edge_nodes: Int  # edges, 2
    edge_start: Int  # edges + 1
    near_start: Int  # nodes + 1
    near: Int  # 2 · edges


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What is left of a problem, and how the nodes of the problem follow from it.

    The strategies of node v are `start[v]:start[v + 1]`; the cells of edge e, one per pair of strategies of
    its ends, row by row, are `edge_start[e]:edge_start[e + 1]`. Layer 0 of `cost` and `edge_cost` is cost,
    layer 1 + h the coefficients of hinge h. Edges are unique, with `edge_nodes[e, 0] < edge_nodes[e, 1]`.
    Node v of the problem has strategy `follows[follows_start[v] + i]` when its root `root[v]` has strategy i.
    """

    start: Int  # nodes + 1
    cost: Int  # layers, strategies
    edge_nodes: Int  # edges, 2
    edge_start: Int  # edges + 1
    edge_cost: Int  # layers, cells
    root: Int  # problem nodes
    follows_start: Int  # problem nodes + 1
    follows: Int
    offset: int = 0

    @property
    def nodes(self) -> int:
        return len(self.start) - 1

    @property
    def sizes(self) -> Int:
        return np.diff(self.start)

    def flat(self) -> Flat:
        """Returns the network's shape for compiled loops."""
        ends = self.edge_nodes.T.reshape(-1)
        near = np.argsort(ends, kind="stable") % max(len(self.edge_nodes), 1)
        near_start = np.concatenate([[0], np.cumsum(np.bincount(ends, minlength=self.nodes))])
        return Flat(
            start=self.start,
            edge_nodes=self.edge_nodes,
            edge_start=self.edge_start,
            near_start=near_start.astype(np.int64),
            near=near.astype(np.int64),
        )

    def expand(self, choice: Int) -> Int:
        """Returns the problem's choice that follows from a choice of the roots."""
        return self.follows[self.follows_start[:-1] + choice[self.root]]

    def positions(self, choice: Int) -> Int:
        """Returns the roots' strategies that stand for a choice of the problem, −1 where none does."""
        sizes = self.sizes[self.root]
        node = np.repeat(np.arange(len(self.root)), sizes)
        local = np.arange(len(self.follows)) - np.repeat(self.follows_start[:-1], sizes)
        right = np.ones(self.start[-1], dtype=bool)
        right[(self.start[self.root[node]] + local)[self.follows != choice[node]]] = False
        at = np.flatnonzero(right)
        owner = np.searchsorted(self.start, at, side="right") - 1
        out = np.full(self.nodes, -1, dtype=np.int64)
        out[owner] = at - self.start[owner]
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A network with memory rows and hinges.

    Memory row r demands that `base[r]` and the chosen entries of `usage[r]` add up to at most `limit`, in
    bytes. Hinge h costs max(0, `hinge_constant[h]` + the chosen entries of layer 1 + h), in the unit of the
    network's costs.
    """

    network: Network
    usage: Int  # rows, strategies
    base: Int  # rows
    limit: int
    hinge_constant: tuple[int, ...]

    @property
    def cells(self) -> int:
        """The number of finite cells, the size that matters to a MIP."""
        return int((self.network.edge_cost[0] < INF).sum())


def cell_ends(network: Network) -> tuple[Int, Int, Int]:
    """Returns each cell's edge and the (global) strategies of its two ends."""
    sizes = network.sizes
    edge = np.repeat(np.arange(len(network.edge_nodes)), np.diff(network.edge_start))
    local = np.arange(network.edge_cost.shape[1]) - network.edge_start[edge]
    u, w = network.edge_nodes[edge, 0], network.edge_nodes[edge, 1]
    return edge, network.start[u] + local // sizes[w], network.start[w] + local % sizes[w]
