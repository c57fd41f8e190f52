"""Cost of keeping: what a plan of a program as it is written loses by what its backward passes find kept.

Three things: memory, which other layouts could have used; in loops, the traffic of stacks; and collectives that move
a kept value to the layout in which it is read. Repeating saves nothing else.
"""

from dataclasses import replace
from math import inf

from autoshard.planner.budget import SETTLE_S, Budget
from autoshard.problem.assignment import Assignment
from autoshard.problem.bill import transfers
from autoshard.problem.decisions import Copy, Decisions
from autoshard.problem.formulation import Formulation
from autoshard.problem.memory_profile import most_peak
from autoshard.solver import Solution, solve


def is_held_back(formulation: Formulation, solution: Solution, budget: Budget, share: float) -> bool:
    """Whether a solution may be slower, by more than a share of its step, than one without a limit of memory."""
    problem = formulation.problem
    if problem.usage_limit is None or most_peak(formulation.decisions) <= problem.usage_limit:
        return False
    least = solution.objective * (1 - share)
    free = solve(
        replace(problem, usage_limit=None),
        time_limit_s=budget.time_limit_s,
        rel_gap=budget.rel_gap,
        settle_s=SETTLE_S,
        cutoff=lambda: least,
        known=[solution.choice],
    )
    return free.objective < least


def most_saved_s(
    formulation: Formulation, solution: Solution, assignment: Assignment, budget: Budget, share: float
) -> float:
    """Seconds that repeating could save a plan at most, but for a share of its step: those that move what it keeps.

    Infinite where loops stack what they keep, or memory holds the plan back: nobody knows how much that costs.
    """
    if formulation.decisions.graph.loops or is_held_back(formulation, solution, budget, share):
        return inf
    return moving_kept_s(assignment)


def moving_kept_s(assignment: Assignment) -> float:
    """Seconds of the collectives that move what the forward pass makes for the backward pass alone."""
    decisions = assignment.decisions
    moved = [row for edge, row in transfers(assignment) if _is_for_backward(decisions, edge.value, edge.v)]
    return sum(row.seconds * row.trips for row in moved)


def _is_for_backward(decisions: Decisions, value: int, node: int) -> bool:
    """Whether a value of the forward pass is moved to a decision for the backward pass alone."""
    graph = decisions.graph
    maker = graph.producers.get(value, (-1, 0))[0]
    if maker < 0 or maker in graph.backward:
        return False
    is_copy = isinstance(decisions.nodes[node], Copy)
    takers = {e for e, _ in graph.consumers.get(value, ()) if is_copy or decisions.node_of[e] == node}
    return bool(takers) and graph.backward.issuperset(takers)
