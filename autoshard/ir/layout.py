"""Layout: the mesh axes that shard each dimension of a value, and those over which it is unreduced.

Canonical text: `[data,-,model] Σ{x}`: dimension 0 split over `data`, dimension 1
whole, dimension 2 split over `model`, and partial sums over `x`. A dimension
over two axes prints as `data·model`, major to minor.
"""

from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec

from autoshard.errors import SpecError
from autoshard.ir.mesh import MeshAxes


@dataclass(frozen=True, slots=True)
class Layout:
    """Mesh axes per dimension (major to minor) and unreduced axes.

    An axis appears at most once. Axes in no dimension and not unreduced hold
    full copies (replicated).
    """

    dims: tuple[tuple[str, ...], ...]
    unreduced: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        used = [axis for dim in self.dims for axis in dim] + list(self.unreduced)
        if len(set(used)) != len(used):
            raise SpecError(f"a mesh axis is used twice in one layout: {self}")

    @classmethod
    def replicated(cls, ndim: int) -> "Layout":
        return cls(((),) * ndim)

    @classmethod
    def from_spec(cls, spec: PartitionSpec, ndim: int) -> "Layout":
        """From a PartitionSpec; missing trailing dimensions are whole.

        Raises:
          SpecError: the spec has more entries than the value has dimensions, or
            an entry that is neither an axis name, a tuple of names nor None.
        """
        entries: list[Any] = list(spec)
        if len(entries) > ndim:
            raise SpecError(f"{spec} has {len(entries)} entries for {ndim} dimensions")
        entries += [None] * (ndim - len(entries))
        dims: list[tuple[str, ...]] = []
        for entry in entries:
            if entry is None:
                dims.append(())
            elif isinstance(entry, str):
                dims.append((entry,))
            elif isinstance(entry, tuple):
                dims.append(tuple(str(axis) for axis in entry))
            else:
                raise SpecError(f"cannot read {entry!r} in {spec}")
        return cls(tuple(dims))

    @property
    def ndim(self) -> int:
        return len(self.dims)

    def spec(self) -> PartitionSpec:
        """The PartitionSpec of the sharded part (unreduced axes do not show)."""
        entries = [dim[0] if len(dim) == 1 else dim or None for dim in self.dims]
        while entries and entries[-1] is None:
            entries.pop()
        return PartitionSpec(*entries)

    def local_shape(self, shape: tuple[int, ...], mesh: MeshAxes) -> tuple[int, ...]:
        """Per-device shape; every dimension must divide."""
        sizes = mesh.shape
        local: list[int] = []
        for size, axes in zip(shape, self.dims, strict=True):
            for axis in axes:
                if size % sizes[axis]:
                    raise SpecError(f"{self} does not divide {shape} on {mesh}")
                size //= sizes[axis]
            local.append(size)
        return tuple(local)

    def __str__(self) -> str:
        dims = ",".join("·".join(dim) if dim else "-" for dim in self.dims)
        tail = f" Σ{{{','.join(self.unreduced)}}}" if self.unreduced else ""
        return f"[{dims}]{tail}"
