"""Places a logical mesh on a physical topology, and finds the links that a set of its axes crosses.

Each mesh axis is given factors of physical dimensions. By default axes choose in
turn, the last (innermost) first, and each takes the fastest links that are left:
inner levels before outer ones; on a torus whole dimensions before parts of them,
more links before fewer, and the last dimension first. Along one dimension the
axis that chose first lies innermost (stride 1).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

from cost_models.errors import MeshFitError
from cost_models.machines.alpha_beta import Ring
from cost_models.machines.amounts import count
from cost_models.machines.hardware_file import LINK_ROLES, Medium
from cost_models.machines.topology import Topology


@dataclass(frozen=True, slots=True)
class Crossing:
    """The part of one level of links that a group of devices crosses.

    Attributes:
        level: `"die"`, `"domain"` or `"scale_out"`.
        medium: How the level links devices.
        n: Devices of the group along this level.
        inner: Devices of the group per one of those: the product over inner levels.
        rings: On a torus, the group's part of each dimension.
    """

    level: str
    medium: Medium
    n: int
    inner: int
    rings: tuple[Ring, ...] = ()


@dataclass(frozen=True, slots=True)
class Placement:
    """A mesh on a topology.

    Attributes:
        axes: Mesh axis names, as in the mesh.
        sizes: Their sizes.
        order: The axes from outermost to innermost, as they were placed.
        factors: `[axis, dimension]`: how much of each physical dimension an axis takes.
    """

    topology: Topology
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    order: tuple[str, ...]
    factors: tuple[tuple[int, ...], ...]

    def device_order(self) -> NDArray[np.intp]:
        """Device id at each mesh coordinate, `[*sizes]`; ids are row-major in the topology."""
        ids = np.arange(self.topology.devices, dtype=np.intp)
        outer_first = [self.axes.index(a) for a in self.order]
        dimensions = range(len(self.topology.dimensions))
        split = [(d, a) for d in dimensions for a in outer_first if self.factors[a][d] > 1]
        moves = [split.index((d, a)) for a in range(len(self.axes)) for d in dimensions if (d, a) in split]
        return ids.reshape([self.factors[a][d] for d, a in split]).transpose(moves).reshape(self.sizes)

    def crossings(self, axes: Sequence[str]) -> tuple[Crossing, ...]:
        """The levels that a group over these mesh axes crosses, inner to outer.

        Raises:
            MeshFitError: The mesh has no such axis.
        """
        for axis in axes:
            if axis not in self.axes:
                raise MeshFitError(f"the mesh has no axis `{axis}`; it has {', '.join(self.axes)}")
        chosen = {self.axes.index(a) for a in axes}
        found: list[Crossing] = []
        inner = 1
        for level in LINK_ROLES:
            rings: list[Ring] = []
            n = 1
            medium: Medium = "switch"
            for d, dim in enumerate(self.topology.dimensions):
                if dim.level != level:
                    continue
                medium = dim.medium
                ring = self._ring(d, chosen)
                n *= ring.n
                if ring.n > 1:
                    rings.append(ring)
            if n > 1:
                found.append(Crossing(level, medium, n, inner, tuple(rings) if medium == "torus" else ()))
                inner *= n
        return tuple(found)

    def _ring(self, d: int, chosen: set[int]) -> Ring:
        """The group's part of dimension d: interleaved groups share its links."""
        inner_first = [self.axes.index(a) for a in reversed(self.order)]
        n, sharers, below = 1, 1, 1
        reaches_end = True
        for a in inner_first:
            factor = self.factors[a][d]
            if factor == 1:
                continue
            if a in chosen:
                n *= factor
                sharers, reaches_end = below, True
            else:
                below *= factor
                reaches_end = False
        return Ring(n, self.topology.dimensions[d].wraps and reaches_end and n > 1, sharers)


MOST_AXES = 32


def place(topology: Topology, mesh: Mapping[str, int], order: Sequence[str] | None = None) -> Placement:
    """Place mesh axes on the topology.

    Args:
        topology: The physical topology.
        mesh: Axis name → size, major to minor.
        order: The axes from outermost to innermost; the mesh's own order if None.

    Raises:
        MeshFitError: The mesh has another number of devices, or `order` is no
            permutation of its axes.
    """
    axes, sizes = tuple(mesh), tuple(count(s, "a mesh axis's size", error=MeshFitError) for s in mesh.values())
    if len(axes) > MOST_AXES:
        raise MeshFitError(f"a mesh of {len(axes)} axes: {MOST_AXES} is the most; leave out those of size 1")
    shown = " × ".join(f"{a}={s}" for a, s in zip(axes, sizes, strict=True)) or "(no axes)"
    if prod(sizes) != topology.devices:
        raise MeshFitError(
            f"mesh {shown} has {prod(sizes)} devices, topology {topology.name} has {topology.devices}; "
            f"change one so that they are equal"
        )
    chosen = tuple(axes) if order is None else tuple(order)
    if len(chosen) != len(axes) or set(chosen) != set(axes):
        raise MeshFitError(f"order {chosen} is no permutation of the mesh axes {axes}")
    left = list(topology.shape)
    factors: dict[str, tuple[int, ...]] = {}
    for axis in reversed(chosen):
        factors[axis] = min(_splits(int(mesh[axis]), left), key=lambda f: _preference(f, left, topology))
        left = [n // f for n, f in zip(left, factors[axis], strict=True)]
    return Placement(topology, axes, sizes, chosen, tuple(factors[a] for a in axes))


def _splits(size: int, left: Sequence[int]) -> list[tuple[int, ...]]:
    """All ways to take `size` devices as factors of the rest of each dimension."""
    divisors = [[f for f in range(1, min(n, size) + 1) if n % f == 0 and size % f == 0] for n in left]
    return [f for f in product(*divisors) if prod(f) == size]


def _preference(factors: tuple[int, ...], left: Sequence[int], topology: Topology) -> tuple[int | tuple[int, ...], ...]:
    """Smallest is best: little of outer levels, whole dimensions, many links, last dimensions."""
    dims = topology.dimensions
    outer = tuple(
        prod(f for f, dim in zip(factors, dims, strict=True) if dim.level == level) for level in reversed(LINK_ROLES)
    )
    torus = [(f, n, dim) for f, n, dim in zip(factors, left, dims, strict=True) if dim.medium == "torus" and f > 1]
    parts = sum(f < n for f, n, _ in torus)
    links = sum(2 if dim.wraps and f == dim.size else 1 for f, _, dim in torus)
    return (outer, parts, -links, factors)
