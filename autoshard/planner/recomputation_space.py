"""Recomputation space: layouts, and what is kept for backward passes, as one problem."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import log, sqrt

import numpy as np
from numpy.typing import NDArray

from autoshard.costs.resharding import Resharder
from autoshard.ir import graph as graphs
from autoshard.ir.grouping import lengths
from autoshard.ir.recomputation import NO_OFFLOAD, Offload, Recomputation, offloads_residuals
from autoshard.ir.recomputed import recomputation_of, recomputed, savable
from autoshard.ir.saved_values import CARRIED, ForwardPass, SavedValues
from autoshard.planner.backward_passes import decided_text
from autoshard.planner.record import PlanRecord
from autoshard.planner.request import PlanRequest
from autoshard.planner.search_space import SearchSpace, decide_anew, held
from autoshard.problem.assignment import Assignment
from autoshard.problem.decisions import Decision, Decisions, Equation
from autoshard.problem.formulation import Formulation
from autoshard.problem.network import INF, Problem
from autoshard.problem.symmetry import Folding
from autoshard.problem.whole_step import WholeStep, kept_values, offloaded_values, whole_step

LARGE = 0.05  # of the memory of all devices: carries that are worth keeping fewer of
GROUPS = 2  # of trips, that are tried of each choice of what is kept


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecomputationSpace:
    """A program's decisions with those of what its backward passes find kept."""

    request: PlanRequest
    saved: SavedValues
    whole: WholeStep
    decisions: Decisions
    resharder: Resharder

    @classmethod
    def of(cls, space: SearchSpace, offload: Offload = NO_OFFLOAD) -> "RecomputationSpace | None":
        """The space of a program as it is written; None if it has no backward pass that reads a forward one.

        If `offload` says so, what its loops stack may lie in the host's memory.
        """
        request = space.request
        saved = savable(request.traced, request.remat)
        if not saved.saved:
            return None
        graph = graphs.build(saved.closed, request.target.compiler.platform)
        whole = whole_step(graph, saved, held(space, graph), offload=offloads_residuals(offload))
        decisions = decide_anew(space, whole.graph)
        return cls(request=request, saved=saved, whole=whole, decisions=decisions, resharder=space.resharder)

    def read(self, choice: NDArray[np.int64]) -> Recomputation:
        """What a choice per decision keeps."""
        kept = kept_values(self.whole, self.saved, self.decisions, choice)
        on_host = offloaded_values(self.whole, self.decisions, choice)
        return recomputation_of(self.saved, {*kept, *self.saved.missing(kept)}, self.request.remat, on_host)

    @property
    def everything(self) -> Recomputation:
        """The choice that keeps all it may: where nothing but repetition may be added, the program as it is written."""
        return recomputation_of(self.saved, self.saved.saved, self.request.remat)

    @property
    def little(self) -> tuple[Recomputation, ...]:
        """Choices that keep little: of loops what has to be, and then also of flat passes what their segments need.

        A segment needs what it reads of those before; all else is repeated.
        """
        fewest = self.read(np.array([_first_repeating(decision) for decision in self.decisions.nodes]))
        return tuple(dict.fromkeys((self._least(), fewest)))

    def repeating(self, formulation: Formulation) -> Problem:
        """The problem of the layouts of a program that repeats all that it may: of the formulation's own decisions."""
        problem = formulation.problem
        cost = problem.cost.copy()
        for place, members in enumerate(formulation.folding.members):
            decision = self.decisions.nodes[members[0]]
            if (repeats := _repeats(decision)) is not None:
                cost[problem.start[place] : problem.start[place + 1]][~repeats] = INF
        return replace(problem, cost=cost)

    def groupings(self, chosen: Recomputation | None) -> Iterator[tuple[Recomputation, ...]]:
        """What may be kept where one carry of every few trips is: what repeats least first, each in several groups.

        Everything that is kept as the program is written; what was `chosen`; and of loops nothing but what has to be.
        """
        for kept in dict.fromkeys(filter(None, (self.everything, chosen, self._least()))):
            groups = tuple(replace(kept, offloaded=(), group=group) for group in self._groups(frozenset(kept.kept)))
            if groups:
                yield groups

    def _least(self) -> Recomputation:
        """The choice of what is kept that keeps of loops nothing but what has to be; of flat passes, everything."""
        flat = {v.id for one in self.saved.passes if one.source.is_flat for v in one.values if v.read and not v.free}
        least = {at for at in flat if not at.stacked}
        while missing := self.saved.missing(least):
            least.update(missing)
        return recomputation_of(self.saved, self.saved.stacks(least), self.request.remat)

    def _groups(self, kept: frozenset[str]) -> list[int]:
        """The groups with the smallest peak, of the scan that carries most: what they carry and keep at once.

        In groups of k, L / k carries are kept and k trips' values: least at k² = L · carry / values. There are none
        where all carries together are a small part of the memory, however they are split: without them, as little fits.
        """
        trips = lengths(self.saved.closed)
        loops = [one for one in self.saved.passes if one.source.length in trips]
        deepest = max(loops, key=lambda one: _carried(one) * one.source.length, default=None)
        if deepest is None:
            return []
        length, memory = deepest.source.length, self.request.memory_bytes * self.request.target.axes.size
        if _carried(deepest) * length < LARGE * memory:
            return []
        values = sum(v.aval.nbytes for v in deepest.values if str(v.id) in kept and not v.id.stacked)
        best = sqrt(length * max(_carried(deepest), 1) / max(values, 1))
        divisors = [k for k in range(2, length // 2 + 1) if not length % k]
        return sorted(divisors, key=lambda k: abs(log(k / best)))[:GROUPS]

    def said(self, folding: Folding) -> str:
        """The space, in words, if decisions that are folded share one."""
        ways = "kept here or in the host's memory" if self.whole.offloads else "kept"
        within = folding.within
        alike = "" if within is None else f"; decisions that are alike within {within} steps share one there"
        return (
            f"with {len(self.whole.recalls)} values that backward passes read, each {ways} or repeated from others, "
            f"priced on one graph that has both{alike}"
        )

    def summary(self, record: PlanRecord, assignment: Assignment) -> str:
        """What a plan of the program that keeps what was chosen keeps and repeats, in words."""
        chosen = record.recomputation
        texts = () if chosen is None else chosen.kept
        own = sum("^" not in text for text in texts)
        said = decided_text(assignment, record.cost.step_s, own, 0 if chosen is None else len(chosen.offloaded))
        if chosen is None or chosen.group == 1:
            return said
        return (
            f"{said}; what loops carry is kept once for every {chosen.group} trips, and what else a trip keeps as long "
            f"as its group of {chosen.group} runs, which they run again"
        )


def _repeats(decision: Decision) -> NDArray[np.bool_] | None:
    """Of what may be kept or repeated, the choices (S,) that repeat it, or leave it out; None of all else."""
    if not isinstance(decision, Equation) or not decision.untaken or decision.off is None:
        return None
    return decision.untaken[0] | decision.off


def _first_repeating(decision: Decision) -> int:
    """A choice that leaves nothing out and, of what is kept or repeated, takes what is repeated."""
    repeats, off = _repeats(decision), decision.off
    return 0 if repeats is None or off is None else int(np.flatnonzero(repeats & ~off)[0])


def _carried(one: ForwardPass) -> int:
    """The bytes that a scan carries from trip to trip, which its backward scan reads."""
    return sum(v.aval.nbytes for v in one.values if v.must_keep == CARRIED)


def keeping(request: PlanRequest, chosen: Recomputation) -> PlanRequest:
    """The request for the program that keeps these values for its backward passes.

    Raises:
      SpecError: they do not fit the program.
    """
    program = request.program.rewritten(recomputed(request.program.traced, chosen), "recomputing")
    return replace(request, program=program, recomputation=chosen)
