"""Own rows: indices that count along a dimension of their own, as in `x[jnp.arange(batch), places]`.

Every row of a batch takes, or writes, elements of its own row of the operand. JAX has a notation for that, the batching
dimensions of `take_along_axis` and of vmapped lookups: operand and indices are split alike, and nothing is
communicated. XLA's partitioner splits them so, too, where it finds an iota among the indices
(`hlo_sharding_util::GetGatherScatterBatchParallelDims`); the graph has the equation in that notation, and so has what
is emitted (`batched_rows`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from autoshard.ir.op_traits import BROADCAST, CAST, CONCATENATE, GATHER, IOTA, LESS, SELECT, traits_of

Column = int | None  # the dimension of the indices along which a coordinate counts


class OwnRows:
    """What is known of integers while a program is walked: which of them count along one of their dimensions."""

    def __init__(self, number: Callable[[Any], Any]) -> None:
        """`number`: what an equation's input is if it is a literal, else None."""
        self._number = number
        self._counts: dict[int, int] = {}  # value → the dimension
        self._columns: dict[int, tuple[Column, ...]] = {}  # concatenated coordinates → each one's
        self._never: set[int] = set()  # conditions that do not hold anywhere

    def constant(self, value: int, array: Any) -> None:
        """Looks at what a program closes over, no tracer."""
        if not isinstance(array, np.ndarray | jax.Array) or not getattr(array, "is_fully_addressable", True):
            return
        if array.dtype == np.bool_ and not np.any(array):
            self._never.add(value)
        elif np.issubdtype(array.dtype, np.integer) and array.ndim:
            for d, size in enumerate(array.shape):
                if size > 1 and np.array_equal(array, _count(array.shape, d)):
                    self._counts[value] = d

    def see(self, name: str, eqn: Any, operands: Sequence[int], results: Sequence[int]) -> Mapping[str, Any]:
        """An equation's parameters, after what it computes was looked at; indices that count are batching dimensions.

        Args:
          name: its primitive's.
          eqn: of the program.
          operands: the graph's values, in the order of the equation's inputs.
          results: the graph's values, in the order of the equation's outputs.
        """
        if name == GATHER or traits_of(name).scatters:
            return _batched(eqn, self._coordinates(operands[1], eqn.invars[1].aval.shape))
        if name == IOTA:
            along = eqn.params["dimension"]
            if _holds(eqn.params["dtype"], eqn.params["shape"][along]):
                self._counts[results[0]] = along
        elif name == CAST:
            along = self._counts.get(operands[0])
            if along is not None and _holds(eqn.params["new_dtype"], eqn.invars[0].aval.shape[along]):
                self._counts[results[0]] = along
        elif name == BROADCAST:
            if (along := self._counts.get(operands[0])) is not None:
                self._counts[results[0]] = eqn.params["broadcast_dimensions"][along]
        elif name == LESS:
            bound = self._number(eqn.invars[1])
            if operands[0] in self._counts and bound is not None and not np.any(bound > 0):
                self._never.add(results[0])
        elif name == SELECT:
            if operands[0] in self._never and operands[1] in self._counts:
                self._counts[results[0]] = self._counts[operands[1]]
        elif name == CONCATENATE:
            shapes = [v.aval.shape for v in eqn.invars]
            if eqn.params["dimension"] == len(shapes[0]) - 1:
                parts = [self._coordinates(v, shape) for v, shape in zip(operands, shapes, strict=True)]
                self._columns[results[0]] = tuple(column for part in parts for column in part)
        return eqn.params

    def _coordinates(self, value: int, shape: Sequence[int]) -> Sequence[Column]:
        along = self._counts.get(value)
        own = along if along != len(shape) - 1 else None
        return self._columns.get(value) or (own,) * shape[-1]


def coordinates(name: str, numbers: Any) -> tuple[int, ...]:
    """The operand's dimensions that the coordinates of an index are in, in order: of a lookup or of a scatter."""
    return tuple(numbers.start_index_map if name == GATHER else numbers.scatter_dims_to_operand_dims)


def _holds(dtype: Any, size: int) -> bool:
    """Whether a type has all positions of so many: an `int8` begins again behind 127."""
    return np.issubdtype(dtype, np.integer) and size - 1 <= np.iinfo(dtype).max


def _count(shape: Sequence[int], along: int) -> NDArray[np.int64]:
    """The positions along a dimension."""
    sizes = [n if d == along else 1 for d, n in enumerate(shape)]
    return np.broadcast_to(np.arange(shape[along]).reshape(sizes), shape)


def _batched(eqn: Any, columns: Sequence[Column]) -> Mapping[str, Any]:
    """A lookup's or a scatter's parameters, with the dimensions of which indices count as batching dimensions."""
    numbers = eqn.params["dimension_numbers"]
    operand, indices = (v.aval.shape for v in eqn.invars[:2])
    looks_up = eqn.primitive.name == GATHER
    indexed = coordinates(eqn.primitive.name, numbers)
    single = numbers.collapsed_slice_dims if looks_up else numbers.inserted_window_dims
    batches = numbers.start_indices_batching_dims if looks_up else numbers.scatter_indices_batching_dims
    found = {
        d: along
        for d, along in zip(indexed, columns, strict=True)
        if along is not None and d in single and along not in batches
        if operand[d] == indices[along] and columns.count(along) == 1
    }
    if not found or len(found) == len(indexed):
        return eqn.params
    pairs = sorted([*zip(numbers.operand_batching_dims, batches, strict=True), *found.items()])
    own, theirs = (tuple(side) for side in zip(*pairs, strict=True))
    rest = tuple(d for d in single if d not in found)
    left = tuple(d for d in indexed if d not in found)
    names = (
        ("collapsed_slice_dims", "start_index_map", "start_indices_batching_dims")
        if looks_up
        else ("inserted_window_dims", "scatter_dims_to_operand_dims", "scatter_indices_batching_dims")
    )
    changed = dict(zip(names, (rest, left, theirs), strict=True))
    return {**eqn.params, "dimension_numbers": numbers._replace(operand_batching_dims=own, **changed)}
