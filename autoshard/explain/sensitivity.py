"""Sensitivity: the link rate, memory, batch or sequence at which a decision turns.

One number is changed, and the program planned again: outward by factors of two, then by
bisection. A decision has turned if keeping its layout costs more than the certificates leave
open; a change between layouts that tie is no turn. Numbers of the hardware only change prices. A
batch or a sequence changes the program, so the caller provides the function that plans at
another size.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import gcd

import numpy as np

from autoshard.errors import AutoshardError, InfeasibleError, SpecError
from autoshard.explain.asked import choice_text, decided, solved
from autoshard.explain.explanation import Flip
from autoshard.planner.pipeline import assign
from autoshard.planner.planning_result import PlanningResult
from autoshard.problem.decisions import Decisions
from autoshard.problem.formulation import Formulation, formulate
from autoshard.problem.network import INF, Int
from autoshard.solver import Evaluation, evaluate
from cost_models import Hardware, Machine

FACTOR = 16.0  # how far from its present value a number of the hardware is varied
SIZE_FACTOR = 8.0  # and how far a batch or a sequence
STEPS = 4  # bisections between two powers of two: to 2^(1/16), 4%
LIMIT_S = 6.0  # of the solver, for one value
UNTOLD = 0.02  # gap of a plan that says nothing of its layouts
TIED = 1e-3  # layouts whose steps differ by less are equally good

Varied = Mapping[str, tuple[int, Callable[[int], PlanningResult]]]
"""Name → its present value, and the plan at another one.

The function raises InfeasibleError where nothing fits, and SpecError where there is no
such program, beyond which nothing is tried.
"""


class UnprovenError(AutoshardError):
    """The plan at a value is not proven well enough to tell its layouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """Solutions found so far, of programs with the same decisions: every search begins with them.

    Attributes:
      sizes: the number of choices per decision.
      choices: one per decision.
    """

    sizes: tuple[int, ...]
    choices: list[Int]

    @staticmethod
    def by(planned: PlanningResult) -> "Met":
        """The solution of one plan."""
        return Met(sizes=_sizes(planned.assignment.decisions), choices=[planned.assignment.choice])

    def of(self, formulation: Formulation) -> list[Int]:
        """The solutions for a formulation's problem; none if its decisions are others."""
        return [*map(formulation.write, self.choices)] if _sizes(formulation.decisions) == self.sizes else []

    def add(self, formulation: Formulation, choice: Int) -> None:
        """Adds a solution, a choice per decision, if its decisions are the same."""
        if _sizes(formulation.decisions) == self.sizes:
            self.choices.append(choice)


def _sizes(decisions: Decisions) -> tuple[int, ...]:
    return tuple(map(len, decisions.nodes))


def turning_points(
    planned: PlanningResult,
    hardware: Hardware,
    pattern: str | None = None,
    *,
    at: str | None = None,
    varied: Varied | None = None,
) -> tuple[Flip, ...]:
    """The link rates, the memory and the sizes at which the first decision that is asked for turns.

    Args:
      planned: the plan with its problem.
      hardware: that it was made for.
      pattern: as in `explain`.
      at: as in `explain`.
      varied: sizes of the program, such as its batch.
    """
    layout = _layout(planned, pattern, at)
    met = Met.by(planned)
    found = partial(lies, pattern=pattern, at=at, layout=layout, met=met)
    again = partial(_replan, planned, met=met)
    flips: list[Flip] = []
    for role, link in hardware.chip.links.items():
        key = "one_way_bytes_per_s"
        crossed = any(dim.level == role and dim.size > 1 for dim in hardware.topology.dimensions)
        if key not in link.numbers or not crossed:
            continue

        def rated(rate: float, role: str = role) -> str | None:
            other = hardware.replaced("varied", **{f"{role}__one_way_bytes_per_s": rate})
            machine = other.place(planned.record.mesh.shape)
            return found(partial(again, machine, planned.record.memory.limit_bytes))

        now = link.numbers[key].value
        flips.append(flip(f"{role}.{key}", now, layout, rated, (now / FACTOR, now * FACTOR)))
    limit = float(planned.record.memory.limit_bytes)
    flips.append(
        flip(
            "memory_bytes",
            limit,
            layout,
            lambda nbytes: found(partial(again, None, int(nbytes))),
            (limit / FACTOR, limit),
        )
    )
    for name, (size, plan_at) in (varied or {}).items():
        flips.append(
            flip(
                name,
                size,
                layout,
                lambda value, plan_at=plan_at: found(partial(plan_at, int(value))),
                (size / SIZE_FACTOR, size * SIZE_FACTOR),
                whole=gcd(size, planned.record.mesh.size),
            )
        )
    return tuple(flips)


def flip(
    number: str,
    now: float,
    layout: str,
    layout_at: Callable[[float], str | None],
    bounds: tuple[float, float],
    *,
    whole: int | None = None,
) -> Flip:
    """The value nearest to `now` at which `layout_at` gives another layout (None: nothing fits).

    Args:
      number: name of the varied number.
      now: its present value.
      layout: the layout at `now`.
      layout_at: value → layout; SpecError if the value cannot be tried, UnprovenError if the layout is not known.
      bounds: least and largest value to try.
      whole: every tried value is a multiple of it, or a half of `now`; None for real numbers.
    """
    best: tuple[float, str] | None = None
    tried = [now]
    for step in (0.5, 2.0):
        same, value = now, now * step
        while bounds[0] * 0.999 <= value <= bounds[1] * 1.001 and (whole is None or value == int(value)):
            try:
                found = layout_at(value)
            except (SpecError, UnprovenError):
                break
            tried.append(value)
            if found != layout:
                value, turned = _bisect(same, value, found, layout, layout_at, whole)
                nearer = best is None or abs(np.log(value / now)) < abs(np.log(best[0] / now))
                best = (value, turned or "nothing fits") if nearer else best
                break
            same, value = value, value * step
    return Flip(
        number=number,
        now=now,
        at=None if best is None else best[0],
        layout="" if best is None else best[1],
        range=(min(tried), max(tried)),
    )


def _bisect(
    same: float,
    value: float,
    turned: str | None,
    layout: str,
    layout_at: Callable[[float], str | None],
    whole: int | None,
) -> tuple[float, str | None]:
    """The turn between two values, closer: bisected in the logarithm."""
    for _ in range(STEPS):
        middle = (same * value) ** 0.5
        if whole is not None:
            middle = float(round(middle / whole) * whole)
        if not min(same, value) < middle < max(same, value):
            break
        try:
            found = layout_at(middle)
        except (SpecError, UnprovenError):
            break
        if found == layout:
            same = middle
        else:
            value, turned = middle, found
    return value, turned


def _layout(planned: PlanningResult, pattern: str | None, at: str | None) -> str:
    node = next(iter(decided(planned, pattern, at).values()))[0]
    return choice_text(planned.assignment, node, int(planned.assignment.choice[node]))


def lies(
    plan: Callable[[], PlanningResult], pattern: str | None, at: str | None, layout: str, met: Met | None = None
) -> str | None:
    """How the decision lies in another plan: as before, if that is as good; None if nothing fits.

    Raises:
      UnprovenError: the plan is too far from its bound, or the cost of the previous layout is not known.
    """
    try:
        planned = plan()
    except InfeasibleError:
        return None
    if planned.solution.gap > UNTOLD:
        raise UnprovenError(f"a plan within {planned.solution.gap:.1%} of its bound says nothing of its layouts")
    found = _layout(planned, pattern, at)
    if found == layout:
        return layout
    c, nodes = next(iter(decided(planned, pattern, at).items()))
    problem = planned.formulation.problem
    first, last = int(problem.start[c]), int(problem.start[c + 1])
    kept = [k for k in range(last - first) if choice_text(planned.assignment, nodes[0], k) == layout]
    if not kept:
        return found
    cost = problem.cost.copy()
    cost[first:last] = INF
    cost[first + kept[0]] = problem.cost[first + kept[0]]
    tied = max(TIED, planned.solution.gap)  # layouts within the gap cannot be told apart
    most = planned.solution.objective * (1 + tied)
    kept_problem = replace(problem, cost=cost)
    known = [] if met is None else met.of(planned.formulation)
    if any(_at_most(evaluate(kept_problem, choice), most) for choice in known):
        return layout
    solution = solved(planned, kept_problem, time_limit_s=LIMIT_S, cutoff=lambda: most, known=known)
    if solution.found and solution.objective <= most:
        return layout
    if solution.found and solution.bound < most:
        raise UnprovenError(f"whether {layout} costs more is not proven")
    return found


def _at_most(priced: Evaluation, most: float) -> bool:
    return priced.feasible and priced.objective is not None and priced.objective <= most


def _replan(planned: PlanningResult, machine: Machine | None, memory_bytes: int, *, met: Met) -> PlanningResult:
    """The same program on another machine or in other memory.

    Args:
      planned: the program's plan.
      machine: None for the plan's own.
      memory_bytes: the limit.
      met: solutions found so far; its own is added.

    Raises:
      InfeasibleError: nothing fits.
    """
    space, formulation = planned.space, planned.formulation
    if machine is None:
        formulation = replace(formulation, problem=replace(formulation.problem, usage_limit=memory_bytes))
    else:
        space = space.repriced(machine)
        formulation = formulate(space.decisions, space.resharder, memory_bytes=memory_bytes)
    known = met.of(formulation)
    solution = solved(planned, formulation.problem, time_limit_s=LIMIT_S, known=known)
    if not solution.found:
        raise InfeasibleError(f"nothing fits {memory_bytes / 1e9:.3g} GB per device")
    assignment = assign(formulation, solution)
    met.add(formulation, assignment.choice)
    return replace(planned, space=space, formulation=formulation, solution=solution, assignment=assignment)
