"""Merged products: contractions that share an operand, of which a compiler makes one.

Queries, keys and values, a gate and what it multiplies: XLA:GPU multiplies what they share with all the others side by
side, in one kernel, if they contract the same dimensions, are of one type and do not depend on each other. One of two
must be small (`CompilerModel.merged_product_bytes`). One large product fills the chip better than several small ones;
but what another product multiplies is first copied out of it (jax-cuda12-pjrt 0.10.2: queries, keys, and values without
rotations). What element-wise kernels read they read there.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoshard.ir.graph import Graph
from autoshard.ir.op_traits import DOT_GENERAL


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedProduct:
    """What a contraction is merged with.

    Attributes:
      shared: the operand, 0 or 1, that all of them have.
      times: elements of all results, by those of its own.
      smallest: elements of the smallest result, by those of its own.
      copied: whether its result is copied out of theirs.
      up_to: bytes of the operands and the result of the smallest of them, up to which they are one.
    """

    shared: int
    times: float
    smallest: float
    copied: bool
    up_to: int


def merged_products(graph: Graph, up_to: int) -> Mapping[int, MergedProduct]:
    """Equation → what it is merged with, if it is; one that shares both of its operands is merged by its left one.

    `up_to`: see `MergedProduct`.
    """
    found: dict[int, MergedProduct] = {}
    for shared in (0, 1):
        alike: dict[Any, list[int]] = defaultdict(list)
        for e, eqn in enumerate(graph.eqns):
            if eqn.primitive == DOT_GENERAL and e not in found and graph.operands[e][0] != graph.operands[e][1]:
                dtypes = tuple(aval.dtype for aval in (*eqn.operands, *eqn.results))
                value = graph.operands[e][shared]
                alike[value, graph.eqn_loop[e], eqn.params["dimension_numbers"], dtypes].append(e)
        for group in (_independent(graph, group) for group in alike.values() if len(group) > 1):
            sizes = {e: max(graph.avals[graph.results[e][0]].size, 1) for e in group}
            if len(group) > 1:
                found |= {
                    e: MergedProduct(
                        shared=shared,
                        times=sum(sizes.values()) / size,
                        smallest=min(sizes.values()) / size,
                        copied=_is_multiplied(graph, graph.results[e][0]),
                        up_to=up_to,
                    )
                    for e, size in sizes.items()
                }
    return found


def _independent(graph: Graph, group: list[int]) -> list[int]:
    """Those of some equations, first ones first, that are not computed from others of them that are kept."""
    kept: list[int] = []
    made: set[int] = set()  # values that are computed from those
    left = set(group)
    for e in range(group[0], group[-1] + 1):
        follows = not made.isdisjoint(graph.operands[e])
        if e in left and not follows:
            kept.append(e)
        if follows or e in kept:
            made.update(graph.results[e])
    return kept


def _is_multiplied(graph: Graph, value: int) -> bool:
    """Whether a contraction takes a value, under any name."""
    users = [e for e, _ in graph.consumers.get(value, ())]
    names = [graph.results[e][0] for e in users if graph.eqns[e].traits.renames]
    return any(graph.eqns[e].traits.contraction for e in users) or any(_is_multiplied(graph, name) for name in names)
