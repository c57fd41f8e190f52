"""Compiled message passing over a flat network, in integers, so that every bound is exact.

Costs are moved between nodes and edges without changing what any choice costs: the cells of edge e become
`T + A + B` (A per row, B per column), the costs of node v its `potential`. All stay at least zero. What is
taken out is added up in a constant, which is a lower bound at every moment. The order of moves is that of
sequential tree-reweighted message passing (Kolmogorov 2006; in this form, 2015).
"""

from typing import NamedTuple

import numpy as np

from autoshard.problem.network import INF, Int
from autoshard.solver.kernels import jit
from autoshard.solver.program import FORBIDDEN, Flat


class Messages(NamedTuple):
    """What was moved into every edge: A per row, B per column. Both are changed in place."""

    row_start: Int  # edges + 1; into `rows`
    rows: Int  # A: edge e's row i at `rows[row_start[e] + i]`
    column_start: Int  # edges + 1; into `columns`
    columns: Int  # B


class Tables(NamedTuple):
    """The cells T of every edge, with the strategies of its first node as rows, and of its second."""

    straight: Int  # cells
    flipped: Int  # cells


class Visited(NamedTuple):
    """What a sweep knows of strategies, and decides for nodes. All but `cost` is changed in place."""

    cost: Int  # strategies; what each costs by itself
    potential: Int  # strategies; that and what was moved into the node, less what was taken out
    lower: Int  # strategies; the best lower bound seen on any choice that contains the strategy
    least: Int  # nodes; the strategy of least potential on the last visit
    choice: Int  # nodes; a strategy rounded, going forward, in view of those behind


@jit
def transpose(flat: Flat, table: Int) -> Int:
    """Returns every edge's table with its second node's strategies as rows."""
    start, edge_nodes, edge_start = flat.start, flat.edge_nodes, flat.edge_start
    out = np.empty_like(table)
    for e in range(len(edge_nodes)):
        u, w = edge_nodes[e, 0], edge_nodes[e, 1]
        ku, kw = start[u + 1] - start[u], start[w + 1] - start[w]
        base = edge_start[e]
        for i in range(ku):
            for j in range(kw):
                out[base + j * ku + i] = table[base + i * kw + j]
    return out


@jit
def settle_edges(flat: Flat, messages: Messages, table: Int) -> int:
    """Makes the least cell of every edge zero again; returns what was taken out."""
    start, edge_nodes, edge_start = flat.start, flat.edge_nodes, flat.edge_start
    row_start, rows = messages.row_start, messages.rows
    column_start, columns = messages.column_start, messages.columns
    taken = 0
    for e in range(len(edge_nodes)):
        u, w = edge_nodes[e, 0], edge_nodes[e, 1]
        ku, kw = start[u + 1] - start[u], start[w + 1] - start[w]
        low = FORBIDDEN
        for i in range(ku):
            for j in range(kw):
                cell = table[edge_start[e] + i * kw + j]
                low = min(low, cell + rows[row_start[e] + i] + columns[column_start[e] + j])
        for j in range(kw):
            columns[column_start[e] + j] -= low
        taken += int(low)
    return taken


@jit
def residual(flat: Flat, messages: Messages, table: Int) -> Int:
    """Returns the cells as they are after all moves: T + A + B."""
    start, edge_nodes, edge_start = flat.start, flat.edge_nodes, flat.edge_start
    row_start, rows = messages.row_start, messages.rows
    column_start, columns = messages.column_start, messages.columns
    out = np.empty_like(table)
    for e in range(len(edge_nodes)):
        u, w = edge_nodes[e, 0], edge_nodes[e, 1]
        ku, kw = start[u + 1] - start[u], start[w + 1] - start[w]
        for i in range(ku):
            for j in range(kw):
                at = edge_start[e] + i * kw + j
                total = table[at] + rows[row_start[e] + i] + columns[column_start[e] + j]
                out[at] = FORBIDDEN if table[at] >= INF else total
    return out


@jit
def sweep(
    direction: int, flat: Flat, messages: Messages, tables: Tables, visited: Visited, constant: int
) -> tuple[int, int]:
    """Visits every node once: collects what its edges behind hold, and passes it on to those ahead.

    Goes from the first node to the last if `direction` is positive, else back. Changes `messages` and
    `visited` in place. Returns the new constant, and how many strategies of `visited.choice` met a
    forbidden pair.
    """
    start, edge_nodes, edge_start = flat.start, flat.edge_nodes, flat.edge_start
    near_start, near = flat.near_start, flat.near
    row_start, rows = messages.row_start, messages.rows
    column_start, columns = messages.column_start, messages.columns
    table, flipped = tables.straight, tables.flipped
    cost, potential, lower = visited.cost, visited.potential, visited.lower
    least, choice = visited.least, visited.choice
    n = len(start) - 1
    forward = direction > 0
    failures = 0
    widest = 0
    for v in range(n):
        widest = max(widest, start[v + 1] - start[v])
    raw = np.empty(widest, dtype=np.int64)
    value = np.empty(widest, dtype=np.int64)
    for step in range(n):
        v = step if forward else n - 1 - step
        first, k = start[v], start[v + 1] - start[v]
        ahead = 0
        behind = 0
        for i in range(k):
            value[i] = cost[first + i]
        for at in range(near_start[v], near_start[v + 1]):
            e = near[at]
            u, w = edge_nodes[e, 0], edge_nodes[e, 1]
            other = u + w - v
            if (other > v) == forward:
                ahead += 1
                if forward:
                    for i in range(k):
                        value[i] -= rows[row_start[e] + i]
                continue
            behind += 1
            ko = start[other + 1] - start[other]
            base = edge_start[e]
            raw[:k] = FORBIDDEN
            if v == w:
                for i in range(ko):
                    add = rows[row_start[e] + i]
                    cells = table[base + i * k : base + (i + 1) * k]
                    for j in range(k):
                        total = cells[j] + add
                        raw[j] = total if total < raw[j] else raw[j]
                for j in range(k):
                    potential[first + j] += raw[j] + columns[column_start[e] + j]
                    columns[column_start[e] + j] = -raw[j]
                if forward:
                    cells = table[base + choice[u] * k : base + (choice[u] + 1) * k]
                    for j in range(k):
                        value[j] = min(value[j] + cells[j], FORBIDDEN)
            else:
                for j in range(ko):
                    add = columns[column_start[e] + j]
                    cells = flipped[base + j * k : base + (j + 1) * k]
                    for i in range(k):
                        total = cells[i] + add
                        raw[i] = total if total < raw[i] else raw[i]
                for i in range(k):
                    potential[first + i] += raw[i] + rows[row_start[e] + i]
                    rows[row_start[e] + i] = -raw[i]
        low = potential[first]
        best = 0
        for i in range(1, k):
            if potential[first + i] < low:
                low = potential[first + i]
                best = i
        least[v] = best
        constant += int(low)
        for i in range(k):
            potential[first + i] -= low
            if constant + potential[first + i] > lower[first + i]:
                lower[first + i] = constant + potential[first + i]
        if forward:
            best = 0
            for i in range(1, k):
                if value[i] < value[best]:
                    best = i
            choice[v] = best
            failures += value[best] >= INF
        if ahead > 0:
            share = max(ahead, behind)
            for at in range(near_start[v], near_start[v + 1]):
                e = near[at]
                u, w = edge_nodes[e, 0], edge_nodes[e, 1]
                if (u + w - v > v) != forward:
                    continue
                if v == u:
                    for i in range(k):
                        rows[row_start[e] + i] += potential[first + i] // share
                else:
                    for i in range(k):
                        columns[column_start[e] + i] += potential[first + i] // share
            for i in range(k):
                potential[first + i] -= ahead * (potential[first + i] // share)
    return constant, failures
