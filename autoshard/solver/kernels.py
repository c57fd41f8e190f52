"""Compiled loops over networks; `program.Network` says what the arrays mean.

Arrays that belong together travel as one NamedTuple, which numba takes apart without cost. Numba caches
compiled code beside this file, so that only the first run pays; the solver's clocks stand still meanwhile.
"""

import logging
from collections.abc import Callable
from typing import NamedTuple, TypeVar, cast

import numba
import numpy as np
from numba.core import event
from numpy.typing import NDArray

from autoshard.problem.network import INF, Int
from autoshard.solver.clock import compilation
from autoshard.solver.program import FORBIDDEN, Flat

Mask = NDArray[np.bool_]
Function = TypeVar("Function", bound=Callable[..., object])


class Merge(NamedTuple):
    """What one pass of the presolve does with every node: it follows a root, which may be the node itself."""

    root: Int  # nodes; the root's number in the new network
    map_start: Int  # nodes + 1
    position: Int  # node v has strategy `position[map_start[v] + i]` when its root has its i-th


class Groups(NamedTuple):
    """The edges of a network by the roots that they join after a pass; group g becomes one edge."""

    order: Int  # the edges, group by group
    start: Int  # groups + 1; into `order`
    ends: Int  # groups, 2; the roots, equal where the edge lies within one root


class Layers(NamedTuple):
    """The entries of a network, costs first, then the coefficients of each hinge."""

    start: Int  # nodes + 1
    cost: Int  # layers, strategies
    edge_start: Int  # edges + 1
    edge_cost: Int  # layers, cells


LONG_S = 2.0  # loading all loops that were compiled before takes less


class _Listener(event.Listener):
    """Tells the clock when numba compiles, or loads what it compiled before; and who waits, where that takes long."""

    def on_start(self, event: object) -> None:
        compilation.begin()
        if compilation.spent_s > LONG_S:
            now = f"compile the solver, once per installation: {compilation.spent_s:.0f} s"
            logging.getLogger("autoshard").debug(now, extra={"now": now})

    def on_end(self, event: object) -> None:
        compilation.end()


event.register("numba:compiler_lock", _Listener())


def jit(function: Function) -> Function:
    """Compiles a function on its first call, once per installation."""
    return cast(Function, numba.njit(cache=True, nogil=True)(function))


@jit
def make_consistent(flat: Flat, table: Int, alive: Mask) -> bool:
    """Clears `alive` of the strategies that have no finite partner on some edge; returns False if a node empties."""
    start, edge_nodes, edge_start = flat.start, flat.edge_nodes, flat.edge_start
    near_start, near = flat.near_start, flat.near
    n = len(start) - 1
    queue = np.empty(n, dtype=np.int64)
    waiting = np.ones(n, dtype=np.bool_)
    for v in range(n):
        queue[v] = v
    head, count = 0, n
    while count > 0:
        v = queue[head]
        head = (head + 1) % n
        count -= 1
        waiting[v] = False
        lost = False
        any_alive = False
        for i in range(start[v], start[v + 1]):
            any_alive |= alive[i]
        for at in range(near_start[v], near_start[v + 1]):
            e = near[at]
            u, w = edge_nodes[e, 0], edge_nodes[e, 1]
            ku, kw = start[u + 1] - start[u], start[w + 1] - start[w]
            base = edge_start[e]
            if u == w:
                for i in range(ku):
                    if alive[start[v] + i] and table[base + i * kw + i] >= INF:
                        alive[start[v] + i] = False
                        lost = True
            elif v == u:
                for i in range(ku):
                    if alive[start[u] + i]:
                        found = False
                        for j in range(kw):
                            if table[base + i * kw + j] < INF and alive[start[w] + j]:
                                found = True
                                break
                        if not found:
                            alive[start[u] + i] = False
                            lost = True
            else:
                for j in range(kw):
                    if alive[start[w] + j]:
                        found = False
                        for i in range(ku):
                            if table[base + i * kw + j] < INF and alive[start[u] + i]:
                                found = True
                                break
                        if not found:
                            alive[start[w] + j] = False
                            lost = True
        any_alive = False
        for i in range(start[v], start[v + 1]):
            any_alive |= alive[i]
        if not any_alive:
            return False
        # neighbours must look again when v lost strategies, also those lost before this call
        if lost:
            for at in range(near_start[v], near_start[v + 1]):
                e = near[at]
                w = edge_nodes[e, 0] + edge_nodes[e, 1] - v
                if not waiting[w]:
                    waiting[w] = True
                    queue[(head + count) % n] = w
                    count += 1
    return True


@jit
def choose_parents(flat: Flat, table: Int, alive: Mask) -> Int:
    """Returns for each node the edge over which it follows its parent, or −1.

    A parent has more alive strategies, or as many and a smaller number, so that there are no cycles.
    """
    start, edge_nodes = flat.start, flat.edge_nodes
    n = len(start) - 1
    size = np.zeros(n, dtype=np.int64)
    for v in range(n):
        for i in range(start[v], start[v + 1]):
            size[v] += alive[i]
    parent = np.full(n, -1, dtype=np.int64)
    for e in range(len(edge_nodes)):
        u, w = edge_nodes[e, 0], edge_nodes[e, 1]
        if u == w:
            continue
        for side in range(2):
            v, p = (w, u) if side == 0 else (u, w)
            if size[p] < size[v] or (size[p] == size[v] and p > v):
                continue
            if parent[v] >= 0:
                old = edge_nodes[parent[v], 0] + edge_nodes[parent[v], 1] - v
                if size[old] < size[p] or (size[old] == size[p] and old <= p):
                    continue
            if _determines(flat, table, alive, e, side):
                parent[v] = e
    return parent


@jit
def _determines(flat: Flat, table: Int, alive: Mask, e: int, side: int) -> bool:
    """Whether each alive row (side 0) or column (side 1) of edge e has exactly one finite cell."""
    start, edge_nodes, edge_start = flat.start, flat.edge_nodes, flat.edge_start
    u, w = edge_nodes[e, 0], edge_nodes[e, 1]
    ku, kw = start[u + 1] - start[u], start[w + 1] - start[w]
    base = edge_start[e]
    if side == 0:
        for i in range(ku):
            if alive[start[u] + i]:
                found = 0
                for j in range(kw):
                    if alive[start[w] + j] and table[base + i * kw + j] < INF:
                        found += 1
                        if found > 1:
                            return False
    else:
        for j in range(kw):
            if alive[start[w] + j]:
                found = 0
                for i in range(ku):
                    if alive[start[u] + i] and table[base + i * kw + j] < INF:
                        found += 1
                        if found > 1:
                            return False
    return True


@jit
def follow(flat: Flat, table: Int, alive: Mask, parent: Int) -> Merge:
    """Returns each node's root, and its strategy for every alive strategy of the root.

    Roots and strategies are numbered as they were before the pass.
    """
    start, edge_nodes, edge_start = flat.start, flat.edge_nodes, flat.edge_start
    n = len(start) - 1
    size = np.zeros(n, dtype=np.int64)
    for v in range(n):
        for i in range(start[v], start[v + 1]):
            size[v] += alive[i]
    root = np.full(n, -1, dtype=np.int64)
    depth_first = np.empty(n, dtype=np.int64)  # parents before children
    count = 0
    stack = np.empty(n, dtype=np.int64)
    for v in range(n):
        top = 0
        w = v
        while root[w] < 0:
            stack[top] = w
            top += 1
            if parent[w] < 0:
                root[w] = w
                break
            w = edge_nodes[parent[w], 0] + edge_nodes[parent[w], 1] - w
        r = root[w]
        while top > 0:
            top -= 1
            root[stack[top]] = r
            depth_first[count] = stack[top]
            count += 1
    map_start = np.zeros(n + 1, dtype=np.int64)
    for v in range(n):
        map_start[v + 1] = map_start[v] + size[root[v]]
    position = np.empty(map_start[n], dtype=np.int64)
    for c in range(n):
        v = depth_first[c]
        if parent[v] < 0:
            k = 0
            for i in range(start[v], start[v + 1]):
                if alive[i]:
                    position[map_start[v] + k] = i - start[v]
                    k += 1
            continue
        e = parent[v]
        p = edge_nodes[e, 0] + edge_nodes[e, 1] - v
        by_rows = edge_nodes[e, 0] == p
        kv, kp = start[v + 1] - start[v], start[p + 1] - start[p]
        answer = np.full(kp, -1, dtype=np.int64)
        for i in range(kp):
            if alive[start[p] + i]:
                for j in range(kv):
                    cell = edge_start[e] + (i * kv + j if by_rows else j * kp + i)
                    if alive[start[v] + j] and table[cell] < INF:
                        answer[i] = j
                        break
        for i in range(size[root[v]]):
            position[map_start[v] + i] = answer[position[map_start[p] + i]]
    return Merge(root, map_start, position)


@jit
def add_nodes(old_start: Int, old_cost: Int, merge: Merge, layers: Layers) -> None:
    """Adds the costs of every node to those of its root in `layers`, in place."""
    root, map_start, position = merge.root, merge.map_start, merge.position
    start, cost = layers.start, layers.cost
    for v in range(len(old_start) - 1):
        r = root[v]
        for layer in range(len(cost)):
            for i in range(start[r + 1] - start[r]):
                at = start[r] + i
                total = cost[layer, at] + old_cost[layer, old_start[v] + position[map_start[v] + i]]
                if layer == 0 and total >= INF:
                    total = FORBIDDEN
                cost[layer, at] = total


@jit
def add_edges(flat: Flat, old_edge_cost: Int, merge: Merge, groups: Groups, layers: Layers) -> None:
    """Adds the cells of every edge to the edge between its roots in `layers`, or to their common root, in place."""
    edge_nodes, old_edge_start, old_start = flat.edge_nodes, flat.edge_start, flat.start
    root, map_start, position = merge.root, merge.map_start, merge.position
    order, group_start, group_ends = groups.order, groups.start, groups.ends
    start, cost, edge_start, edge_cost = layers.start, layers.cost, layers.edge_start, layers.edge_cost
    for g in range(len(group_ends)):
        a, b = group_ends[g, 0], group_ends[g, 1]
        ka, kb = start[a + 1] - start[a], start[b + 1] - start[b]
        for o in range(group_start[g], group_start[g + 1]):
            e = order[o]
            u, w = edge_nodes[e, 0], edge_nodes[e, 1]
            kw = old_start[w + 1] - old_start[w]
            base = old_edge_start[e]
            mu, mw = map_start[u], map_start[w]
            for layer in range(len(cost)):
                if a == b:
                    for i in range(ka):
                        total = cost[layer, start[a] + i]
                        total += old_edge_cost[layer, base + position[mu + i] * kw + position[mw + i]]
                        if layer == 0 and total >= INF:
                            total = FORBIDDEN
                        cost[layer, start[a] + i] = total
                    continue
                straight = root[u] == a
                for i in range(ka):
                    to = edge_start[g] + i * kb
                    for j in range(kb):
                        if straight:
                            cell = base + position[mu + i] * kw + position[mw + j]
                        else:
                            cell = base + position[mu + j] * kw + position[mw + i]
                        total = edge_cost[layer, to + j] + old_edge_cost[layer, cell]
                        if layer == 0 and total >= INF:
                            total = FORBIDDEN
                        edge_cost[layer, to + j] = total


@jit
def separate(edge_nodes: Int, layers: Layers) -> Mask:
    """Moves the edges that are separable in every layer into their nodes, in place; returns which they were."""
    start, cost, edge_start, edge_cost = layers.start, layers.cost, layers.edge_start, layers.edge_cost
    separable = np.zeros(len(edge_nodes), dtype=np.bool_)
    for e in range(len(edge_nodes)):
        u, w = edge_nodes[e, 0], edge_nodes[e, 1]
        if u == w:
            continue
        ku, kw = start[u + 1] - start[u], start[w + 1] - start[w]
        base = edge_start[e]
        good = True
        for layer in range(len(cost)):
            corner = edge_cost[layer, base]
            if layer == 0 and corner >= INF:
                good = False
            for i in range(ku):
                if not good:
                    break
                shift = edge_cost[layer, base + i * kw] - corner
                for j in range(kw):
                    cell = edge_cost[layer, base + i * kw + j]
                    if cell - shift != edge_cost[layer, base + j] or (layer == 0 and cell >= INF):
                        good = False
                        break
            if not good:
                break
        if not good:
            continue
        separable[e] = True
        for layer in range(len(cost)):
            corner = edge_cost[layer, base]
            for i in range(ku):
                total = cost[layer, start[u] + i] + edge_cost[layer, base + i * kw]
                cost[layer, start[u] + i] = FORBIDDEN if layer == 0 and total >= INF else total
            for j in range(kw):
                total = cost[layer, start[w] + j] + edge_cost[layer, base + j] - corner
                cost[layer, start[w] + j] = FORBIDDEN if layer == 0 and total >= INF else total
    return separable


@jit
def compose(root: Int, follows_start: Int, follows: Int, merge: Merge, new_start: Int) -> Int:
    """Returns what the nodes of the problem follow after a pass, from what they followed before it."""
    map_start, position = merge.map_start, merge.position
    out = np.empty(new_start[-1], dtype=np.int64)
    for v in range(len(root)):
        r = root[v]
        for i in range(new_start[v + 1] - new_start[v]):
            out[new_start[v] + i] = follows[follows_start[v] + position[map_start[r] + i]]
    return out
