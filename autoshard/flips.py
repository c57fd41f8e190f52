"""Flips: at which link rate, memory, batch or sequence a decision turns.

One number is changed, and the program planned again: outward by factors of two, then by
bisection. A decision has turned where keeping its layout costs more than the certificate
can tell apart; of layouts that tie none is a turn. Numbers of the hardware change prices
alone. A batch or a sequence changes the program, so whoever asks says how it is planned
at another one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import Any

import numpy as np

from autoshard import meshes
from autoshard.errors import InfeasibleError, SpecError
from autoshard.explain import choice_text, decided, solved
from autoshard.planner import SETTLE_S, Planned
from autoshard.problem.assignment import Assignment
from autoshard.problem.decide import decide
from autoshard.problem.formulation import formulate
from autoshard.problem.network import INF, Int
from autoshard.resharding import Resharder
from autoshard.setting import OPTIMIZER_BYTES
from cost_models import Hardware, Machine

FACTOR = 16.0  # how far from its present value a number of the hardware is varied
SIZE_FACTOR = 8.0  # and how far a batch or a sequence
STEPS = 4  # bisections between two powers of two: to 2^(1/16), 4%
TIED = 1e-3  # layouts whose steps differ by less are equally good

Varied = Mapping[str, tuple[int, Callable[[int], Planned]]]
"""Name → its present value, and the plan at another one.

The function raises InfeasibleError where nothing fits, and SpecError where there is no
such program, beyond which nothing is tried.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """Where a decision turns: at `at` it becomes `layout`; None if nothing turns it within the `range` tried."""

    number: str
    now: float
    at: float | None
    layout: str
    range: tuple[float, float]


def flip_points(
    planned: Planned,
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
    found = partial(lies, pattern=pattern, at=at, layout=layout)
    again = partial(_again, planned, hardware, met=[planned.assignment.choice])
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
      number: what is varied.
      now: its value.
      layout: at that value.
      layout_at: the layout at another; SpecError where there is none to try.
      bounds: how far it is varied.
      whole: what every value is a multiple of, but for halves of `now`; None for real numbers.
    """
    best: tuple[float, str] | None = None
    tried = [now]
    for step in (0.5, 2.0):
        same, value = now, now * step
        while bounds[0] * 0.999 <= value <= bounds[1] * 1.001 and (whole is None or value == int(value)):
            try:
                found = layout_at(value)
            except SpecError:
                break
            tried.append(value)
            if found != layout:
                value, turned = _between(same, value, found, layout, layout_at, whole)
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


def _between(
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
        found = layout_at(middle)
        if found == layout:
            same = middle
        else:
            value, turned = middle, found
    return value, turned


def _layout(planned: Planned, pattern: str | None, at: str | None) -> str:
    node = next(iter(decided(planned, pattern, at).values()))[0]
    return choice_text(planned.assignment, node, int(planned.assignment.choice[node]))


def lies(plan: Callable[[], Planned], pattern: str | None, at: str | None, layout: str) -> str | None:
    """How the decision lies in another plan: as before, if that is as good; None if nothing fits."""
    try:
        planned = plan()
    except InfeasibleError:
        return None
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
    solution = solved(planned, replace(problem, cost=cost), settle_s=SETTLE_S)
    tied = max(TIED, planned.solution.gap)  # what is not proven cannot be told apart
    return layout if solution.found and solution.objective <= planned.solution.objective * (1 + tied) else found


def _again(
    planned: Planned, hardware: Hardware, machine: Machine | None, memory_bytes: int, *, met: list[Int]
) -> Planned:
    """The same program on another machine or in other memory.

    Args:
      planned: the program's plan.
      hardware: that it was made for.
      machine: None for the plan's own.
      memory_bytes: the limit.
      met: solutions found so far, a choice per decision: each search begins with them, and adds its own.

    Raises:
      InfeasibleError: nothing fits.
    """
    formulation = planned.formulation
    if machine is None:
        formulation = replace(formulation, problem=replace(formulation.problem, usage_limit=memory_bytes))
    else:
        setting, d = planned.setting, planned.assignment.decisions
        held = dict.fromkeys(setting.gradient.gradient_of, OPTIMIZER_BYTES) if setting.gradient else {}
        resharder = Resharder(d.mesh, machine, scatters_whole=machine.scatters_whole, tiled=machine.tiled)
        constraints = [e for e, eqn in enumerate(d.graph.eqns) if eqn.primitive == "sharding_constraint"]
        codes: Any = [node.codes for node in d.nodes]  # all that were allowed; inputs and outputs have codes
        d = decide(
            d.graph,
            d.mesh,
            machine,
            tied=setting.tied,
            donated=frozenset(planned.record.donated),
            input_pins={i: codes[n] for i, n in enumerate(d.inputs)},
            output_pins={o: codes[n] for o, n in enumerate(d.outputs)},
            equation_pins={e: codes[d.node_of[e]] for e in constraints},
            held_bytes=held,
            unknown="replicate",
            platform=meshes.platform(hardware.name),
        )
        formulation = formulate(d, resharder, memory_bytes=memory_bytes)
    alike = [*map(len, formulation.decisions.nodes)] == [*map(len, planned.setting.decisions.nodes)]
    known = [formulation.write(choice) for choice in met] if alike else []
    solution = solved(planned, formulation.problem, settle_s=SETTLE_S, known=known)
    if not solution.found:
        raise InfeasibleError(f"nothing fits {memory_bytes / 1e9:.3g} GB per device")
    choice = formulation.read(solution.choice)
    if alike:
        met.append(choice)
    assignment = Assignment(decisions=formulation.decisions, resharder=formulation.resharder, choice=choice)
    return replace(planned, formulation=formulation, solution=solution, assignment=assignment)
