"""Graph: a jaxpr as frozen equations over numbered values."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from autoshard import _jax


@dataclass(frozen=True, slots=True)
class Aval:
    """Shape and dtype of a value (`dtype` may be an extended one, such as `key<fry>`)."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * _jax.itemsize(self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Eqn:
    """One equation as rules see it: no tracers, no variables, no mesh.

    `where` is the user's `file:line (function)`.
    """

    primitive: str
    operands: tuple[Aval, ...]
    results: tuple[Aval, ...]
    params: Mapping[str, Any]
    where: str = "<unknown>"
