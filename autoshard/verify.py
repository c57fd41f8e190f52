"""Verify: what a plan promised against what the compiler emitted, row by row."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from autoshard import compilers, hlo
from autoshard.mesh import MeshAxes
from autoshard.record import PlanRecord
from autoshard.tables import bytes_text, columns, fields, render, table

# Padding, scalar bookkeeping and halos up to this share of all bytes are no news.
SMALL = 0.01


class Match(StrEnum):
    """How one row of promised and emitted bytes compares."""

    MATCH = "MATCH"  # within tolerance
    DIFFERS = "DIFFERS"  # both sides have it, in another amount
    EXTRA = "EXTRA"  # the compiler emitted what the plan does not know
    MISSING = "MISSING"  # the plan expects what the compiler did not emit
    SMALL = "small"  # below a hundredth of all bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One collective kind over one set of mesh axes: logical bytes per device and step."""

    kind: str
    axes: tuple[str, ...]
    predicted_bytes: int
    emitted_bytes: int
    predicted_count: int
    emitted_count: int
    status: Match

    @property
    def ratio(self) -> float:
        """Emitted over predicted; infinite where nothing was predicted."""
        return self.emitted_bytes / self.predicted_bytes if self.predicted_bytes else float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The comparison of a plan with one compiled program."""

    compiler: str
    version: str
    topology: str
    rows: tuple[Row, ...]
    predicted_peak_bytes: int
    compiled_peak_bytes: int
    emitted: tuple[hlo.Collective, ...]
    wall_s: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether every kind's bytes agree and the compiler emitted nothing unknown."""
        return all(row.status in (Match.MATCH, Match.SMALL) for row in self.by_kind())

    def __str__(self) -> str:
        """The verdict and the rows, for a terminal."""
        ratio = _ratio_text(self.compiled_peak_bytes, self.predicted_peak_bytes)
        lines = [
            (
                "verdict",
                f"{'MATCH' if self.ok else 'NO MATCH'} (bytes of each kind within {self.tolerance:.0%}, "
                "and no kind that the plan does not have)",
            ),
            (
                "memory",
                f"peak per device: predicted {bytes_text(self.predicted_peak_bytes)}, "
                f"compiled {bytes_text(self.compiled_peak_bytes)} ({ratio})",
            ),
            ("compiler", f"{self.compiler}, {self.version}, for {self.topology}: {self.wall_s:.1f} s"),
        ]
        cells: list[tuple[str, ...]] = []
        for kind in self.by_kind():
            split = [row for row in self.rows if row.kind == kind.kind]
            cells += [_cells(row) for row in (split if len(split) == 1 else (*split, kind))]
        rows = table(
            "collectives per step: logical bytes per device, predicted → emitted",
            ("collective", "over", "count", "predicted", "emitted", "ratio", "status"),
            cells,
            right=("count", "predicted", "emitted", "ratio"),
            whole=("collective", "over", "status"),
        )
        width = columns()
        return render(fields(lines, width) + "\n", rows, width=width)

    def by_kind(self) -> tuple[Row, ...]:
        """The rows with all axis sets of one kind together."""
        kinds = sorted({row.kind for row in self.rows})
        total = sum(row.predicted_bytes for row in self.rows), sum(row.emitted_bytes for row in self.rows)
        return tuple(
            _row(kind, (), [r for r in self.rows if r.kind == kind], max(total), self.tolerance) for kind in kinds
        )


def verify(
    lowerable: Any,
    record: PlanRecord,
    *,
    compiler: str | None = None,
    topology: str | None = None,
    tolerance: float = 0.10,
) -> Verification:
    """Compiles a planned program and compares its collectives and memory with the plan.

    Args:
      lowerable: the planned function, traced on abstract arguments with an abstract mesh.
      record: the plan.
      compiler: "gpu", "tpu", "cpu", or None for the hardware's own.
      topology: hardware to compile for; None takes the plan's own (for "cpu": as many devices).
      tolerance: relative difference in bytes per kind that still counts as a match.
    """
    if topology is None:
        topology = f"cpu:{record.mesh.size}" if compiler == "cpu" else record.hardware
    compiled = compilers.compile(
        lowerable,
        topology=topology,
        mesh=record.mesh,
        compiler=compiler,  # pyright: ignore[reportArgumentType]
        device_order=record.device_order,
        compiler_options=None if compiler == "cpu" else record.compiler_options,
    )
    emitted = hlo.collectives(hlo.read(compiled.hlo_text), record.mesh, fold_slices=compiled.compiler == "cpu")
    return Verification(
        compiler=compiled.compiler,
        version=compiled.version,
        topology=topology,
        rows=compare(record, emitted, record.mesh, tolerance),
        predicted_peak_bytes=record.memory.peak_bytes,
        compiled_peak_bytes=compiled.peak_bytes,
        emitted=emitted,
        wall_s=compiled.wall_s,
        tolerance=tolerance,
    )


def compare(record: PlanRecord, emitted: Sequence[hlo.Collective], mesh: MeshAxes, tolerance: float) -> tuple[Row, ...]:
    """Promised against emitted bytes per (kind, axes); axes in mesh order."""
    sides: dict[tuple[str, tuple[str, ...]], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    order = {name: i for i, name in enumerate(mesh.names)}
    for promised in record.collectives:
        side = sides[promised.kind, tuple(sorted(promised.axes, key=order.__getitem__))]
        side[0] += promised.nbytes * promised.trips
        side[2] += promised.trips
    for found in emitted:
        axes = found.axes if found.axes is not None else ("?",)
        side = sides[found.kind, tuple(sorted(axes, key=lambda a: order.get(a, -1)))]
        side[1] += found.nbytes * found.trips
        side[3] += found.trips
    total = max(sum(s[0] for s in sides.values()), sum(s[1] for s in sides.values()))
    return tuple(
        Row(
            kind=kind,
            axes=axes,
            predicted_bytes=p,
            emitted_bytes=e,
            predicted_count=pc,
            emitted_count=ec,
            status=_status(p, e, total, tolerance),
        )
        for (kind, axes), (p, e, pc, ec) in sorted(sides.items())
    )


def _row(kind: str, axes: tuple[str, ...], rows: Sequence[Row], total: int, tolerance: float) -> Row:
    predicted, emitted = sum(r.predicted_bytes for r in rows), sum(r.emitted_bytes for r in rows)
    return Row(
        kind=kind,
        axes=axes,
        predicted_bytes=predicted,
        emitted_bytes=emitted,
        predicted_count=sum(r.predicted_count for r in rows),
        emitted_count=sum(r.emitted_count for r in rows),
        status=_status(predicted, emitted, total, tolerance),
    )


def _status(predicted: int, emitted: int, total: int, tolerance: float) -> Match:
    if abs(predicted - emitted) <= tolerance * max(predicted, emitted):
        return Match.MATCH
    if abs(predicted - emitted) <= SMALL * total:
        return Match.SMALL
    if not predicted:
        return Match.EXTRA
    return Match.DIFFERS if emitted else Match.MISSING


def _cells(row: Row) -> tuple[str, ...]:
    """A row of the table; the sum of a kind names no axes."""
    return (
        row.kind if row.axes else "",
        "·".join(row.axes) or "all",
        f"{row.predicted_count:,} → {row.emitted_count:,}",
        bytes_text(row.predicted_bytes),
        bytes_text(row.emitted_bytes),
        _ratio_text(row.emitted_bytes, row.predicted_bytes),
        str(row.status),
    )


def _ratio_text(emitted: int, predicted: int) -> str:
    return f"×{emitted / predicted:.2f}" if predicted else ""
