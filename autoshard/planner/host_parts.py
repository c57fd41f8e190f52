"""Host parts: inputs of which each host loads its part, and the layouts in which that part stays on its own devices.

A host's part is contiguous: with H hosts, host h loads rows h/H to (h+1)/H of one dimension, as `put_local` takes them.
A layout keeps the part where it is loaded if every device's rows lie within those of its own host.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from math import prod

import numpy as np
from numpy.typing import NDArray

from autoshard.errors import InfeasibleError, SpecError
from autoshard.ir.layout import Layout
from autoshard.ir.mesh import MeshAxes
from autoshard.ir.paths import dotted, matches
from autoshard.ir.trace import Traced
from autoshard.planner.record import Leaf

HostPatterns = str | Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostParts:
    """Which dimension of which inputs is split over the hosts.

    Attributes:
      dimensions: input position → the dimension of which each host loads its part.
      mesh: the mesh axes.
      hosts: the host of each device, in the shape of the mesh.
    """

    dimensions: Mapping[int, int]
    mesh: MeshAxes
    hosts: NDArray[np.int64]

    @property
    def count(self) -> int:
        """The number of hosts."""
        return int(self.hosts.max()) + 1

    @property
    def crossing(self) -> tuple[str, ...]:
        """The mesh axes along which the host changes: a split over the hosts is at least over these."""
        return tuple(name for a, name in enumerate(self.mesh.names) if np.ptp(self.hosts, axis=a).any())

    @property
    def digest(self) -> str:
        """A hash of all that is asked."""
        text = (sorted(self.dimensions.items()), self.hosts.shape, self.hosts.ravel().tolist())
        return hashlib.sha256(repr(text).encode()).hexdigest()[:32]

    def keeps(self, layout: Layout, dimension: int) -> bool:
        """Whether every device's part of the dimension lies within its host's."""
        axes = [self.mesh.names.index(name) for name in layout.dims[dimension]]
        parts = prod(self.mesh.sizes[a] for a in axes)
        if parts % self.count:
            return False
        part = np.zeros((1,) * self.mesh.ndim, np.int64)  # which part each device has
        for a in axes:
            along = np.arange(self.mesh.sizes[a]).reshape([-1 if b == a else 1 for b in range(self.mesh.ndim)])
            part = part * self.mesh.sizes[a] + along
        return bool((part * self.count // parts == self.hosts).all())

    def strays(self, leaves: Sequence[Leaf]) -> list[Leaf]:
        """Those inputs of a plan of which a host would need another's part."""
        at = [(leaves[i], d) for i, d in sorted(self.dimensions.items())]
        return [leaf for leaf, d in at if not self.keeps(Layout.from_spec(leaf.spec, len(leaf.shape)), d)]

    def least(self, position: int, shape: tuple[int, ...], what: str) -> Layout:
        """The layout of an input that is split over the hosts, and no further.

        Raises:
          InfeasibleError: no layout on this mesh is.
        """
        d, axes = self.dimensions[position], self.crossing
        layout = Layout(tuple(axes if k == d else () for k in range(len(shape))))
        parts = prod(self.mesh.shape[name] for name in axes)
        over = f"the mesh {self.mesh} has {self.count} hosts along {'·'.join(axes)}"
        if not self.keeps(layout, d):
            raise InfeasibleError(
                f"{what}: {over}, but not one after the other, so that no layout leaves each host's part with it\n"
                "  order the devices by process, or take a mesh whose first axes are the hosts"
            )
        if shape[d] % parts:
            raise InfeasibleError(
                f"{what}: {over}, and dimension {d} of {shape[d]} does not divide into {parts}\n"
                "  take a mesh in which fewer devices lie along the axes between hosts, or another batch"
            )
        return layout


def read_host_parts(traced: Traced, asked: HostPatterns, mesh: MeshAxes, hosts: NDArray[np.int64]) -> HostParts:
    """The inputs that patterns name; values without dimensions are left out, as each host has the whole of them.

    Raises:
      SpecError: a pattern matches no input, or an input has no such dimension.
    """
    found: dict[int, int] = {}
    for pattern, dimension in ({asked: 0} if isinstance(asked, str) else asked).items():
        named = [i for i, path in enumerate(traced.in_paths) if matches(pattern, path) or _within(pattern, path)]
        if not named:
            near = get_close_matches(pattern.lstrip("*."), traced.in_paths, n=3, cutoff=0.2)
            hint = f"; near it: {', '.join(near)}" if near else ""
            raise SpecError(f"host_local: {pattern!r} matches no input{hint}")
        for i in named:
            ndim = len(traced.in_avals[i].shape)
            if ndim and not 0 <= dimension < ndim:
                raise SpecError(
                    f"host_local: {dotted(traced.in_paths[i])} has {ndim} dimensions, and no dimension {dimension}"
                )
            if ndim:
                found.setdefault(i, dimension)
    return HostParts(dimensions=found, mesh=mesh, hosts=hosts)


def _within(pattern: str, path: str) -> bool:
    """Whether a path lies below one that matches: `batch` names `batch.tokens`, too."""
    return matches(f"{pattern}.**", path)
