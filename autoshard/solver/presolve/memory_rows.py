"""Memory rows: the time points at which memory can matter, and who uses memory there.

Few time points need a row. One at which the items of another, or fewer, are alive is dominated by it. One
that can never reach the limit needs no row. Items of one root that are alive over the same rows are one
item. An item that uses the same whatever the strategy of its root is a constant. Each step keeps the choices
that fit, exactly.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autoshard.problem.network import Int, Problem
from autoshard.solver.clock import Clock, endless
from autoshard.solver.memory import Memory, memory_of
from autoshard.solver.presolve.consistency import settle
from autoshard.solver.program import Network


class MemoryItems(NamedTuple):
    """Who uses memory in which rows, as compiled loops take it; `Rows` says what the arrays mean."""

    start: Int  # roots + 1; the items of root v are `start[v]:start[v + 1]`
    begin: Int  # items; the first row that an item covers
    end: Int  # items; one after the last
    first: Int  # items; into `usage`
    usage: Int  # bytes; an item uses `usage[first[i] + s]` when its root has strategy s


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Row r asks for `base[r]` + usage of the items that cover it ≤ `limit`.

    Item i covers the rows `[begin[i], end[i])` and uses `usage[first[i] + s]` when its root has
    strategy s. The items of root v are `items[v]:items[v + 1]`.
    """

    events: Int  # each row's event in the `Memory` that it came from
    base: Int
    items: Int  # roots + 1
    begin: Int
    end: Int
    first: Int
    usage: Int
    limit: int

    @property
    def count(self) -> int:
        return len(self.events)

    @property
    def memory_items(self) -> MemoryItems:
        """The items for compiled loops."""
        return MemoryItems(start=self.items, begin=self.begin, end=self.end, first=self.first, usage=self.usage)

    def profile(self, choice: Int) -> Int:
        """Returns every row's usage under a choice of the roots."""
        root = np.repeat(np.arange(len(self.items) - 1), np.diff(self.items))
        used = self.usage[self.first + choice[root]]
        change = np.zeros(self.count + 1, dtype=np.int64)
        np.add.at(change, self.begin, used)
        np.subtract.at(change, self.end, used)
        return self.base + np.cumsum(change)[:-1]


def rows_of(memory: Memory) -> Rows:
    """Returns the rows of `memory` that some choice may break."""
    roots = len(memory.strategies) - 1
    sizes = np.diff(memory.strategies)[memory.root]
    start = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    item = np.repeat(np.arange(len(sizes)), sizes)
    local = np.arange(start[-1]) - start[:-1][item]
    usage = memory.usage[memory.first[item] + memory.follows[memory.follow_first[item] + local]]
    most = np.maximum.reduceat(usage, start[:-1]) if len(sizes) else np.zeros(0, dtype=np.int64)
    uses = most > 0
    begin, end, root, most = memory.begin[uses], memory.end[uses], memory.root[uses], most[uses]
    usage, sizes = usage[uses[item]], sizes[uses]

    kept = undominated(begin, end, len(memory.times))
    begin, end = np.searchsorted(kept, begin), np.searchsorted(kept, end)
    highest = stacked(begin, end, most, len(kept))
    kept, begin, end = without_rows(highest > memory.limit, kept, begin, end)

    # one item per root and interval
    order = np.lexsort((end, begin, root))
    key = np.stack([root, begin, end], axis=1)[order]
    fresh = np.ones(len(order), dtype=bool)
    fresh[1:] = (key[1:] != key[:-1]).any(axis=1)
    group = np.empty(len(order), dtype=np.int64)
    group[order] = np.cumsum(fresh) - 1
    root, begin, end = key[fresh].T
    size = np.diff(memory.strategies)[root]
    first = np.concatenate([[0], np.cumsum(size)]).astype(np.int64)
    total = np.zeros(first[-1], dtype=np.int64)
    old = np.repeat(np.arange(len(sizes)), sizes)
    local = np.arange(len(old)) - (np.cumsum(sizes) - sizes)[old]
    np.add.at(total, first[:-1][group[old]] + local, usage)

    # constants; what is left counts from its least
    low = np.minimum.reduceat(total, first[:-1]) if len(root) else np.zeros(0, dtype=np.int64)
    high = np.maximum.reduceat(total, first[:-1]) if len(root) else low
    base = stacked(begin, end, low, len(kept))
    total -= np.repeat(low, size)
    vary = (high > low) & (begin < end)
    items = np.concatenate([[0], np.cumsum(np.bincount(root[vary], minlength=roots))]).astype(np.int64)
    return Rows(
        events=kept,
        base=base,
        items=items,
        begin=begin[vary],
        end=end[vary],
        first=first[:-1][vary],
        usage=total,
        limit=memory.limit,
    )


def undominated(begin: Int, end: Int, events: int) -> Int:
    """Returns the last event of each run of begins: what is alive at any event is alive at one of them."""
    starts, stops = np.zeros(events + 1, dtype=bool), np.zeros(events + 1, dtype=bool)
    starts[begin], stops[end] = True, True
    changes = np.flatnonzero(starts | stops)
    last_stop = -1
    kept: list[int] = []
    began = False
    for event in changes.tolist():
        if stops[event] and began:
            kept.append(last_stop)
            began = False
        if starts[event]:
            began, last_stop = True, event
    return np.array(kept, dtype=np.int64)


def stacked(begin: Int, end: Int, amount: Int, rows: int) -> Int:
    """Returns the sum over the rows that each amount covers."""
    change = np.zeros(rows + 1, dtype=np.int64)
    np.add.at(change, begin, amount)
    np.subtract.at(change, end, amount)
    return np.cumsum(change)[:-1]


def without_rows(keep: np.ndarray, kept: Int, begin: Int, end: Int) -> tuple[Int, Int, Int]:
    """Returns events and intervals with only the rows in `keep`."""
    before = np.concatenate([[0], np.cumsum(keep)]).astype(np.int64)
    return kept[keep], before[begin], before[end]


def within_memory(problem: Problem, network: Network, left_s: Clock = endless) -> Network | None:
    """Returns `network` without strategies that overflow even if all others use their least.

    None if no choice fits. Stops once `left_s()` is not positive.
    """
    while left_s() > 0:
        rows = rows_of(memory_of(problem, network))
        room = rows.limit - rows.base
        if room.min(initial=0) < 0:
            return None
        root = np.repeat(np.arange(network.nodes), np.diff(rows.items))
        sizes = network.sizes[root]
        item = np.repeat(np.arange(len(root)), sizes)
        local = np.arange(len(item)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        over = rows.usage[rows.first[item] + local] > least_between(room, rows.begin, rows.end)[item]
        alive = np.ones(int(network.start[-1]), dtype=bool)
        alive[(network.start[root[item]] + local)[over]] = False
        if alive.all():
            return network
        settled = settle(network, alive, left_s)
        if settled is None:
            return None
        network = settled
    return network


def least_between(values: Int, begin: Int, end: Int) -> Int:
    """Returns the least of `values[begin[i]:end[i]]` for every i; no range is empty."""
    levels = [values]  # levels[k][r] is the least of the 2^k values from r on
    while 2 ** len(levels) <= len(values):
        half = 2 ** (len(levels) - 1)
        levels.append(np.minimum(levels[-1][:-half], levels[-1][half:]))
    out = np.empty(len(begin), dtype=np.int64)
    octave = np.frexp((end - begin).astype(float))[1] - 1
    for k in np.unique(octave).tolist():
        of = octave == k
        out[of] = np.minimum(levels[k][begin[of]], levels[k][end[of] - 2**k])
    return out
