"""Patterns of collectives that could be cheaper, or not be there.

Each says what would stand in the place of a collective that is so. A finding is all of a pattern's collectives from
one source line; its price is how much sooner the compiled schedule ends with the better ones: what hides behind
compute is worth nothing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod

from autoshard.backends import hlo
from autoshard.backends.hlo.dataflow import VIEWS
from autoshard.backends.partitioner_log import way_between
from autoshard.diagnosis.evidence import Evidence
from autoshard.diagnosis.finding import Finding
from autoshard.report.tables import bytes_text

REDUCES = frozenset({"all-reduce", "reduce-scatter"})

Better = tuple[hlo.Collective, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """Collectives that could be cheaper.

    Attributes:
      kind: the finding's.
      better: the collectives that would stand in the place of one, by the evidence and its position; None if it is
        not of this pattern.
      cause: what happens.
      change: what to do about it.
    """

    kind: str
    better: Callable[[Evidence, int], Better | None]
    cause: str
    change: str


def rematerialized(evidence: Evidence, at: int) -> Better | None:
    """A gather whose result is cut again on every device: an all-to-all moves a share of it."""
    one = evidence.emitted[at]
    if one.kind != "all-gather" or one.instruction not in evidence.module[one.computation].instructions:
        return None
    if all(value.op_name != one.op_name for value in evidence.rematerialized):
        result = _result(evidence, at)
        if result is None or not evidence.flow.is_cut_again(*result):
            return None
    return (replace(one, kind="all-to-all", nbytes=one.nbytes // one.group_size),)


def summed_in_trips(evidence: Evidence, at: int) -> Better | None:
    """A sum in every trip of a loop that only adds it up: one after the loop, which is a share of each trip's."""
    one = evidence.emitted[at]
    if one.kind not in REDUCES or one.trips == 1:
        return None
    if one.kind == "reduce-scatter" and not evidence.has_room_for_parts:
        return None
    equation = evidence.equation(one)
    by_equation = 1 if equation is None else evidence.added_in_trips.get(equation, 1)
    trips = max(by_equation, _trips_that_add(evidence, at))
    return (replace(one, nbytes=one.nbytes // trips),) if trips > 1 else None


def gathered_wide(evidence: Evidence, at: int) -> Better | None:
    """A gather of a value that everyone who takes it casts to a narrower type."""
    one, result = evidence.emitted[at], _result(evidence, at)
    if one.kind != "all-gather" or result is None:
        return None
    size = hlo.Shape(dtype=one.dtype, dims=()).element_bytes
    narrow = evidence.flow.narrowest(*result)
    if narrow is None or narrow >= size or evidence.was_narrower(at, narrow):
        return None
    return (replace(one, nbytes=one.nbytes * narrow // size),)


def gathered_in_trips(evidence: Evidence, at: int) -> Better | None:
    """A gather in every trip of a loop that does not change the value, or the stack that it is of: one ahead of it."""
    one, trips = evidence.emitted[at], evidence.unchanged_gathers.get(at, 1)
    return (replace(one, nbytes=one.nbytes // trips),) if trips > 1 else None


def gathered_twice(evidence: Evidence, at: int) -> Better | None:
    """A gather of a value that was gathered before."""
    return () if at in evidence.repeated_gathers else None


def whole_sum(evidence: Evidence, at: int) -> Better | None:
    """An all-reduce of which every device keeps a share alone: what is kept of it is scattered, and the rest summed.

    Not where the compiler all-reduces a sum over all devices whatever is asked of it (`Machine.unscattered_axes`).
    """
    one, result = evidence.emitted[at], _result(evidence, at)
    if one.kind != "all-reduce" or one.axes is None or result is None:
        return None
    ways, sizes = evidence.flow.ways_kept(*result), evidence.mesh.shape
    axes = [axis for axis in one.axes if axis in sizes]
    if ways >= one.group_size:
        unscattered = evidence.machine.unscattered_axes
        scatters = not unscattered or not unscattered <= set(one.axes)
        return (replace(one, kind="reduce-scatter"),) if scatters else None
    kept = next((some for n in range(1, len(axes)) for some in combinations(axes, n) if _size(some, sizes) == ways), ())
    if not kept:
        return None
    rest = tuple(axis for axis in axes if axis not in kept)
    return (
        replace(one, kind="reduce-scatter", axes=kept, group_size=ways),
        replace(one, axes=rest, group_size=one.group_size // ways, nbytes=one.nbytes // ways),
    )


def unasked(evidence: Evidence, at: int) -> Better | None:
    """A collective that no annotation asks for."""
    one, asked = evidence.emitted[at], evidence.asked
    return () if asked is not None and one.kind not in REDUCES and not asked(one) else None


# The first pattern that a collective has is its own.
PATTERNS: tuple[Pattern, ...] = (
    Pattern(
        kind="rematerialized",
        better=rematerialized,
        cause="A value is made whole on every device, and cut again: the partitioner does not know how to move it from "
        "one layout to the other (its `Involuntary full rematerialization`)",
        change="Constrain it to a layout between the two, so that each step moves one mesh axis",
    ),
    Pattern(
        kind="sums in every trip",
        better=summed_in_trips,
        cause="A loop adds to a value that it carries round, and finishes the sum over devices in every trip",
        change="Keep one partial sum per device until the loop is over: autoshard.accumulate does for micro-batches, "
        "and autoshard.plan for any loop",
    ),
    Pattern(
        kind="gathered in every trip",
        better=gathered_in_trips,
        cause="A loop gathers in every trip what it does not change, and the device has room to keep it",
        change="Gather it once: constrain it (of scanned layers, their stack) to be whole ahead of the loop, and take "
        "the whole value inside, without a constraint",
    ),
    Pattern(
        kind="gathered wide",
        better=gathered_wide,
        cause="A value is gathered before it, or what is computed of it, is cast to a narrower type",
        change="Cast it first, constrain the cast value to the layout that it was stored in, and only then to be "
        "whole: the gather then moves less",
    ),
    Pattern(
        kind="gathered twice",
        better=gathered_twice,
        cause="A value is gathered more than once in the same part of the program, in several types or orders",
        change="Gather it once: constrain it to be whole where it is first needed, and cast or transpose the whole "
        "value",
    ),
    Pattern(
        kind="summed whole",
        better=whole_sum,
        cause="Every device gets a whole sum, and keeps its share of it alone",
        change="Constrain the sum itself, not what is made of it, to the layout in which it is kept: a reduce-scatter "
        "moves half as much",
    ),
    Pattern(
        kind="unasked",
        better=unasked,
        cause="A value moves between two layouts that no annotation connects",
        change="Constrain it where it is made to the layout in which it is taken, or change one of the two",
    ),
)


def of_collectives(evidence: Evidence) -> Iterator[Finding]:
    """The findings among a program's collectives: of a pattern and a source line, one."""
    groups: dict[tuple[int, str], dict[int, Better]] = {}
    for at, one in enumerate(evidence.emitted):
        if one.kind == "collective-broadcast":
            continue
        for p, pattern in enumerate(PATTERNS):
            better = pattern.better(evidence, at)
            if better is not None:
                groups.setdefault((p, evidence.where(one)), {})[at] = better
                break
    for (p, where), better in groups.items():
        pattern, members = PATTERNS[p], [evidence.emitted[at] for at in better]
        kinds = " and ".join(sorted({one.kind for one in members}))
        count, nbytes = sum(one.trips for one in members), sum(one.total_bytes for one in members)
        yield Finding(
            kind=pattern.kind,
            seconds=evidence.saved_s(better),
            where=where,
            cause=f"{pattern.cause}: {kinds}, {count:,} {'time' if count == 1 else 'times'}, {bytes_text(nbytes)}",
            change=_between(evidence, members) or pattern.change,
        )


def _between(evidence: Evidence, members: list[hlo.Collective]) -> str:
    """The constraint by which a value does not have to be made whole, if the compiler's log has both layouts."""
    for one in members:
        found = evidence.made_whole(one)
        if found is not None and found.source is not None and found.target is not None:
            first = way_between(found.source, found.target)
            if first is not None:
                return (
                    f"It goes from {found.source.spec()} to {found.target.spec()}: constrain it to {first.spec()} "
                    "on its way, so that each step moves one mesh axis"
                )
    return ""


def _element(evidence: Evidence, at: int) -> int | None:
    """Which of the elements that an instruction moves a collective is; None where a concatenation hides it."""
    one = evidence.emitted[at]
    first = at
    while first and evidence.emitted[first - 1].instruction == one.instruction and one.combined > 1:
        first -= 1
    instruction = evidence.module[one.computation].instructions.get(one.instruction)
    if instruction is None or len(instruction.operands) != one.combined:
        return None
    return (at - first) % one.combined


def _result(evidence: Evidence, at: int) -> tuple[hlo.Computation, hlo.Instruction, int | None] | None:
    """Where a collective's result is: the computation, the instruction, and its element there; None: it is hidden."""
    one, element = evidence.emitted[at], _element(evidence, at)
    if element is None or not hlo.communicates(evidence.module[one.computation][one.instruction]):
        return None
    computation, result = evidence.result(one)
    if element >= len(result.shapes):
        return None
    return computation, result, element if result.type.startswith("(") else None


def _size(axes: Sequence[str], sizes: Mapping[str, int]) -> int:
    return prod(sizes[axis] for axis in axes)


def _trips_that_add(evidence: Evidence, at: int) -> int:
    """The trips of the loop that adds a collective's result, or a view of it, to what it carries; 1: none does."""
    one, flow = evidence.emitted[at], evidence.flow
    computation = evidence.module[one.computation]
    if one.computation not in flow.loops.around or one.done not in computation.instructions:
        return 1
    left, seen = [computation[one.done]], set[str]()
    returned = set(computation.root.operands)
    while left:
        value = left.pop()
        for user in flow.users_in(computation)[value.name]:
            if user.name in seen or user is computation.root:
                continue
            seen.add(user.name)
            if flow.adds(user) and user.name in returned and _only_adds_to_carry(evidence, computation, user):
                return flow.loops.trip_count(flow.loops.around[one.computation][1]) or 1
            if user.opcode in VIEWS:
                left.append(user)
    return 1


def _only_adds_to_carry(evidence: Evidence, computation: hlo.Computation, addition: hlo.Instruction) -> bool:
    """Whether an operand is an element of what the loop carries, and nothing else in a trip takes it."""
    for name in addition.operands:
        x = computation[name]
        if x.opcode == "get-tuple-element" and computation[x.operands[0]].opcode == "parameter":
            return evidence.flow.users_in(computation)[name] == (addition,)
    return False


def mended_in_vain(evidence: Evidence, least_s: float) -> Mapping[str, float]:
    """The seconds, below `least_s`, that mending saves where the partitioner warns: by line, the largest first."""
    found: dict[str, float] = {}
    for value in evidence.rematerialized:
        at = [i for i, one in enumerate(evidence.emitted) if evidence.made_whole(one) is value]
        better = {i: cheaper for i in at if (cheaper := rematerialized(evidence, i)) is not None}
        saved_s = evidence.saved_s(better) if better else 0.0
        if saved_s < least_s:
            where = evidence.where(evidence.emitted[at[0]]) if at else value.op_name
            found[where] = max(saved_s, found.get(where, 0.0))
    return dict(sorted(found.items(), key=lambda item: -item[1]))
