r"""Label elimination: the exact engine for narrow networks with hinges and memory rows.

This is bucket elimination in which an entry of a table is not one least cost but a set of *labels*: the
cost, the hinge values and the usages of what was eliminated. One label dominates another of the same entry
if it costs no more at every corner of the multipliers' box (hinges are convex, so corners suffice) and uses
no more in every memory row. A label also goes when message passing proves that no choice through it costs
less than the target. Tables are sparse: they hold rows of positions.

Source: Dechter, "Bucket elimination", 1999; labels as in multi-objective shortest paths (Martins
1984).
"""

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.problem.network import INF, Int
from autoshard.solver.clock import Clock, effort, endless
from autoshard.solver.dual.dual import Dual
from autoshard.solver.kernels import jit
from autoshard.solver.program import Network, Program
from autoshard.solver.tuning import TableTuning


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """A sparse table: row r holds for positions `at[r]` of the nodes `scope` the sums `value[r]`.

    `value` columns: cost left at the multipliers, cost, hinges, usages. `node`, `position` and
    `parts` (each a table and its row, per row) say what was eliminated into it.
    """

    scope: tuple[int, ...]
    at: Int  # rows, scope
    value: Int  # rows, columns
    node: int | None = None
    position: Int | None = None
    parts: "tuple[tuple[Labels, Int], ...]" = ()

    def kept(self, rows: Int) -> "Labels":
        return Labels(
            scope=self.scope,
            at=self.at[rows],
            value=self.value[rows],
            node=self.node,
            position=None if self.position is None else self.position[rows],
            parts=tuple((part, index[rows]) for part, index in self.parts),
        )

    def trace(self, row: int, choice: Int) -> None:
        """Writes into `choice` the positions that row `row` stands for."""
        stack: list[tuple[Labels, int]] = [(self, row)]
        while stack:
            table, r = stack.pop()
            if table.node is not None and table.position is not None:
                choice[table.node] = table.position[r]
            stack.extend((part, int(index[r])) for part, index in table.parts)


class TooManyLabelsError(Exception):
    """A table would hold more labels than the tuning allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelAnswer:
    """The best choice that the target does not exclude; None if there is none."""

    choice: Int | None


def solve_by_labels(
    program: Program, dual: Dual, room: int, tuning: TableTuning, left_s: Clock = endless
) -> LabelAnswer | None:
    """Solves a program exactly; None if tables grow too large, or time is over.

    Args:
      program: the network and its rows.
      dual: message passing over the program's network at fixed multipliers.
      room: how far from the dual's constant, in the network's unit, a choice may lie.
      tuning: how large tables may grow.
      left_s: how much time is left.
    """
    if len(program.hinge_constant) > tuning.label_hinges:
        return None
    sizes = program.network.sizes
    tables = initial(program, dual, room)
    try:
        while True:
            waiting = {v for table in tables for v in table.scope}
            if not waiting:
                break
            if left_s() <= 0:
                return None
            v = min(waiting, key=lambda node: (weight(node, tables, sizes), node))
            mine = [table for table in tables if v in table.scope]
            tables = [table for table in tables if v not in table.scope]
            tables.append(undominated(without(joined(mine, sizes, room, tuning.labels), v), sizes, program))
        while len(tables) > 1:
            tables.sort(key=lambda table: -len(table.at))
            pair = [tables.pop(), tables.pop()]
            tables.append(undominated(joined(pair, sizes, room, tuning.labels), sizes, program))
    except TooManyLabelsError:
        return None
    choice = np.zeros(program.network.nodes, dtype=np.int64)
    if not tables:
        return LabelAnswer(choice=choice)
    (last,) = tables
    hinges = len(program.hinge_constant)
    total = last.value[:, 1].copy()
    for h, constant in enumerate(program.hinge_constant):
        total += np.maximum(0, last.value[:, 2 + h] + constant)
    fits = (last.value[:, 2 + hinges :] + program.base <= program.limit).all(axis=1)
    if not fits.any():
        return LabelAnswer(choice=None)
    last.trace(int(np.where(fits, total, np.iinfo(np.int64).max).argmin()), choice)
    return LabelAnswer(choice=choice)


def layer_sums(network: Network, choice: Int) -> list[int]:
    """Returns the sum of each layer's chosen entries; all of them are finite."""
    u, w = network.edge_nodes.T
    strategy = network.start[:-1] + choice
    cell = network.edge_start[:-1] + choice[u] * network.sizes[w] + choice[w]
    return [int(a[strategy].sum()) + int(b[cell].sum()) for a, b in zip(network.cost, network.edge_cost, strict=True)]


def objective_of(program: Program, choice: Int) -> int:
    """Returns what a finite choice costs, with hinges, in the network's unit."""
    cost, *hinges = layer_sums(program.network, choice)
    return (
        program.network.offset
        + cost
        + sum(max(0, value + constant) for value, constant in zip(hinges, program.hinge_constant, strict=True))
    )


def initial(program: Program, dual: Dual, room: int) -> list[Labels]:
    """Returns a table per node and per edge."""
    network, left = program.network, dual.residual()
    tables: list[Labels] = []
    for v in range(network.nodes):
        span = slice(int(network.start[v]), int(network.start[v + 1]))
        value = np.concatenate([left.cost[:, span], network.cost[:, span], program.usage[:, span]]).T
        rows = np.flatnonzero((network.cost[0, span] < INF) & (value[:, 0] <= room))
        tables.append(Labels(scope=(v,), at=rows[:, None], value=value[rows]))
    for e, (u, w) in enumerate(network.edge_nodes.tolist()):
        span = slice(int(network.edge_start[e]), int(network.edge_start[e + 1]))
        value = np.concatenate([left.edge_cost[:, span], network.edge_cost[:, span]]).T
        value = np.pad(value, ((0, 0), (0, len(program.usage))))
        rows = np.flatnonzero((network.edge_cost[0, span] < INF) & (value[:, 0] <= room))
        at = np.stack(np.divmod(rows, int(network.sizes[w])), axis=1)
        tables.append(Labels(scope=(u, w), at=at, value=value[rows]))
    return tables


def weight(v: int, tables: list[Labels], sizes: Int) -> tuple[float, int]:
    """Returns the size of the table that eliminating v would make, and how many labels go in."""
    mine = [table for table in tables if v in table.scope]
    around = set[int]().union(*(table.scope for table in mine)) - {v}
    cells = float(np.prod([float(sizes[w]) for w in around]))
    return min(cells, 1e300), sum(len(table.at) for table in mine)


def key_of(at: Int, columns: list[int], scope: tuple[int, ...], sizes: Int) -> Int:
    """Returns a number per row that tells apart the positions in `columns`."""
    key = np.zeros(len(at), dtype=np.int64)
    for column in columns:
        key = key * sizes[scope[column]] + at[:, column]
    return key


def joined(tables: list[Labels], sizes: Int, room: int, most: int) -> Labels:
    """Returns all combinations of rows that agree, within the room.

    Raises TooManyLabelsError where there are more than `most`.
    """
    first, *others = sorted(tables, key=lambda table: len(table.at))
    result = Labels(scope=first.scope, at=first.at, value=first.value, parts=((first, np.arange(len(first.at))),))
    for other in others:
        shared = [w for w in result.scope if w in other.scope]
        mine = key_of(result.at, [result.scope.index(w) for w in shared], result.scope, sizes)
        theirs = key_of(other.at, [other.scope.index(w) for w in shared], other.scope, sizes)
        order = np.argsort(theirs, kind="stable")
        low = np.searchsorted(theirs[order], mine, side="left")
        count = np.searchsorted(theirs[order], mine, side="right") - low
        if count.sum() > most:
            raise TooManyLabelsError
        effort.spend(steps=10, cells=int(count.sum()) * (10 + 2 * result.value.shape[1]))
        a = np.repeat(np.arange(len(mine)), count)
        b = order[np.arange(len(a)) + np.repeat(low - (np.cumsum(count) - count), count)]
        within = result.value[a, 0] + other.value[b, 0] <= room
        a, b = a[within], b[within]
        new = [column for column, w in enumerate(other.scope) if w not in result.scope]
        result = Labels(
            scope=(*result.scope, *(other.scope[column] for column in new)),
            at=np.concatenate([result.at[a], other.at[b][:, new]], axis=1),
            value=result.value[a] + other.value[b],
            parts=(*((part, index[a]) for part, index in result.parts), (other, b)),
        )
    return result


def without(table: Labels, v: int) -> Labels:
    """Returns the table with v's column moved from the scope into the labels."""
    column = table.scope.index(v)
    return Labels(
        scope=table.scope[:column] + table.scope[column + 1 :],
        at=np.delete(table.at, column, axis=1),
        value=table.value,
        node=v,
        position=table.at[:, column],
        parts=table.parts,
    )


def undominated(table: Labels, sizes: Int, program: Program) -> Labels:
    """Returns the table without rows that another row of the same positions dominates."""
    hinges = len(program.hinge_constant)
    cost, of_hinges = table.value[:, 1], table.value[:, 2 : 2 + hinges]
    corners = [
        cost + of_hinges @ np.array(corner, dtype=np.int64) for corner in itertools.product((0, 1), repeat=hinges)
    ]
    against = np.column_stack([*corners, table.value[:, 2 + hinges :]])
    effort.spend(steps=10, cells=20 * against.size)
    group = key_of(table.at, list(range(len(table.scope))), table.scope, sizes)
    order = np.lexsort((*against.T[::-1], group))
    keep = skyline(group[order], np.ascontiguousarray(against[order]))
    return table.kept(order[keep])


@jit
def skyline(group: Int, against: Int) -> NDArray[np.bool_]:
    """Returns which rows no earlier row of their group is at most equal to in every column.

    Rows are sorted by group, then lexicographically, so that whatever dominates comes first.
    """
    keep = np.ones(len(group), dtype=np.bool_)
    kept = np.empty(len(group), dtype=np.int64)
    count = 0
    for i in range(len(group)):
        if i > 0 and group[i] != group[i - 1]:
            count = 0
        for k in range(count):
            better = True
            for column in range(against.shape[1]):
                if against[kept[k], column] > against[i, column]:
                    better = False
                    break
            if better:
                keep[i] = False
                break
        if keep[i]:
            kept[count] = i
            count += 1
    return keep
