"""Random small problems of the form of a whole step: what its forward pass makes is kept, or made again.

A layer's value is made in one of a few layouts. What the backward pass reads of it is *recalled* from one of two
sources: a *keep*, which uses memory from the forward pass on, or a *repeat*, which costs what the layer costs and reads
what is recalled of the layer below. Either may be off, and then costs nothing; nothing may be recalled from a source
that is off. Links carry reshardings: each is a knapsack with a limit of its own.
"""

from dataclasses import replace

import numpy as np

from autoshard.problem import INF, Knapsack, Problem, cost_network
from autoshard.problem.network import Hinge, Int

Tables = dict[tuple[int, int], Int]


class Draft:
    """The nodes and tables so far, and what each node uses at each time."""

    def __init__(self, rng: np.random.Generator, times: int) -> None:
        self.rng, self.times = rng, times
        self.costs: list[Int] = []
        self.tables: Tables = {}
        self.usage: list[dict[int, Int]] = [{} for _ in range(times)]

    def node(self, cost: Int, usage: Int, alive: range) -> int:
        """Adds a node that uses memory at the times `alive`."""
        self.costs.append(cost)
        for time in alive:
            self.usage[time][len(self.costs) - 1] = usage
        return len(self.costs) - 1

    def resharding(self, sources: Int, targets: Int) -> Int:
        """Returns a table that is cheap where layouts are equal."""
        far = self.rng.integers(1, 20, (len(sources), len(targets)))
        return np.where(sources[:, None] == targets[None, :], 0, far)


def random_whole_step(rng: np.random.Generator, *, links: int, hinges: int = 0) -> Problem:
    """Returns a whole step of two or three layers, with as many links and hinges."""
    layers = int(rng.integers(2, 4))
    layouts = 2 if layers == 3 else int(rng.integers(2, 4))
    draft = Draft(rng, times=2 * layers)
    codes = np.arange(layouts)
    with_off = np.append(codes, -1)  # the last choice of a keep or a repeat is off
    read: int | None = None  # what is recalled of the layer below
    forward: list[int] = []
    for layer in range(layers):
        size, shards = int(rng.integers(2, 20)), rng.integers(1, 4, layouts)
        work, usage = rng.integers(1, 25, layouts), size // shards
        made = draft.node(work, usage, range(layer, layer + 1))
        if forward:
            draft.tables[forward[-1], made] = draft.resharding(codes, codes)
        forward.append(made)
        back = 2 * layers - 1 - layer
        if layer == layers - 1:  # the backward pass reads it at once
            continue
        off = np.zeros(1, dtype=np.int64)
        keep = draft.node(np.append(rng.integers(0, 2, layouts), off), np.append(usage, off), range(layer, back + 1))
        table = draft.resharding(codes, with_off)
        table[:, -1] = 0
        draft.tables[made, keep] = np.where((table > 0) & (rng.random() < 0.5), INF, table)
        again = draft.node(np.append(work, off), np.append(usage, off), range(back - 1, back + 1))
        if read is not None:
            table = np.concatenate([draft.resharding(codes, codes)] * 2)  # recalled layouts: of the keep, of the repeat
            draft.tables[read, again] = np.concatenate([table, np.zeros((2 * layouts, 1), dtype=np.int64)], axis=1)
        recall = draft.node(rng.integers(0, 3, 2 * layouts), np.tile(usage // 2, 2), range(back, back + 1))
        for source, first in ((keep, 0), (again, layouts)):
            table = np.zeros((layouts + 1, 2 * layouts), dtype=np.int64)
            mine = slice(first, first + layouts)
            table[:-1, mine] = draft.resharding(codes, codes)
            table[-1, mine] = INF
            draft.tables[source, recall] = table
        read = recall
    return finished(draft, links=links, hinges=hinges)


def finished(draft: Draft, *, links: int, hinges: int) -> Problem:
    """Returns a draft as a problem: a memory limit that some choices break, links, hinges over random choices."""
    rng = draft.rng
    most = max(sum(int(used.max()) for used in usage.values()) for usage in draft.usage)
    limit = int(rng.integers(most // 4, most + 1))
    rows = [Knapsack(usage={v: used.tolist() for v, used in usage.items()}, limit=limit) for usage in draft.usage]
    for _ in range(links):
        nodes = np.flatnonzero(rng.random(len(draft.costs)) < 0.4).tolist()
        carried = {v: rng.integers(0, 9, len(draft.costs[v])).tolist() for v in nodes}
        rows.append(Knapsack(usage=carried, limit=int(rng.integers(0, 5 * len(nodes) + 1))))
    problem = cost_network([cost.tolist() for cost in draft.costs], draft.tables, rows)
    made: list[Hinge] = []
    for _ in range(hinges):
        strategy = np.flatnonzero(rng.random(len(problem.cost)) < 0.4)
        cell = np.flatnonzero((rng.random(len(problem.edge_cost)) < 0.2) & (problem.edge_cost < INF))
        made.append(
            Hinge(
                strategy=strategy,
                strategy_coef=-rng.integers(0, 12, len(strategy)),
                cell=cell,
                cell_coef=rng.integers(0, 20, len(cell)),
            )
        )
    return replace(problem, hinges=tuple(made))
