"""Small problems: exact reduction, then elimination or a MIP, with memory rows as they bind.

Without memory rows a problem is relaxed: if the optimum of the relaxation fits, it is the optimum. If
not, the time points that overflow become rows and the loop repeats. Every bound on the way is a bound on
the problem.
"""

import numpy as np

from autoshard.problem.network import Int
from autoshard.solver.evaluate import evaluate, usage_profile
from autoshard.solver.exact.bucket_elimination import eliminate_all
from autoshard.solver.exact.mip_process import solve_for, solve_in_time
from autoshard.solver.incumbent import Incumbent
from autoshard.solver.memory import peaks_over
from autoshard.solver.presolve.elimination import Core, reduce
from autoshard.solver.scaling import coarsened, coarsening
from autoshard.solver.solution import Engine


def solve_directly(incumbent: Incumbent, *, patience_s: float) -> Engine | None:
    """Solves the problem in `incumbent`; returns the engine, or None if it gave up.

    It gives up where elimination is impossible and the MIP would have more cells than the tuning allows,
    or its MIPs do not finish within `patience_s` together.
    """
    until_s = incumbent.left_s() - patience_s
    times = np.zeros(0, dtype=np.int64)
    while True:
        core = Core(incumbent.problem, times)
        reduce(core, incumbent.tuning.presolve, incumbent.left_s)
        if not core.feasible:
            incumbent.infeasible = True
            return Engine.CONSISTENCY
        choice, solver = optimum(core, incumbent, incumbent.left_s() - until_s)
        if incumbent.infeasible or choice is None:
            return solver
        if incumbent.offer(choice):
            done = incumbent.closed() or incumbent.gap() <= incumbent.tuning.small_problems.float_gap
            return solver if done else None
        more = np.union1d(times, overflowing(incumbent, choice))
        if len(more) == len(times) or incumbent.left_s() <= 0:
            return None
        times = more


def optimum(core: Core, incumbent: Incumbent, patience_s: float) -> tuple[Int | None, Engine | None]:
    """Solves one relaxation; raises the bound; returns a choice and the engine, None for what there is not."""
    if all(not row.node and not row.edge for row in core.rows):
        if any(row.limit is not None and row.constant > row.limit for row in core.rows):
            incumbent.infeasible = True
            return None, Engine.ELIMINATION
        try:
            position = eliminate_all(core, incumbent.tuning.tables, incumbent.left_s)
        except ValueError:
            incumbent.infeasible = True
            return None, Engine.ELIMINATION
        if position is not None:
            choice = core.expand(position)
            exact = evaluate(incumbent.problem, choice).objective
            if exact is not None:
                incumbent.raise_bound(exact)
            return choice, Engine.ELIMINATION
    program, names = core.program()
    limit_s = incumbent.limit_s(program.cells, patience_s)
    if program.cells > incumbent.tuning.small_problems.mip_cells or limit_s <= 0:
        return None, None
    answer = solve_for(incumbent, program, limit_s=limit_s)
    if answer.infeasible:
        incumbent.infeasible = True
        return None, Engine.MIP
    if answer.bound is not None:
        incumbent.raise_bound(answer.bound)
    if answer.choice is None:
        return None, None
    return core.expand(dict(zip(names, answer.choice.tolist(), strict=True))), Engine.MIP


def overflowing(incumbent: Incumbent, choice: Int) -> Int:
    """Returns the worst time point of each stretch over the limit, of the worst stretches."""
    problem = incumbent.problem
    assert problem.usage_limit is not None
    times, usage = usage_profile(problem, choice)
    return times[peaks_over(usage, problem.usage_limit, incumbent.tuning.small_problems.new_rows)]


def smallest_peak(incumbent: Incumbent) -> bool:
    """Finds the choice of smallest peak of a small problem that no choice satisfies.

    Returns False, having found nothing, where the MIP would have more cells than the tuning allows.
    """
    problem = coarsened(incumbent.problem, coarsening(incumbent.problem))
    times = np.zeros(0, dtype=np.int64)
    while problem.usage_limit is not None and incumbent.left_s() > 0:
        core = Core(problem, times)
        core.make_consistent(list(core.cost))
        if not core.feasible:
            return True
        program, names = core.program()
        if program.cells > incumbent.tuning.small_problems.mip_cells:
            return False
        left_s = incumbent.left_s()
        answer = solve_in_time(
            program,
            left_s=left_s,
            time_limit_s=left_s,
            tuning=incumbent.tuning.mip_process,
            seed=incumbent.seed,
            minimise_peak=True,
        )
        if answer.choice is None:
            return True
        choice = core.expand(dict(zip(names, answer.choice.tolist(), strict=True)))
        incumbent.offer_peak(choice, answer.bound)
        peak_at = evaluate(problem, choice).peak_at
        if peak_at is None or peak_at in times or incumbent.left_s() <= 0:
            return True
        times = np.union1d(times, [peak_at])
    return True
