"""Recalls: why a value of the forward pass is kept for the backward one, or made again there.

The problem in which both are choices is solved again: with the choice turned round, and for a value that is
repeated in more and more memory, until it is kept.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autoshard.explain.explanation import Recall
from autoshard.ir.recomputation import WRITTEN
from autoshard.ir.saved_values import ForwardValue, ValueId
from autoshard.planner.budget import SETTLE_S
from autoshard.planner.planning_result import PlanningResult
from autoshard.planner.program import Program
from autoshard.planner.recomputation_space import RecomputationSpace
from autoshard.planner.request import PlanRequest
from autoshard.planner.search_space import build_search_space
from autoshard.problem import memory_profile
from autoshard.problem.assignment import Assignment
from autoshard.problem.decisions import Equation
from autoshard.problem.formulation import UNIT_S, Formulation, formulate
from autoshard.problem.memory_usage import local_bytes
from autoshard.problem.network import INF
from autoshard.report.tables import short_place
from autoshard.solver import Solution, solve

MOST = 4  # values that one question explains
STEPS = 5  # bisections of the memory from which a value is kept
LIMIT_S = 6.0  # of the solver, for one variation
GAP = 5e-3
EVERY = 2**62  # bytes: no limit


def recalls(planned: PlanningResult, at: str) -> tuple[Recall, ...]:
    """Why the values that are made at a source line, and that a backward pass reads, are kept or repeated.

    Others are told if they are kept: the rest of what is read is made from them. There are none for a plan that was
    not asked to decide that.
    """
    request = planned.space.request
    if request.remat == WRITTEN or request.gradient_of:
        return ()
    space = RecomputationSpace.of(build_search_space(_as_traced(request)), request.offload)
    if space is None:
        return ()
    chosen = request.recomputation
    kept = {*map(str, space.saved.saved)} if chosen is None else {*chosen.kept}
    offloaded = () if chosen is None else chosen.offloaded
    values = {v.id: (v, one) for one in space.saved.passes for v in one.values}
    here = {
        e: values[of][0]
        for e, of in space.whole.recalls.items()
        if _is_at(values[of][0], at) and (str(of) in kept or e not in space.whole.graph.optional)
    }
    if not here:
        return ()
    asked = _Asked(space, request.memory_bytes)
    found: list[Recall] = []
    for e, value in list(here.items())[:MOST]:
        step = None if value.step is None else values[value.id][1].steps[value.step]
        what = f"{step.primitive} at {short_place(value.where)}" if step else short_place(value.where)
        one = asked.kept(e, value) if str(value.id) in kept else asked.repeated(e, value)
        found.append(replace(one, what=what, on_host=str(value.id) in offloaded))
    return tuple(found)


def _as_traced(request: PlanRequest) -> PlanRequest:
    """The request for the program before it was written again."""
    traced = request.traced
    if traced.source is None:
        return request
    traced = replace(traced, jaxpr=traced.source, source=None, source_digest=traced.digest)
    return replace(request, program=Program(name=request.name, traced=traced), recomputation=None)


def _is_at(value: ForwardValue, at: str) -> bool:
    return value.where.partition(" (")[0].endswith(at)


@dataclass(slots=True, init=False)
class _Asked:
    """The problem in which values are kept or repeated, and its solutions."""

    space: RecomputationSpace
    formulation: Formulation
    limit: int
    met: dict[int, Solution]  # limit → the best solution within it

    def __init__(self, space: RecomputationSpace, limit: int) -> None:
        self.space, self.limit = space, limit
        self.formulation = formulate(space.decisions, space.resharder, memory_bytes=limit)
        self.met = {}

    def within(self, limit: int) -> Solution:
        """The best solution within a limit."""
        if limit not in self.met:
            self.met[limit] = self.solved(limit, self.formulation.problem.cost)
        return self.met[limit]

    def solved(self, limit: int, cost: NDArray[np.int64]) -> Solution:
        """The best solution within a limit at some costs; the search begins with those that were found before."""
        problem = replace(self.formulation.problem, usage_limit=limit, cost=cost)
        known = [solution.choice for solution in self.met.values() if solution.found]
        return solve(problem, time_limit_s=LIMIT_S, rel_gap=GAP, settle_s=SETTLE_S, known=known)

    def kept(self, e: int, value: ForwardValue) -> Recall:
        """What it costs to repeat a value that is kept."""
        best, other = self.within(self.limit), self.solved(self.limit, self.without(e, kept=True))
        more_s = max(other.objective - best.objective, 0) * UNIT_S if other.found and best.found else None
        return _recall(value, kept=True, nbytes=self.nbytes(value.id, best), more_s=more_s)

    def repeated(self, e: int, value: ForwardValue) -> Recall:
        """What a value that is repeated would take if it were kept, and in how much memory it is."""
        free = self.within(EVERY)
        if not self.keeps(e, free):
            kept = self.solved(self.limit, self.without(e, kept=False))
            kept = kept if kept.found else self.solved(EVERY, self.without(e, kept=False))
            return _recall(value, kept=False, nbytes=self.nbytes(value.id, kept))
        low, high = self.limit, max(self.peak(free), self.limit)
        least = free
        for _ in range(STEPS if high > low else 0):
            middle = (low + high) // 2
            found = self.within(middle)
            if self.keeps(e, found):
                high, least = middle, found
            else:
                low = middle
        return _recall(value, kept=False, nbytes=self.nbytes(value.id, least), kept_from_bytes=high)

    def without(self, e: int, *, kept: bool) -> NDArray[np.int64]:
        """The costs under which a recall does not take what is kept, wherever that lies, or what is repeated."""
        problem, decision, c = self.formulation.problem, *self.decision(e)
        cost = problem.cost.copy()
        first = int(problem.start[c])
        for k in range(len(decision)):
            if bool(decision.untaken[-1][k]) == kept and not (decision.off is not None and decision.off[k]):
                cost[first + k] = INF
        return cost

    def decision(self, e: int) -> tuple[Equation, int]:
        """The decision of a recall, whose last operand is what is repeated, and its class."""
        node = self.space.decisions.node_of[e]
        decision = self.space.decisions.nodes[node]
        assert isinstance(decision, Equation)  # a recall chooses between operands
        return decision, int(self.formulation.folding.class_of[node])

    def keeps(self, e: int, solution: Solution) -> bool:
        """Whether a recall takes what is kept."""
        if not solution.found:
            return False
        decision, c = self.decision(e)
        pick = int(solution.choice[c])
        return bool(decision.untaken[-1][pick]) and not (decision.off is not None and decision.off[pick])

    def assignment(self, solution: Solution) -> Assignment:
        choice = self.formulation.read(solution.choice)
        return Assignment(decisions=self.space.decisions, resharder=self.space.resharder, choice=choice)

    def peak(self, solution: Solution) -> int:
        found = self.assignment(solution)
        return memory_profile.peak(found.decisions, found.choice)[0]

    def nbytes(self, of: ValueId, solution: Solution) -> int | None:
        """What keeping a value takes on one device, in the layout of a solution that keeps it."""
        if not solution.found:
            return None
        found, graph = self.assignment(solution), self.space.decisions.graph
        total = 0
        for e, value in self.space.whole.keeps.items():
            here = value == of and e not in self.space.whole.offloads
            code = found.made(graph.results[e][0]) if here else None
            if code is not None:
                aval = graph.avals[graph.results[e][0]]
                total += int(local_bytes(aval, np.array([code]), self.space.decisions.mesh)[0])
        return total or None


def _recall(
    value: ForwardValue,
    *,
    kept: bool,
    nbytes: int | None,
    more_s: float | None = None,
    kept_from_bytes: int | None = None,
) -> Recall:
    return Recall(
        what=short_place(value.where),
        value=str(value.aval),
        trips=value.trips,
        kept=kept,
        nbytes=nbytes,
        more_s=more_s,
        kept_from_bytes=kept_from_bytes,
    )
