"""Moved state: the bytes that devices must receive when another plan takes a program's state over.

Device i of the first plan's mesh is device i of the second one's: the i-th of `jax.devices()`, wherever the mesh has
it. It keeps what it holds, also where that is a copy, or lies in its host's memory. A device that only the second mesh
has holds nothing. What devices of the first mesh alone hold is gone with them: it has to come from a checkpoint.

A layout gives each device one box of a value's indices. So what a device must receive of a value is its new box less
the overlap with its old one, and the overlap is a product over dimensions: exact, and one sum for all devices.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import RenderableType

from autoshard import _jax
from autoshard.ir.layout import Layout
from autoshard.ir.paths import dotted, joined, pattern_of
from autoshard.planner.record import Leaf, PlanRecord
from autoshard.report.tables import GAP, broken_path, bytes_text, short_aval, table

MOST_ROWS = 8  # rows of a table that are shown; --json has all

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedLeaves:
    """Leaves of the state, those that differ in indices alone together, of which some device lacks bytes.

    Attributes:
      path: where they are in the arguments.
      value: dtype and shape of one of them.
      before: the first plan's layout.
      after: the second plan's.
      count: how many leaves.
      received_bytes: what all devices together must receive.
      most_bytes: what the device must receive that receives most of these.
      lost_bytes: what no device holds that both meshes have, each element once.
    """

    path: str
    value: str
    before: str
    after: str
    count: int
    received_bytes: int
    most_bytes: int
    lost_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedState:
    """What each device must receive of the state beyond what it holds.

    Attributes:
      donated: whether the state are the inputs that one of the plans donates; False: every input, for none is donated.
      devices_before: of the first mesh.
      devices_after: of the second mesh.
      state_bytes: the state's size, each element once.
      device_bytes: what each device of the second mesh must receive.
      lost_bytes: what no device holds that both meshes have, each element once.
      leaves: where there is something to receive, the most first.
      others: paths of the state whose shape or dtype is another in the second plan; they are not counted.
    """

    donated: bool
    devices_before: int
    devices_after: int
    state_bytes: int
    device_bytes: tuple[int, ...]
    lost_bytes: int
    leaves: tuple[MovedLeaves, ...]
    others: tuple[str, ...]

    @property
    def received_bytes(self) -> int:
        """What all devices together must receive."""
        return sum(self.device_bytes)

    @property
    def most_bytes(self) -> int:
        """What the device must receive that receives most."""
        return max(self.device_bytes)

    def rows(self) -> list[tuple[str, str]]:
        """Names and sentences for a list of fields."""
        kind = "donated inputs" if self.donated else "all inputs: none is donated"
        fleet = (
            f"{self.devices_before} devices become {self.devices_after}"
            if self.devices_before != self.devices_after
            else f"{self.devices_after} devices"
        )
        said = f"{bytes_text(self.state_bytes)} ({kind}); {fleet}: "
        if self.received_bytes:
            first = self.device_bytes.index(self.most_bytes)
            said += (
                f"they must receive {bytes_text(self.received_bytes)} beyond what they hold, "
                f"none more than device {first}, {bytes_text(self.most_bytes)}"
            )
        else:
            said += "each holds what it needs"
        if self.lost_bytes:
            said += f"; {bytes_text(self.lost_bytes)} of the state lies on none of those that stay"
        rows = [("state", said)]
        if self.received_bytes:
            rows.append(("devices", "device i before is device i after; a new one holds nothing"))
        if self.others:
            rows.append(("not counted", f"{len(self.others)} of the state, of another shape or dtype in one plan"))
        return rows

    def table(self, width: int) -> RenderableType:
        """The leaves with the most bytes to receive."""
        head = ("state to receive", "leaves", "value", "largest\ndevice", "all\ndevices")
        cells = [
            (x.path, f"{x.count:,}", short_aval(x.value), bytes_text(x.most_bytes), bytes_text(x.received_bytes))
            for x in self.leaves[:MOST_ROWS]
        ]
        if len(self.leaves) > MOST_ROWS:
            rest = self.leaves[MOST_ROWS:]
            left = sum(x.received_bytes for x in rest)
            cells.append((f"{len(rest)} more rows", f"{sum(x.count for x in rest):,}", "--json", "", bytes_text(left)))
        room = width - GAP - sum(_widest(row[i] for row in (head, *cells)) + GAP for i in range(1, len(head)))
        cells = [(broken_path(path, max(room, 20)), *rest) for path, *rest in cells]
        return table("", head, cells, right=("leaves", *head[3:]), whole=(head[0],))

    def to_json(self) -> dict[str, Any]:
        """Everything, in bytes."""
        return {
            "donated": self.donated,
            "devices_before": self.devices_before,
            "devices_after": self.devices_after,
            "state_bytes": self.state_bytes,
            "received_bytes": self.received_bytes,
            "most_bytes": self.most_bytes,
            "device_bytes": list(self.device_bytes),
            "lost_bytes": self.lost_bytes,
            "leaves": [
                {
                    "path": x.path,
                    "value": x.value,
                    "before": x.before,
                    "after": x.after,
                    "count": x.count,
                    "received_bytes": x.received_bytes,
                    "most_bytes": x.most_bytes,
                    "lost_bytes": x.lost_bytes,
                }
                for x in self.leaves
            ],
            "others": list(self.others),
        }


@dataclass(slots=True)
class _Sum:
    """Equal leaves so far: bytes per device of the second mesh, and lost ones."""

    device_bytes: Ints
    lost_bytes: int = 0
    paths: list[list[str]] = field(default_factory=list[list[str]])


def moved_state(before: PlanRecord, after: PlanRecord) -> MovedState:
    """What each device must receive when `after` takes over the state that lies as `before` says."""
    pairs, donated = _state(before, after)
    sums: dict[tuple[tuple[str, ...], str, str, str], _Sum] = {}
    known: dict[tuple[str, str, str], tuple[Ints, int]] = {}
    total = gone = 0
    changed: list[str] = []
    for old, new in pairs:
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            changed.append(dotted(new.path))
            continue
        value = f"{new.dtype}[{','.join(map(str, new.shape))}]"
        lay, lies = (Layout.from_spec(x.spec, len(x.shape)) for x in (old, new))
        if (key := (value, str(lay), str(lies))) not in known:
            known[key] = _bytes_of(new, _boxes(lay, new.shape, before), _boxes(lies, new.shape, after))
        device_bytes, lost = known[key]
        segments = dotted(new.path).split(".")
        group = (pattern_of(segments), value, _said(lay, old), _said(lies, new))
        one = sums.setdefault(group, _Sum(np.zeros(after.mesh.size, np.int64)))
        one.device_bytes += device_bytes
        one.lost_bytes += lost
        one.paths.append(segments)
        total += prod(new.shape) * _jax.itemsize_of(new.dtype)
        gone += lost
    every = sum((one.device_bytes for one in sums.values()), np.zeros(after.mesh.size, np.int64))
    leaves = [
        MovedLeaves(
            path=joined(one.paths),
            value=value,
            before=lay,
            after=lies,
            count=len(one.paths),
            received_bytes=int(one.device_bytes.sum()),
            most_bytes=int(one.device_bytes.max()),
            lost_bytes=one.lost_bytes,
        )
        for (_, value, lay, lies), one in sums.items()
        if one.device_bytes.any()
    ]
    return MovedState(
        donated=donated,
        devices_before=before.mesh.size,
        devices_after=after.mesh.size,
        state_bytes=total,
        device_bytes=tuple(every.tolist()),
        lost_bytes=gone,
        leaves=tuple(sorted(leaves, key=lambda x: -x.received_bytes)),
        others=tuple(changed),
    )


def _state(before: PlanRecord, after: PlanRecord) -> tuple[Iterable[tuple[Leaf, Leaf]], bool]:
    """The inputs of both plans that one of them donates, by path; every one where none is donated."""
    donated = {record.inputs[i].path for record in (before, after) for i in record.donated}
    old = {leaf.path: leaf for leaf in before.inputs}
    shared = [leaf for leaf in after.inputs if leaf.path in old and (leaf.path in donated or not donated)]
    return [(old[leaf.path], leaf) for leaf in shared], bool(donated)


def _widest(cells: Iterable[str]) -> int:
    return max(len(line) for cell in cells for line in cell.splitlines() or ("",))


def _said(layout: Layout, leaf: Leaf) -> str:
    return f"{layout}{' on the host' if leaf.on_host else ''}"


@dataclass(frozen=True, slots=True)
class _Boxes:
    """The part of a value that each device holds.

    Attributes:
      index: `[device, dimension]`, which of the dimension's equal parts.
      parts: into how many parts each dimension is split.
      local: the shape of one box.
    """

    index: Ints
    parts: tuple[int, ...]
    local: tuple[int, ...]


def _boxes(layout: Layout, shape: tuple[int, ...], record: PlanRecord) -> _Boxes:
    """Where a value lies, by device: row i is the i-th device, not the i-th position of the mesh."""
    mesh = record.mesh
    axes = dict(zip(mesh.names, np.indices(mesh.sizes).reshape(mesh.ndim, mesh.size), strict=True))
    by_position = np.zeros((mesh.size, len(shape)), np.int64)
    for dimension, names in enumerate(layout.dims):
        for name in names:
            by_position[:, dimension] = by_position[:, dimension] * mesh.shape[name] + axes[name]
    index = np.empty_like(by_position)
    index[np.asarray(record.device_order, np.int64)] = by_position
    parts = tuple(prod(mesh.shape[name] for name in names) for names in layout.dims)
    return _Boxes(index, parts, layout.local_shape(shape, mesh))


def _bytes_of(leaf: Leaf, old: _Boxes, new: _Boxes) -> tuple[Ints, int]:
    """Bytes that each device of the second mesh must receive, and those that no device holds that both have."""
    stay = min(len(old.index), len(new.index))
    held = np.ones(stay, np.int64)
    for d in range(len(leaf.shape)):
        first, then = old.index[:stay, d] * old.local[d], new.index[:stay, d] * new.local[d]
        ends = np.minimum(first + old.local[d], then + new.local[d])
        held *= np.maximum(ends - np.maximum(first, then), 0)
    received = np.full(len(new.index), prod(new.local), np.int64)
    received[:stay] -= held
    distinct = len(np.unique(old.index[:stay], axis=0))
    itemsize = _jax.itemsize_of(leaf.dtype)
    return received * itemsize, (prod(old.parts) - distinct) * prod(old.local) * itemsize
