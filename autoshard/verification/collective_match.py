"""Collective match: compares the collectives of a plan with those that a compiler emitted.

Twice: per kind and mesh axes (`compare`), and one by one (`attribute`), each with the
jaxpr equation and the source line that it comes from. Bytes are logical, per device and
step; *wire* bytes are those that one device sends by a ring (`hlo.wire_bytes`).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod

from autoshard.backends import hlo
from autoshard.backends.hlo.text import UNKNOWN
from autoshard.ir.mesh import MeshAxes
from autoshard.pipeline_parallel.hand_overs import Pipeline
from autoshard.problem.collective import Collective as Promised

# The verdict: a row with at least this share of all bytes must agree; a row that the plan does not
# have must be smaller than SMALL of them (padding, scalar bookkeeping).
LARGE = 0.05
SMALL = 0.01

HANDING = ("collective-permute", "all-to-all")  # how stages hand on: the first of these that a loop has

Origin = tuple[str, str]  # primitive of an equation, and its `file:line (function)`


class Match(StrEnum):
    """How promised and emitted bytes compare."""

    MATCH = "MATCH"  # within tolerance
    MERGED = "MERGED"  # within tolerance, launched in fewer collectives than the plan has
    DIFFERS = "DIFFERS"  # both sides have it, in another amount
    EXTRA = "EXTRA"  # the compiler emitted it, the plan does not have it
    MISSING = "MISSING"  # the plan has it, the compiler did not emit it
    SMALL = "small"  # they differ by less than a hundredth of all bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """One collective kind over one set of mesh axes (none: over all of them together).

    Counts are executions per step; `emitted_launches` those of instructions, each of
    which may execute several collectives that the compiler combined.
    """

    kind: str
    axes: tuple[str, ...]
    predicted_bytes: int
    emitted_bytes: int
    predicted_wire_bytes: int
    emitted_wire_bytes: int
    predicted_count: int
    emitted_count: int
    emitted_launches: int
    status: Match

    @property
    def ratio(self) -> float:
        """Emitted over predicted; infinite where nothing was predicted."""
        return self.emitted_bytes / self.predicted_bytes if self.predicted_bytes else float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Collectives of one kind, axes and status that come from one equation: `count` of them, `trips` times each.

    `where` is the user's `file:line (function)`, `primitive` the equation's. Both are the
    compiler's; the plan's if the collective is MISSING or has lost its metadata.
    """

    kind: str
    axes: tuple[str, ...]
    primitive: str
    where: str
    trips: int
    count: int
    predicted_bytes: int
    emitted_bytes: int
    status: Match


def compare(
    promised: Sequence[Promised], emitted: Sequence[hlo.Collective], mesh: MeshAxes, tolerance: float
) -> tuple[CollectiveRow, ...]:
    """Promised against emitted bytes per (kind, axes); axes in mesh order."""
    sides: dict[tuple[str, tuple[str, ...]], _Side] = defaultdict(_Side)
    for row in promised:
        side = sides[row.kind, in_order(row.axes, mesh)]
        side.predicted_bytes += row.nbytes * row.trips
        size = prod(mesh.shape[axis] for axis in row.axes)
        side.predicted_wire_bytes += hlo.wire_bytes(row.kind, row.nbytes, size) * row.trips
        side.predicted_count += row.trips
    for found in emitted:
        side = sides[found.kind, in_order(found.axes, mesh)]
        side.emitted_bytes += found.total_bytes
        side.emitted_wire_bytes += found.wire_bytes
        side.emitted_count += found.trips
        side.launches[found.computation, found.instruction] = found.trips
    total = max(sum(s.predicted_bytes for s in sides.values()), sum(s.emitted_bytes for s in sides.values()))
    return tuple(side.row(kind, axes, total, tolerance) for (kind, axes), side in sorted(sides.items()))


def together(kind: str, rows: Sequence[CollectiveRow], total: int, tolerance: float) -> CollectiveRow:
    """Several rows as one, over no axes in particular."""
    side = _Side(
        predicted_bytes=sum(r.predicted_bytes for r in rows),
        emitted_bytes=sum(r.emitted_bytes for r in rows),
        predicted_wire_bytes=sum(r.predicted_wire_bytes for r in rows),
        emitted_wire_bytes=sum(r.emitted_wire_bytes for r in rows),
        predicted_count=sum(r.predicted_count for r in rows),
        emitted_count=sum(r.emitted_count for r in rows),
        launches={("", ""): sum(r.emitted_launches for r in rows)},
    )
    return side.row(kind, (), total, tolerance)


def agrees(rows: Sequence[CollectiveRow], tolerance: float) -> bool:
    """Whether the total agrees, every large row agrees, and no more than small rows are unknown to the plan."""
    predicted, emitted = sum(r.predicted_bytes for r in rows), sum(r.emitted_bytes for r in rows)
    total = max(predicted, emitted)
    return within(predicted, emitted, tolerance) and all(
        row.emitted_bytes <= SMALL * total
        if row.status is Match.EXTRA
        else within(row.predicted_bytes, row.emitted_bytes, tolerance)
        or max(row.predicted_bytes, row.emitted_bytes) < LARGE * total
        for row in rows
    )


def attribute(
    promised: Sequence[Promised],
    emitted: Sequence[hlo.Collective],
    mesh: MeshAxes,
    tolerance: float,
    place: Callable[[hlo.Collective], Origin],
) -> tuple[Line, ...]:
    """Every collective with its equation and source line, the largest first.

    Within a kind and axes, an emitted collective is matched with a promised one of equal bytes
    and trips, of the same source line first. The collectives left on both sides are MERGED if
    their bytes agree, else EXTRA and MISSING.
    """
    ours: dict[tuple[str, tuple[str, ...]], list[Promised]] = defaultdict(list)
    theirs: dict[tuple[str, tuple[str, ...]], list[hlo.Collective]] = defaultdict(list)
    for row in promised:
        ours[row.kind, in_order(row.axes, mesh)].append(row)
    for found in emitted:
        theirs[found.kind, in_order(found.axes, mesh)].append(found)
    lines: dict[tuple[str, tuple[str, ...], str, str, int, Match], list[int]] = defaultdict(lambda: [0, 0, 0])

    def add(key: tuple[str, tuple[str, ...]], at: Origin, trips: int, status: Match, *amounts: int) -> None:
        line = lines[*key, *at, trips, status]
        for i, amount in enumerate((1, *amounts)):
            line[i] += amount

    for key in sorted(ours.keys() | theirs.keys()):
        places = {id(found): place(found) for found in theirs[key]}
        pairs, missing, extra = _pair_equal(ours[key], theirs[key], {i: where for i, (_, where) in places.items()})
        for row, found in pairs:
            status = Match.MERGED if found.combined > 1 else Match.MATCH
            primitive, where = places[id(found)]
            at = (primitive, where) if where != UNKNOWN else ("", row.where)  # the compiler dropped its metadata
            add(key, at, found.trips, status, row.nbytes * row.trips, found.total_bytes)
        left = sum(row.nbytes * row.trips for row in missing), sum(found.total_bytes for found in extra)
        merged = bool(missing and extra) and within(*left, tolerance)
        for row in missing:
            status = Match.MERGED if merged else Match.MISSING
            add(key, ("", row.where), row.trips, status, row.nbytes * row.trips, 0)
        for found in extra:
            status = Match.MERGED if merged else Match.EXTRA
            add(key, places[id(found)], found.trips, status, 0, found.total_bytes)
    made = [
        Line(
            kind=kind,
            axes=axes,
            primitive=primitive,
            where=where,
            trips=trips,
            count=count,
            predicted_bytes=predicted,
            emitted_bytes=got,
            status=status,
        )
        for (kind, axes, primitive, where, trips, status), (count, predicted, got) in lines.items()
    ]
    return tuple(sorted(made, key=lambda line: (-max(line.predicted_bytes, line.emitted_bytes), line.where)))


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOvers:
    """The collectives by which a pipeline's stages hand micro-batches on, forward and backward.

    Permutes move each stage's to the next. Where micro-batches are split over the stages' devices, too, all-to-alls
    bring them there and back, and the stages move on within each device.

    Attributes:
      pipeline: the loop in the planned program.
      kind: of the collectives; empty where there are none.
      compiled_trips: how often they run in the compiled program, each number once; none where none was emitted.
      predicted_bytes: of the plan, per device and step.
      emitted_bytes: of the compiled program.
      tolerance: relative difference in bytes that still counts as equal.
    """

    pipeline: Pipeline
    kind: str
    compiled_trips: tuple[int, ...]
    predicted_bytes: int
    emitted_bytes: int
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether the compiled loop has as many trips, so that the bubble is as predicted, and hands on as much."""
        trips = (self.pipeline.trips,) if self.predicted_bytes else ()
        return self.compiled_trips == trips and within(self.predicted_bytes, self.emitted_bytes, self.tolerance)


def hand_overs(lines: Sequence[Line], pipelines: Sequence[Pipeline], tolerance: float) -> tuple[HandOvers, ...]:
    """What each pipeline hands on in the plan, and in the compiled program, of their collectives by line."""
    found: list[HandOvers] = []
    for pipeline in pipelines:
        of_layers = [line for line in lines if line.where == pipeline.where]
        kind = next((kind for kind in HANDING if any(line.kind == kind for line in of_layers)), "")
        own = [line for line in of_layers if line.kind == kind]
        found.append(
            HandOvers(
                pipeline=pipeline,
                kind=kind,
                compiled_trips=tuple(sorted({line.trips for line in own if line.emitted_bytes})),
                predicted_bytes=sum(line.predicted_bytes for line in own),
                emitted_bytes=sum(line.emitted_bytes for line in own),
                tolerance=tolerance,
            )
        )
    return tuple(found)


def within(predicted: int, emitted: int, tolerance: float) -> bool:
    """Whether two amounts differ by no more than a fraction of the larger."""
    return abs(predicted - emitted) <= tolerance * max(predicted, emitted)


def in_order(axes: Iterable[str] | None, mesh: MeshAxes) -> tuple[str, ...]:
    """Axes in mesh order, parts of one (`model:(1)2`) with it; `?` for groups that are no product of axes."""
    if axes is None:
        return ("?",)
    order = {name: i for i, name in enumerate(mesh.names)}
    return tuple(sorted(axes, key=lambda axis: (order[axis.partition(":")[0]], axis)))


@dataclass(slots=True, kw_only=True)
class _Side:
    """Sums of one (kind, axes); `launches` by instruction."""

    predicted_bytes: int = 0
    emitted_bytes: int = 0
    predicted_wire_bytes: int = 0
    emitted_wire_bytes: int = 0
    predicted_count: int = 0
    emitted_count: int = 0
    launches: dict[tuple[str, str], int] = field(default_factory=dict)

    def row(self, kind: str, axes: tuple[str, ...], total: int, tolerance: float) -> CollectiveRow:
        return CollectiveRow(
            kind=kind,
            axes=axes,
            predicted_bytes=self.predicted_bytes,
            emitted_bytes=self.emitted_bytes,
            predicted_wire_bytes=self.predicted_wire_bytes,
            emitted_wire_bytes=self.emitted_wire_bytes,
            predicted_count=self.predicted_count,
            emitted_count=self.emitted_count,
            emitted_launches=sum(self.launches.values()),
            status=_status(self, total, tolerance),
        )


def _status(side: _Side, total: int, tolerance: float) -> Match:
    predicted, emitted = side.predicted_bytes, side.emitted_bytes
    if within(predicted, emitted, tolerance):
        return Match.MERGED if sum(side.launches.values()) < side.predicted_count else Match.MATCH
    if abs(predicted - emitted) <= SMALL * total:
        return Match.SMALL
    if not predicted:
        return Match.EXTRA
    return Match.DIFFERS if emitted else Match.MISSING


def _pair_equal(
    ours: Sequence[Promised], theirs: Sequence[hlo.Collective], where: dict[int, str]
) -> tuple[list[tuple[Promised, hlo.Collective]], list[Promised], list[hlo.Collective]]:
    """Pairs of equal bytes and trips, of one source line first; and the collectives left on either side."""
    pairs: list[tuple[Promised, hlo.Collective]] = []
    for by_line in (True, False):
        waiting: dict[tuple[int, int, str], list[Promised]] = defaultdict(list)
        for row in reversed(ours):
            waiting[row.nbytes, row.trips, row.where if by_line else ""].append(row)
        left: list[hlo.Collective] = []
        for found in theirs:
            fitting = waiting.get((found.nbytes, found.trips, where[id(found)] if by_line else ""))
            if fitting:
                pairs.append((fitting.pop(), found))
            else:
                left.append(found)
        ours = [row for rows in waiting.values() for row in rows]
        theirs = left
    return pairs, list(ours), list(theirs)
