"""Evaluate: price a choice exactly, in integers. It judges every answer, independently of the engines.

Nothing here shares code with the presolve, message passing or the MIP, so that a bug there cannot hide
itself. Sums run in two halves of 32 bits, so that entries up to 10^18 cannot overflow.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.problem.network import INF, Int, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What a choice costs and uses.

    `objective` is None if the choice contains a forbidden strategy or cell. `peak_bytes` is the
    largest usage at any time point and `peak_at` the first time point that reaches it (None
    without usage).
    """

    objective: int | None
    peak_bytes: int
    peak_at: int | None
    fits: bool  # peak_bytes is within the problem's limit

    @property
    def feasible(self) -> bool:
        return self.fits and self.objective is not None


def evaluate(problem: Problem, choice: NDArray[np.int64]) -> Evaluation:
    """Returns cost and peak of `choice` (one strategy per node, numbered within its node).

    Raises:
      ValueError: `choice` has the wrong length or names a strategy that does not exist.
    """
    choice = np.asarray(choice, dtype=np.int64)
    sizes = np.diff(problem.start)
    if choice.shape != (problem.nodes,):
        raise ValueError(f"choice has shape {choice.shape}; the problem has {problem.nodes} nodes")
    wrong = np.flatnonzero((choice < 0) | (choice >= sizes))
    if len(wrong):
        v = int(wrong[0])
        raise ValueError(f"choice[{v}] = {choice[v]}, but node {v} has {sizes[v]} strategies")

    strategy = problem.start[:-1] + choice
    u, v = problem.edge_nodes[:, 0], problem.edge_nodes[:, 1]
    cell = problem.edge_start[:-1] + choice[u] * sizes[v] + choice[v]
    terms = np.concatenate([problem.cost[strategy], problem.edge_cost[cell]])
    objective = None
    if not (terms >= INF).any():
        objective = exact_sum(terms) + problem.offset
        objective += sum(max(0, value) for value in hinge_values(problem, strategy, cell))

    times, peaks = usage_profile(problem, choice)
    peak = int(peaks.max()) if len(peaks) else 0
    at = int(times[int(peaks.argmax())]) if len(peaks) else None
    fits = problem.usage_limit is None or peak <= problem.usage_limit
    return Evaluation(objective=objective, peak_bytes=peak, peak_at=at, fits=fits)


def exact_sum(terms: Int) -> int:
    """Returns the sum of int64 terms as a Python integer, however large."""
    return (int((terms >> 32).sum()) << 32) + int((terms & 0xFFFFFFFF).sum())


def hinge_values(problem: Problem, strategy: Int, cell: Int) -> list[int]:
    """Returns each hinge's linear value under the chosen strategies and cells (global indices)."""
    values: list[int] = []
    for hinge in problem.hinges:
        on_strategy = hinge.strategy_coef[np.isin(hinge.strategy, strategy)]
        on_cell = hinge.cell_coef[np.isin(hinge.cell, cell)]
        values.append(exact_sum(on_strategy) + exact_sum(on_cell) + hinge.constant)
    return values


def usage_profile(problem: Problem, choice: Int) -> tuple[Int, Int]:
    """Returns the times at which usage can change, and the usage from each on, in bytes.

    An item with an empty interval is never alive.
    """
    begin, end = problem.use_interval[:, 0], problem.use_interval[:, 1]
    chosen = saturated(problem.usage[problem.use_start[:-1] + choice[problem.use_node]], problem.usage_limit)
    alive = begin < end
    times, where = np.unique(np.concatenate([begin[alive], end[alive]]), return_inverse=True)
    change = np.zeros(len(times), dtype=np.int64)
    count = int(alive.sum())
    np.add.at(change, where[:count], chosen[alive])
    np.subtract.at(change, where[count:], chosen[alive])
    return times, np.cumsum(change)


def saturated(usage: Int, limit: int | None) -> Int:
    """Returns usages whose sum fits into 64 bits: as they are or, if too large, cut just above the limit.

    What a choice that fits uses is never cut.
    """
    if limit is None or usage.sum(dtype=float) < 2.0**62:
        return usage
    return np.minimum(usage, limit + 1)


def users_at(problem: Problem, choice: Int, time: int) -> list[tuple[int, int]]:
    """Returns (node, bytes) of what is alive at a time point under `choice`, largest first."""
    alive = (problem.use_interval[:, 0] <= time) & (time < problem.use_interval[:, 1])
    node = problem.use_node[alive]
    used = problem.usage[problem.use_start[:-1][alive] + choice[node]]
    total = np.zeros(problem.nodes, dtype=np.int64)
    np.add.at(total, node, used)
    order = np.argsort(-total, kind="stable")
    return [(int(v), int(total[v])) for v in order[: int((total > 0).sum())]]
