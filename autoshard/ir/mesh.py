"""Mesh axes: names, sizes and order; `cost_models` places them on hardware.

Not a second `jax.sharding.Mesh`: users only ever see JAX's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from operator import index
from typing import Any

from autoshard.errors import MeshError


@dataclass(frozen=True, slots=True)
class MeshAxes:
    """The logical mesh: axis names and sizes, major to minor.

    `groups`: in how many groups of neighbouring axes a layout may use it, at most, each for one purpose; None: in as
    many as there are axes. Layouts of fewer groups are those of a mesh that has several axes as one.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    groups: int | None = None

    def __post_init__(self) -> None:
        if len(self.names) != len(self.sizes):
            raise MeshError(f"{len(self.names)} axis names, {len(self.sizes)} sizes")
        for name in self.names:
            if not _is_name(name):
                raise MeshError(
                    f"mesh axis {name!r}: XLA and Shardy read names of printable ASCII with a letter or a digit, "
                    "without quotes, backslashes and colons (others end the process or are misread): rename the axis"
                )
        if len(set(self.names)) != len(self.names):
            raise MeshError(f"mesh axis names repeat: {self.names}")
        axes: list[tuple[Any, Any]] = list(zip(self.names, self.sizes, strict=True))
        for name, size in axes:
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise MeshError(f"mesh axis {name!r} of size {size!r}: a size is a positive whole number")

    @classmethod
    def of(cls, shape: Mapping[str, int]) -> "MeshAxes":
        """From `{"data": 2, "model": 4}`; order is major to minor."""
        return cls(tuple(shape), tuple(map(_whole, shape.values())))

    @property
    def ndim(self) -> int:
        return len(self.names)

    @property
    def size(self) -> int:
        """Number of devices."""
        return prod(self.sizes)

    @property
    def shape(self) -> dict[str, int]:
        return dict(zip(self.names, self.sizes, strict=True))

    def __str__(self) -> str:
        return " × ".join(f"{n}={s}" for n, s in zip(self.names, self.sizes, strict=True))


def _is_name(name: object) -> bool:
    """Whether everything that reads an axis name, here and in the compilers, reads the same one."""
    return (
        isinstance(name, str)
        and name.isascii()
        and name.isprintable()
        and any(letter.isalnum() for letter in name)
        and not set(name) & set("\"'\\:")
    )


def _whole(size: Any) -> Any:
    """A NumPy integer as Python's; other values are returned as they are, to be refused."""
    return index(size) if hasattr(size, "__index__") and not isinstance(size, bool) else size
