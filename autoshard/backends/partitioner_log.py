"""Partitioner log: the values that XLA's SPMD partitioner made whole to move them between two layouts.

It warns of each on standard error (`spmd_partitioner.cc`): "Involuntary full rematerialization".
"""

import re
from dataclasses import dataclass

from autoshard.backends.hlo.shardings import layout_of
from autoshard.errors import HloError
from autoshard.ir.layout import Layout
from autoshard.ir.mesh import MeshAxes

# Its words before and since jaxlib 0.10.
_WARNING = re.compile(
    r"Involuntary full rematerialization\. The compiler (?:cannot|was not able to) go from sharding (\{.*?\}) to "
    r"(\{.*?\}) (?:efficiently|without doing a full rematerialization of the tensor)(?: for HLO operation:? ?(.*))?"
)
_SHAPE = re.compile(r"= \(?\w+\[([\d,]*)\]")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Rematerialized:
    """A value that the partitioner made whole: the op that makes it, and both layouts, if they are of mesh axes."""

    op_name: str
    source: Layout | None
    target: Layout | None


def rematerialized(log: str, mesh: MeshAxes) -> tuple[Rematerialized, ...]:
    """The values of a compilation that were made whole, each once, in the order of the log."""
    found: dict[tuple[str, str, str], Rematerialized] = {}
    for warning in _WARNING.finditer(log):
        source, target, operation = warning[1], warning[2], warning[3] or ""
        shape, name = _SHAPE.search(operation), _OP_NAME.search(operation)
        ndim = len(shape[1].split(",")) if shape and shape[1] else 0
        op_name = name[1] if name else ""
        found[op_name, source, target] = Rematerialized(
            op_name=op_name, source=_layout(source, ndim, mesh), target=_layout(target, ndim, mesh)
        )
    return tuple(found.values())


def _layout(text: str, ndim: int, mesh: MeshAxes) -> Layout | None:
    try:
        return layout_of(text, ndim, mesh)
    except HloError:
        return None


def way_between(source: Layout, target: Layout) -> Layout | None:
    """The layout after the first of several moves of one mesh axis each; None if one move is enough.

    Axes of a dimension move from the major one on, since a further axis is always the minor one of its dimension.
    """
    dims = [list(dim) for dim in source.dims]
    moves = 0
    first: Layout | None = None
    for d, wanted in enumerate(target.dims):
        for at, axis in enumerate(wanted):
            if dims[d][at : at + 1] == [axis]:
                continue
            for dim in dims:
                if axis in dim:
                    dim.remove(axis)
            dims[d].insert(at, axis)
            moves += 1
            first = first or Layout(tuple(tuple(dim) for dim in dims))
    return first if moves > 1 else None
