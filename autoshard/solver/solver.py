"""Solve a problem: a small one directly, a large one reduced and then part by part, by search."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from autoshard.problem.network import Int, Problem
from autoshard.solver.clock import compilation
from autoshard.solver.evaluate import saturated
from autoshard.solver.exact.small_problems import smallest_peak, solve_directly
from autoshard.solver.incumbent import NO_BOUND, Cutoff, Incumbent, Progress, no_cutoff
from autoshard.solver.program import Network
from autoshard.solver.scaling import coarsened, coarsening, least
from autoshard.solver.solution import Engine, Solution
from autoshard.solver.tuning import TUNED, SolverTuning


def solve(
    problem: Problem,
    *,
    time_limit_s: float = 60.0,
    rel_gap: float = 0.0,
    seed: int = 0,
    rounds: int | None = None,
    settle_s: float = math.inf,
    cutoff: Cutoff = no_cutoff,
    known: Iterable[Int] = (),
    on_progress: Progress | None = None,
    tuning: SolverTuning = TUNED,
    clock: Callable[[], float] = compilation.worked_s,
) -> Solution:
    """Returns the best choice within the time, with a proven bound.

    Args:
      problem: the network.
      time_limit_s: seconds of `clock`.
      rel_gap: stop once (objective − bound) / objective is at most this.
      seed: of the engines; equal seeds give equal answers under `rounds` or `settle_s`, where no time
        limit bites, however fast the machine is and whatever else it does.
      rounds: the most rounds of the search; None for as many as time allows.
      settle_s: the work after which ten times `rel_gap` will do. Work is counted, in about seconds
        (`clock.Effort`). Where it is finite, a fifth of `time_limit_s` (`StoppingTuning.work`), counted in
        work from the first choice on, ends the solve. The clock does only on machines several times as slow.
      cutoff: the cost from which on a choice is of no use; asked again and again, as it may fall. Once it
        is proven that every choice costs as much, ten times `rel_gap` will do, and after `settle_s` any gap.
      known: choices to begin with, such as solutions of similar problems; each a strategy per node. Those
        that are forbidden here, or do not fit, are passed over.
      on_progress: called with (best, bound, elapsed seconds) whenever either improves; None is what there is
        not yet. If it returns True, the solve ends with the best choice and bound so far.
      tuning: the numbers that trade time for quality.
      clock: the time in seconds, compilation of the solver itself left out; `time.process_time` where
        other processes slow this one down.

    Raises:
      ValueError: what is `known` is no choice of this problem.
    """
    problem = replace(problem, usage=saturated(problem.usage, problem.usage_limit))
    incumbent = Incumbent(
        problem=problem,
        time_limit_s=time_limit_s,
        rel_gap=rel_gap,
        seed=seed,
        rounds=rounds,
        settle_s=settle_s,
        work_s=max(settle_s, tuning.stopping.work * time_limit_s) if math.isfinite(settle_s) else math.inf,
        cutoff=cutoff,
        on_progress=on_progress,
        tuning=tuning,
        clock=clock,
    )
    for choice in known:
        incumbent.offer(whole_numbers(choice))
    incumbent.raise_bound(least(problem))
    if incumbent.closed():
        return incumbent.solution(Engine.KNOWN)
    shift = coarsening(problem)
    solver = solve_coarse(incumbent, shift) if shift else run_engines(incumbent)
    if incumbent.infeasible:
        find_reason(incumbent)
    return incumbent.solution(solver)


def whole_numbers(choice: Int) -> Int:
    """Returns a known choice as an array; refuses what is none."""
    found = np.asarray(choice)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise ValueError(
            f"known={choice!r}: it holds choices, each with the number of a strategy per node: known=[choice]"
        )
    return found


def find_reason(incumbent: Incumbent) -> None:
    """Finds out why no choice satisfies a problem: because of memory, or because costs forbid every choice.

    Memory is the reason if some choice is allowed: the one of the smallest peak found is kept. Costs are
    the reason if it is proven that none is allowed.
    """
    if incumbent.problem.usage_limit is None:
        incumbent.forbidden = True
        return
    from autoshard.solver.primal.smallest_peak import approximate_peak, peak_from, small_usage

    found = approximate_peak(incumbent)
    if found is None:  # what rounds the least usage may be forbidden
        engines = incumbent.tuning.engines
        limit_s = max(incumbent.left_s(), engines.reason_s)
        own = part_of(incumbent, small_usage(incumbent.problem), limit_s, unreported)
        own.rel_gap = engines.reason_gap
        run_engines(own)
        incumbent.forbidden = own.infeasible
        found = None if own.choice is None else peak_from(incumbent, own.choice)
    if found is not None:
        incumbent.offer_peak(found.choice, found.bound_bytes)
        if found.peak_bytes > found.bound_bytes:
            smallest_peak(incumbent)


def unreported(*_: object) -> None:
    """Tells nobody of progress."""


def solve_coarse(incumbent: Incumbent, shift: int) -> Engine:
    """Solves the problem in `incumbent` with costs divided by 2^shift; returns the last engine."""

    def report(*_: object) -> bool:
        if own.bound > NO_BOUND:
            incumbent.raise_bound(own.bound << shift)
        if own.choice is not None:
            incumbent.offer(own.choice)
        return incumbent.stopped

    own = part_of(incumbent, coarsened(incumbent.problem, shift), incumbent.left_s(), report)
    own.work_s = incumbent.to_end_s()
    own.cutoff = lambda: incumbent.cutoff() / 2**shift
    solver = run_engines(own)
    incumbent.infeasible = own.infeasible
    return solver


def part_of(incumbent: Incumbent, problem: Problem, time_limit_s: float, report: Progress) -> Incumbent:
    """Returns an incumbent for another problem, which is solved on the way with the same options."""
    return Incumbent(
        problem=problem,
        time_limit_s=time_limit_s,
        rel_gap=incumbent.rel_gap,
        seed=incumbent.seed,
        rounds=incumbent.rounds,
        settle_s=incumbent.settle_s,
        work_s=incumbent.work_s,
        on_progress=report,
        tuning=incumbent.tuning,
        clock=incumbent.clock,
    )


def run_engines(incumbent: Incumbent) -> Engine:
    """Solves the problem in `incumbent` by one engine after another; returns the last one."""
    problem, engines, solver = incumbent.problem, incumbent.tuning.engines, None
    patience_s = min(engines.patience_s, engines.patience * incumbent.time_limit_s)
    # numba takes its time to load, and small problems do without it
    if problem.hinges and len(problem.edge_cost) > engines.hinged_cells:
        from autoshard.solver.exact.hinges import solve_hinged

        solver = solve_hinged(incumbent, patience_s=patience_s)
    small = len(problem.edge_cost) <= engines.direct_cells and problem.nodes <= engines.direct_nodes
    if solver is None and small and not incumbent.closed():
        solver = solve_directly(incumbent, patience_s=patience_s)
    if solver is not None:  # what is still open is within the tolerance of a MIP; a few exact steps may close it
        incumbent.rounds = min(incumbent.rounds or engines.closing_rounds, engines.closing_rounds)
    if not incumbent.closed() and incumbent.left_s() > 0:
        from autoshard.solver.presolve.reduction import reduced

        network = reduced(problem, incumbent.tuning.presolve, incumbent.left_s)
        if network is None:
            incumbent.infeasible = True
            return Engine.PRESOLVE
        solve_parts(incumbent, network)
    return solver or Engine.SEARCH


def solve_parts(incumbent: Incumbent, network: Network) -> None:
    """Solves the problem in `incumbent`, which was reduced to `network`, each component on its own."""
    if incumbent.left_s() <= 0:
        return
    from autoshard.solver.memory import memory_of
    from autoshard.solver.presolve.components import components
    from autoshard.solver.presolve.memory_rows import rows_of
    from autoshard.solver.search import solve_by_search

    parts = [] if incumbent.problem.hinges else components(network, rows_of(memory_of(incumbent.problem, network)))
    if sum(len(part.problem.cost) > part.problem.nodes for part in parts) <= 1:  # the others have no choice
        solve_by_search(incumbent, network)
        return
    solved: list[Incumbent] = []

    def gather(*_: object) -> bool:
        """Offers the parts' choices together, and the sum of their bounds, once each has one; whether to stop."""
        if len(solved) < len(parts):
            return incumbent.stopped
        if all(own.bound > NO_BOUND for own in solved):
            incumbent.raise_bound(network.offset + sum(own.bound for own in solved))
        position = np.zeros(network.nodes, dtype=np.int64)
        for part, own in zip(parts, solved, strict=True):
            if own.choice is None:
                return incumbent.stopped
            position[part.nodes] = own.choice
        incumbent.offer(network.expand(position))
        return incumbent.stopped

    weight = [len(part.problem.cost) + len(part.problem.edge_cost) for part in parts]
    for k, part in enumerate(parts):
        share = weight[k] / sum(weight[k:])
        own = part_of(incumbent, part.problem, incumbent.left_s() * share, gather)
        own.work_s = incumbent.to_end_s() * share
        solved.append(own)
        run_engines(own)
        if own.infeasible:
            incumbent.infeasible = True
            return
    gather()
