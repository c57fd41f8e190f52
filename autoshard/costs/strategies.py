"""Strategies: rule × mesh → which axes split which factor, as arrays.

A *code* is a layout as one integer: per mesh axis the dimension that it splits
(`d`), `WHOLE` if the value is replicated over it, or `SUM` if the value is unreduced
over it, in base `ndim + 2`. Two axes on one dimension lie in mesh order, major to
minor. Divisibility and pruning live here, and pruned strategies are counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

from autoshard.errors import MeshError
from autoshard.ir.graph import Graph
from autoshard.ir.layout import Layout
from autoshard.ir.mesh import MeshAxes
from autoshard.rules.rule import FactorKind, ShardingRule

Codes = NDArray[np.int64]
Rows = NDArray[np.int8]  # codes × mesh axes

SUM = -2
WHOLE = -1

# The most that are searched. Paths between all layouts of a value take the cube of their number: at this one, a
# minute. 2,401 are those of five dimensions on four axes of two, 1,000 those of eight dimensions on three.
MOST_LAYOUTS = 3_000
MOST_STRATEGIES = 100_000


def encode(rows: Rows, ndim: int) -> Codes:
    """Rows (…, axes) of dimension numbers, WHOLE or SUM → codes (…,)."""
    base = ndim + 2
    weights = base ** np.arange(rows.shape[-1], dtype=np.int64)
    return (rows.astype(np.int64) + 2) @ weights


def decode(codes: Codes | int, ndim: int, axes: int) -> Rows:
    """Codes (…,) → rows (…, axes)."""
    base = ndim + 2
    weights = base ** np.arange(axes, dtype=np.int64)
    return ((np.asarray(codes)[..., None] // weights) % base - 2).astype(np.int8)


def code_of(layout: Layout, mesh: MeshAxes) -> int:
    """The code of a layout whose axes lie in mesh order within each dimension."""
    row = np.full(mesh.ndim, WHOLE, np.int8)
    for d, axes in enumerate(layout.dims):
        for axis in axes:
            row[mesh.names.index(axis)] = d
    for axis in layout.unreduced:
        row[mesh.names.index(axis)] = SUM
    return int(encode(row, layout.ndim))


def layout_of(code: int, ndim: int, mesh: MeshAxes) -> Layout:
    """The layout of a code; axes within a dimension in mesh order."""
    row = decode(code, ndim, mesh.ndim)
    dims = tuple(tuple(n for n, d in zip(mesh.names, row, strict=True) if d == dim) for dim in range(ndim))
    return Layout(dims, tuple(n for n, d in zip(mesh.names, row, strict=True) if d == SUM))


def shards(codes: Codes, ndim: int, mesh: MeshAxes) -> NDArray[np.int64]:
    """Into how many pieces each code splits a value."""
    rows = decode(codes, ndim, mesh.ndim)
    return np.where(rows >= 0, np.array(mesh.sizes, np.int64), 1).prod(axis=-1)


def split(codes: Codes, dimension: int, ndim: int, mesh: MeshAxes) -> NDArray[np.int64]:
    """The number of parts (N,) that one dimension is split into."""
    return np.where(decode(codes, ndim, mesh.ndim) == dimension, mesh.sizes, 1).prod(axis=1)


@cache
def layouts(shape: tuple[int, ...], mesh: MeshAxes, *, unreduced: bool) -> Codes:
    """Codes of every layout that divides `shape`, replicated first; read-only. Empty arrays are not split.

    Raises:
      MeshError: there are more than `MOST_LAYOUTS`.
    """
    ndim = len(shape)
    count = layout_count(shape, mesh)
    if count > MOST_LAYOUTS:
        raise MeshError(_too_many(f"a value of shape {list(shape)} has", count, "layouts", mesh))
    choices = [[WHOLE, *_dividing(shape, size), *([SUM] if unreduced else [])] for size in mesh.sizes]
    rows = assignments(choices, mesh.groups)
    sizes = np.array(mesh.sizes, np.int64)
    fits = np.ones(len(rows), bool)
    for d in range(ndim):
        pieces = np.where(rows == d, sizes, 1).prod(axis=1)
        fits &= shape[d] % pieces == 0
    codes = encode(rows[fits], ndim)
    codes.setflags(write=False)
    return codes


def assignments(choices: list[list[int]], groups: int | None) -> Rows:
    """Every assignment of mesh axes to one of their choices, in at most so many groups; one empty row without axes."""
    if groups is None:
        return np.array(list(product(*choices)), np.int8).reshape(prod(map(len, choices)), len(choices))
    rows: Rows = np.zeros((1, 0), np.int8)
    counts = np.zeros(1, np.int64)
    for axis, own in enumerate(choices):
        more = np.tile(np.array(own, np.int8), len(rows))[:, None]
        rows, counts = np.repeat(rows, len(own), axis=0), np.repeat(counts, len(own))
        counts = counts + (rows[:, -1] != more[:, 0] if axis else 1)
        rows = np.concatenate([rows, more], axis=1)[counts <= groups]
        counts = counts[counts <= groups]
    return rows


def groups_of(row: Sequence[int]) -> int:
    """In how many groups of neighbouring axes an assignment falls."""
    return sum(i == 0 or row[i - 1] != one for i, one in enumerate(row))


def _count(choices: list[list[int]], groups: int | None) -> int:
    """How many `assignments` there are; none is made."""
    if groups is None:
        return prod(map(len, choices))
    ending: dict[int, list[int]] = {}  # choice of the last axis → how many, by groups
    for axis, own in enumerate(choices):
        total = [sum(column) for column in zip(*ending.values(), strict=True)] or [0] * (groups + 1)
        same = {one: ending.get(one, [0] * (groups + 1)) for one in own}
        ending = {
            one: [0, *(before[g] + total[g - 1] - before[g - 1] for g in range(1, groups + 1))]
            for one, before in same.items()
        }
        if axis == 0:
            ending = {one: [0, 1, *[0] * (groups - 1)] for one in own}
    return sum(map(sum, ending.values())) if choices else 1


def _dividing(sizes: Sequence[int], axis: int) -> list[int]:
    """The positions of the sizes that a mesh axis of so many devices divides; none for an empty array."""
    return [] if 0 in sizes else [i for i, size in enumerate(sizes) if size % axis == 0]


def layout_count(shape: tuple[int, ...], mesh: MeshAxes) -> int:
    """How many layouts a value has at most, sums included; none is made."""
    return _count([[WHOLE, *_dividing(shape, size), SUM] for size in mesh.sizes], mesh.groups)


def finished_count(shape: tuple[int, ...], mesh: MeshAxes) -> int:
    """As `layout_count`, without sums."""
    return _count([[WHOLE, *_dividing(shape, size)] for size in mesh.sizes], mesh.groups)


def strategy_count(rule: ShardingRule, mesh: MeshAxes) -> int:
    """How many strategies an equation has at most, sums included; none is made."""
    sizes = [rule.factors[f].size for f in splittable(rule)]
    return _count([[WHOLE, *_dividing(sizes, size), SUM] for size in mesh.sizes], mesh.groups)


def check_counts(graph: Graph, rules: Sequence[ShardingRule], mesh: MeshAxes) -> None:
    """Raises a MeshError, before any is made, where there are more layouts or strategies than can be searched."""
    counted: dict[tuple[int, ...], int] = {}
    for eqn, rule in zip(graph.eqns, rules, strict=True):
        for aval in (*eqn.operands, *eqn.results):
            count = counted[aval.shape] = counted.get(aval.shape) or layout_count(aval.shape, mesh)
            if count > MOST_LAYOUTS:
                raise MeshError(_too_many(f"{eqn.primitive} at {eqn.where}: {aval} has", count, "layouts", mesh))
        count = strategy_count(rule, mesh)
        if count > MOST_STRATEGIES:
            raise MeshError(_too_many(f"{eqn.primitive} at {eqn.where} has", count, "strategies", mesh))


def _too_many(what: str, count: int, of: str, mesh: MeshAxes) -> str:
    pairs = [range(i, min(i + 2, mesh.ndim)) for i in range(0, mesh.ndim, 2)]
    fewer = {"_".join(mesh.names[a] for a in pair): prod(mesh.sizes[a] for a in pair) for pair in pairs}
    most = MOST_LAYOUTS if of == "layouts" else MOST_STRATEGIES
    return (
        f"{what} {count:,} {of} on {mesh}; {most:,} are the most that are searched\n"
        f"  give the mesh fewer axes, several as one: mesh={fewer}"
    )


def matching(shape: tuple[int, ...], mesh: MeshAxes, layout: Layout, free: frozenset[int]) -> Codes:
    """Codes of the layouts of `shape` that agree with `layout` in every dimension not in `free`.

    Axes of the layout that the mesh does not have (size 1) are ignored, and so is the layout of a
    value without elements. Empty if the layout does not divide, or asks for an axis order that codes
    do not have.
    """
    codes = layouts(shape, mesh, unreduced=False)
    if 0 in shape:
        return codes
    rows = decode(codes, len(shape), mesh.ndim)
    real = [[mesh.names.index(name) for name in axes if name in mesh.names] for axes in layout.dims]
    agree = np.full(len(codes), all(axes == sorted(axes) for axes in real))
    for a, name in enumerate(mesh.names):
        wanted = next((d for d, axes in enumerate(layout.dims) if name in axes), WHOLE)
        allowed = rows[:, a] == wanted
        if wanted == WHOLE:
            allowed |= np.isin(rows[:, a], sorted(free))
        agree &= allowed
    return codes[agree]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Strategies:
    """Every way to split one equation: S strategies over k mesh axes.

    `factor` is (S, k): the factor that each axis splits, WHOLE for none, SUM where
    partial sums flow through. `operands[i]` and `results[i]` are codes (S,).
    `in_op` is (S, k): axes over which an equation communicates by itself, by `in_op_kind`: a
    reduction other than a sum is finished inside, elements hop from shard to shard.
    `finished` is (S,): the operand that is no pending sum where it comes from; −1: any may be.
    """

    factor: NDArray[np.int8]
    operands: tuple[Codes, ...]
    results: tuple[Codes, ...]
    in_op: NDArray[np.bool_]
    finished: NDArray[np.int8]
    pruned: int
    in_op_kind: str = "all-reduce"

    def __len__(self) -> int:
        return len(self.factor)

    def only(self, kept: NDArray[np.bool_]) -> "Strategies":
        """The strategies that a mask (S,) keeps."""
        return replace(self.at(np.flatnonzero(kept)), pruned=self.pruned + int((~kept).sum()))

    def merging(self) -> "Strategies":
        """The same of an addition whose terms' sums the compiler would finish together, after it.

        What is not added pending has a term that was finished before, each in turn.
        """
        flowing = (self.factor == SUM).any(axis=1)
        apart, turns = np.flatnonzero(~flowing), range(len(self.operands))
        finished = [np.full(len(apart), i, np.int8) for i in turns]
        found = self.at(np.concatenate([*(apart for _ in turns), np.flatnonzero(flowing)]))
        return replace(found, finished=np.concatenate([*finished, np.full(int(flowing.sum()), -1, np.int8)]))

    def at(self, which: NDArray[np.int64]) -> "Strategies":
        """The strategies of these numbers, in this order; one may come several times."""
        return Strategies(
            factor=self.factor[which],
            operands=tuple(codes[which] for codes in self.operands),
            results=tuple(codes[which] for codes in self.results),
            in_op=self.in_op[which],
            finished=self.finished[which],
            pruned=self.pruned,
            in_op_kind=self.in_op_kind,
        )

    def local_sizes(self, rule: ShardingRule, mesh: MeshAxes) -> NDArray[np.int64]:
        """Per-device size of every factor: (S, factors)."""
        local = np.tile(np.array([f.size for f in rule.factors], np.int64), (len(self), 1))
        for axis, size in enumerate(mesh.sizes):
            split = self.factor[:, axis]
            rows = np.flatnonzero(split >= 0)
            local[rows, split[rows]] //= size
        return local


def given(layouts: Sequence[Layout], operands: int, mesh: MeshAxes) -> Strategies:
    """The one strategy of an equation whose layouts are given: of its operands, then of its results."""
    codes = tuple(np.array([code_of(layout, mesh)], np.int64) for layout in layouts)
    return Strategies(
        factor=np.full((1, mesh.ndim), WHOLE, np.int8),
        operands=codes[:operands],
        results=codes[operands:],
        in_op=np.zeros((1, mesh.ndim), bool),
        finished=np.full(1, -1, np.int8),
        pruned=0,
    )


def parted(source: Codes, target: Codes, ndim: int, axes: int) -> NDArray[np.bool_]:
    """Whether a sum is scattered over some of its axes, and not so over its others: (sources, targets)."""
    pending = decode(source, ndim, axes) == SUM
    if axes < 2 or not pending.any():
        return np.zeros((len(source), len(target)), bool)
    kinds, kind = np.unique(pending, axis=0, return_inverse=True)
    sums, ends = kinds[:, None, :], decode(target, ndim, axes)[None, :, :]
    highest = np.where(sums, ends, SUM).max(axis=2, initial=SUM)
    lowest = np.where(sums, ends, ndim).min(axis=2, initial=ndim)
    return ((highest >= 0) & (highest != lowest))[kind.ravel()]


def splittable(rule: ShardingRule) -> tuple[int, ...]:
    """Factors that an axis may split: those that pass, reduce or hop, and are major-most wherever they lie."""
    minor: set[int] = set()
    for dims in (*rule.operands, *rule.results):
        for dim in dims:
            minor.update(dim[1:])
    return tuple(
        f
        for f, factor in enumerate(rule.factors)
        if factor.size > 1
        and (factor.kind in (FactorKind.PASS, FactorKind.REDUCTION) or factor.hops)
        and f not in minor
    )


@cache
def enumerate_strategies(rule: ShardingRule, mesh: MeshAxes, *, sums_flow: bool = False) -> Strategies:
    """All assignments of mesh axes to factors that divide evenly, the whole one first.

    Args:
      rule: the equation's factors.
      mesh: the logical mesh.
      sums_flow: whether partial sums may flow through the equation's first linear set.

    Raises:
      MeshError: there are more than `MOST_STRATEGIES`.
    """
    factors = splittable(rule)
    if strategy_count(rule, mesh) > MOST_STRATEGIES:
        raise MeshError(_too_many("an equation has", strategy_count(rule, mesh), "strategies", mesh))
    flow = [SUM] if sums_flow and rule.linear else []
    split = [rule.factors[f].size for f in factors]
    choices = [[WHOLE, *(factors[i] for i in _dividing(split, n)), *flow] for n in mesh.sizes]
    rows = assignments(choices, mesh.groups)
    every = (1 + len(factors) + len(flow)) ** mesh.ndim
    sizes = np.array(mesh.sizes, np.int64)
    fits = np.ones(len(rows), bool)
    for f in factors:
        pieces = np.where(rows == f, sizes, 1).prod(axis=1)
        fits &= rule.factors[f].size % pieces == 0
        if rule.factors[f].hops:  # in shards of one element, or not at all
            fits &= (pieces == 1) | (pieces == rule.factors[f].size)
    kept = rows[fits]

    flowing = rule.linear[0] if sums_flow and rule.linear else frozenset[int]()
    reduces = [f.reduction == "sum" for f in rule.factors]
    in_op = np.zeros(kept.shape, bool)
    for f in factors:
        if (rule.factors[f].kind is FactorKind.REDUCTION and not reduces[f]) or rule.factors[f].hops:
            in_op |= kept == f

    def codes(dims: tuple[tuple[int, ...], ...], *, result: bool, sums: bool) -> Codes:
        layout = np.full(kept.shape, WHOLE, np.int8)
        present: set[int] = set()
        for d, dim in enumerate(dims):
            for f in dim:
                layout[kept == f] = d
                present.add(f)
        if result:
            for f in factors:
                if reduces[f] and f not in present:
                    layout[kept == f] = SUM
        if sums:
            layout[kept == SUM] = SUM
        return encode(layout, len(dims))

    return Strategies(
        factor=kept,
        operands=tuple(codes(dims, result=False, sums=i in flowing) for i, dims in enumerate(rule.operands)),
        results=tuple(codes(dims, result=True, sums=True) for dims in rule.results),
        in_op=in_op,
        finished=np.full(len(kept), -1, np.int8),
        pruned=every - len(kept),
        in_op_kind="collective-permute" if any(factor.hops for factor in rule.factors) else "all-reduce",
    )


def reduced(codes: Codes, ndim: int, mesh: MeshAxes) -> Codes:
    """The codes with unreduced axes made whole."""
    rows = decode(codes, ndim, mesh.ndim).copy()
    rows[rows == SUM] = WHOLE
    return np.unique(encode(rows, ndim))


def unscattered(source: Codes, target: Codes, made: Codes, ndim: int, axes: int) -> NDArray[np.bool_]:
    """Pairs in which a sum of an author's is finished as no compiler does.

    It does not wait; and sliced over other axes, too, it is all-reduced: the slices are merged first.
    """
    here, there, whole = (decode(codes, ndim, axes) for codes in (source, target, made[:1]))
    summed = whole[0] == SUM
    others = (there[:, ~summed] != whole[:, ~summed]).any(axis=1)
    never = (here[:, summed] != WHOLE).any(axis=1)[:, None] & others[None, :]
    return never | (there == SUM).any(axis=1)
