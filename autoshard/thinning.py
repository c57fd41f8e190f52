"""Thinning: the compiler in the loop for constraints. Those that it does not need are left out.

Shardy in-process says which constraints its propagation reaches by itself (`minimal`), but XLA's
partitioner has ways of its own, so that many stay that it would not have needed: of 42 of llama3-8b
on 8 H100 about a dozen. Here the compiler itself is asked, constraint by constraint: one without
which it emits the same collectives, needs no more memory and has no longer schedule is left out.
Constraints in equal places (of unrolled layers) go together. It takes a compile per question,
which is minutes, and is for plans that are kept.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoshard.errors import CompileError
from autoshard.pins import Pins, Specs
from autoshard.plans import Plan
from autoshard.probe import values_at
from autoshard.verification import Verification

log = logging.getLogger("autoshard")

# Of all bytes, how much they and any (collective, axes) may differ by; and a peak and a schedule may be larger by.
SAME_BYTES, SAME_PEAK, SAME_STEP = 1e-2, 1e-2, 1e-3
MOST = 8  # constraints that are left out at once, where the last ones all could be

Step = tuple[str, Any, int]  # a constraint: the group of pins, its place in the program, its position among those there


def thinned(plan: Plan) -> Plan:
    """The same plan without the constraints that its hardware's compiler does not need, with a note of how many.

    Raises:
      CompilerMissingError: that compiler is not installed.
      CompileError: it refuses the plan itself.
      PlanMismatchError: a plan file that is not bound to its function.
    """
    goal = _Emitted.of(plan.verify())
    left, stayed = list(classes(plan)), list[Sequence[Step]]()
    dropped: set[Step] = set()
    compiles, at_once, last = 1, 1, 0  # last: how many were dropped when the sweep began
    while left:
        tried = left[:at_once]
        without = dropped.union(*tried)
        now = f"constraints: {plan.record.pins.count - len(dropped)}, {sum(map(len, left))} of them not asked for yet"
        log.debug("%s", now, extra={"now": now})
        compiles += 1
        if _same(plan.pinned(_without(plan.record.pins, without)), goal):
            dropped, left, at_once = without, left[len(tried) :], min(2 * at_once, MOST)
        elif len(tried) > 1:
            at_once = len(tried) // 2
        else:
            stayed, left = [*stayed, *tried], left[1:]
        if not left and len(dropped) > last:  # without the others, some more may go
            left, stayed, last = stayed, [], len(dropped)
    pins = _without(plan.record.pins, dropped)
    told = f"{pins.count} of {plan.record.pins.count} constraints are left"
    return plan.pinned(pins).noted(f"{told}: without the others the compiler emits the same ({compiles} compiles)")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Emitted:
    """What a compiler made of a plan: bytes per (collective, axes), peak memory, seconds of schedule."""

    nbytes: Mapping[tuple[str, tuple[str, ...]], int]
    peak: int
    step_s: float

    @classmethod
    def of(cls, found: Verification) -> "_Emitted":
        assert found.memory.compiled is not None  # a compiler's program has memory and a schedule
        assert found.timeline is not None
        nbytes = {(row.kind, tuple(row.axes)): row.emitted_bytes for row in found.rows}
        return cls(nbytes=nbytes, peak=found.memory.compiled.peak, step_s=found.timeline.step_s)

    def serves(self, goal: "_Emitted") -> bool:
        """Whether this is as good as the goal."""
        most = SAME_BYTES * sum(goal.nbytes.values())
        kinds = self.nbytes.keys() | goal.nbytes.keys()
        return (
            all(abs(self.nbytes.get(k, 0) - goal.nbytes.get(k, 0)) <= most for k in kinds)
            and abs(sum(self.nbytes.values()) - sum(goal.nbytes.values())) <= most
            and self.peak <= (1 + SAME_PEAK) * goal.peak
            and self.step_s <= (1 + SAME_STEP) * goal.step_s
        )


def _same(plan: Plan, goal: _Emitted) -> bool:
    try:
        return _Emitted.of(plan.verify()).serves(goal)
    except CompileError:
        return False


def _groups(pins: Pins) -> Mapping[str, Mapping[Any, Specs]]:
    """The constraints that may be left out, by the word for their place."""
    return {"made": pins.made, "taken": pins.taken, "input": pins.inputs, "output": pins.outputs}


def classes(plan: Plan) -> Iterator[Sequence[Step]]:
    """A plan's constraints, those that stand in equal places together."""
    planned = plan.planned
    found: dict[object, list[Step]] = {}
    values = {} if planned is None else values_at(planned.assignment.decisions.graph)
    for name, group in _groups(plan.record.pins).items():
        for key, specs in group.items():
            where: object = (name, key)
            value = values.get((name, key))
            if planned is not None and value is not None and value in planned.assignment.decisions.made:
                node = planned.assignment.decisions.made[value].node
                aval = planned.assignment.decisions.graph.avals[value]
                where = (name, int(planned.formulation.folding.class_of[node]), aval, specs)
            for i in range(len(specs)):
                found.setdefault((where, i), []).append((name, key, i))
    yield from found.values()


def _without(pins: Pins, dropped: set[Step]) -> Pins:
    """The constraints but for some."""
    left: dict[str, dict[Any, Specs]] = {}
    for name, group in _groups(pins).items():
        left[name] = {}
        for key, specs in group.items():
            kept = tuple(spec for i, spec in enumerate(specs) if (name, key, i) not in dropped)
            if kept:
                left[name][key] = kept
    return replace(pins, made=left["made"], taken=left["taken"], inputs=left["input"], outputs=left["output"])
