"""Usages: the memory that a value takes under each choice, where it is made, and where it is taken."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autoshard.backends.model import CompilerModel
from autoshard.costs.casts import BFLOAT16
from autoshard.costs.compute import is_part_computed
from autoshard.costs.execution_order import behind_loops, loop_spans
from autoshard.costs.fusion import FusionTraits
from autoshard.costs.lanes import share_in_lanes
from autoshard.costs.liveness import LiveRanges
from autoshard.costs.strategies import SUM, WHOLE, Codes, decode, shards, split
from autoshard.costs.windows import EARLY, LATE, OverlapWindows
from autoshard.ir.graph import Aval, Graph
from autoshard.ir.mesh import MeshAxes
from autoshard.problem.ports import KEPT, REPEATED, Port, Usage


def local_bytes(aval: Aval, codes: Codes, mesh: MeshAxes) -> NDArray[np.int64]:
    """Bytes per device of a value in each layout."""
    return aval.nbytes // shards(codes, aval.ndim, mesh)


class MemoryUsageBuilder:
    """The usages of a graph's values, those of one decision, kind and time together."""

    def __init__(
        self,
        graph: Graph,
        mesh: MeshAxes,
        lives: LiveRanges,
        traits: FusionTraits,
        windows: OverlapWindows,
        compiler: CompilerModel,
        *,
        before: Sequence[tuple[int, int]] | None,
        defers: bool,
    ) -> None:
        """`before`: equations to which whole gradients are deferred, with the bytes gathered there.

        See `add_value`; None if gradients are made at once. `defers`: whether they are moved behind loops.
        """
        self._defers = defers
        self.graph, self.mesh, self.lives, self._before = graph, mesh, lives, before
        self._traits, self._windows, self._compiler = traits, windows, compiler
        self._made_by, self._spans = graph.producers, loop_spans(graph)
        self._waiting = Counter[int]()  # gradients that are put off, by the equation that they are made before
        self._nbytes: dict[tuple[int, int, int, str], NDArray[np.int64]] = {}
        self._parts: dict[tuple[int, int, int, str], dict[str, NDArray[np.int64]]] = {}
        backward = sorted(graph.backward)
        after = np.searchsorted(backward, np.arange(len(graph.eqns)), side="right")
        self._backward_from = np.append(backward, len(graph.eqns) + 1)[after]  # equation → the next backward one

    def all(self) -> tuple[Usage, ...]:
        """Every usage, in the order in which they came."""
        return tuple(
            Usage(node=key[0], start=key[1], end=key[2], nbytes=nbytes, kind=key[3], parts=self._parts.get(key, {}))
            for key, nbytes in self._nbytes.items()
        )

    def add(self, node: int, start: int, end: int, nbytes: NDArray[np.int64], kind: str, *, part: str = "") -> None:
        """Bytes per choice of a decision, alive over [start, end); `part`: see `Usage.parts`."""
        key = (node, start, end, kind)
        self._nbytes[key] = self._nbytes[key] + nbytes if key in self._nbytes else nbytes
        if part:
            parts = self._parts.setdefault(key, {})
            parts[part] = parts[part] + nbytes if part in parts else nbytes

    def add_value(self, value: int, port: Port, begin: int, name: int, target: Port | None, *, in_place: bool) -> None:
        """Memory of a value with one consumer at most: in its own layout first, then in the consumer's.

        What leaves a contraction is reduced or moved at once; all else moves where it is taken. Where nothing runs
        beside compute libtpu moves a weight's gradient behind the loops that follow (the head's, behind the backward
        pass of the layers), and schedules for memory: a gradient that is whole on every device, to be reduced over all
        of them, is made last, or before as much is gathered.

        Args:
          value: the value.
          port: where it is made.
          begin: the equation that takes it, or before which its gather begins.
          name: the value under the name by which a pending sum is finished.
          target: who takes it by that name, if anyone does.
          in_place: whether that is an output in an input's place, which has that input's memory.
        """
        kind = self._kind(value)
        start, end = min(begin, int(self.lives.start[value])), int(self.lives.end[value])
        if target is None:
            self._add_layouts(port, start, end, value, kind)
            return
        maker = self._made_by[value][0] if value in self._made_by else -1
        at_once = maker >= 0 and (self.graph.eqns[maker].traits.contraction or self._traits.flows[maker])
        moved = start + 1 if at_once else min(max(begin, start + 1), end)
        if at_once and name != value:
            end = max(end, int(self.lives.end[name]))
        if at_once and kind == "gradients" and self._defers:
            moved = max(moved, behind_loops(self._spans, start))
            end = max(end, moved)
        if at_once and kind == "gradients" and self._before is not None:
            size, whole = self.graph.avals[value].nbytes, self._pending(value, port).all(axis=1)
            before = next((e for e, nbytes in self._before if e > moved and nbytes >= size), len(self.graph.eqns))
            self._waiting[before] += 1  # one after the other
            made = max(before - self._waiting[before], moved)
            self.add(port.node, start, moved, np.where(whole, 0, self._local(value, port)), kind)
            self.add(port.node, made, made + 1, np.where(whole, size, 0), kind)
        else:
            self._add_layouts(port, start, moved, value, kind)
        if not in_place:
            self._add_layouts(target, moved, end, name, kind)

    def add_carried_constant(self, constant: int, value: int, port: Port) -> None:
        """Memory of a constant that a loop carries on (zeros, to which every trip adds), in the layout of what it is.

        No decision makes a constant. In the loop it lies in memory until what is carried on is written over it.

        Args:
          constant: the value that enters the loop.
          value: the same in the loop.
          port: the loop's.
        """
        begin, _ = self._spans[self.graph.value_loop[value]]
        self._add_layouts(port, begin, max(int(self.lives.end[constant]), begin), value, self._kind(value))

    def add_copy(
        self, value: int, copy: Port, port: Port, begin: int, groups: Sequence[Sequence[int]], *, lent: bool
    ) -> None:
        """Adds the memory of a value's copy, from its first use to its last, or per group of uses.

        Args:
          value: the value.
          copy: its copy; if it is lent, each layout appears twice: as the value itself and beside it.
          port: the place where it is made.
          begin: the first equation that takes it, or before which its gather begins.
          groups: the equations that take it, in groups with a copy each.
          lent: whether the value's own memory belongs to another value.
        """
        start, end = int(self.lives.start[value]), int(self.lives.copied[value])
        start = max(begin, start) if lent else min(begin, start)
        spans = [(start, end)]
        if groups and all(before[-1] < after[0] for before, after in pairwise(groups)):
            starts = [start, *(group[0] for group in groups[1:])]
            spans = list(zip(starts, [*(max(map(self._read, group)) + 1 for group in groups[:-1]), end], strict=True))
        if lent:
            there = copy.codes if copy.off is None else copy.codes[~copy.off]
            repeated = np.unique(there, return_counts=True)[1]
            narrow = value in self.lives.multiplied
            for span in spans:
                self._add_layouts(copy, *span, value, "copies", lent=int((repeated > 1).sum()), narrow=narrow)
        elif self.lives.stored[value]:
            for span in spans:
                self._add_layouts(copy, *span, value, "activations")
            for (_, before), (after, _) in pairwise(spans):  # the value that it is gathered from again
                self._add_layouts(port, before, after, value, "activations")
            pending = self._pending(value, port).any(axis=1)
            if pending.any():  # the partial sums lie beside their reduced value
                self.add(port.node, start, start + 1, np.where(pending, self._local(value, port), 0), "activations")

    def _read(self, e: int) -> int:
        """The last equation that reads what an equation takes, or gives a name to."""
        names = self.graph.results[e] if self.graph.eqns[e].traits.renames else ()
        return max((self._read(u) for v in names for u, _ in self.graph.consumers.get(v, ())), default=e)

    def _add_layouts(
        self, port: Port, start: int, end: int, value: int, kind: str, *, lent: int = 0, narrow: bool = False
    ) -> None:
        """Memory of a value in each layout of a port, but for the first `lent`; `narrow`: as products cast it."""
        nbytes = self._local(value, port, narrow=narrow)
        soon, early = int(self.lives.soon[value]), int(self.lives.early[value])
        nbytes[:lent] = 0
        part = self._part(value, end) if kind == "activations" else ""
        if value in self.lives.across and start < soon < end:
            self.add(port.node, start, soon, nbytes, kind, part=part)
            start, nbytes = soon, np.where(self._hurries(value, port), 0, nbytes)
        elif value in self.lives.across and early < start == int(self.lives.start[value]):
            self.add(port.node, early, start, np.where(self._hurries(value, port), nbytes, 0), kind, part=part)
        self.add(port.node, start, end, nbytes, kind, part=part)

    def _hurries(self, value: int, port: Port) -> NDArray[np.bool_]:
        """Per choice, whether what could wait for others (`LiveRanges.across`) does not."""
        rows, across = decode(port.codes, self.graph.avals[value].ndim, self.mesh.ndim), self.lives.across[value]
        # An axis along which the value is whole splits what it is multiplied with.
        hurrying: NDArray[np.bool_] = np.isin(rows, list(across)) if across else rows == WHOLE
        return np.logical_or.reduce(hurrying, axis=1)

    def _part(self, value: int, end: int) -> str:
        """What a value that lives so long is there for; results of the program, which live longest, for themselves."""
        maker = self._made_by.get(value, (-1, 0))[0]
        if maker in self.graph.repeated:
            return REPEATED
        if maker < 0 or maker in self.graph.backward:
            return ""
        return KEPT if self._backward_from[maker] < end <= len(self.graph.eqns) else ""

    def _pending(self, value: int, port: Port) -> NDArray[np.bool_]:
        """Whether a value is a pending sum, `[choices, mesh axes]`."""
        return decode(port.codes, self.graph.avals[value].ndim, self.mesh.ndim) == SUM

    def _local(self, value: int, port: Port, *, narrow: bool = False) -> NDArray[np.int64]:
        aval = self.graph.avals[value]
        if self._compiler.keeps_host_values_apart and value in self.graph.on_host:
            return np.zeros(len(port.codes), np.int64)
        if (cast := self.lives.cast_ahead.get(value)) is not None and cast.alone:
            aval = replace(aval, dtype=cast.dtype)
        nbytes = local_bytes(aval, port.codes, self.mesh)
        if (part := self.lives.parts.get(value)) is not None:
            computed = is_part_computed(aval, port.codes, self.mesh)
            nbytes = np.where(computed, nbytes * (part.size / max(aval.size, 1)), nbytes).astype(np.int64)
        cast_for = self.lives.multiplied.get(value)
        if narrow or (cast_for is not None and cast_for.alone and value in self._made_by):  # partial sums are float32
            cast = local_bytes(replace(aval, dtype=BFLOAT16), port.codes, self.mesh)
            nbytes = np.where(self._pending(value, port).any(axis=1), nbytes, cast)
        if (numerator := self.lives.numerators.get(value)) is not None:
            nbytes = (nbytes * numerator.share(aval, split(port.codes, 0, aval.ndim, self.mesh))).astype(np.int64)
        if (matrix := self.lives.matrices.get(value)) is not None and value in self._made_by:
            nbytes = (nbytes * share_in_lanes(matrix, aval.shape, port.codes, self.mesh)).astype(np.int64)
        return nbytes if port.off is None else np.where(port.off, 0, nbytes)

    def _kind(self, value: int) -> str:
        window = self._windows.of_value[value]
        return "gradients" if window == LATE else "copies" if window == EARLY else "activations"
