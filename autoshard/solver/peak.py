r"""The smallest peak: what an infeasible problem would need, from above and from below.

For weights $w_t \ge 0$ with sum 1 the peak of any choice is at least $\min_x \sum_t w_t\,
\mathrm{usage}_t(x)$, a network without rows, which message passing bounds and rounds. The weights
follow the time points that stand out (multiplicative weights: Arora, Hazan & Kale 2012).
"""

from dataclasses import dataclass, replace

import numpy as np

from autoshard.problem.network import INF, Int, Problem
from autoshard.solver.bound import Dual, shifted
from autoshard.solver.incumbent import Incumbent
from autoshard.solver.presolve import presolve
from autoshard.solver.usage import memory_of, peaks_over

ROUNDS, PASSES = 30, 20
EAGERNESS = 4.0  # exponent of a time point's excess over the mean
NEAR = 0.98  # time points so near the peak get a weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The choice of least peak found, its peak, and a lower bound on any choice's."""

    choice: Int
    peak_bytes: int
    bound_bytes: int


def approximate_peak(incumbent: Incumbent) -> Peak | None:
    """Returns a small peak and a bound on the smallest; None if no choice is finite."""
    problem = incumbent.problem
    network = presolve(without_costs(problem))
    if network is None:
        return None
    memory = memory_of(problem, network)
    nothing = memory_of(replace(problem, usage_limit=None), network)
    least = memory.least()
    bound, best, smallest = int(least.max(initial=0)), None, None
    events = np.argsort(-least, kind="stable")[:1]  # none if nothing is ever alive
    weight = np.ones(len(events))
    for _ in range(ROUNDS):
        rows = memory.coefficients(events)
        cost = np.floor(weight @ rows).astype(np.int64)
        weighted, _, shift = shifted(replace(network, cost=cost[None]), ())
        dual = Dual(weighted, nothing, (), shift)
        dual.improve(PASSES)
        bound = max(bound, dual.bound)
        profile = memory.profile(dual.choice)
        peak = int(profile.max(initial=0))
        if dual.failures == 0 and (smallest is None or peak < smallest):
            best, smallest = dual.choice.copy(), peak
        if (smallest is not None and smallest <= bound) or incumbent.left_s() <= 0:
            break
        events, where = np.union1d(events, peaks_over(profile, NEAR * peak, 4)), events
        old, weight = weight, np.full(len(events), 1 / len(events))
        weight[np.searchsorted(events, where)] = old
        weight *= np.exp(EAGERNESS * (profile[events] / profile[events].mean() - 1))
        weight /= weight.sum() * (1 + 1e-9)  # at most 1 in spite of rounding
    if best is None or smallest is None:
        return None
    return Peak(choice=network.expand(best), peak_bytes=smallest, bound_bytes=min(bound, smallest))


def without_costs(problem: Problem) -> Problem:
    """Returns the problem with every finite cost 0 and no hinges."""
    return replace(
        problem,
        cost=np.where(problem.cost >= INF, INF, 0),
        edge_cost=np.where(problem.edge_cost >= INF, INF, 0),
        hinges=(),
        offset=0,
    )
