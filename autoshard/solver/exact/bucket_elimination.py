"""Bucket elimination: minimise nodes out one by one with tables over all their neighbours.

Exact, and fast while every table stays small (a narrow network). Source: Dechter, "Bucket
elimination", 1999.
"""

import heapq
import math
from functools import reduce

import numpy as np

from autoshard.problem.network import INF, Int
from autoshard.solver.clock import Clock, effort, endless
from autoshard.solver.presolve.elimination import Core, join
from autoshard.solver.tuning import TableTuning


def order_by_size(core: Core, tuning: TableTuning) -> tuple[list[int], int, int]:
    """Returns a greedy order (smallest next table first), its largest table and their sum."""
    near = {v: set(around) for v, around in core.near.items()}
    size = {v: len(cost) for v, cost in core.cost.items()}
    order: list[int] = []
    largest = total = 0

    def cells(v: int) -> int:
        return math.prod(size[w] for w in near[v]) * size[v]

    weight = {v: cells(v) for v in near}
    heap = [(of, v) for v, of in weight.items()]
    heapq.heapify(heap)
    while near:
        of, v = heapq.heappop(heap)
        if weight.get(v) != of:
            continue  # its table has changed since
        largest, total = max(largest, weight[v]), total + weight[v]
        order.append(v)
        if largest > tuning.bucket_cells or total > tuning.bucket_work:
            break
        around = near.pop(v)
        del weight[v]
        for w in around:
            near[w] |= around
            near[w] -= {v, w}
        for w in around:
            weight[w] = cells(w)
            heapq.heappush(heap, (weight[w], w))
    return order, largest, total


def eliminate_all(core: Core, tuning: TableTuning, left_s: Clock = endless) -> dict[int, int] | None:
    """Returns an optimal position for every node of a core without rows on its nodes.

    None if the tables would be too large, or time is over. Raises ValueError if no finite choice exists.
    """
    order, largest, total = order_by_size(core, tuning)
    if largest > tuning.bucket_cells or total > tuning.bucket_work:
        return None
    effort.spend(steps=4 * len(order), cells=4 * total)
    factors: dict[int, tuple[tuple[int, ...], Int]] = {}
    of: dict[int, set[int]] = {v: set() for v in core.cost}

    def add(scope: tuple[int, ...], table: Int) -> None:
        name = len(names)
        names.append(name)
        factors[name] = (scope, table)
        for v in scope:
            of[v].add(name)

    names: list[int] = []
    for v, cost in core.cost.items():
        add((v,), cost)
    for (u, v), table in core.table.items():
        add((u, v), table)

    answers: list[tuple[int, tuple[int, ...], Int]] = []
    for v in order:
        if left_s() <= 0:
            return None
        mine = [factors.pop(name) for name in sorted(of.pop(v))]
        scope = tuple(sorted(set().union(*(s for s, _ in mine)) - {v}))
        axes = (v, *scope)
        total_table = reduce(join, [spread(s, table, axes) for s, table in mine])
        total_table = np.broadcast_to(total_table, [len(core.cost[w]) for w in axes])
        best = total_table.argmin(axis=0)
        least = np.take_along_axis(total_table, best[None], axis=0)[0]
        answers.append((v, scope, best))
        for w in scope:
            of[w] = {name for name in of[w] if name in factors}
        if scope:
            add(scope, least)
        elif int(least) >= INF:
            raise ValueError("no finite choice")
    position: dict[int, int] = {}
    for v, scope, best in reversed(answers):
        position[v] = int(best[tuple(position[w] for w in scope)])
    return position


def spread(scope: tuple[int, ...], table: Int, axes: tuple[int, ...]) -> Int:
    """Returns `table` with its axes in the order of `axes` and length-1 axes for the others."""
    present = [w for w in axes if w in scope]
    table = table.transpose([scope.index(w) for w in present])
    return table.reshape([table.shape[present.index(w)] if w in scope else 1 for w in axes])
