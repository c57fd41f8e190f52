"""Warm start: carries a choice on one mesh over to a finer mesh.

If neighbouring axes of a mesh, say 4 and 2, split the dimensions that one axis of 8 splits on
another mesh of the same devices, both are the same layouts. So the best plan on the coarser
mesh is a choice on the finer one, and a search there begins with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.costs.strategies import decode
from autoshard.problem.decisions import Decision, Decisions, Equation, layout_codes

Int = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PortableChoice:
    """A choice per decision, written as the dimension or factor that each mesh axis splits.

    Attributes:
      sizes: sizes of the mesh axes.
      kinds: kinds of the decisions, in order.
      splits: (decisions, axes), the factor of an equation or the dimension of a value that
        each axis splits; WHOLE and SUM as in `autoshard.costs.strategies`.
      nth: (decisions,), the position among the decision's choices with these splits.
    """

    sizes: tuple[int, ...]
    kinds: tuple[str, ...]
    splits: NDArray[np.int8]
    nth: NDArray[np.int8]

    def on(self, decisions: Decisions) -> Int | None:
        """The same choice on a mesh as fine or finer; None where it has none."""
        parts = refined(self.sizes, decisions.mesh.sizes)
        if parts is None or self.kinds != tuple(node.kind for node in decisions.nodes):
            return None
        choice = np.zeros(len(decisions.nodes), np.int64)
        ndims = _ndims(decisions)
        for n, (node, split) in enumerate(zip(decisions.nodes, self.splits[:, parts], strict=True)):
            found = np.flatnonzero((_splits(node, ndims[n], decisions.mesh.ndim) == split).all(axis=1))
            if not len(found):
                return None
            choice[n] = found[min(self.nth[n], len(found) - 1)]
        return choice


def chosen(decisions: Decisions, choice: Int) -> PortableChoice:
    """A choice per decision, for other meshes."""
    ndims, axes = _ndims(decisions), decisions.mesh.ndim
    splits = np.zeros((len(decisions.nodes), axes), np.int8)
    nth = np.zeros(len(decisions.nodes), np.int8)
    for n, node in enumerate(decisions.nodes):
        rows = _splits(node, ndims[n], axes)
        splits[n] = rows[choice[n]]
        nth[n] = (rows[: choice[n]] == splits[n]).all(axis=1).sum()
    kinds = tuple(node.kind for node in decisions.nodes)
    return PortableChoice(sizes=decisions.mesh.sizes, kinds=kinds, splits=splits, nth=nth)


def refined(coarse: Sequence[int], fine: Sequence[int]) -> list[int] | None:
    """Axis of the finer mesh → the axis of the coarser one that it is a part of; None if it is not finer."""
    parts: list[int] = []
    at, left = -1, 1
    for size in fine:
        if left == 1:
            at += 1
            if at == len(coarse):
                return None
            left = coarse[at]
        if left % size:
            return None
        left //= size
        parts.append(at)
    return parts if left == 1 and at == len(coarse) - 1 else None


def _splits(node: Decision, ndim: int, axes: int) -> NDArray[np.int8]:
    """The dimension or factor that each axis splits, per choice of a decision: (choices, axes)."""
    return node.strategies.factor if isinstance(node, Equation) else decode(layout_codes(node), ndim, axes)


def _ndims(decisions: Decisions) -> list[int]:
    """The number of dimensions of each decision's value; 0 for equations."""
    avals = decisions.graph.avals
    found = [0] * len(decisions.nodes)
    for ports in (decisions.made, decisions.kept):
        for value, port in ports.items():
            found[port.node] = avals[value].ndim
    for output, node in zip(decisions.graph.outputs, decisions.outputs, strict=True):
        found[node] = avals[output].ndim
    return found
