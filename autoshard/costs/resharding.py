"""Resharding: layout → layout as the cheapest sequence of collectives.

A shortest path over all layouts of a value, not a special case per pair. One step
is a single collective, or a local slice, which moves nothing:

    all-gather       the minor-most axes of one dimension become whole
    all-to-all       the minor-most axes of one dimension move to another, together
    permute          one axis of a dimension is replaced by another of equal size
    all-reduce       all unreduced axes become whole
    reduce-scatter   all unreduced axes become the minor-most of one dimension; or some of them, and an
                     all-reduce over the others follows, or a reduce-scatter onto another dimension
    slice            a whole axis becomes the minor-most of a dimension (free)

Costs are integer picoseconds; among equal costs the fewest collectives win.

Collectives that are off the critical path pay their share of what they are merged into (`buckets`).

XLA:GPU's collectives split and join arrays along their outermost dimension in memory. An array
that moves along another dimension is transposed first; that is work of the device, not
communication. The piece is transposed, unless an element-wise kernel writes it, which transposes
for free. An array of three dimensions or more is also transposed as a whole, unless its
contraction has a stride of its own for that dimension (`costs.strides`), as a matmul has for both
dimensions of a matrix.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, combinations, permutations, product
from math import log2, prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autoshard import deadline
from autoshard.costs.buckets import COMBINED, Bucket, collective_s
from autoshard.costs.prices import INF_PS, PS_PER_S, CollectiveMachine
from autoshard.costs.strategies import SUM, WHOLE, Codes, assignments, decode, encode, layouts, shards
from autoshard.ir.graph import Aval
from autoshard.ir.mesh import MeshAxes

_SUBLANES, _LANES = 8, 128  # of a tile of a TPU's vector memory
# Of a matrix, what XLA:TPU scatters at once: at least so many elements, for each doubling of devices and two more; at
# most so many bytes, its pieces four times over included.
_CHUNK_ELEMENTS, _CHUNK_BYTES = 2**16, 15_000_000
_HOPS = 64  # more than any path has steps: (picoseconds, hops) as one integer


@dataclass(frozen=True, slots=True)
class Step:
    """One collective of a path: `nbytes` logical per device, `after` the layout it leaves.

    Logical bytes: an all-gather's result, every other collective's operand. A local
    slice is a step of kind "slice" with no bytes. `transposed`: bytes that transposes
    around it read and write. `parts`: the collectives that a compiler makes of it, if not itself.
    """

    kind: str
    axes: tuple[str, ...]
    nbytes: int
    after: int
    transposed: int = 0
    parts: tuple[tuple[str, tuple[str, ...], int], ...] = ()

    @property
    def collectives(self) -> tuple[tuple[str, tuple[str, ...], int], ...]:
        """Kind, axes and logical bytes of what is emitted."""
        return self.parts or ((self.kind, self.axes, self.nbytes),)


class Strides(NamedTuple):
    """How those before and behind a collective take arrays that do not lie in the order of their dimensions.

    read, made: the dimensions for which those that read the whole, or who makes it, have strides of their own.
    sent: whether an element-wise kernel writes the pieces that are gathered.
    """

    read: frozenset[int] = frozenset()
    made: frozenset[int] = frozenset()
    sent: bool = False

    @property
    def key(self) -> tuple[object, ...]:
        """The same for equal ones in every process."""
        return (tuple(sorted(self.read)), tuple(sorted(self.made)), self.sent)


NO_STRIDES = Strides()


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfused:
    """A kernel that a value needs if it is moved, by bytes of whole arrays.

    `before`: it writes what moves, in the layout that it moves from; else it goes on with it where it comes to.
    """

    nbytes: int
    before: bool


class Resharder:
    """Shortest resharding paths for every value shape on one machine and mesh.

    Every layout on a path is meant to be pinned. Without pins (`pinned=False`), the partitioner
    finishes a pending sum by an all-reduce, or by a reduce-scatter along one dimension if the target
    layout is split. It never scatters a sum to gather it again, never slices along an axis that the
    target layout does not have, never gathers a value that it could move, and takes no detour to save
    transposes.
    If the machine's compiler does not scatter a sum over some axes (`unscattered_axes`: all of a torus), the sum is
    all-reduced and sliced, and a pinned sum is not finished in parts: libtpu 0.0.52 hides neither part then
    (llama3-8b planned so for v5p:4x4x2 took 551 ms of compiled schedule with rings, docs/verification.md at
    8ddab20, and takes 481 all-reduced), and it scatters the second, too, if the tiles allow it. Tiles decide on
    reduce-scatters everywhere (`tiled`). Over axes between slices (`slice_axes`) and inside of them, XLA:TPU gathers
    between slices first; it scatters a sum inside, reduces the pieces between slices, and gathers them, whether
    the sum is cut then or not (libtpu 0.0.52, two and four slices of v5e:2x4 and 4x4). `outermost`: whether
    collectives move along the outermost dimension in memory alone, as XLA:GPU's do. `shares`: of each kind's seconds,
    how much may hide, 0 for others; empty: kinds do not differ, and the edges say it.
    """

    def __init__(
        self,
        mesh: MeshAxes,
        machine: CollectiveMachine,
        *,
        pinned: bool = True,
        outermost: bool = False,
        shares: Mapping[str, float] | None = None,
    ) -> None:
        self.mesh, self.machine, self.pinned, self.outermost = mesh, machine, pinned, outermost
        self.shares: Mapping[str, float] = shares or {}
        self._tables: dict[tuple[tuple[int, ...], int, Bucket, Strides], _Table] = {}

    def table(self, aval: Aval, *, bucket: Bucket, strides: Strides = NO_STRIDES) -> "_Table":
        """The table of a value's shape and element size."""
        if not self.outermost:
            strides = NO_STRIDES
        key = (aval.shape, aval.itemsize, bucket, strides)
        if key not in self._tables:
            self._tables[key] = _Table(self, aval.shape, aval.itemsize, bucket=bucket, strides=strides)
        return self._tables[key]

    def cost_ps(
        self, aval: Aval, source: Codes, target: Codes, *, bucket: Bucket, strides: Strides = NO_STRIDES
    ) -> NDArray[np.int64]:
        """Picoseconds from each source code (rows) to each target code (columns)."""
        table = self.table(aval, bucket=bucket, strides=strides)
        return table.ps[np.ix_(table.at(source), table.at(target))]

    def transposes_ps(
        self, aval: Aval, source: Codes, target: Codes, *, bucket: Bucket, strides: Strides = NO_STRIDES
    ) -> NDArray[np.int64]:
        """The part of `cost_ps` that transposes take."""
        table = self.table(aval, bucket=bucket, strides=strides)
        return table.transposes_ps[np.ix_(table.at(source), table.at(target))]

    def hidden_ps(
        self, aval: Aval, source: Codes, target: Codes, *, bucket: Bucket, strides: Strides = NO_STRIDES
    ) -> NDArray[np.int64]:
        """The part of `cost_ps` that may hide, by its kind."""
        table = self.table(aval, bucket=bucket, strides=strides)
        return table.hidden_ps[np.ix_(table.at(source), table.at(target))]

    def share(self, kind: str) -> float:
        """How much of a kind's seconds may hide, of what an edge lets hide."""
        return self.shares.get(kind, 0.0) if self.shares else 1.0

    def path(
        self, aval: Aval, source: int, target: int, *, bucket: Bucket, strides: Strides = NO_STRIDES
    ) -> tuple[Step, ...]:
        """The steps of the cheapest path; raises ValueError where there is none."""
        return self.table(aval, bucket=bucket, strides=strides).path(source, target)


@dataclass(frozen=True, slots=True, eq=False)
class _Moves:
    """Every single step of one kind over one set of axes, between layouts of any shape: parallel arrays of codes.

    What it leaves pending over the axes `rest`, in layouts `between`, another collective `ends`.
    """

    kind: str
    axes: tuple[int, ...]
    ends: str
    rest: tuple[int, ...]
    before: Codes
    between: Codes
    after: Codes


class _Table:
    """All-pairs cheapest paths between the layouts of one shape."""

    def __init__(
        self, of: Resharder, shape: tuple[int, ...], itemsize: int, *, bucket: Bucket, strides: Strides
    ) -> None:
        mesh, machine, pinned, outermost, shares = of.mesh, of.machine, of.pinned, of.outermost, of.shares
        self.shape, self.mesh, self._strides = shape, mesh, strides
        self.codes = np.sort(layouts(shape, mesh, unreduced=True))
        total = int(np.prod(shape, dtype=np.int64)) * itemsize
        self.local_bytes = total // shards(self.codes, len(shape), mesh)
        self._rows = decode(self.codes, len(shape), mesh.ndim)
        # Whether a dimension is the outermost in memory, by layout: all before it are single there.
        self._outer = np.ones((len(self.codes), len(shape)), bool)
        for d, size in enumerate(shape[:-1]):
            local = size // np.where(self._rows == d, mesh.sizes, 1).prod(axis=1)
            self._outer[:, d + 1] = self._outer[:, d] & (local == 1)
        alike = tuple(mesh.sizes.index(size) for size in mesh.sizes)
        whole = frozenset(i for i, name in enumerate(mesh.names) if name in machine.unscattered_axes)
        self._unscattered = whole
        self._between = frozenset(i for i, name in enumerate(mesh.names) if name in machine.slice_axes)
        self._itemsize = itemsize
        in_parts = not pinned or whole != frozenset(i for i, size in enumerate(mesh.sizes) if size > 1)
        self._moves = _moves(len(shape), alike, mesh.groups, unscattered=whole, in_parts=in_parts)
        n = len(self.codes)
        sizes, size_of = np.unique(self.local_bytes, return_inverse=True)

        @cache
        def prices(kind: str, over: tuple[int, ...]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
            """Seconds of a collective of each of the sizes that a layout has, and those of them that may hide."""
            seconds, hidden = np.zeros((2, len(sizes)))
            for part, axes, nbytes in self._parts(kind, over, sizes, sizes // itemsize):
                part_s = collective_s(machine, part, self._names(axes), nbytes, bucket=bucket)
                seconds, hidden = seconds + part_s, hidden + shares.get(part, 0.0) * part_s
            return seconds, hidden

        single = np.full((n, n), INF_PS, np.int64)
        np.fill_diagonal(single, 0)
        self._move = np.full((n, n), -1, np.int32)  # by the ends of a single step
        self._transposed = np.zeros((n, n), np.int64)  # bytes, likewise
        self._hidden = np.zeros((n, n))  # seconds that may hide, likewise
        for m, moves in enumerate(self._moves):
            deadline.check("pricing its moves")
            i, k, j = (_positions(self.codes, codes) for codes in (moves.before, moves.between, moves.after))
            exist = (i >= 0) & (k >= 0) & (j >= 0)
            if machine.tiled and moves.kind == "reduce-scatter":
                exist &= _scatters(shape, itemsize, moves.between, moves.axes, mesh)
            if machine.tiled and moves.ends == "reduce-scatter":
                exist &= _scatters(shape, itemsize, moves.after, moves.rest, mesh)
            exist &= pinned or moves.ends != "reduce-scatter"  # it needs a pin in between
            i, k, j = i[exist], k[exist], j[exist]
            self._move[i, j] = m
            single[i, j] = 0
            if moves.kind != "slice" and len(i):
                seconds, hidden = (
                    x[size_of[k if moves.kind == "all-gather" else i]] for x in prices(moves.kind, moves.axes)
                )
                if moves.rest:
                    rest, rest_hidden = (x[size_of[k]] for x in prices(moves.ends, moves.rest))
                    seconds, hidden = seconds + rest, hidden + rest_hidden
                self._hidden[i, j] = hidden
                if outermost:
                    self._transposed[i, j] = self._transposes(moves.kind, moves.axes[0], i, k)
                    if moves.rest:
                        self._transposed[i, j] += self._transposes(moves.ends, moves.rest[0], k, j)
                    if pinned:  # the partitioner by itself knows nothing of them
                        seconds = seconds + machine.hbm_s(self._transposed[i, j])
                single[i, j] = np.rint(seconds * PS_PER_S).astype(np.int64) * _HOPS + (2 if moves.rest else 1)
        # No step leaves a sum pending.
        self._finished = np.flatnonzero((self._rows != SUM).all(axis=1))
        weight, self._next = _shortest(single, self._finished)
        if not pinned:
            self._slice_for_good(single, weight)
            self._finish_sums(single, weight)
        elif outermost and self._moves:  # on one device nothing moves
            self._scatter_sums(single, weight)
        self.transposes_ps = np.zeros((n, n), np.int64)
        if self._transposed.any():
            self.transposes_ps = self._along(np.rint(np.asarray(machine.hbm_s(self._transposed)) * PS_PER_S))
        self.hidden_ps = self._along(np.rint(self._hidden * PS_PER_S)) if shares else self.transposes_ps * 0
        besides = 0 if pinned else self.transposes_ps
        self.ps = np.where(weight < INF_PS, weight // _HOPS + besides, INF_PS)

    def _transposes(self, kind: str, axis: int, i: NDArray[np.int64], j: NDArray[np.int64]) -> NDArray[np.int64]:
        """Bytes that the transposes around collectives from layouts at i to layouts at j read and write.

        `axis`: one of those that are moved.
        """
        before, after = self._rows[i, axis], self._rows[j, axis]
        if kind in ("all-gather", "reduce-scatter"):
            split, whole, dims = (i, j, before) if kind == "all-gather" else (j, i, after)
            read, made, sent = self._strides
            alone, fused = (read, sent) if kind == "all-gather" else (made, False)
            shape = np.array(self.shape)
            strided = np.array([d in alone for d in range(len(shape))]) | ((shape > 1).sum() < 3)
            moved = np.where(strided[dims], 0, self.local_bytes[whole])
            moved += 0 if fused else self.local_bytes[split]
            return np.where(self._outer[i, dims], 0, 2 * moved)
        if kind == "all-to-all":
            return 2 * self.local_bytes[i] * (2 - self._outer[i, after].astype(int) - self._outer[j, before])
        return np.zeros(len(i), np.int64)

    def _along(self, single: NDArray[np.float64]) -> NDArray[np.int64]:
        """The prices of single steps, summed along every path."""
        total = np.zeros(single.shape, np.int64)
        ends = np.broadcast_to(self._finished, (len(single), len(self._finished)))
        here = np.broadcast_to(np.arange(len(single))[:, None], ends.shape)
        while True:
            following = np.where(here == ends, ends, self._next[here, ends])
            going = (following >= 0) & (following != here)
            if not going.any():
                return total
            total[:, self._finished] += np.where(going, single[here, following], 0).astype(np.int64)
            here = np.where(going, following, ends)

    def _singles(self, *kinds: str) -> list[tuple[_Moves, int, int]]:
        """Every single step of these kinds, with the positions of its ends."""
        kind = np.array([moves.kind in kinds for moves in self._moves])
        at = np.argwhere((self._move >= 0) & kind[self._move])
        return [(self._moves[self._move[i, j]], i, j) for i, j in at.tolist()]

    def _slice_for_good(self, single: NDArray[np.int64], weight: NDArray[np.int64]) -> None:
        """Makes every path slice along axes alone that split its end, too, and gather those only where it must."""
        split = self._rows >= 0
        steps = self._singles("slice", "all-gather")
        for axes in np.unique(split, axis=0):
            allowed = single.copy()
            ends = np.flatnonzero((split == axes).all(axis=1))
            for moves, i, j in steps:
                if moves.kind == "slice" and not axes[list(moves.axes)].all():
                    allowed[i, j] = INF_PS
            gathering = allowed.copy()
            for moves, i, j in steps:
                if moves.kind == "all-gather" and axes[list(moves.axes)].any():
                    allowed[i, j] = INF_PS
            least, following = _shortest(allowed, self._finished)
            least, following = least[:, ends], following[:, ends]
            while (left := np.flatnonzero((least >= INF_PS).any(axis=1))).size:
                through = gathering[left][:, :, None] + least[None]
                found = (through.min(axis=1) < INF_PS) & (least[left] >= INF_PS)
                if not found.any():
                    break
                following[left] = np.where(found, through.argmin(axis=1), following[left])
                least[left] = np.where(found, through.min(axis=1), least[left])
            weight[:, ends], self._next[:, ends] = least, following

    def _scatter_sums(self, single: NDArray[np.int64], weight: NDArray[np.int64]) -> None:
        """Makes no path all-reduce a sum that is cut at once along axes of the sum, in one dimension.

        XLA:GPU makes a reduce-scatter of that, and an all-reduce over the other axes.
        """
        rows = self._rows
        kind = np.array([moves.kind for moves in self._moves])[self._move]
        for i in np.flatnonzero((rows == SUM).any(axis=1)):
            scatters = np.flatnonzero((self._move[i] >= 0) & (kind[i] == "reduce-scatter"))
            (whole,) = np.flatnonzero((self._move[i] >= 0) & (kind[i] == "all-reduce"))
            if not len(scatters):
                continue
            through = single[i, scatters, None] + weight[np.ix_(scatters, self._finished)]
            least, first = through.min(axis=0), scatters[through.argmin(axis=0)]
            ends = rows[self._finished][:, rows[i] == SUM]
            dim = ends.max(axis=1, keepdims=True)
            cut = self._next[i, self._finished] == whole
            cut &= (weight[whole, self._finished] == 0) & (dim[:, 0] >= 0) & (least < INF_PS)
            cut &= ((ends == dim) | (ends == WHOLE)).all(axis=1)
            weight[i, self._finished[cut]], self._next[i, self._finished[cut]] = least[cut], first[cut]

    def _finish_sums(self, single: NDArray[np.int64], weight: NDArray[np.int64]) -> None:
        """Makes every path from a pending sum begin with its all-reduce, or be its reduce-scatter and slices.

        It is scattered over all axes along which the end is split, if they split one dimension.
        """
        whole_over = self._rows == WHOLE
        first: dict[int, list[tuple[_Moves, int]]] = {}
        for moves, i, k in self._singles("all-reduce", "reduce-scatter"):
            first.setdefault(i, []).append((moves, k))
        for i, steps in first.items():
            whole = next(k for moves, k in steps if moves.kind == "all-reduce" and not moves.rest)
            weight[i] = np.minimum(single[i, whole] + weight[whole], INF_PS)
            weight[i, i] = 0
            self._next[i] = np.where(weight[i] < INF_PS, whole, -1)
            for moves, k in steps:
                if moves.kind == "reduce-scatter" or moves.rest:  # and slices alone, which cost nothing
                    ends = (weight[k] == 0) & whole_over[:, list(moves.rest)].all(axis=1)
                    weight[i, ends], self._next[i, ends] = single[i, k], k

    def _names(self, axes: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(self.mesh.names[a] for a in axes)

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
            moves = self._moves[self._move[i, k]]
            size = 0 if moves.kind == "slice" else int(self.local_bytes[k if moves.kind == "all-gather" else i])
            axes, transposed, after = self._names(moves.axes), int(self._transposed[i, k]), int(self.codes[k])
            if moves.rest:
                after = self._pending(k, moves.rest)
            steps.append(Step(moves.kind, axes, size, after, transposed, self._emitted(moves.kind, moves.axes, size)))
            if moves.rest:
                left = int(self.local_bytes[self.at(np.array([after]))[0]])
                steps.append(Step(moves.ends, self._names(moves.rest), left, int(self.codes[k])))
            i = k
        return tuple(steps)

    def _emitted(self, kind: str, over: tuple[int, ...], nbytes: int) -> tuple[tuple[str, tuple[str, ...], int], ...]:
        """The parts of a collective, if it is made of several."""
        parts = self._parts(kind, over, np.array([nbytes]), np.array([nbytes // self._itemsize]))
        named = tuple((part, self._names(axes), int(moved[0])) for part, axes, moved in parts if moved[0])
        return named if len(parts) > 1 else ()

    def _parts(
        self, kind: str, over: tuple[int, ...], nbytes: NDArray[np.int64], elements: NDArray[np.int64]
    ) -> list[tuple[str, tuple[int, ...], NDArray[np.int64]]]:
        """Kind, axes and logical bytes of the collectives that are made of one: several, if it leaves slices."""
        between = tuple(a for a in over if a in self._between)
        inside = tuple(a for a in over if a not in self._between)
        if not between or not inside or kind not in COMBINED:
            return [(kind, over, nbytes)]
        devices = prod(self.mesh.sizes[a] for a in inside)
        if kind == "all-gather":
            return [(kind, between, nbytes // devices), (kind, inside, nbytes)]
        whole = elements < devices  # too few to be scattered
        scatters = "all-reduce" if self._unscattered and self._unscattered <= set(inside) else "reduce-scatter"
        return [
            (scatters, inside, np.where(whole, 0, nbytes)),
            ("all-reduce", inside, np.where(whole, nbytes, 0)),
            ("all-reduce", between, np.where(whole, nbytes, nbytes // devices)),
            ("all-gather", inside, np.where(whole, 0, nbytes)),
        ]

    def _pending(self, position: int, rest: tuple[int, ...]) -> int:
        """The code at a position before sums over the axes `rest` are finished."""
        row = self._rows[position].copy()
        row[list(rest)] = SUM
        return int(encode(row, len(self.shape)))


@cache
def _moves(
    ndim: int, alike: tuple[int, ...], groups: int | None, *, unscattered: frozenset[int], in_parts: bool
) -> tuple[_Moves, ...]:
    """Every single step between layouts of `ndim` dimensions, dividing or not.

    Args:
      ndim: of the value.
      alike: mesh axis → the first axis of its size.
      groups: as of the mesh.
      unscattered: the axes over all of which a sum is all-reduced and cut.
      in_parts: whether sums are scattered over some axes and finished over the others.
    """
    axes = range(len(alike))
    rows = assignments([[SUM, WHOLE, *range(ndim)] for _ in axes], groups)
    every = np.sort(encode(rows, ndim))
    rows = decode(every, ndim, len(alike))
    sums = rows == SUM
    pendings = [tuple(np.flatnonzero(mask).tolist()) for mask in np.unique(sums, axis=0)]
    reduced = ~sums.any(axis=1)
    last = [np.where(rows == d, axes, -1).max(axis=1, initial=-1) for d in range(ndim)]  # the minor-most axis, or −1
    found: dict[tuple[str, tuple[int, ...], str, tuple[int, ...]], list[tuple[Codes, Codes, Codes]]] = {}

    def add(
        kind: str,
        over: tuple[int, ...],
        which: NDArray[np.bool_],
        *to: tuple[Sequence[int], int],
        rest: tuple[int, ...] = (),
        onto: int = WHOLE,
    ) -> None:
        if not which.any():
            return
        after = rows[which]
        for moved, place in to:
            after[:, moved] = place
        between = encode(after, ndim)
        after[:, rest] = onto
        ends = "" if not rest else "all-reduce" if onto == WHOLE else "reduce-scatter"
        found.setdefault((kind, over, ends, rest), []).append((every[which], between, encode(after, ndim)))

    for over in _subsets(axes):
        inside = np.isin(axes, over)
        # A pin makes the partitioner finish every pending sum at once: over all axes together here, over those
        # that are not scattered right behind the scatter below.
        add("all-reduce", over, (sums == inside).all(axis=1), (over, WHOLE))
        scattered = not unscattered or not unscattered <= set(over)
        if scattered or in_parts:
            kind = "reduce-scatter" if scattered else "all-reduce"  # and a cut
            rests: list[tuple[int, ...]] = [()]
            if in_parts:
                masks = (mask for mask in pendings if set(over) <= set(mask))
                rests = sorted((tuple(a for a in m if a not in over) for m in masks), key=lambda m: (len(m), m))
            for rest in rests if scattered else rests[1:]:
                pending = (sums == np.isin(axes, over + rest)).all(axis=1)
                for d in range(ndim):
                    add(kind, over, pending & (last[d] < over[0]), (over, d), rest=rest)
                for d, e in permutations(range(ndim), 2) if rest else ():
                    free = (last[d] < over[0]) & (last[e] < rest[0])
                    add(kind, over, pending & free, (over, d), rest=rest, onto=e)
        for d in range(ndim):
            minor = reduced & (rows[:, over] == d).all(axis=1)  # exactly the minor-most axes of d
            minor &= ~((rows == d) & ~inside)[:, over[0] :].any(axis=1)
            add("all-gather", over, minor, (over, WHOLE))
            for e in range(ndim):
                if e != d:
                    add("all-to-all", over, minor & (last[e] < over[0]), (over, e))
    for a, d in product(axes, range(ndim)):
        whole = reduced & (rows[:, a] == WHOLE)
        # Where layouts are left out, those between the slices of one axis each may be: a slice is free of any.
        for over in [(a,)] if groups is None else [s for s in _subsets(axes) if s[0] == a]:
            cut = reduced & (rows[:, over] == WHOLE).all(axis=1) & (last[d] < a)
            add("slice", over, cut, (over, d))
        for b in (b for b in axes if b != a and alike[b] == alike[a]):
            others = ((rows == d) & (np.array(axes) != b))[:, a:].any(axis=1)  # of d, minor to a
            replaced = whole & (last[d] == b) & ~others
            add("collective-permute", tuple(sorted((a, b))), replaced, ([b], WHOLE), ([a], d))
    return tuple(
        _Moves(kind, over, ends, rest, *(np.concatenate(codes) for codes in zip(*parts, strict=True)))
        for (kind, over, ends, rest), parts in found.items()
    )


def _positions(codes: Codes, of: Codes) -> NDArray[np.int64]:
    """Where some codes are among sorted ones, −1 where they are not."""
    at = np.minimum(np.searchsorted(codes, of), len(codes) - 1)
    return np.where(codes[at] == of, at, -1)


def _subsets(axes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every one but the empty, small ones first."""
    return chain.from_iterable(combinations(axes, count) for count in range(1, len(axes) + 1))


def _scatters(
    shape: tuple[int, ...], itemsize: int, after: Codes, over: tuple[int, ...], mesh: MeshAxes
) -> NDArray[np.bool_]:
    """Whether XLA:TPU makes a reduce-scatter of a sum over mesh axes that ends in each of some layouts.

    Arrays lie in tiles of 8 x 128 of their last two dimensions, those of narrow elements in tiles of more rows
    (16 of bfloat16). Along the last dimension but one, whole tiles are scattered; half of one, too, if it is the
    outermost. So along the last, with which it changes places, but if an odd number of tiles of 128 is left. Nor is an
    odd number along the other, if the last fills none: they change places. Of the dimensions before them, the outermost
    is scattered, and any that is longer than the last but one, whose place it then takes (libtpu 0.0.52 without
    windowed einsum; `test_tiles_tpu.py`).
    A matrix is scattered in chunks of equally many tiles of its other dimension (`_in_chunks`).
    """
    ndim, sizes = len(shape), np.array(mesh.sizes)
    rows = decode(after, ndim, mesh.ndim)
    pieces = np.stack([np.where(rows == d, sizes, 1).prod(axis=1) for d in range(ndim)], axis=1)
    local = np.array(shape) // pieces  # (layouts, ndim), for the rest of a scattered value
    dim = rows[:, over[0]].astype(np.int64)
    left = np.take_along_axis(local, dim[:, None], axis=1)[:, 0]
    before = left * int(sizes[list(over)].prod())
    outermost = np.array([row[:d].prod() == 1 for row, d in zip(local, dim, strict=True)], bool)
    if ndim < 2:
        return np.ones(len(after), bool)
    fills = np.where(local[:, : ndim - 2].prod(axis=1) == 1, left >= _SUBLANES, left * itemsize % (4 * _SUBLANES) == 0)
    other = np.where(dim == ndim - 1, local[:, -2], local[:, -1])
    odd = left % (2 * _LANES) == _LANES
    found = np.select(
        [dim == ndim - 1, dim == ndim - 2],
        [fills & ~odd, fills & ~(odd & (other % _LANES != 0))],
        outermost | (before > local[:, ndim - 2]),
    )
    ways = int(sizes[list(over)].prod())
    for at in np.flatnonzero(found & (local[:, : ndim - 2].prod(axis=1) == 1)):
        found[at] = _in_chunks(int(other[at]), int(before[at]), itemsize, ways)
    return found


@cache
def _in_chunks(rows: int, columns: int, itemsize: int, ways: int) -> bool:
    """Whether a matrix of so many rows divides into chunks, tile by tile, in which XLA:TPU scatters its columns.

    One chunk is always scattered if it is small. Bisected with libtpu 0.0.52 on v5p over 2, 4, 8 and 16 devices, and on
    v5e over 4 (`test_tiles_tpu.py`, the slow tests). An eighth of llama3's vocabulary, 16,032 rows (1,002 tiles of 16,
    2 · 3 · 167), is not scattered along 2,048 columns, but along 1,024 or 4,096. `rows` may be the columns, and
    `columns` the rows.
    """
    height = _SUBLANES if rows % (4 * _SUBLANES // itemsize) else 4 * _SUBLANES // itemsize
    tiles, tile = -(-rows // height), height * columns
    least, most = _CHUNK_ELEMENTS * (log2(ways) + 2), _CHUNK_BYTES / (1 + 4 / ways)
    if tiles * tile < least:
        return True
    return any(tiles % n == 0 and n * tile >= least and n * tile * itemsize <= most for n in range(1, tiles + 1))


def _shortest(weight: NDArray[np.int64], within: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Least weights between all pairs, and the first step on each way (Floyd and Warshall).

    `within`: the positions at which single steps end; no way to another leads anywhere.
    """
    following = np.where(weight < INF_PS, np.arange(len(weight))[None, :], -1).astype(np.int32)
    least, first = np.ascontiguousarray(weight[:, within]), np.ascontiguousarray(following[:, within])
    for k, via in enumerate(within):
        through = least[:, k, None] + least[None, via, :]
        better = through < least
        np.copyto(least, through, where=better)
        np.copyto(first, first[:, k, None].copy(), where=better)
    weight = weight.copy()
    weight[:, within], following[:, within] = least, first
    return weight, following
