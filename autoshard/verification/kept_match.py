"""Kept match: what a plan repeats for its backward passes and sends to the host's memory, beside the compiled program.

Matmuls that run once more are counted in FLOPs, copies between a device's memory and its host's in bytes, each way
apart: all together, and by source line. Both are read from the events of two timelines, the plan's and the compiled
schedule's.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from autoshard.backends.timeline import Event, Timeline
from autoshard.verification.collective_match import Match

TOLERANCE = 0.02  # of FLOPs and of bytes: both are counted, not estimated

Key = TypeVar("Key", bound=Hashable)
Amount = TypeVar("Amount", int, float)
LineOf = Callable[[str, str], str]  # name and source line of a compiled operation → the line of its equation


def compared(predicted: float | None, compiled: float, tolerance: float) -> Match | None:
    """How an amount compares with the plan's; None where nothing is predicted."""
    if predicted is None:
        return None
    if abs(compiled - predicted) <= tolerance * max(predicted, compiled):
        return Match.MATCH
    return Match.MISSING if not compiled else Match.DIFFERS if predicted else Match.EXTRA


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedMatmuls:
    """Matmuls that run once more for a backward pass: all of them, or those of one source line.

    Attributes:
      where: the source line; "" for the sum.
      predicted_flops: FLOPs per device and step of the plan; None if the plan was read from a file.
      compiled_flops: of the compiled program's, by their names.
      tolerance: relative difference that still counts as equal.
    """

    where: str
    predicted_flops: float | None
    compiled_flops: float
    tolerance: float

    @property
    def status(self) -> Match | None:
        """How both compare; None where nothing is predicted.

        What the compiled program lacks was merged with the first run; what it has beyond the plan, its compiler
        repeats on its own.
        """
        return compared(self.predicted_flops, self.compiled_flops, self.tolerance)


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadedBytes:
    """Bytes that go one way between a device's memory and its host's: all of them, or those of one source line.

    Attributes:
      where: the source line, of the loop that stacks or reads what is copied if one does; "" for the sum.
      to_host: whether they go to the host's memory.
      predicted_bytes: per device and step of the plan; None if the plan was read from a file.
      compiled_bytes: of the compiled program's copies.
      tolerance: relative difference that still counts as equal.
    """

    where: str
    to_host: bool
    predicted_bytes: int | None
    compiled_bytes: int
    tolerance: float

    @property
    def status(self) -> Match | None:
        """How both compare; None where nothing is predicted.

        What the compiled program lacks stays in the device's memory; what it has beyond the plan is copied more often.
        """
        return compared(self.predicted_bytes, self.compiled_bytes, self.tolerance)

    @property
    def ok(self) -> bool:
        """Whether the compiled program copies what the plan does, as far as that is known."""
        return self.status in (Match.MATCH, None)


def repeated_matmuls(predicted: Timeline | None, compiled: Timeline, line_of: LineOf) -> tuple[RepeatedMatmuls, ...]:
    """The matmuls that run once more for a backward pass, by source line, the largest first.

    Args:
      predicted: the plan's timeline; None if the plan was read from a file.
      compiled: the compiled schedule's.
      line_of: the line that an operation of the compiled program belongs to.
    """
    ours = _sums((x.where, x.flops * e.trips) for e in _events(predicted) for x in e.repeats)
    theirs = _sums((line_of(x.name, x.where), x.flops * e.trips) for e in compiled.events for x in e.repeats)
    lines = [
        RepeatedMatmuls(
            where=where,
            predicted_flops=None if predicted is None else ours.get(where, 0.0),
            compiled_flops=theirs.get(where, 0.0),
            tolerance=TOLERANCE,
        )
        for where in {**ours, **theirs}
    ]
    return tuple(sorted(lines, key=lambda x: (-max(x.predicted_flops or 0.0, x.compiled_flops), x.where)))


def together(lines: Sequence[RepeatedMatmuls]) -> RepeatedMatmuls | None:
    """The sum of all lines; None if nothing runs once more."""
    if not lines:
        return None
    planned = [x.predicted_flops for x in lines if x.predicted_flops is not None]
    return replace(
        lines[0],
        where="",
        predicted_flops=sum(planned) if planned else None,
        compiled_flops=sum(x.compiled_flops for x in lines),
    )


def offloaded_bytes(predicted: Timeline | None, compiled: Timeline, line_of: LineOf) -> tuple[OffloadedBytes, ...]:
    """The bytes of copies to the host's memory and back, by source line and way, the largest first.

    Args:
      predicted: the plan's timeline; None if the plan was read from a file.
      compiled: the compiled schedule's.
      line_of: the line that an operation of the compiled program belongs to.
    """
    planned = [(e, e.moves) for e in _events(predicted) if e.moves is not None]
    made = [(e, e.moves) for e in compiled.events if e.moves is not None]
    ours = _sums(((e.where, moves.to_host), moves.nbytes * e.trips) for e, moves in planned)
    theirs = _sums(((line_of(moves.name, e.where), moves.to_host), moves.nbytes * e.trips) for e, moves in made)
    lines = [
        OffloadedBytes(
            where=where,
            to_host=to_host,
            predicted_bytes=None if predicted is None else ours.get((where, to_host), 0),
            compiled_bytes=theirs.get((where, to_host), 0),
            tolerance=TOLERANCE,
        )
        for where, to_host in {**ours, **theirs}
    ]
    return tuple(sorted(lines, key=lambda x: (-max(x.predicted_bytes or 0, x.compiled_bytes), x.where, not x.to_host)))


def both_ways(lines: Sequence[OffloadedBytes]) -> tuple[OffloadedBytes, ...]:
    """The sums of all lines, to the host's memory first; () if nothing goes there or comes from there."""
    if not lines:
        return ()
    known = all(x.predicted_bytes is not None for x in lines)

    def one_way(*, to_host: bool) -> OffloadedBytes:
        mine = [x for x in lines if x.to_host == to_host]
        return OffloadedBytes(
            where="",
            to_host=to_host,
            predicted_bytes=sum(x.predicted_bytes or 0 for x in mine) if known else None,
            compiled_bytes=sum(x.compiled_bytes for x in mine),
            tolerance=TOLERANCE,
        )

    return one_way(to_host=True), one_way(to_host=False)


def _events(one: Timeline | None) -> tuple[Event, ...]:
    return () if one is None else one.events


def _sums(amounts: Iterable[tuple[Key, Amount]]) -> dict[Key, Amount]:
    found: dict[Key, Amount] = {}
    for key, amount in amounts:
        found[key] = found[key] + amount if key in found else amount
    return found
