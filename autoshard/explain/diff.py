"""Diff: two plans of the same program, side by side."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autoshard.explain.moved_state import MovedState, moved_state
from autoshard.ir.layout import Layout
from autoshard.ir.paths import dotted, joined, pattern_of
from autoshard.ir.recomputation import Recomputation
from autoshard.planner.record import KEEPS, Leaf, PlanRecord
from autoshard.report.notebook import Shown
from autoshard.report.tables import GAP, broken_path, bytes_text, columns, fields, render, short_aval, table, time_text

LONGEST = 8  # paths of one plan alone that are shown one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafChange:
    """Inputs or outputs that lie differently, those that differ in indices alone together."""

    path: str
    value: str
    before: str
    after: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes per step of the collectives of one kind over the same axes, before and after."""

    kind: str
    axes: tuple[str, ...]
    before_bytes: int
    after_bytes: int
    before_s: float
    after_s: float


@dataclass(frozen=True, kw_only=True)
class Diff(Shown):
    """The differences between two plans; equal plans have no `leaves`, no `traffic`, and no state to receive."""

    before: PlanRecord
    after: PlanRecord
    leaves: tuple[LeafChange, ...]
    traffic: tuple[Traffic, ...]
    state: MovedState
    missing: tuple[str, ...]

    def __str__(self) -> str:
        return text(self)

    def to_json(self) -> dict[str, Any]:
        """Everything, in SI units."""
        return {
            "before": _numbers(self.before),
            "after": _numbers(self.after),
            "leaves": [
                {"path": x.path, "value": x.value, "before": x.before, "after": x.after, "count": x.count}
                for x in self.leaves
            ],
            "traffic": [
                {
                    "kind": t.kind,
                    "axes": list(t.axes),
                    "before_bytes": t.before_bytes,
                    "after_bytes": t.after_bytes,
                    "before_s": t.before_s,
                    "after_s": t.after_s,
                }
                for t in self.traffic
            ],
            "state": self.state.to_json(),
            "recomputation": {
                "before": _recomputation(self.before.recomputation),
                "after": _recomputation(self.after.recomputation),
            },
            "missing": list(self.missing),
        }


def diff(before: PlanRecord, after: PlanRecord) -> Diff:
    """Compares layouts by path, traffic by kind and axes, and where the state lies by device."""
    leaves: list[LeafChange] = []
    missing: list[str] = []
    for side, (old, new) in (
        ("", (before.inputs, after.inputs)),
        ("output ", (before.outputs, after.outputs)),
    ):
        found, lost = _leaves(old, new, side)
        leaves += found
        missing += lost
    return Diff(
        before=before,
        after=after,
        leaves=tuple(leaves),
        traffic=_traffic(before, after),
        state=moved_state(before, after),
        missing=tuple(missing),
    )


def text(found: Diff, *, width: int | None = None) -> str:
    """Step and memory of both and the state to move, then the layouts and the traffic that differ."""
    width = columns() if width is None else width
    a, b = found.before, found.after
    same, meshes = a.digest == b.digest, a.mesh == b.mesh
    rows = [
        ("before", _header(a)),
        ("after", _header(b)),
        ("step", time_text(b.cost.step_s - a.cost.step_s) + _relative(a.cost.step_s, b.cost.step_s)),
    ]
    if not same:
        rows.append(("note", "the plans are of different programs; layouts are compared where paths agree"))
    elif not meshes:
        rows.append(("note", "the program is the same, on another mesh"))
    rows += [("backward", words) for words in _recomputing(a, b)]
    rows += found.state.rows()
    rows += [("only one", path) for path in found.missing[:LONGEST]]
    if len(found.missing) > LONGEST:
        rows.append(("only one", f"{len(found.missing) - LONGEST} more have: --json shows all"))
    parts: list[Any] = [fields(rows, width)]
    if found.leaves:
        head = ("layout of", "leaves", "value", "before", "after")
        cells = [(x.path, str(x.count), short_aval(x.value), x.before, x.after) for x in found.leaves]
        others = sum(max(len(row[i]) for row in (head, *cells)) + GAP for i in range(1, len(head)))
        cells = [(broken_path(path, max(width - others - GAP, 20)), *rest) for path, *rest in cells]
        parts.append(table("", head, cells, right=("leaves",), whole=("layout of", "before", "after")))
    if found.traffic:
        cells = [
            (
                t.kind,
                "·".join(t.axes),
                bytes_text(t.before_bytes),
                bytes_text(t.after_bytes),
                time_text(t.before_s),
                time_text(t.after_s),
            )
            for t in found.traffic
        ]
        head = ("collective", "over", "bytes\nbefore", "bytes\nafter", "time\nbefore", "time\nafter")
        parts.append(
            table("collectives per step: logical bytes per device, time if nothing hides", head, cells, right=head[2:])
        )
    if found.state.leaves:
        parts.append(found.state.table(width))
    if not found.leaves and not found.traffic and not found.state.leaves:
        parts.append("both plans lay everything alike\n")
    return render(*parts, width=width)


def _recomputing(before: PlanRecord, after: PlanRecord) -> Iterable[str]:
    """How two plans differ in what backward passes find kept."""
    if before.recomputation == after.recomputation:
        return

    def said(record: PlanRecord) -> str:
        kept = [note for note in record.notes if note.startswith(KEEPS)]
        return (
            kept[0] if record.recomputation is not None and kept else "keep what the program says for backward passes"
        )

    yield f"before {said(before)}; after {said(after)}"
    if before.recomputation is not None and after.recomputation is not None:
        apart = {*before.recomputation.kept} ^ {*after.recomputation.kept}
        own = sum("^" not in place for place in apart)
        if own:
            yield f"{own} value{' is' if own == 1 else 's are'} kept in one of them only"


def _recomputation(chosen: Recomputation | None) -> dict[str, Any] | None:
    if chosen is None:
        return None
    return {"remat": chosen.remat, "kept": list(chosen.kept), "offloaded": list(chosen.offloaded)}


def _relative(before: float, after: float) -> str:
    """In percent, where there is something to compare with."""
    return f" ({after / before - 1:+.2%})" if before else ""


def _header(record: PlanRecord) -> str:
    return (
        f"{record.name} on {record.mesh} ({record.hardware}): {time_text(record.cost.step_s)}, "
        f"{bytes_text(record.memory.peak_bytes)} per device"
    )


def _numbers(record: PlanRecord) -> dict[str, Any]:
    return {
        "name": record.name,
        "digest": record.digest,
        "mesh": record.mesh.shape,
        "hardware": record.hardware,
        "step_s": record.cost.step_s,
        "peak_bytes": record.memory.peak_bytes,
    }


def _leaves(old: Iterable[Leaf], new: Iterable[Leaf], side: str) -> tuple[list[LeafChange], list[str]]:
    then: Mapping[str, Leaf] = {leaf.path: leaf for leaf in new}
    first: Mapping[str, Leaf] = {leaf.path: leaf for leaf in old}
    groups: dict[tuple[tuple[str, ...], str, str, str], list[list[str]]] = {}
    for path, leaf in first.items():
        other = then.get(path)
        if other is None:
            continue
        lay, lies = (str(Layout.from_spec(x.spec, len(x.shape))) for x in (leaf, other))
        if lay != lies:
            segments = dotted(path).split(".")
            value = f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
            groups.setdefault((pattern_of(segments), value, lay, lies), []).append(segments)
    found = [
        LeafChange(path=side + joined(same), value=value, before=a, after=b, count=len(same))
        for (_, value, a, b), same in groups.items()
    ]
    return found, [side + dotted(path) for path in (*first, *then) if (path in first) != (path in then)]


def _traffic(before: PlanRecord, after: PlanRecord) -> tuple[Traffic, ...]:
    moved: dict[tuple[str, tuple[str, ...]], list[float]] = {}
    for i, record in enumerate((before, after)):
        for c in record.collectives:
            amounts = moved.setdefault((c.kind, c.axes), [0, 0, 0.0, 0.0])
            amounts[i] += c.nbytes * c.trips
            amounts[2 + i] += c.seconds * c.trips
    rows = [
        Traffic(kind=kind, axes=axes, before_bytes=int(x), after_bytes=int(y), before_s=s, after_s=t)
        for (kind, axes), (x, y, s, t) in moved.items()
        if x != y
    ]
    return tuple(sorted(rows, key=lambda row: -abs(row.after_s - row.before_s)))
