"""Memory over time, as a function of the strategies of the roots of a network."""

from dataclasses import dataclass

import numpy as np

from autoshard.problem.network import Int, Problem
from autoshard.solver.program import Network


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The items of usage that are ever alive, in compressed time: its points are the distinct events.

    Item i belongs to root `root[i]`, is alive over `[begin[i], end[i])` (event numbers) and uses
    `usage[first[i] + follows[follow_first[i] + s]]` when its root has strategy s.
    """

    times: Int  # events, in the problem's time
    root: Int
    begin: Int
    end: Int
    first: Int
    follow_first: Int
    usage: Int
    follows: Int
    strategies: Int  # start of each root's strategies
    limit: int

    def profile(self, choice: Int) -> Int:
        """Returns usage from each event to the next under a choice of the roots."""
        used = self.usage[self.first + self.follows[self.follow_first + choice[self.root]]]
        change = np.zeros(len(self.times) + 1, dtype=np.int64)
        np.add.at(change, self.begin, used)
        np.subtract.at(change, self.end, used)
        return np.cumsum(change)[:-1]

    def least(self) -> Int:
        """Returns, from each event to the next, the sum of every item's least usage: a lower bound."""
        sizes = np.diff(self.strategies)[self.root]
        item = np.repeat(np.arange(len(self.root)), sizes)
        local = np.arange(len(item)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        used = self.usage[self.first[item] + self.follows[self.follow_first[item] + local]]
        change = np.zeros(len(self.times) + 1, dtype=np.int64)
        if len(used):
            least = np.minimum.reduceat(used, np.cumsum(sizes) - sizes)
            np.add.at(change, self.begin, least)
            np.subtract.at(change, self.end, least)
        return np.cumsum(change)[:-1]

    def coefficients(self, events: Int) -> Int:
        """Returns usage of every root strategy at the given events: (events, strategies)."""
        out = np.zeros((len(events), int(self.strategies[-1])), dtype=np.int64)
        for row, event in zip(out, events.tolist(), strict=True):
            alive = np.flatnonzero((self.begin <= event) & (event < self.end))
            sizes = np.diff(self.strategies)[self.root[alive]]
            item = np.repeat(alive, sizes)
            local = np.arange(len(item)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
            used = self.usage[self.first[item] + self.follows[self.follow_first[item] + local]]
            np.add.at(row, self.strategies[self.root[item]] + local, used)
        return out


def memory_of(problem: Problem, network: Network) -> Memory:
    """Returns the memory of `problem` in terms of `network`, to which it was reduced."""
    alive = np.flatnonzero(problem.use_interval[:, 0] < problem.use_interval[:, 1])
    if problem.usage_limit is None:
        alive = alive[:0]
    times, event = np.unique(problem.use_interval[alive], return_inverse=True)
    event = event.reshape(-1, 2)
    node = problem.use_node[alive]
    return Memory(
        times=times,
        root=network.root[node],
        begin=event[:, 0],
        end=event[:, 1],
        first=problem.use_start[alive],
        follow_first=network.follows_start[node],
        usage=problem.usage,
        follows=network.follows,
        strategies=network.start,
        limit=problem.usage_limit or 0,
    )


def peaks_over(profile: Int, limit: float, most: int) -> Int:
    """Returns the worst event of each stretch over the limit: the worst `most` of them."""
    over = profile > limit
    ends = np.flatnonzero(np.diff(np.concatenate([[False], over, [False]]).astype(np.int8)))
    worst = [int(a + profile[a:b].argmax()) for a, b in zip(ends[::2], ends[1::2], strict=True)]
    worst.sort(key=lambda event: (-profile[event], event))
    return np.array(worst[:most], dtype=np.int64)
