"""Loop sums' space: a request, and the same with sums over loops' trips that are finished once, after the loop."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from autoshard.costs.strategies import layout_of
from autoshard.ir import accumulation
from autoshard.ir.loop_sums import NAMED, LoopSum, loop_sums, summed_once, together
from autoshard.planner.request import PlanRequest
from autoshard.problem.assignment import Assignment


def splittable(request: PlanRequest) -> tuple[LoopSum, ...]:
    """The sums of a request's program that loops may keep in parts, each into as many as the mesh allows."""
    counts = accumulation.choices(request.target.axes)[1:]
    if not counts or request.gradient_of or request.loop_sums:
        return ()
    return loop_sums(request.traced, counts)


def summing_once(request: PlanRequest, sums: Sequence[LoopSum]) -> PlanRequest:
    """The request for the program that finishes these sums after their loops.

    Raises:
      SpecError: the program has no such sums.
    """
    program = request.program.rewritten(summed_once(request.program.traced, sums), "sums after loops")
    return replace(request, program=program, loop_sums=tuple(sums))


def in_use(request: PlanRequest, sums: Sequence[LoopSum], assignment: Assignment) -> tuple[LoopSum, ...]:
    """The sums of a plan, each with as many parts as lie on different devices; those with one are left out.

    Args:
      request: before any were in parts.
      sums: those that the plan has in parts.
      assignment: of that plan.
    """
    decisions = assignment.decisions
    named = decisions.graph.named
    found: list[LoopSum] = []
    for one in sums:
        value = named.get(NAMED + one.place)
        code = None if value is None else assignment.made(value)
        if value is None or code is None:
            continue
        axes = layout_of(code, decisions.graph.avals[value].ndim, decisions.mesh).dims[0]
        parts = prod(decisions.mesh.shape[axis] for axis in axes)
        if parts > 1:
            found.append(replace(one, parts=parts))
    return together(request.traced, found)
