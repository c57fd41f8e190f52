"""Ragged products: groups of rows, whose sizes only the run knows, each times a matrix of its own.

A kernel that knows of groups (libtpu's) multiplies every row once. XLA:GPU and XLA:CPU make a dense product of all
rows and all matrices: of what is ragged they write a copy for every group, with zeros for the rows of others. Copies
lie in memory until their last product. Where rows are contracted they are `[group, row, k]`; where rows are
multiplied, which contracts the groups, too, `[row, group, k]`, transposed from the others if there are any. Matrices
are transposed whose contracting dimension does not follow that of their groups.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from autoshard.ir.graph import Eqn, Graph
from autoshard.ir.op_traits import RAGGED_DOT

Ragged: TypeAlias = Literal["rows", "contracted", "batch"]


def ragged_dimension(eqn: Eqn) -> Ragged:
    """Which dimension of a ragged product has groups: rows of the result, what it contracts, or its batch."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contracted, _), (batch, _) = numbers.dot_dimension_numbers
    (ragged,) = numbers.lhs_ragged_dimensions
    return "contracted" if ragged in contracted else "batch" if ragged in batch else "rows"


def group_count(eqn: Eqn) -> int:
    """How many groups a ragged product has."""
    return max(eqn.operands[2].shape[-1], 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Masked:
    """Copies of an operand, one per group, in one order, that count for one product.

    Attributes:
      operand: of the product, 0 or 1.
      times: how often they are read or written to be made.
      begin: when the first product takes them, or others that they are transposed to.
      end: when the last one does.
    """

    operand: int
    times: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseProduct:
    """A ragged product as a dense one: the copies that count for it; when it transposes its matrices, if it does."""

    groups: int
    masked: tuple[Masked, ...]
    turned: int | None

    def touched_bytes(self, operands: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
        """HBM bytes per device (S,) of making what is multiplied, by those of the operands."""
        total = operands[1] * (0 if self.turned is None else 2)
        return total + sum(masked.times * self.groups * operands[masked.operand] for masked in self.masked)

    def held(self, operands: Sequence[NDArray[np.int64]]) -> Iterator[tuple[tuple[int, int], NDArray[np.int64]]]:
        """What lies in memory for the product: from when until when, and its bytes per device (S,)."""
        for masked in self.masked:
            yield (masked.begin, masked.end), self.groups * operands[masked.operand]
        if self.turned is not None:
            yield (self.turned, self.turned), operands[1]


def dense_products(graph: Graph, start: Sequence[int] | NDArray[np.int64]) -> Mapping[int, DenseProduct]:
    """Ragged product → what a compiler makes of it that multiplies all rows with all matrices.

    Products that take copies of one value are assumed to take it in one layout.

    Args:
      graph: the program.
      start: when each value is made (`LiveRanges.start`).
    """
    ragged = {e: ragged_dimension(eqn) for e, eqn in enumerate(graph.eqns) if eqn.primitive == RAGGED_DOT}
    made = {e: int(start[graph.results[e][0]]) for e in ragged}
    uses = defaultdict[tuple[int, int], list[tuple[int, int, int]]](list)  # value, loop → when, product, operand
    for e, dimension in ragged.items():
        for i in {"rows": (0,), "contracted": (0, 1), "batch": ()}[dimension]:
            uses[graph.operands[e][i], graph.eqn_loop[e]].append((made[e], e, i))
    masked = defaultdict[int, list[Masked]](list)
    for products in map(sorted, uses.values()):
        by_row, by_group = ([use for use in products if ragged[use[1]] == of] for of in ("rows", "contracted"))
        if by_group:  # in the layout of the last: a gradient's operands may be whole where its rows were split
            end, e, operand = by_group[-1]
            masked[e].append(Masked(operand=operand, times=1, begin=products[0][0], end=end))
        if by_row:
            begin, e, operand = by_row[0]
            masked[e].append(Masked(operand=operand, times=2 if by_group else 1, begin=begin, end=by_row[-1][0]))
    turned = {e for e, dimension in ragged.items() if dimension == "rows" and _are_turned(graph.eqns[e])}
    return {
        e: DenseProduct(
            groups=group_count(graph.eqns[e]), masked=tuple(masked[e]), turned=made[e] if e in turned else None
        )
        for e in ragged
    }


def _are_turned(eqn: Eqn) -> bool:
    """Whether a dense product must transpose its matrices: groups and what is contracted are not one dimension."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, contracted), _ = numbers.dot_dimension_numbers
    (groups,) = numbers.rhs_group_dimensions
    dims = [groups, *contracted]
    return dims != list(range(groups, groups + len(dims)))
