"""Alike layers: where many values may be kept, they are first chosen alike in layers that are alike.

In an unrolled program no two layers are in equal places: each is at another distance from the ends. What each of 32
layers keeps is then a choice of its own, and of those that fit a search finds a poor one, if any. Where decisions share
a choice whose surroundings are alike within a few steps (`problem/symmetry.py`), the problem is as small as that of a
scan; what is found there begins the search of the next one, in which fewer of them do.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from autoshard.planner.budget import Budget
from autoshard.planner.recomputation_space import RecomputationSpace
from autoshard.problem.formulation import Formulation, cells, formulate
from autoshard.problem.network import Int
from autoshard.problem.symmetry import Folding, fold, foldings
from autoshard.solver import Solution, Status

Solve = Callable[[Formulation, Budget, Sequence[Int]], Solution]

WITHIN = (1, 3, 6)  # steps; in the end, decisions in equal places alone share a choice
MOST_CELLS = 3_000_000  # of moves between decisions: where more were to be priced, the last of these steps are the end
LATER = (16, 32, 64, 128)  # steps at which that is looked at: to tell all places apart may take a second by itself
FIRST_GAP = 0.05  # of a choice that repeats all, which is looked for where layers that are alike do not fit


def begun_alike(
    choices: RecomputationSpace, budget: Budget, solve: Solve, *, unrolled: bool
) -> tuple[Formulation, Sequence[Int]]:
    """The problem of what is kept, and a choice per decision, if one was found, with which its search begins.

    Args:
      choices: the layouts, and what is kept.
      budget: how far to solve the problems before.
      solve: solves one from known choices on.
      unrolled: whether many values may be kept; if not, there is one problem.
    """
    decisions, first = choices.decisions, tuple[Int, ...]()

    def problem(folding: Folding) -> Formulation:
        limit = choices.request.memory_bytes
        return formulate(decisions, choices.resharder, memory_bytes=limit, folding=folding)

    alike: list[Folding] = []
    for folding in foldings(decisions, (*WITHIN, *LATER) if unrolled else ()):
        if folding.within is None or folding.within in WITHIN:
            alike.append(folding)
        elif cells(decisions, folding) > MOST_CELLS:
            break
    for folding in alike[:-1]:
        formulation = problem(folding)
        first = _chosen(formulation, solve(formulation, budget, first)) or first
    if first or not unrolled:
        return problem(alike[-1]), first
    formulation = problem(fold(decisions))
    all_repeated = replace(formulation, problem=choices.repeating(formulation))
    roughly = replace(budget, rel_gap=max(budget.rel_gap, FIRST_GAP))
    return formulation, _chosen(formulation, solve(all_repeated, roughly, ()))


def _chosen(formulation: Formulation, solution: Solution) -> tuple[Int, ...]:
    fits = solution.status not in (Status.INFEASIBLE, Status.UNKNOWN)
    return (formulation.read(solution.choice),) if fits else ()
