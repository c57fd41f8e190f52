"""Resharding: layout → layout as the cheapest sequence of collectives.

A shortest path over all layouts of a value, not a special case per pair. One step
is a single collective, or a local slice, which moves nothing:

    all-gather       the minor-most axes of one dimension become whole
    all-to-all       the minor-most axes of one dimension move to another, together
    permute          one axis of a dimension is replaced by another of equal size
    all-reduce       all unreduced axes become whole
    reduce-scatter   all unreduced axes become the minor-most of one dimension
    slice            a whole axis becomes the minor-most of a dimension (free)

Costs are integer picoseconds; among equal costs the fewest collectives win.

Collectives that are off the critical path (weights' gathers, gradients' reductions)
are *combined* by the compilers into buckets, so that many small ones pay one latency:
below a bucket they are priced at the bucket's rate, plus what each costs by itself.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autoshard.graph import Aval
from autoshard.mesh import MeshAxes
from autoshard.strategies import SUM, WHOLE, Codes, decode, encode, layouts, shards

INF_PS = 10**18
PS_PER_S = 1e12
# XLA:GPU's default combine threshold for all-gather, all-reduce and reduce-scatter
# (`xla_gpu_*_combine_threshold_bytes`, openxla/xla debug_options_flags.cc).
BUCKET_BYTES = 30 * 2**20
# What one member of a bucket adds: the kernel that copies it in and out (kernel launch
# overhead of 1 µs in XLA's own model, openxla/xla sol_gpu_cost_model.cc).
MEMBER_S = 1e-6
_HOPS = 64  # more than any path has steps: (picoseconds, hops) as one integer


class Machine(Protocol):
    """What resharding and costs ask of a cost model (`cost_models.Machine` is one)."""

    @property
    def overlap(self) -> float: ...

    def collective_s(self, kind: Any, axes: tuple[str, ...], nbytes: ArrayLike) -> NDArray[np.float64]: ...


@dataclass(frozen=True, slots=True)
class Step:
    """One collective of a path: `nbytes` logical per device, `after` the layout it leaves.

    Logical bytes: an all-gather's result, every other collective's operand. A local
    slice is a step of kind "slice" with no bytes.
    """

    kind: str
    axes: tuple[str, ...]
    nbytes: int
    after: int


def collective_s(
    machine: Machine, kind: str, axes: tuple[str, ...], nbytes: ArrayLike, *, combined: bool
) -> NDArray[np.float64]:
    """Seconds of collectives, alone or as their share of a combined bucket."""
    sizes = np.asarray(nbytes, np.float64)
    if not combined:
        return np.asarray(machine.collective_s(kind, axes, sizes))
    whole = np.maximum(sizes, BUCKET_BYTES)
    share = np.asarray(machine.collective_s(kind, axes, whole)) * (sizes / whole)
    return share + np.where((sizes > 0) & (share > 0), MEMBER_S, 0.0)


class Resharder:
    """Shortest resharding paths for every value shape on one machine and mesh.

    Every layout on a path is meant to be pinned. Left to itself (`pinned=False`), the
    partitioner finishes a pending sum by an all-reduce, or by a reduce-scatter where the
    layout that is wanted is split anyway; it never scatters a sum to gather it again, nor
    slices along an axis that the wanted layout does not have.
    Where the compiler does not scatter a sum over all devices (`scatters_whole`, as of
    `cost_models.Machine`), it is all-reduced and sliced.
    """

    def __init__(self, mesh: MeshAxes, machine: Machine, *, pinned: bool = True, scatters_whole: bool = True) -> None:
        self.mesh, self.machine, self.pinned = mesh, machine, pinned
        self.scatters_whole = scatters_whole
        self._tables: dict[tuple[tuple[int, ...], int, bool], _Table] = {}

    def table(self, aval: Aval, *, combined: bool) -> "_Table":
        """The table of a value's shape and element size."""
        key = (aval.shape, aval.itemsize, combined)
        if key not in self._tables:
            self._tables[key] = _Table(
                aval.shape,
                aval.itemsize,
                self.mesh,
                self.machine,
                combined=combined,
                pinned=self.pinned,
                scatters_whole=self.scatters_whole,
            )
        return self._tables[key]

    def cost_ps(self, aval: Aval, source: Codes, target: Codes, *, combined: bool) -> NDArray[np.int64]:
        """Picoseconds from each source code (rows) to each target code (columns)."""
        table = self.table(aval, combined=combined)
        return table.ps[np.ix_(table.at(source), table.at(target))]

    def path(self, aval: Aval, source: int, target: int, *, combined: bool) -> tuple[Step, ...]:
        """The steps of the cheapest path; raises ValueError where there is none."""
        return self.table(aval, combined=combined).path(source, target)


class _Table:
    """All-pairs cheapest paths between the layouts of one shape."""

    def __init__(
        self,
        shape: tuple[int, ...],
        itemsize: int,
        mesh: MeshAxes,
        machine: Machine,
        *,
        combined: bool,
        pinned: bool,
        scatters_whole: bool,
    ) -> None:
        self.shape, self.mesh, self.combined, self.scatters_whole = shape, mesh, combined, scatters_whole
        self.codes = np.sort(layouts(shape, mesh, unreduced=True))
        total = int(np.prod(shape, dtype=np.int64)) * itemsize
        self.local_bytes = total // shards(self.codes, len(shape), mesh)
        self._steps: dict[tuple[int, int], tuple[str, tuple[str, ...], int]] = {}
        n = len(self.codes)
        weight = np.full((n, n), INF_PS, np.int64)
        np.fill_diagonal(weight, 0)
        self._link(weight, machine)
        single = weight
        weight, self._next = _shortest(single)
        if not pinned:
            self._slice_for_good(single, weight)
            self._finish_sums(single, weight)
        self.ps = np.where(weight < INF_PS, weight // _HOPS, INF_PS)

    def _slice_for_good(self, single: NDArray[np.int64], weight: NDArray[np.int64]) -> None:
        """Makes every path slice along axes alone that split its end, too."""
        split = decode(self.codes, len(self.shape), self.mesh.ndim) >= 0
        slices = [
            (i, j, self.mesh.names.index(a[0])) for (i, j), (kind, a, _) in self._steps.items() if kind == "slice"
        ]
        for axes in np.unique(split, axis=0):
            allowed = single.copy()
            for i, j, axis in slices:
                if not axes[axis]:
                    allowed[i, j] = INF_PS
            ends = (split == axes).all(axis=1)
            least, following = _shortest(allowed)
            weight[:, ends], self._next[:, ends] = least[:, ends], following[:, ends]

    def _finish_sums(self, single: NDArray[np.int64], weight: NDArray[np.int64]) -> None:
        """Makes every path from a pending sum begin with its all-reduce, or be its reduce-scatter and slices."""
        first: dict[int, list[tuple[str, int]]] = {}
        for (i, k), (kind, _, _) in self._steps.items():
            if kind in ("all-reduce", "reduce-scatter"):
                first.setdefault(i, []).append((kind, k))
        for i, steps in first.items():
            (whole,) = (k for kind, k in steps if kind == "all-reduce")
            weight[i] = np.minimum(single[i, whole] + weight[whole], INF_PS)
            weight[i, i] = 0
            self._next[i] = np.where(weight[i] < INF_PS, whole, -1)
            for kind, k in steps:
                better = (weight[k] == 0) & (single[i, k] < weight[i])  # slices alone cost nothing
                if kind == "reduce-scatter":
                    weight[i, better], self._next[i, better] = single[i, k], k

    def at(self, codes: Codes) -> NDArray[np.int64]:
        """Positions of codes in this table."""
        return np.searchsorted(self.codes, codes)

    def path(self, source: int, target: int) -> tuple[Step, ...]:
        i, j = (int(p) for p in self.at(np.array([source, target])))
        if self.ps[i, j] >= INF_PS:
            raise ValueError(f"no resharding from code {source} to {target} of {self.shape}")
        steps: list[Step] = []
        while i != j:
            k = int(self._next[i, j])
            kind, axes, nbytes = self._steps[i, k]
            steps.append(Step(kind, axes, nbytes, int(self.codes[k])))
            i = k
        return tuple(steps)

    def _link(self, weight: NDArray[np.int64], machine: Machine) -> None:
        """Fills in every single step, pricing all of one kind and axis set at once."""
        names = self.mesh.names
        found: dict[tuple[str, tuple[int, ...]], list[tuple[int, int, int]]] = {}
        for i, row in enumerate(decode(self.codes, len(self.shape), self.mesh.ndim)):
            for kind, axes, after in self._moves(row):
                j = int(np.searchsorted(self.codes, encode(after, len(self.shape))))
                if j < len(self.codes) and self.codes[j] == encode(after, len(self.shape)):
                    nbytes = int(self.local_bytes[j if kind == "all-gather" else i])
                    found.setdefault((kind, axes), []).append((i, j, nbytes))
        for (kind, axes), moves in found.items():
            where = tuple(names[a] for a in axes)
            nbytes = np.array([m[2] for m in moves], np.float64)
            if kind == "slice":
                ps = np.zeros(len(moves), np.int64)
            else:
                seconds = collective_s(machine, kind, where, nbytes, combined=self.combined)
                ps = np.rint(seconds * PS_PER_S).astype(np.int64) * _HOPS + 1
            for (i, j, size), price in zip(moves, ps, strict=True):
                if price < weight[i, j]:
                    weight[i, j] = price
                    self._steps[i, j] = (kind, where, 0 if kind == "slice" else size)

    def _moves(self, row: NDArray[np.int8]) -> list[tuple[str, tuple[int, ...], NDArray[np.int8]]]:
        moves: list[tuple[str, tuple[int, ...], NDArray[np.int8]]] = []
        ndim = len(self.shape)

        def change(kind: str, axes: tuple[int, ...], *to: tuple[int, int]) -> None:
            after = row.copy()
            for axis, value in to:
                after[axis] = value
            moves.append((kind, axes, after))

        whole = [a for a in range(len(row)) if row[a] == WHOLE]
        sums = [a for a in range(len(row)) if row[a] == SUM]
        members = [[a for a in range(len(row)) if row[a] == d] for d in range(ndim)]
        if sums:
            # A pin makes the partitioner finish every pending sum at once, over all axes together.
            change("all-reduce", tuple(sums), *((a, WHOLE) for a in sums))
        for d in range(ndim):
            last = members[d][-1] if members[d] else -1
            if sums and sums[0] > last and (self.scatters_whole or len(sums) < len(row)):
                change("reduce-scatter", tuple(sums), *((a, d) for a in sums))
            if sums:
                continue
            for a in whole:
                if a > last:
                    change("slice", (a,), (a, d))
            for count in range(1, len(members[d]) + 1):
                gone = tuple(members[d][-count:])
                change("all-gather", gone, *((a, WHOLE) for a in gone))
                for e in range(ndim):
                    if e != d and (not members[e] or members[e][-1] < gone[0]):
                        change("all-to-all", gone, *((a, e) for a in gone))
            if members[d]:
                for a in whole:
                    if self.mesh.sizes[a] == self.mesh.sizes[last] and all(m < a for m in members[d][:-1]):
                        change("collective-permute", tuple(sorted((a, last))), (last, WHOLE), (a, d))
        return moves


def _shortest(weight: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Least weights between all pairs, and the first step on each way (Floyd and Warshall)."""
    following = np.where(weight < INF_PS, np.arange(len(weight))[None, :], -1).astype(np.int32)
    for via in range(len(weight)):
        through = weight[:, via, None] + weight[None, via, :]
        better = through < weight
        weight = np.where(better, through, weight)
        following = np.where(better, following[:, via, None], following)
    return weight, following
