r"""The smallest peak: the memory that an infeasible problem would need, from above and from below.

For weights $w_t \ge 0$ with sum 1 the peak of any choice is at least $\min_x \sum_t w_t\,
\mathrm{usage}_t(x)$, a network without rows, which message passing bounds and rounds. The weights
follow the time points that stand out (multiplicative weights: Arora, Hazan & Kale 2012).
"""

from dataclasses import dataclass, replace

import numpy as np

from autoshard.problem.network import INF, Int, Problem
from autoshard.solver.dual.dual import Dual, shifted
from autoshard.solver.evaluate import evaluate
from autoshard.solver.incumbent import Incumbent
from autoshard.solver.memory import Memory, memory_of, peaks_over
from autoshard.solver.presolve.consistency import presolve
from autoshard.solver.presolve.memory_rows import rows_of
from autoshard.solver.primal.local_search import LocalSearch
from autoshard.solver.program import Network

PARTS = 2**40  # the unit of a mean usage is the usage of all strategies together, divided by this


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The choice of the smallest peak found, its peak, and a lower bound on the peak of every choice."""

    choice: Int
    peak_bytes: int
    bound_bytes: int


def approximate_peak(incumbent: Incumbent) -> Peak | None:
    """Returns a small peak and a bound on the smallest; None if no choice is finite."""
    problem, tuning = incumbent.problem, incumbent.tuning.peak
    network = presolve(without_costs(problem), incumbent.left_s)
    if network is None:
        return None
    memory = memory_of(problem, network)
    nothing = memory_of(replace(problem, usage_limit=None), network)
    least = memory.least()
    bound, best, smallest = int(least.max(initial=0)), None, None
    events = np.argsort(-least, kind="stable")[:1]  # none if nothing is ever alive
    weight = np.ones(len(events))
    for _ in range(tuning.rounds):
        rows = memory.coefficients(events)
        cost = np.floor(weight @ rows).astype(np.int64)
        weighted, _, shift = shifted(replace(network, cost=cost[None]), ())
        dual = Dual(weighted, nothing, (), shift, incumbent.tuning.dual)
        dual.improve(tuning.passes, incumbent.left_s)
        bound = max(bound, dual.bound)
        profile = memory.profile(dual.choice)
        peak = int(profile.max(initial=0))
        if (smallest is None or peak < smallest) and is_finite(problem, network, dual.choice):
            best, smallest = dual.choice.copy(), peak
        found = smallest is not None and smallest <= bound
        if found or not len(memory.times) or incumbent.left_s() <= 0:
            break
        events, where = np.union1d(events, peaks_over(profile, tuning.near * peak, tuning.points_at_once)), events
        old, weight = weight, np.full(len(events), 1 / len(events))
        weight[np.searchsorted(events, where)] = old
        weight *= np.exp(tuning.eagerness * (profile[events] / max(profile[events].mean(), 1.0) - 1))
        weight /= weight.sum() * (1 + 1e-9)  # at most 1 in spite of rounding
    if best is None:
        return None
    return lowest(incumbent, network, memory, best, bound)


def peak_from(incumbent: Incumbent, choice: Int) -> Peak:
    """Returns a small peak that the local search reaches from a finite choice of the problem."""
    problem = incumbent.problem
    network = presolve(without_costs(problem), incumbent.left_s)
    assert network is not None  # `choice` is finite
    memory = memory_of(problem, network)
    return lowest(incumbent, network, memory, network.positions(choice), int(memory.least().max(initial=0)))


def lowest(incumbent: Incumbent, network: Network, memory: Memory, choice: Int, bound: int) -> Peak:
    """Returns the lowest peak that is found from a choice of the roots, no choice having less than `bound`."""
    best = lowered(incumbent, network, memory, choice, bound)
    smallest = int(memory.profile(best).max(initial=0))
    return Peak(choice=network.expand(best), peak_bytes=smallest, bound_bytes=min(bound, smallest))


def small_usage(problem: Problem) -> Problem:
    """Returns the problem without a limit in which a choice costs its mean usage over time.

    The mean is cheap to minimise, and a choice that minimises it has a peak that little can lower.
    """
    begin, end = problem.use_interval[:, 0], problem.use_interval[:, 1]
    share = (end - begin) / max(int(end.max(initial=1)) - int(begin.min(initial=0)), 1)
    item = np.repeat(np.arange(len(problem.use_node)), np.diff(problem.use_start))
    strategy = problem.start[problem.use_node[item]] + np.arange(len(problem.usage)) - problem.use_start[item]
    mean = np.bincount(strategy, weights=problem.usage * share[item], minlength=len(problem.cost))
    unit = max(float(mean.sum()) / PARTS, 1.0)
    free = without_costs(problem)
    cost = np.where(free.cost >= INF, INF, np.floor(mean / unit).astype(np.int64))
    return replace(free, cost=cost, usage_limit=None)


def is_finite(problem: Problem, network: Network, choice: Int) -> bool:
    """Whether a choice of the roots contains nothing forbidden."""
    return evaluate(problem, network.expand(choice)).objective is not None


def lowered(incumbent: Incumbent, network: Network, memory: Memory, choice: Int, bound: int) -> Int:
    """Returns a choice whose peak is no higher: what the local search finds under lower and lower limits."""
    idle, tuning = 0, incumbent.tuning
    while idle < tuning.peak.lowerings and incumbent.left_s() > 0:
        peak = int(memory.profile(choice).max(initial=0))
        if peak <= bound:
            break
        limit = bound if idle == 0 else (bound + (2**idle - 1) * peak) >> idle
        if limit >= peak:
            break
        rows = rows_of(replace(memory, limit=limit))
        local = LocalSearch(network, rows, incumbent.seed, tuning.local_search, incumbent.left_s)
        local.go_on_from(choice)
        for _ in range(tuning.peak.turns):
            if local.best is not None or incumbent.left_s() <= 0:
                break
            local.turn()
        if local.best is None:
            idle += 1
        else:
            choice, idle = local.best, 0
    return choice


def without_costs(problem: Problem) -> Problem:
    """Returns the problem with every finite cost 0 and no hinges."""
    return replace(
        problem,
        cost=np.where(problem.cost >= INF, INF, 0),
        edge_cost=np.where(problem.edge_cost >= INF, INF, 0),
        hinges=(),
        offset=0,
    )
