"""Scaling: costs that together are too large for 64 bits are made smaller, so that engines add up without care.

Every entry is divided by a power of two and rounded down. A choice of the coarse problem is a choice of the
problem, and a bound on the coarse problem, shifted back, is a bound on the problem.
"""

from dataclasses import replace

import numpy as np

from autoshard.problem.network import INF, Int, Problem
from autoshard.solver.evaluate import exact_sum

BITS = 59  # 2^59 is less than INF


def coarsening(problem: Problem) -> int:
    """Returns by how many bits to shift costs down, so that no choice's costs add up to INF."""
    total = (
        float(abs(problem.offset))
        + largest(problem.cost, problem.start)
        + largest(problem.edge_cost, problem.edge_start)
    )
    for hinge in problem.hinges:
        parts = (np.abs(hinge.strategy_coef).sum(dtype=float), np.abs(hinge.cell_coef).sum(dtype=float))
        total += sum(parts) + abs(hinge.constant)
    return max(0, int(total).bit_length() - BITS)


def largest(cost: Int, start: Int) -> float:
    """Returns the sum over spans of the largest finite entry, by absolute value."""
    if len(start) < 2:
        return 0.0
    return float(np.maximum.reduceat(np.abs(np.where(cost >= INF, 0, cost)), start[:-1]).sum(dtype=float))


def coarsened(problem: Problem, shift: int) -> Problem:
    """Returns `problem` with every finite cost divided by 2^shift and rounded down."""
    return replace(
        problem,
        cost=np.where(problem.cost >= INF, INF, problem.cost >> shift),
        edge_cost=np.where(problem.edge_cost >= INF, INF, problem.edge_cost >> shift),
        hinges=tuple(
            replace(
                hinge,
                strategy_coef=hinge.strategy_coef >> shift,
                cell_coef=hinge.cell_coef >> shift,
                constant=hinge.constant >> shift,
            )
            for hinge in problem.hinges
        ),
        offset=problem.offset >> shift,
    )


def least(problem: Problem) -> int:
    """Returns the sum of every node's and every edge's least entry: a bound on every choice, at once."""
    parts = ((problem.cost, problem.start), (problem.edge_cost, problem.edge_start))
    return problem.offset + sum(
        exact_sum(np.minimum.reduceat(cost, start[:-1])) for cost, start in parts if len(start) > 1
    )
