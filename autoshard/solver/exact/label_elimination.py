r"""Label elimination: the exact engine for narrow networks with hinges and memory rows.

This is bucket elimination in which an entry of a table is not one least cost but a set of *labels*: the
cost, the hinge values and the usages of what was eliminated. One label dominates another of the same entry
if it costs no more at every corner of the multipliers' box (hinges are convex, so corners suffice) and uses
no more in every memory row. A hinge is *closed*, and a cost, once one table holds all that adds to it, so that
only those that are open tell labels apart. A label also goes when message passing proves that no choice
through it costs less than the target. Tables are sparse: they hold rows of positions.

Source: Dechter, "Bucket elimination", 1999; labels as in multi-objective shortest paths (Martins
1984).
"""

from dataclasses import dataclass, replace

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


class Tables:
    """What is left to eliminate, and how much all of it may add to each hinge."""

    def __init__(self, program: Program, tables: list[Labels], room: int, tuning: TableTuning) -> None:
        self.program, self.sizes, self.room, self.tuning = program, program.network.sizes, room, tuning
        self.ends = np.tile(np.array(program.hinge_constant, dtype=np.int64), (2, 1))
        self.all: dict[int, Labels] = {}  # by number, in the order in which they were made
        self.of: dict[int, set[int]] = {}  # node → the tables that hold it
        self.weights: dict[int, tuple[float, int, int]] = {}  # of the nodes that are left
        self.made = 0
        for table in tables:
            self._put(table)

    def _put(self, table: Labels) -> None:
        self.all[self.made] = table
        self.ends += self._ends(table)
        for v in table.scope:
            self.of.setdefault(v, set()).add(self.made)
        self.weights.update({v: self._weight(v) for v in table.scope})
        self.made += 1

    def _take(self, number: int) -> Labels:
        table = self.all.pop(number)
        self.ends -= self._ends(table)
        for v in table.scope:
            self.of[v].remove(number)
        return table

    def _ends(self, table: Labels) -> Int:
        """Returns the least and the most that a table adds to each hinge, of shape (2, hinges)."""
        value = table.value[:, 2 : 2 + self.ends.shape[1]]
        return np.stack([value.min(axis=0), value.max(axis=0)]) if len(value) else np.zeros_like(self.ends)

    def _weight(self, v: int) -> tuple[float, int, int]:
        """Returns the size of the table that eliminating v would make, how many labels go in, and v."""
        mine = [self.all[number] for number in self.of[v]]
        around = set[int]().union(*(table.scope for table in mine)) - {v}
        cells = float(np.prod([float(self.sizes[w]) for w in around]))
        return min(cells, 1e300), sum(len(table.at) for table in mine), v

    def eliminate(self) -> None:
        """Eliminates the node that makes the smallest table.

        Raises TooManyLabelsError where it would hold too many labels, or depend on too many hinges.
        """
        _, _, v = min(self.weights.values())
        effort.spend(steps=10, cells=20 * len(self.weights))
        made = self._joined(sorted(self.of[v]), v)
        del self.weights[v]
        self._put(self._undominated(made))

    def merge(self) -> None:
        """Puts one table in the place of the two smallest, once no node is left; raises as `eliminate` does."""
        made = self._joined(sorted(self.all, key=lambda number: len(self.all[number].at))[:2], None)
        self._put(self._undominated(made))

    def _joined(self, numbers: list[int], v: int | None) -> Labels:
        made = joined([self.all[number] for number in numbers], self.sizes, self.room, self.tuning.labels)
        for number in numbers:
            self._take(number)
        return made if v is None else without(made, v)

    def _undominated(self, table: Labels) -> Labels:
        """Returns a table that all others do not hold without rows that another of the same positions dominates.

        A hinge to which the others add one known amount becomes a cost. Of one that they cannot make negative, or
        positive, one corner suffices.
        """
        hinges = self.ends.shape[1]
        value = table.value.copy()
        cost, of_hinges = value[:, 1], value[:, 2 : 2 + hinges]
        least, most = self.ends
        known = least == most
        cost += np.maximum(0, of_hinges[:, known] + least[known]).sum(axis=1)
        of_hinges[:, known] = -least[known]
        corners = cost[:, None]
        for h in np.flatnonzero(~known).tolist() if len(value) else ():
            of_hinge = of_hinges[:, h]
            if of_hinge.min() + least[h] >= 0:
                corners = corners + of_hinge[:, None]
            elif of_hinge.max() + most[h] > 0 and of_hinge.min() < of_hinge.max():
                corners = np.column_stack([corners, corners + of_hinge[:, None]])
        if corners.shape[1] > 2**self.tuning.label_hinges:
            raise TooManyLabelsError
        against = np.column_stack([corners, value[:, 2 + hinges :]])
        effort.spend(steps=10, cells=20 * against.size)
        group = key_of(table.at, list(range(len(table.scope))), table.scope, self.sizes)
        order = np.lexsort((*against.T[::-1], group))
        keep = skyline(group[order], np.ascontiguousarray(against[order]))
        return replace(table, value=value).kept(order[keep])


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
    tables = Tables(program, initial(program, dual, room), room, tuning)
    try:
        while tables.weights or len(tables.all) > 1:
            if left_s() <= 0:
                return None
            if tables.weights:
                tables.eliminate()
            else:
                tables.merge()
    except TooManyLabelsError:
        return None
    choice = np.zeros(program.network.nodes, dtype=np.int64)
    if not tables.all:
        return LabelAnswer(choice=choice)
    (last,) = tables.all.values()
    usage = last.value[:, 2 + len(program.hinge_constant) :]
    fits = np.flatnonzero((usage + program.base <= program.limit).all(axis=1))
    if not len(fits):
        return LabelAnswer(choice=None)
    last.trace(int(fits[last.value[fits, 1].argmin()]), choice)
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
