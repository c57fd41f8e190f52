"""Verification: the promises of a plan beside the compiled program, and the verdict."""

from dataclasses import dataclass, field
from dataclasses import fields as fields_of
from typing import Any

from rich.console import RenderableType

from autoshard.backends import hlo
from autoshard.backends.timeline import Timeline, side_by_side
from autoshard.planner.record import Cost
from autoshard.report.notebook import Shown
from autoshard.report.tables import GAP, bytes_text, columns, fields, flops_text, render, short_place, table, time_text
from autoshard.verification.collective_match import (
    LARGE,
    CollectiveRow,
    HandOvers,
    Line,
    Match,
    agrees,
    together,
)
from autoshard.verification.kept_match import OffloadedBytes, RepeatedMatmuls

LONGEST = 12  # attributed collectives that are shown one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Bytes of one device: arguments, outputs, those outputs that lie in arguments, temporaries, and the peak."""

    arguments: int
    outputs: int
    aliases: int
    temporaries: int
    peak: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryComparison:
    """Predicted and compiled memory of one device.

    Attributes:
      predicted: bytes of the plan; its temporaries are the rest of its peak beyond the arguments.
      compiled: bytes of the compiled program; None if no compiler ran.
      meaning: the definition of this compiler's peak.
      bound: whether that peak is only an upper bound (XLA:CPU reports none), which is shown and not judged.
      tolerance: fraction by which the compiled peak may be above the predicted.
    """

    predicted: Parts
    compiled: Parts | None
    meaning: str
    bound: bool
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether the compiled peak is at most `tolerance` above the predicted one."""
        return self.compiled is None or self.bound or self.compiled.peak <= (1 + self.tolerance) * self.predicted.peak


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeComparison:
    """Compute of one device and step.

    Attributes:
      predicted_s: seconds of the plan.
      predicted_flops: FLOPs of the plan's contractions; None if the plan was read from a file.
      compiled_s: seconds of the compiled program's instructions, priced by the plan's cost model.
      compiled_flops: FLOPs of the compiled program's matmuls, loops multiplied out.
      estimated_s: the compiler's own estimate (XLA:TPU); None if it gives none.
    """

    predicted_s: float
    predicted_flops: float | None
    compiled_s: float
    compiled_flops: float
    estimated_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification(Shown):
    """The comparison of a plan with one compiled program.

    Attributes:
      compiler: "gpu", "tpu", "cpu" or "shardy".
      version: version of the compiler's package.
      topology: the hardware that it compiled for.
      rows: one row per collective kind and mesh axes.
      lines: one line per equation and source line.
      memory: bytes per device.
      compute: seconds and FLOPs per device and step.
      repeated: the matmuls that run once more for a backward pass; None if there are none, or no compiler ran.
      repeated_lines: the same by source line, the largest first.
      offloaded: the bytes that are copied to the host's memory, and those that come back; () if there are none, or no
        compiler ran.
      offloaded_lines: the same by source line and way, the largest first.
      pipelines: what the stages of each pipeline in the program hand on.
      cost: the plan's own times.
      predicted: the plan's prices as a timeline; None if the plan was read from a file.
      timeline: the compiled schedule, priced by the plan's cost model; None without a schedule.
      emitted: every collective of the compiled program.
      wall_s: seconds that the compiler ran.
      tolerance: relative difference in bytes that still counts as equal.
      module: the compiled program; None if no compiler ran.
      log: the compiler's standard error.
    """

    compiler: str
    version: str
    topology: str
    rows: tuple[CollectiveRow, ...]
    lines: tuple[Line, ...]
    memory: MemoryComparison
    compute: ComputeComparison | None
    repeated: RepeatedMatmuls | None = None
    repeated_lines: tuple[RepeatedMatmuls, ...] = ()
    offloaded: tuple[OffloadedBytes, ...] = ()
    offloaded_lines: tuple[OffloadedBytes, ...] = ()
    pipelines: tuple[HandOvers, ...] = ()
    cost: Cost
    predicted: Timeline | None
    timeline: Timeline | None
    emitted: tuple[hlo.Collective, ...]
    wall_s: float
    tolerance: float
    module: hlo.Module | None = field(default=None, repr=False)
    log: str = field(default="", repr=False)

    @property
    def ok(self) -> bool:
        """Whether bytes and pipelines agree, the compiler emitted nothing unknown, and the program fits as planned."""
        return not self._wrong()

    def by_kind(self) -> tuple[CollectiveRow, ...]:
        """The rows with all axis sets of one kind together."""
        total = max(sum(row.predicted_bytes for row in self.rows), sum(row.emitted_bytes for row in self.rows))
        kinds = sorted({row.kind for row in self.rows})
        return tuple(together(k, [r for r in self.rows if r.kind == k], total, self.tolerance) for k in kinds)

    def trace(self) -> dict[str, Any]:
        """The predicted and the compiled timeline as one Chrome trace (JSON), as Perfetto reads it."""
        both = {"predicted by the plan": self.predicted, f"compiled by {self.compiler}": self.timeline}
        return side_by_side({name: one for name, one in both.items() if one is not None})

    def __str__(self) -> str:
        """The verdict and the tables, for a terminal."""
        width = columns()
        parts = [fields(self._verdict(), width) + "\n", self._collectives()]
        if self.memory.compiled is not None:
            parts.append(self._memory())
        parts.append(self._line_table(width))
        if self.repeated_lines:
            parts.append(self._repeated_table())
        if self.offloaded_lines:
            parts.append(self._offloaded_table())
        return render(*parts, width=width)

    def _wrong(self) -> list[str]:
        """The parts of the comparison that do not match."""
        judged = {
            "collectives": agrees(self.rows, self.tolerance),
            "memory": self.memory.ok,
            "copies to the host": all(one.ok for one in self.offloaded),
            "stages": all(one.ok for one in self.pipelines),
        }
        return [part for part, ok in judged.items() if not ok]

    def _verdict(self) -> list[tuple[str, str]]:
        wrong = self._wrong()
        lines = [
            (
                "verdict",
                f"{'NO MATCH: ' + ' and '.join(wrong) if wrong else 'MATCH'} (bytes within {self.tolerance:.0%}, "
                f"in total and in each row of {LARGE:.0%} of them, nothing unknown; "
                f"memory no more than {self.memory.tolerance:.0%} above the plan)",
            )
        ]
        if self.timeline is not None:
            lines.append(
                (
                    "step",
                    f"predicted {_times(self.cost.step_s, self.cost.exposed_s, self.cost.hidden_s)}; compiled "
                    f"schedule, priced by the same model: "
                    f"{_times(self.timeline.step_s, self.timeline.exposed_s, self.timeline.hidden_s)}",
                )
            )
        if (compute := self.compute) is not None:
            flops = f" ({flops_text(compute.predicted_flops)} of matmuls)" if compute.predicted_flops else ""
            own = f"; the compiler's own estimate: {time_text(compute.estimated_s)}" if compute.estimated_s else ""
            lines.append(
                (
                    "compute",
                    f"predicted {time_text(compute.predicted_s)}{flops}, compiled {time_text(compute.compiled_s)} "
                    f"({flops_text(compute.compiled_flops)} of matmuls{self._uncounted_text()}){own}",
                )
            )
        if (repeated := self.repeated) is not None:
            lines.append(("repeated", _repeated_text(repeated, compute)))
        if self.offloaded:
            lines.append(("offloaded", "; ".join(map(_offloaded_text, self.offloaded))))
        lines += [("stages", _stages_text(one)) for one in self.pipelines]
        return [*lines, ("compiler", f"{self.compiler}, {self.version}, for {self.topology}: {self.wall_s:.1f} s")]

    def _uncounted_text(self) -> str:
        """Instructions of the compiled program that multiply an unknown amount."""
        names = () if self.timeline is None else self.timeline.uncounted
        return f", without what {', '.join(names)} multiply" if names else ""

    def _collectives(self) -> RenderableType:
        cells: list[tuple[str, ...]] = []
        for kind in self.by_kind():
            split = [row for row in self.rows if row.kind == kind.kind]
            cells += [_cells(row) for row in (split if len(split) == 1 else (*split, kind))]
        return table(
            "collectives per step and device; bytes are logical, wire: what a ring sends",
            ("collective", "over", "count", "predicted", "emitted", "wire", "ratio", "status"),
            cells,
            right=("count", "predicted", "emitted", "wire", "ratio"),
            whole=("collective", "over", "status"),
            spare=("wire", "ratio"),
        )

    def _memory(self) -> RenderableType:
        compiled = self.memory.compiled
        assert compiled is not None  # asked before
        cells = [
            (
                part.name,
                bytes_text(getattr(self.memory.predicted, part.name)),
                bytes_text(getattr(compiled, part.name)),
                _ratio_text(getattr(compiled, part.name), getattr(self.memory.predicted, part.name)),
            )
            for part in fields_of(Parts)
        ]
        return table(
            f"memory per device; compiled peak: {self.memory.meaning}",
            ("memory", "predicted", "compiled", "ratio"),
            cells,
            right=("predicted", "compiled", "ratio"),
            whole=("memory",),
        )

    def _repeated_table(self) -> RenderableType:
        shown, rest = self.repeated_lines[:LONGEST], self.repeated_lines[LONGEST:]
        cells = [
            (
                short_place(line.where),
                "" if line.predicted_flops is None else flops_text(line.predicted_flops),
                flops_text(line.compiled_flops),
                str(line.status or ""),
            )
            for line in shown
        ]
        if rest:
            predicted = sum(line.predicted_flops or 0.0 for line in rest)
            compiled = flops_text(sum(line.compiled_flops for line in rest))
            cells.append((f"{len(rest)} smaller", flops_text(predicted), compiled, ""))
        head = ("repeated at", "predicted", "compiled", "status")
        title = "matmuls that run once more for backward passes: FLOPs per device and step"
        return table(title, head, cells, right=head[1:3], whole=("status",))

    def _offloaded_table(self) -> RenderableType:
        shown, rest = self.offloaded_lines[:LONGEST], self.offloaded_lines[LONGEST:]
        cells = [
            (
                short_place(line.where),
                "to the host" if line.to_host else "back",
                "" if line.predicted_bytes is None else bytes_text(line.predicted_bytes),
                bytes_text(line.compiled_bytes),
                str(line.status or ""),
            )
            for line in shown
        ]
        if rest:
            predicted = bytes_text(sum(line.predicted_bytes or 0 for line in rest))
            compiled = bytes_text(sum(line.compiled_bytes for line in rest))
            cells.append((f"{len(rest)} smaller", "", predicted, compiled, ""))
        head = ("offloaded at", "way", "predicted", "compiled", "status")
        title = "copies between the device's memory and its host's: bytes per device and step"
        return table(title, head, cells, right=head[2:4], whole=("way", "status"))

    def _line_table(self, width: int) -> RenderableType:
        shown, rest = self.lines[:LONGEST], self.lines[LONGEST:]
        head = ("from", "collective", "over", "count", "bytes", "status")
        cells = [
            (
                "",
                line.kind,
                "·".join(line.axes),
                f"{line.count:,}" + (f"×{line.trips:,}" if line.trips > 1 else ""),
                _arrow(bytes_text(line.predicted_bytes), bytes_text(line.emitted_bytes)),
                str(line.status),
            )
            for line in shown
        ]
        if rest:
            sums = (sum(x.predicted_bytes for x in rest), sum(x.emitted_bytes for x in rest))
            count = f"{sum(x.count for x in rest):,}"
            cells.append((f"{len(rest)} smaller", "", "", count, _arrow(*map(bytes_text, sums)), ""))
        others = sum(max(len(row[i]) for row in (head, *cells)) + GAP for i in range(1, len(head)))
        places = [place_text(line, max(width - others - 1, 12)) for line in shown]
        return table(
            "where they come from: source line and equation (count × trips)",
            head,
            [*((place, *row[1:]) for place, row in zip(places, cells, strict=False)), *cells[len(shown) :]],
            right=("count", "bytes"),
            whole=("collective", "over", "status"),
        )


def _repeated_text(found: RepeatedMatmuls, compute: ComputeComparison | None) -> str:
    """`predicted 4 TFLOP of matmuls (10% of all), compiled 4 TFLOP: MATCH`."""
    compiled = flops_text(found.compiled_flops)
    if found.predicted_flops is None:
        return f"compiled {compiled} of matmuls"
    every = None if compute is None else compute.predicted_flops
    share = f" ({found.predicted_flops / every:.1%} of all)" if every else ""
    return f"predicted {flops_text(found.predicted_flops)} of matmuls{share}, compiled {compiled}: {found.status}"


def _offloaded_text(found: OffloadedBytes) -> str:
    """`to the host predicted 4 GB, compiled 4 GB: MATCH`."""
    way, compiled = "to the host" if found.to_host else "back", f"compiled {bytes_text(found.compiled_bytes)}"
    if found.predicted_bytes is None:
        return f"{way} {compiled}"
    return f"{way} predicted {bytes_text(found.predicted_bytes)}, {compiled}: {found.status}"


def _stages_text(found: HandOvers) -> str:
    """`4 stages: 3 of 11 trips are the bubble (27%), compiled 11 trips; collective-permutes hand on 4 MB, …`."""
    p = found.pipeline
    bubble = f"{p.stages} stages: {p.stages - 1} of {p.trips} trips are the bubble ({p.bubble:.0%})"
    if not found.kind:
        return f"{bubble}; nothing is handed on between devices"
    compiled = " and ".join(map(str, found.compiled_trips)) or "no"
    predicted, emitted = bytes_text(found.predicted_bytes), bytes_text(found.emitted_bytes)
    status = Match.MATCH if found.ok else Match.DIFFERS
    return f"{bubble}, compiled {compiled} trips; {found.kind}s hand on {predicted}, emitted {emitted}: {status}"


def _times(step_s: float, exposed_s: float, hidden_s: float) -> str:
    return f"{time_text(step_s)} ({time_text(exposed_s)} exposed, {time_text(hidden_s)} hidden)"


def _cells(row: CollectiveRow) -> tuple[str, ...]:
    """A row of the table; the sum of a kind names no axes."""
    return (
        row.kind if row.axes else "",
        "·".join(row.axes) or "all",
        _arrow(f"{row.predicted_count:,}", f"{row.emitted_count:,}"),
        bytes_text(row.predicted_bytes),
        bytes_text(row.emitted_bytes),
        bytes_text(row.emitted_wire_bytes),
        _ratio_text(row.emitted_bytes, row.predicted_bytes),
        str(row.status),
    )


def _arrow(predicted: str, emitted: str) -> str:
    return predicted if predicted == emitted else f"{predicted} → {emitted}"


def place_text(line: Line, width: int) -> str:
    """`transformer.py:199 dot_general`, cut in two lines where there is no room."""
    where = short_place(line.where).partition(" (")[0]
    text = f"{where} {line.primitive}".rstrip()
    return text if len(text) <= width or not line.primitive else f"{where}\n{line.primitive}"


def _ratio_text(emitted: int, predicted: int) -> str:
    return f"×{emitted / predicted:.2f}" if predicted else ""


__all__ = ["CollectiveRow", "ComputeComparison", "Line", "Match", "MemoryComparison", "Parts", "Verification"]
