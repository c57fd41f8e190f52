"""Reductions: which of them are kernels of their own, and what these read again.

A reduction is fused with what its operand is computed from, so that an operand that lies nowhere in memory costs it
nothing by itself: but the kernel reads the values that the operand is made from. XLA:GPU (jax-cuda12-pjrt 0.10.2)
reduces short rows in the kernel that uses them, and again in every other that computes the same expression: the
maximum of a softmax. If more than one expression takes the result, a kernel of its own writes it: sums of a softmax
that the backward pass divides by once more, norms. Reductions of the same values share that kernel, unless their rows
are long: a vocabulary's maximum and its sum are two. A reduction of a long row is made beside what one kernel writes
of the same values, if that is as large as its operand and waits for nothing more: a loss beside the gradient of its
scores. What leads to reductions alone that have a kernel of their own is computed, and read, in no other.
"""

from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autoshard.costs.liveness import SHORT_ROW
from autoshard.ir.graph import Graph
from autoshard.ir.op_traits import LOOP_STACK


class Rereads(NamedTuple):
    """What reductions with a kernel of their own read.

    Attributes:
      usual: reduction → bytes per element of its operand; 0 for one more in the kernel of another. The others have no
        kernel of their own.
      to_keep: stack that a plan may leave out → bytes of whole arrays that they read more in a trip where it is kept,
        each as if nothing else were: statistics of rows that are kept are one more expression that takes the reduction.
    """

    usual: Mapping[int, float]
    to_keep: Mapping[int, float]


def rereads(
    graph: Graph,
    fuses: Sequence[bool],
    held: NDArray[np.bool_],
    levels: NDArray[np.int64],
    across: Container[int],
) -> Rereads:
    """What the reductions of a program read that have a kernel of their own.

    Args:
      graph: the program.
      fuses: per equation, whether XLA fuses it with its neighbours.
      held: the values that lie in memory, also under another name.
      levels: of the values, see `costs.fusion`.
      across: reductions along other dimensions than the minor ones, see `costs.dimension_orders`.
    """
    rereading = _Rereading(graph, fuses, held, levels, across)
    usual, to_keep = rereading.found(graph.aside), dict[int, float]()
    for e in sorted(graph.aside):
        if graph.eqns[e].primitive != LOOP_STACK:
            continue
        kept = rereading.found(graph.aside - _way(graph, e))
        nbytes = sum(
            (each - usual.get(reduction, 0.0)) * graph.avals[graph.operands[reduction][0]].size
            for reduction, each in kept.items()
        )
        if nbytes > 0:
            to_keep[e] = nbytes
    return Rereads(usual, to_keep)


def _way(graph: Graph, stack: int) -> frozenset[int]:
    """A stack that a plan may leave out, and what is computed for it alone."""
    found, left = {stack}, [stack]
    while left:
        makers = {graph.producers.get(v, (-1, 0))[0] for v in graph.operands[left.pop()]}
        new = (makers & graph.aside) - found
        found |= new
        left += new
    return frozenset(found)


class _Rereading:
    """The reductions of a graph, and what they read."""

    def __init__(
        self,
        graph: Graph,
        fuses: Sequence[bool],
        held: NDArray[np.bool_],
        levels: NDArray[np.int64],
        across: Container[int],
    ) -> None:
        self.graph, self.fuses, self.levels, self.across = graph, fuses, levels, across
        self.sources = sources_in_memory(graph, fuses, held)
        self.written = [v for v in self.sources if held[v] and not graph.eqns[graph.producers[v][0]].traits.renames]
        self.reductions: list[tuple[int, frozenset[int]]] = []  # and the values in memory that its operand is made from
        for e, eqn in enumerate(graph.eqns):
            if not eqn.traits.ends_fusion or not eqn.operands:
                continue
            operand, result = graph.operands[e][0], graph.results[e][0]
            read = self.sources.get(operand, frozenset[int]())
            if read and not held[operand] and graph.avals[operand].size > graph.avals[result].size:
                self.reductions.append((e, read))

    def found(self, aside: Container[int]) -> dict[int, float]:
        """Reduction → bytes as of `Rereads.usual`; what is `aside` does not count as an expression."""
        graph, found, counted = self.graph, dict[int, float](), set[frozenset[int]]()
        for e, read in self.reductions:
            operand, result = graph.operands[e][0], graph.results[e][0]
            aval = graph.avals[operand]
            # Of what is cut it reads its part.
            each = sum(min(1.0, graph.avals[v].size / aval.size) * graph.avals[v].itemsize for v in read)
            if e in self.across:
                found[e] = each
            elif aval.size > SHORT_ROW * graph.avals[result].size:
                if not any(self._is_beside(v, operand, read) for v in self.written):
                    counted.add(read)
                    found[e] = each
            elif len(_expressions(graph, self.fuses, result, aside)) > 1:
                found[e] = 0.0 if read in counted else each
                counted.add(read)
        return found

    def _is_beside(self, value: int, operand: int, read: frozenset[int]) -> bool:
        """Whether a kernel that writes a value can reduce an operand that is made from what it reads."""
        graph, levels = self.graph, self.levels
        alike = levels[value] == levels[operand] and graph.avals[value].size == graph.avals[operand].size
        return bool(alike) and read <= self.sources[value]


def computed_elsewhere(
    graph: Graph, fuses: Sequence[bool], held: NDArray[np.bool_], reread: Mapping[int, float]
) -> NDArray[np.bool_]:
    """Whether each value is computed in another kernel than those of reductions that have one of their own.

    Args:
      graph: the program.
      fuses: per equation, whether XLA fuses it with its neighbours.
      held: the values that lie in memory, also under another name.
      reread: the reductions that have a kernel of their own.
    """
    found = held.copy()
    for e in range(len(graph.eqns) - 1, -1, -1):
        traits = graph.eqns[e].traits
        onward = (fuses[e] or traits.renames) and not traits.ends_fusion
        if found[list(graph.results[e])].any() if onward else e not in reread:
            found[list(graph.read_by(e))] = True
    return found


class KernelLevels(NamedTuple):
    """Per value, the levels of the kernels that compute it, and of those that read it if it lies in memory."""

    computing: list[frozenset[int]]
    reading: list[frozenset[int]]


def kernel_levels(
    graph: Graph,
    fuses: Sequence[bool],
    held: NDArray[np.bool_],
    levels: NDArray[np.int64],
    paid: Container[int],
    *,
    made: Container[int] = frozenset(),
    recalled: bool = False,
) -> KernelLevels:
    """The levels of the kernels of every value: one in memory is read by each kernel that computes a reader.

    A reduction that is not `paid` is made in the kernels that take it, if its rows are short; else beside the values of
    its operand's level. Of an operand that is not in memory, a gather computes what it takes of it: next to nothing.

    Args:
      graph: the program.
      fuses: per equation, whether XLA fuses it with its neighbours.
      held: the values that lie in memory, also under another name.
      levels: of the values, see `costs.fusion`.
      paid: the equations that pay themselves for what they read, as reductions with a kernel of their own do.
      made: the operands that matmuls compute themselves (`costs.matmul_fusions`).
      recalled: whether who reads what is kept or repeated reads what that is recalled from; else its recall does.
    """
    computing: list[frozenset[int]] = [frozenset()] * len(graph.avals)
    reading: list[frozenset[int]] = [frozenset()] * len(graph.avals)
    for e in range(len(graph.eqns) - 1, -1, -1):
        traits, operands = graph.eqns[e].traits, graph.read_by(e)
        for v in graph.results[e]:
            computing[v] = frozenset({int(levels[v])}) if held[v] else reading[v]
        if traits.choice and (fuses[e] or traits.renames):
            for v in operands if recalled else ():
                reading[v] |= reading[graph.results[e][0]]
            continue
        if e in paid and not traits.choice:
            continue
        for v in operands:
            if not (fuses[e] or traits.renames):
                takes_part = traits.reads_part and v == graph.operands[e][0]
                inside = takes_part or (v in made and traits.contraction)
                reading[v] |= frozenset[int]() if inside else frozenset({int(levels[v])})
                continue
            result = graph.results[e][0]
            if not traits.ends_fusion:
                reading[v] |= computing[result]
                continue
            short = graph.avals[v].size <= SHORT_ROW * graph.avals[result].size
            reading[v] |= (reading[result] if short else frozenset()) or frozenset({int(levels[v])})
    return KernelLevels(computing, reading)


def sources_in_memory(graph: Graph, fuses: Sequence[bool], held: NDArray[np.bool_]) -> dict[int, frozenset[int]]:
    """Value that fusions make element by element → the values in memory, of more than half its size, that they read.

    Args:
      graph: the program.
      fuses: per equation, whether XLA fuses it with its neighbours.
      held: the values that lie in memory, also under another name.
    """
    found: dict[int, frozenset[int]] = {}
    for e, eqn in enumerate(graph.eqns):
        if not (fuses[e] or eqn.traits.renames) or eqn.traits.ends_fusion:
            continue
        for result in graph.results[e]:
            large = graph.avals[result].size // 2
            read = (frozenset({v}) if held[v] else found.get(v, frozenset[int]()) for v in graph.made_from(e))
            found[result] = frozenset(v for v in frozenset[int]().union(*read) if graph.avals[v].size > large)
    return found


def _expressions(graph: Graph, fuses: Sequence[bool], reduction: int, aside: Container[int]) -> frozenset[int]:
    """The larger values that are computed from a reduction directly, or from values as small as it; and other uses.

    What equations compute that are `aside` does not count.
    """
    found, left, seen = set[int](), [reduction], {reduction}
    outputs = frozenset(graph.outputs)
    while left:
        value = left.pop()
        if value in outputs:
            found.add(value)
        for e, _ in graph.consumers.get(value, ()):
            traits = graph.eqns[e].traits
            for result in graph.results[e] if e not in aside else ():
                small = graph.avals[result].size <= graph.avals[reduction].size or traits.repeats or traits.renames
                if not (small and (fuses[e] or traits.renames)):
                    found.add(result)
                elif result not in seen:
                    seen.add(result)
                    left.append(result)
    return frozenset(found)
