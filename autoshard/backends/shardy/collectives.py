"""Explicit: the collectives that Shardy itself would insert, in-process, with no compiler.

After propagation Shardy can make every resharding explicit and name each as a collective
over mesh axes (`sdy-insert-explicit-reshards`, `sdy-reshard-to-collectives`). XLA's SPMD
partitioner decides by itself which of them to merge, or to replace by cheaper ones, so
this is the plan as Shardy reads it: every install has it, and it takes milliseconds.

If only a slice of an all-reduce is used, it counts as the reduce-scatter that compilers
make of it.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any

from autoshard import _jax
from autoshard.backends import hlo
from autoshard.backends.shardy import passes
from autoshard.ir.layout import Layout
from autoshard.ir.mesh import MeshAxes

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
_WRITE_OUT = (
    "func.func(sdy-insert-explicit-reshards{enable-full-version=true})",
    "func.func(sdy-reshard-to-collectives)",
)


def collectives(lowered: Any, mesh: MeshAxes) -> tuple[hlo.Collective, ...]:
    """Every collective of a lowering after Shardy, per device, in program order, loops multiplied out.

    Args:
      lowered: the result of `jax.jit(…, in_shardings=…).lower(…)`; it is not changed.
      mesh: the axes of its mesh.

    Raises:
      ShardyError: a pass fails.
    """
    module = _jax.stablehlo(lowered)
    passes.simplify(module)
    passes.run(module, "sdy-propagation-pipeline")
    write_out(module)
    return tuple(row for op, around in passes.walk(module) for row in _rows(op, around, mesh))


def write_out(module: Any) -> None:
    """Makes every resharding of a propagated module explicit, as collectives, in place.

    Raises:
      ShardyError: a pass fails.
    """
    for pipeline in _WRITE_OUT:
        passes.run(module, pipeline)


def operations(module: Any) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """The collectives of a module that is written out, once per call, each with the calls and loops around it."""
    calls: dict[str, list[Any]] = {}
    found: list[Any] = []
    for op in _jax.operations(module, {*_KINDS, "func.call"}):
        if op.name == "func.call":
            calls.setdefault(op.attributes["callee"].value, []).append(op)
        else:
            found.append(op)

    def around(op: Any) -> Iterator[tuple[Any, ...]]:
        owner = op.parent
        if owner.name != "func.func":
            yield from ((*outer, owner) for outer in around(owner))
        elif (name := owner.attributes["sym_name"].value) == "main":
            yield ()
        else:
            yield from ((*outer, call) for call in calls.get(name, ()) for outer in around(call))

    return ((op, outer) for op in found for outer in around(op))


def text(op: Any) -> str:
    """A collective as text; equal collectives have equal texts."""
    return f"{op.name} {op.attributes[_AXES[op.name]] if op.name in _AXES else ''} {op.attributes['out_sharding']}"


def parts(op: Any, around: tuple[Any, ...], mesh: MeshAxes) -> Iterator[tuple[hlo.Kind, tuple[str, ...], int, int]]:
    """(kind, axes, bytes, trips) of the collectives that a compiler makes of one: an all-reduce may end as two."""
    kind = _KINDS[op.name]
    after = passes.layouts_of(op)[0]
    nbytes = _local_bytes(op, after, mesh)
    axes = _axes(op)
    if kind == "collective-permute":
        axes = _moved_axes(_layout_of(op.operands[0]), after)
    if kind == "reduce-scatter":
        nbytes *= _size(axes, mesh)
    scattered = _slice_axes(op) if kind == "all-reduce" else frozenset[str]()
    first = tuple(a for a in axes if a in scattered)
    trips = prod(_trips(owner) or 1 for owner in around if owner.name == "stablehlo.while")
    if first:
        yield "reduce-scatter", first, nbytes, trips
    rest = tuple(a for a in axes if a not in scattered)
    if rest:
        yield kind, rest, nbytes // _size(first, mesh), trips


def _rows(op: Any, around: tuple[Any, ...], mesh: MeshAxes) -> Iterator[hlo.Collective]:
    if op.name not in _KINDS:
        return
    loops = [owner for owner in around if owner.name == "stablehlo.while"]
    name, where = passes.source_of(op, passes.calls_of(around))
    for kind, over, nbytes, trips in parts(op, around, mesh):
        size = _size(over, mesh)
        yield hlo.Collective(
            kind=kind,
            axes=over,
            group_size=size,
            nbytes=nbytes,
            dtype=str(op.results[0].type.element_type),
            trips=trips,
            where=where,
            op_name=name,
            instruction=str(op.results[0].get_name()),
            done=str(op.results[0].get_name()),
            computation=f"{len(loops)}",
            asynchronous=False,
            combined=1,
            conditional=any(owner.name in ("stablehlo.case", "stablehlo.if") for owner in around),
            unknown_loops=tuple(str(n) for n, loop in enumerate(loops) if _trips(loop) is None),
            moved_bytes=hlo.wire_bytes(kind, nbytes, size),
            groups=(),
        )


def _axes(op: Any) -> tuple[str, ...]:
    """The mesh axes that a collective names; a permute names none."""
    key = _AXES.get(op.name)
    return tuple(dict.fromkeys(passes.axes_in(str(op.attributes[key])))) if key else ()


def _slice_axes(op: Any) -> frozenset[str]:
    """The axes over which every reader of a value slices it at once."""
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


def _layout_of(value: Any) -> Layout | None:
    """The layout that a value has by the op that makes it; None for an argument of a block."""
    if not hasattr(value.owner, "attributes"):
        return None
    layouts = passes.layouts_of(value.owner)
    return layouts[value.result_number] if layouts else None


def _moved_axes(before: Layout | None, after: Layout) -> tuple[str, ...]:
    """The axes that lie elsewhere after a permute: those whose dimension or place in it changes."""
    if before is None:
        return tuple(axis for dim in after.dims for axis in dim)
    found = [set(enumerate(old)) ^ set(enumerate(new)) for old, new in zip(before.dims, after.dims, strict=True)]
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
