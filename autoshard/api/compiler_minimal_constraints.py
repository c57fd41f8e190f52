"""Compiler-minimal constraints: leaves out the constraints that the compiler does not need.

Shardy in-process says which constraints its propagation reaches by itself (`minimal`), but XLA's
partitioner has ways of its own, so that many stay that it would not have needed: of 42 of llama3-8b
on 8 H100 about a dozen. Here the compiler itself is asked, constraint by constraint: one without
which it emits the same collectives, needs no more memory and has no longer schedule is left out.
Constraints in equal places (of unrolled layers) go together; then all that are left of one value,
since of both ends of a move one alone draws the other side over. It takes a compile per question,
which is minutes, and is for plans that are kept.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from autoshard.api.solved_plan import SolvedPlan
from autoshard.backends.shardy.probe import values_at
from autoshard.errors import CompileError, PlanMismatchError
from autoshard.ir.constraints import Constraints, Specs
from autoshard.planner.doubtful_constraints import wrong_without
from autoshard.verification.result import Verification

log = logging.getLogger("autoshard")

# Of all bytes, how much they and any (collective, axes) may differ by; and a peak and a schedule may be larger by.
SAME_BYTES, SAME_PEAK, SAME_STEP = 1e-2, 1e-2, 1e-3
MOST = 8  # constraints that are left out at once, where the last ones all could be

Step = tuple[str, Any, int]  # a constraint: the group of pins, its place in the program, its position among those there


def compiler_minimal(plan: SolvedPlan) -> SolvedPlan:
    """The same plan without the constraints that its hardware's compiler does not need, with a note of how many.

    Raises:
      CompilerMissingError: that compiler is not installed.
      CompileError: it refuses the plan itself.
    """
    search = _Search(plan)
    every = list(classes(plan))
    search.sweep(every)
    search.sweep(search.chains(every))
    search.sweep(every)  # without the others, some more may go
    pins = _without(plan.record.pins, search.dropped)
    told = f"{pins.count} of {plan.record.pins.count} constraints are left"
    return plan.pinned(pins).noted(
        f"{told}: without the others the compiler emits the same ({search.compiles} compiles)"
    )


class _Search:
    """Which constraints of a plan were found to make no difference."""

    def __init__(self, plan: SolvedPlan) -> None:
        self._plan, self._goal = plan, _Emitted.of(plan.verify(compiler_options={}))
        self.dropped: set[Step] = set()
        self.compiles = 1
        self._refused: set[frozenset[Step]] = set()  # constraints that could not be left out together

    def sweep(self, groups: Iterable[Sequence[Step]]) -> None:
        """Drops every group without which all is the same: one by one, more at once while that goes well."""
        left = [group for group in groups if not self.dropped.issuperset(group)]
        at_once = 1
        while left:
            tried = left[:at_once]
            if self._same(frozenset(self.dropped.union(*tried)), len(left)):
                self.dropped.update(*tried)
                left, at_once = left[len(tried) :], min(2 * at_once, MOST)
            elif len(tried) > 1:
                at_once = len(tried) // 2
            else:
                left = left[1:]

    def chains(self, groups: Iterable[Sequence[Step]]) -> Iterator[Sequence[Step]]:
        """The remaining constraints of values with several: one alone would change the other side."""
        value_of = _values(self._plan)
        found: dict[object, list[Sequence[Step]]] = {}
        for group in groups:
            if not self.dropped.issuperset(group):
                name, key, _ = group[0]
                found.setdefault(value_of(name, key), []).append(group)
        yield from ([step for group in chain for step in group] for chain in found.values() if len(chain) > 1)

    def _same(self, without: frozenset[Step], left: int) -> bool:
        """Whether the compiler emits the same without these; asked once."""
        if without in self._refused:
            return False
        plan, count = self._plan, self._plan.record.pins.count - len(self.dropped)
        now = f"constraints: {count}, {left} places not asked for yet"
        log.debug("%s", now, extra={"now": now})
        self.compiles += 1
        try:
            same = _Emitted.of(plan.pinned(_without(plan.record.pins, without)).verify(compiler_options={})).serves(
                self._goal
            )
        except CompileError:
            same = False
        if not same:
            self._refused.add(without)
        return same


@dataclass(frozen=True, slots=True, kw_only=True)
class _Emitted:
    """The compiled program of a plan: bytes per (collective, axes), peak memory, seconds of schedule."""

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


def _groups(pins: Constraints) -> Mapping[str, Mapping[Any, Specs]]:
    """The constraints that may be left out, by the word for their place."""
    return {"made": pins.made, "taken": pins.taken, "input": pins.inputs, "output": pins.outputs}


def classes(plan: SolvedPlan) -> Iterator[Sequence[Step]]:
    """A plan's constraints that may go, those that stand in equal places together."""
    value_of, needed = _values(plan), _needed(plan)
    found: dict[object, list[Step]] = {}
    for name, group in _groups(plan.record.pins).items():
        for key, specs in group.items():
            if (name, key) in needed:
                continue
            for i in range(len(specs)):
                found.setdefault((name, value_of(name, key), specs, i), []).append((name, key, i))
    yield from found.values()


def _values(plan: SolvedPlan) -> Callable[[str, Any], object]:
    """Place of a constraint → the constrained value; one number for all values in equal places."""
    try:
        planned = plan.planned
    except PlanMismatchError:  # a hand-written layout that entered `refine`
        return lambda name, key: (name, key)
    decisions, folding = planned.assignment.decisions, planned.formulation.folding
    values = values_at(decisions.graph)

    def value_of(name: str, key: Any) -> object:
        value = values.get((name, key))
        if value is None or value not in decisions.made:
            return name, key
        return int(folding.class_of[decisions.made[value].node]), decisions.graph.avals[value]

    return value_of


def _needed(plan: SolvedPlan) -> frozenset[tuple[str, Any]]:
    """The places of constraints without which numbers would be wrong: that is not seen in what the compiler emits."""
    try:
        graph = plan.planned.assignment.decisions.graph
    except PlanMismatchError:
        return frozenset()
    record = plan.record
    if len(graph.inputs) != len(record.inputs):
        return frozenset()  # the gradient program, whose places are others
    wrong = wrong_without(graph, record.pins, {i: leaf.spec for i, leaf in enumerate(record.inputs)})
    return frozenset(place for place, value in values_at(graph).items() if value in wrong)


def _without(pins: Constraints, dropped: Set[Step]) -> Constraints:
    """The constraints but for some."""
    left: dict[str, dict[Any, Specs]] = {}
    for name, group in _groups(pins).items():
        left[name] = {}
        for key, specs in group.items():
            kept = tuple(spec for i, spec in enumerate(specs) if (name, key, i) not in dropped)
            if kept:
                left[name][key] = kept
    return replace(pins, made=left["made"], taken=left["taken"], inputs=left["input"], outputs=left["output"])
