"""Explicit: the collectives that Shardy itself would insert, in-process, with no compiler.

After propagation Shardy can make every resharding explicit and name each as a collective
over mesh axes (`sdy-insert-explicit-reshards`, `sdy-reshard-to-collectives`). XLA's SPMD
partitioner decides by itself which of them to merge, or to replace by cheaper ones, so
this is the plan as Shardy reads it: every install has it, and it takes milliseconds.

An all-reduce of which only a slice is used stands for the reduce-scatter that the
compilers make of it.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any

from autoshard import _jax, hlo, shardy
from autoshard.layout import Layout
from autoshard.mesh import MeshAxes

_KINDS: Mapping[str, hlo.Kind] = {
    "sdy.all_gather": "all-gather",
    "sdy.all_reduce": "all-reduce",
    "sdy.all_to_all": "all-to-all",
    "sdy.collective_permute": "collective-permute",
    "sdy.reduce_scatter": "reduce-scatter",
}
_AXES = {
    "sdy.all_gather": "gathering_axes",
    "sdy.all_reduce": "reduction_axes",
    "sdy.all_slice": "slicing_axes",
    "sdy.all_to_all": "params",
    "sdy.reduce_scatter": "reduce_scatter_axes",
}
_NUMBER = re.compile(r"dense<(-?\d+)>")
_PIPELINE = (
    "sdy-propagation-pipeline",
    "func.func(sdy-insert-explicit-reshards{enable-full-version=true})",
    "func.func(sdy-reshard-to-collectives)",
)


def collectives(lowered: Any, mesh: MeshAxes) -> tuple[hlo.Collective, ...]:
    """Every collective of a lowering after Shardy, per device, in program order, loops multiplied out.

    Args:
      lowered: what `jax.jit(…, in_shardings=…).lower(…)` returns; it is not changed.
      mesh: the axes of its mesh.

    Raises:
      ShardyError: a pass fails.
    """
    module = _jax.stablehlo(lowered)
    shardy.state_pointwise_rules(module)
    for pipeline in _PIPELINE:
        shardy.run(module, pipeline)
    return tuple(row for op, around in shardy.walk(module) for row in _rows(op, around, mesh))


def _rows(op: Any, around: tuple[Any, ...], mesh: MeshAxes) -> Iterator[hlo.Collective]:
    kind = _KINDS.get(op.name)
    if kind is None:
        return
    after = shardy.layouts_of(op)[0]
    nbytes = _local_bytes(op, after, mesh)
    axes = _axes(op)
    if kind == "collective-permute":
        axes = _moved(shardy.layouts_of(op.operands[0].owner), after)
    if kind == "reduce-scatter":
        nbytes *= _size(axes, mesh)
    scattered = _sliced(op) if kind == "all-reduce" else frozenset[str]()
    parts = [("reduce-scatter", tuple(a for a in axes if a in scattered), nbytes)]
    rest = tuple(a for a in axes if a not in scattered)
    parts.append((kind, rest, nbytes // _size(parts[0][1], mesh)))
    loops = [owner for owner in around if owner.name == "stablehlo.while"]
    counts = [_trips(loop) for loop in loops]
    name, where = shardy.source_of(op, shardy.calls_of(around))
    for part, over, amount in parts:
        if over:
            size = _size(over, mesh)
            yield hlo.Collective(
                kind=part,  # pyright: ignore[reportArgumentType]
                axes=over,
                group_size=size,
                nbytes=amount,
                dtype=str(op.results[0].type.element_type),
                trips=prod(count or 1 for count in counts),
                where=where,
                op_name=name,
                instruction=str(op.results[0].get_name()),
                done=str(op.results[0].get_name()),
                computation=f"{len(loops)}",
                asynchronous=False,
                combined=1,
                conditional=any(owner.name in ("stablehlo.case", "stablehlo.if") for owner in around),
                unknown_loops=tuple(str(n) for n, count in enumerate(counts) if count is None),
                moved_bytes=hlo.wire_bytes(part, amount, size),
                groups=(),
            )


def _axes(op: Any) -> tuple[str, ...]:
    """The mesh axes that a collective names; a permute names none."""
    key = _AXES.get(op.name)
    return tuple(dict.fromkeys(shardy.axes_in(str(op.attributes[key])))) if key else ()


def _sliced(op: Any) -> frozenset[str]:
    """The axes over which everything that reads a value slices it at once."""
    cut: list[frozenset[str]] = []
    for use in op.results[0].uses:
        user, over = use.owner, frozenset[str]()
        while user.name == "sdy.all_slice":
            over |= set(_axes(user))
            onward = [x.owner for x in user.results[0].uses]
            if len(onward) != 1:
                break
            user = onward[0]
        cut.append(over)
    return frozenset.intersection(*cut) if cut else frozenset()


def _moved(before: tuple[Layout, ...], after: Layout) -> tuple[str, ...]:
    """The axes that lie elsewhere after a permute: those whose dimension or place in it changes."""
    if not before:
        return tuple(axis for dim in after.dims for axis in dim)
    found = [set(enumerate(old)) ^ set(enumerate(new)) for old, new in zip(before[0].dims, after.dims, strict=True)]
    names = dict.fromkeys(axis for places in found for _, axis in sorted(places))
    return tuple(axis for axis in names if ":" not in axis or axis.partition(":")[0] not in names)


def _local_bytes(op: Any, layout: Layout, mesh: MeshAxes) -> int:
    """Bytes of an op's result on one device; the last shard of an uneven split counts as the others."""
    kind = op.results[0].type
    pieces = prod(-(-size // _size(axes, mesh)) for size, axes in zip(kind.shape, layout.dims, strict=True))
    return (pieces * _jax.element_bits(kind.element_type) + 7) // 8


def _size(axes: Iterable[str], mesh: MeshAxes) -> int:
    """Devices along axes; a part of one, `model:(1)2`, says its own size."""
    return prod(int(axis.rpartition(")")[2]) if ":" in axis else mesh.shape[axis] for axis in axes)


def _trips(loop: Any) -> int | None:
    """Trips of a loop that counts up from 0 by 1, as JAX's scans do; None for others."""
    for view in loop.regions[0].blocks[0].operations:
        op = view.operation
        if op.name == "stablehlo.compare" and "LT" in str(op.attributes["comparison_direction"]):
            owner = op.operands[1].owner
            value = getattr(owner, "attributes", {}).get("value") if hasattr(owner, "attributes") else None
            found = _NUMBER.search(str(value))
            return int(found[1]) if found else None
    return None
