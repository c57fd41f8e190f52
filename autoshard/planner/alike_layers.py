"""Alike layers: where many values may be kept, they are first chosen alike in layers that are alike.

In an unrolled program no two layers are in equal places: each is at another distance from the ends. What each of 32
layers keeps is then a choice of its own, and of those that fit a search finds a poor one, if any. Where decisions share
a choice whose surroundings are alike within a few steps (`problem/symmetry.py`), the problem is as small as that of a
scan; what is found there begins the search of the next one, in which fewer of them do.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from autoshard.costs.resharding import Resharder
from autoshard.planner.budget import Budget
from autoshard.problem.decisions import Decisions
from autoshard.problem.formulation import Formulation, edge_cells, formulate
from autoshard.problem.network import Int, Problem
from autoshard.problem.symmetry import Folding, foldings
from autoshard.solver import Solution, Status

MANY_KEPT = 100  # values, in a program of unrolled layers
WITHIN = (1, 3, 6)  # steps; in the end, decisions in equal places alone share a choice
MOST_CELLS = 3_000_000  # of moves between decisions: where more were to be priced, the last of these steps are the end
LATER = (16, 32, 64, 128)  # steps at which that is looked at: to tell all places apart may take a second by itself
FIRST_GAP = 0.05  # of a choice that repeats all, which is looked for where layers that are alike do not fit


class Solve(Protocol):
    """Solves a problem within a budget, from known choices per decision on."""

    def __call__(
        self, formulation: Formulation, budget: Budget, known: Sequence[Int], *, settle_s: float = ...
    ) -> Solution: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AlikeLayers:
    """The problems of what is kept, those with the fewest choices first; where few values may be kept, there is one.

    `problems` have no limit of memory; `repeating` is that of a formulation in which all is repeated that may be.
    """

    decisions: Decisions
    resharder: Resharder
    problems: tuple[Formulation, ...]
    repeating: Callable[[Formulation], Problem]

    @classmethod
    def of(
        cls, decisions: Decisions, resharder: Resharder, repeating: Callable[[Formulation], Problem], *, kept: int
    ) -> "AlikeLayers":
        """Those of a program of which so many values may be kept."""
        folded = _foldings(decisions, WITHIN if kept >= MANY_KEPT else ())
        problems = tuple(formulate(decisions, resharder, memory_bytes=None, folding=one) for one in folded)
        return cls(decisions=decisions, resharder=resharder, problems=problems, repeating=repeating)

    @property
    def unrolled(self) -> bool:
        """Whether many values may be kept."""
        return len(self.problems) > 1

    def solved(
        self, limit: int, budget: Budget, solve: Solve, *, last: Budget, settle_s: float
    ) -> tuple[Formulation, Solution]:
        """The last problem and its solution.

        Args:
          limit: bytes of memory per device.
          budget: how far to solve the problems before.
          solve: solves one.
          last: how far to solve the last one.
          settle_s: the work after which that may end.
        """
        *before, end = (_within(problem, limit) for problem in self.problems)
        first: tuple[Int, ...] = ()
        for problem in before:
            first = _chosen(problem, solve(problem, budget, first)) or first
        if before and not first:
            end = _within(self._of_all(), limit)
            all_repeated = replace(end, problem=self.repeating(end))
            roughly = replace(budget, rel_gap=max(budget.rel_gap, FIRST_GAP))
            first = _chosen(end, solve(all_repeated, roughly, ()))
        return end, solve(end, last, first, settle_s=settle_s)

    def _of_all(self) -> Formulation:
        *_, end = self.problems
        return end if end.folding.within is None else formulate(self.decisions, self.resharder, memory_bytes=None)


def _foldings(decisions: Decisions, within: Sequence[int]) -> Iterator[Folding]:
    """Those within so many steps, and the stable one if its problem is not too large."""
    for folding in foldings(decisions, (*within, *LATER) if within else ()):
        if folding.within is None or folding.within in within:
            yield folding
        elif edge_cells(decisions, folding) > MOST_CELLS:
            return


def _within(formulation: Formulation, limit: int) -> Formulation:
    return replace(formulation, problem=replace(formulation.problem, usage_limit=limit))


def _chosen(formulation: Formulation, solution: Solution) -> tuple[Int, ...]:
    fits = solution.status not in (Status.INFEASIBLE, Status.UNKNOWN)
    return (formulation.read(solution.choice),) if fits else ()
