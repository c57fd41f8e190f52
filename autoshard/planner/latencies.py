"""Latencies: of plans that take nearly as long, the one whose small collectives wait for fewer.

Every small collective is priced as if it shared its latency with a bucket of others. A plan may move a vector over axes
over which it moves nothing else, for what little it saves elsewhere; it then waits for a latency that no price says. At
the prices of what a plan merges (`problem.filled_buckets`) another one is found, and taken if it saves far more of
latencies than it loses otherwise. Its objective stays that of the problem, and so does the bound.
"""

from collections.abc import Callable
from math import inf

from autoshard.errors import TimeLimitError
from autoshard.problem.assignment import Assignment
from autoshard.problem.filled_buckets import refilled, unpaid_s
from autoshard.problem.formulation import UNIT_S, Formulation, formulate
from autoshard.problem.network import Int
from autoshard.solver import Solution
from autoshard.solver.evaluate import evaluate

UNPAID = 5e-3  # of a step, what merged collectives may take beyond their prices
MOST_LOST = 0.05  # of a step, at the prices of the problem
TIMES_LOST = 30  # saved of latencies, at least
ATTEMPTS = 4  # at a plan that merges what its prices say


def sharing_latencies(
    formulation: Formulation, choice: Int, solve: Callable[[Formulation, Int], Solution]
) -> tuple[Formulation, Int]:
    """The choice with all latencies the best, of those that were found and lose little; else the given one.

    Args:
      formulation: the problem.
      choice: the best at its prices, as far as it was solved.
      solve: the solution of a problem of the same decisions at other prices, given a choice per decision to begin with.

    Returns:
      The problem at whose prices it was found, and the choice.
    """
    first_s = _objective_s(formulation, choice)
    tried, priced, best = _assigned(formulation, choice), formulation, (formulation, choice)
    whole_s = least_s = first_s + unpaid_s(tried)
    for _ in range(ATTEMPTS):
        if unpaid_s(tried) <= UNPAID * first_s:
            break
        try:
            priced = formulate(refilled(tried), priced.resharder, memory_bytes=formulation.problem.usage_limit)
            found = solve(priced, tried.choice)
        except TimeLimitError:
            break
        if not found.found:
            break
        tried = _assigned(priced, found.choice)
        lost_s = _objective_s(formulation, formulation.write(tried.choice)) - first_s
        step_s = _objective_s(priced, found.choice) + unpaid_s(tried)
        if step_s < least_s and lost_s <= min(MOST_LOST * first_s, (whole_s - step_s) / TIMES_LOST):
            best, least_s = (priced, found.choice), step_s
    return best


def waits_longer(formulation: Formulation, choice: Int, than: Int) -> bool:
    """Whether the step of a choice takes longer than that of another one, with all latencies."""
    this_s, other_s = (_objective_s(formulation, one) + unpaid_s(_assigned(formulation, one)) for one in (choice, than))
    return this_s > (1 + UNPAID) * other_s


def _assigned(formulation: Formulation, choice: Int) -> Assignment:
    return Assignment(decisions=formulation.decisions, resharder=formulation.resharder, choice=formulation.read(choice))


def _objective_s(formulation: Formulation, choice: Int) -> float:
    """Seconds of a step at a problem's prices; infinite where it forbids the choice."""
    objective = evaluate(formulation.problem, choice).objective
    return inf if objective is None else objective * UNIT_S
