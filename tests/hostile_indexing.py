"""Hostile operations that look up and write by index: gathers, scatters, dynamic slices, in range and out of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.hostile_draw import ANY, MAX_SIZE, Draw, Shape, UnfitError, Value, kind_of, without_nan

CLIP, FILL, PROMISE, ONE_HOT = (lax.GatherScatterMode(i) for i in (1, 2, 3, 4))
NARROW = ("int8", "uint8", "int16", "uint16", "uint32")


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """Which windows of an operand stand where, for a gather and for a scatter."""

    operand: Shape
    batch: Shape  # of the indices
    batching: tuple[int, ...]  # dimensions of the operand
    along: tuple[int, ...]  # those of the indices that they go with
    mapped: tuple[int, ...]
    sizes: Shape  # of the windows
    collapsed: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def out(self) -> Shape:
        kept = [self.sizes[i] for i in range(len(self.sizes)) if i not in self.collapsed and i not in self.batching]
        batch, found = list(self.batch), []
        for position in range(len(kept) + len(batch)):
            found.append(kept.pop(0) if position in self.offsets else batch.pop(0))
        return tuple(found)

    def starts(self, d: Draw, *, within: bool) -> Value:
        """The positions, a column per dimension that they say."""
        columns = [self.operand[i] - self.sizes[i] + 1 for i in self.mapped]
        found = jnp.stack([d.indices(self.batch, limit, within=within) for limit in columns], axis=-1)
        return narrowed(found, d.choice(NARROW)) if d.coin(0.2) else found


def narrowed(x: Value, dtype: str) -> Value:
    """Positions of another type, none of which it changes: XLA reads a known -1, cast to an unsigned type, as -1."""
    near = lax.rem(x, jnp.int32(120))
    return (jnp.abs(near) if dtype.startswith("u") else near).astype(dtype)


def lookup(d: Draw, operand: Shape, batch_rank: int) -> Lookup:
    rank = len(operand)
    batch = list(d.shape(batch_rank, 32))
    batching: tuple[int, ...] = ()
    along: tuple[int, ...] = ()
    if batch_rank and rank > 1 and d.coin(0.3):
        batching, along = (d.whole(0, rank - 1),), (d.whole(0, batch_rank - 1),)
        batch[along[0]] = operand[batching[0]]
    others = [i for i in d.order(rank) if i not in batching]
    mapped = tuple(others[: d.whole(1, len(others))])
    sizes: list[int] = []
    for i, size in enumerate(operand):
        if i in batching:
            sizes.append(min(size, 1))
        elif i in mapped:
            sizes.append(min(d.choice((1, 1, 1, d.whole(0, size), size)), size))
        else:
            sizes.append(size if d.coin(0.7) else d.whole(min(size, 1), size))
    ones = [i for i in range(rank) if sizes[i] == 1 and i not in batching]
    collapsed = tuple(i for i in ones if d.coin(0.8 if i in mapped else 0.3))
    kept = rank - len(collapsed) - len(batching)
    offsets = tuple(sorted(d.order(kept + batch_rank)[:kept]))
    return Lookup(
        operand=operand,
        batch=tuple(batch),
        batching=batching,
        along=along,
        mapped=mapped,
        sizes=tuple(sizes),
        collapsed=collapsed,
        offsets=offsets,
    )


def looked_up(d: Draw) -> tuple[Value, Lookup]:
    x = d.pick("fi", 1, most=4, where=lambda v: v.size > 0)
    if d.coin(0.5):
        x = d.operand(d.shape(d.whole(1, 4), 128) if d.coin(0.7) else x.shape, "f")
    if not x.size:
        raise UnfitError
    found = lookup(d, x.shape, d.whole(0, 2))
    if prod(found.out) > MAX_SIZE:
        raise UnfitError
    return x, found


def gather(d: Draw) -> Value:
    """Any dimension numbers, in every mode."""
    x, at = looked_up(d)
    mode = d.choice((CLIP, CLIP, FILL, FILL, PROMISE))
    return lax.gather(
        x,
        at.starts(d, within=mode is PROMISE),
        lax.GatherDimensionNumbers(
            offset_dims=at.offsets,
            collapsed_slice_dims=at.collapsed,
            start_index_map=at.mapped,
            operand_batching_dims=at.batching,
            start_indices_batching_dims=at.along,
        ),
        at.sizes,
        mode=mode,
        fill_value=d.choice((None, 0, 3)) if mode is FILL else None,
    )


def scatter(d: Draw) -> Value:
    """Any dimension numbers, in every mode; what overwrites writes the same or writes once."""
    x, at = looked_up(d)
    mode = d.choice((CLIP, CLIP, FILL, FILL, PROMISE, ONE_HOT))  # the last is no mode of a gather that JAX compiles
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=at.offsets,
        inserted_window_dims=at.collapsed,
        scatter_dims_to_operand_dims=at.mapped,
        operand_batching_dims=at.batching,
        scatter_indices_batching_dims=at.along,
    )
    op: Any = d.choice(
        (
            lax.scatter_add,
            lax.scatter_add,
            lax.scatter_mul,
            lax.scatter_min,
            lax.scatter_max,
            lax.scatter,
            lax.scatter_sub,
        )
    )
    if d.rounded:
        op = d.choice((lax.scatter_add, lax.scatter_sub))
    undefined = d.derived and op not in (lax.scatter_add, lax.scatter_sub)  # out of range JAX's derivatives are wrong
    mode = PROMISE if undefined else FILL if d.derived and mode is ONE_HOT else mode
    starts = at.starts(d, within=mode is PROMISE)
    updates = d.operand(at.out, kind_of(x), dtype=str(x.dtype))
    if op is lax.scatter_mul:
        updates = jnp.where(updates > 0, 1, -1).astype(x.dtype)
    if op is lax.scatter and prod(at.batch) > 1:
        updates = jnp.broadcast_to(d.fresh((), str(x.dtype), d), at.out)
    return d.small(op(x, starts, updates, numbers, mode=mode), max(prod(at.batch), 1) + 1)


def indexed(d: Draw) -> Value:
    """NumPy's indexing, with arrays that broadcast against each other."""
    x = d.pick(ANY, 1, most=4, where=lambda v: v.size > 0)
    mode = d.choice(("clip", "fill", "promise_in_bounds", None))
    within = mode == "promise_in_bounds"
    shape = d.shape(d.whole(0, 2), 16)
    chosen = d.some(x.ndim, 1)
    key = tuple(
        d.indices(shape if d.coin(0.7) else shape[-1:], size, within=within)
        if i in chosen
        else d.choice((slice(None), slice(None, None, -1)))
        for i, size in enumerate(x.shape)
    )
    if d.coin(0.5) or kind_of(x) == "b":
        return x.at[key].get(mode=mode, fill_value=1 if mode == "fill" and d.coin() else None)
    made = jax.eval_shape(lambda x: x.at[key].get(), x)
    if prod(made.shape) > MAX_SIZE or kind_of(x) not in "fi":
        raise UnfitError
    x, updates = without_nan(x), without_nan(d.operand(made.shape, kind_of(x), dtype=str(x.dtype)))
    there = x.at[key]
    if d.rounded or d.derived:
        return d.small(there.add(updates, mode=mode), prod(shape) + 1)
    ops: tuple[Callable[[], Value], ...] = (
        lambda: there.add(updates, mode=mode),
        lambda: there.max(updates, mode=mode),
        lambda: there.min(updates, mode=mode),
        lambda: there.multiply(jnp.where(updates > 0, 1, -1).astype(x.dtype), mode=mode),
        lambda: there.set(d.fresh((), str(x.dtype), d), mode=mode),
    )
    return d.small(d.choice(ops)(), 16)


def taken(d: Draw) -> Value:
    x = d.pick(ANY, 1, where=lambda v: v.size > 0)
    axis, mode = d.axis(x), d.choice(("clip", "fill", "wrap"))
    if d.coin():
        return jnp.take(x, d.indices(d.shape(d.whole(0, 2), 8), x.shape[axis]), axis=axis, mode=mode)
    shape = list(x.shape)
    shape[axis] = d.size()
    return jnp.take_along_axis(x, d.indices(tuple(shape), x.shape[axis]), axis=axis, mode=d.choice(("clip", "fill")))


def whole_or_part(d: Draw, shape: Sequence[int]) -> Shape:
    return tuple(size if d.coin(0.4) else d.choice((min(size, 1), d.whole(0, size))) for size in shape)


def starts(d: Draw, shape: Sequence[int]) -> list[Value]:
    """Starts out of range as often as in it, of several dtypes."""
    dtype = d.choice(("int32", "int32", *NARROW))
    return [d.indices((), size) if dtype == "int32" else narrowed(d.indices((), size), dtype) for size in shape]


def sliced(d: Draw) -> Value:
    x = d.pick(ANY, 1)
    return lax.dynamic_slice(x, starts(d, x.shape), whole_or_part(d, x.shape))


def updated(d: Draw) -> Value:
    x = d.pick(ANY, 1)
    part = d.operand(whole_or_part(d, x.shape), kind_of(x), dtype=str(x.dtype))
    return lax.dynamic_update_slice(x, part, starts(d, x.shape))


def mapped_slices(d: Draw) -> Value:
    """A slice or an update per row, each with its own start: what `vmap` makes gathers and scatters of."""
    x = d.pick("fi", 2, most=3, where=lambda v: v.size > 0)
    sizes = whole_or_part(d, x.shape[1:])
    where = [d.indices(x.shape[:1], size) for size in x.shape[1:]]
    if d.coin():
        return jax.vmap(lambda x, *at: lax.dynamic_slice(x, at, sizes))(x, *where)
    part = d.operand((x.shape[0], *sizes), kind_of(x), dtype=str(x.dtype))
    return jax.vmap(lambda x, part, *at: lax.dynamic_update_slice(x, part, at))(x, part, *where)


def cached(d: Draw) -> Value:
    """A key-value cache, written at a position and read from all."""
    slots, heads, width = d.choice((4, 8, 16)), d.choice((1, 2, 4)), d.choice((1, 2, 4))
    cache, token = d.operand((slots, heads, width)), d.operand((1, heads, width))
    at = d.indices((), slots)
    cache = lax.dynamic_update_slice(cache, token, (at, 0 * at, 0 * at))
    return d.small(jnp.einsum("shw,hw->sh", cache, token[0]), width * 8) if d.coin() else cache


def one_hot(d: Draw) -> Value:
    limit = d.size()
    return jax.nn.one_hot(
        d.indices(d.shape(d.whole(0, 2), 32), limit),
        limit,
        axis=d.choice((-1, 0)),
        dtype=d.choice((jnp.float32, jnp.int32)),
    )


def segments(d: Draw) -> Value:
    x = d.operand((d.size(), d.size()))
    at = d.indices(x.shape[:1], 4)
    extremes = (jax.ops.segment_max, jax.ops.segment_min)
    op = jax.ops.segment_sum if d.rounded or d.derived else d.choice((jax.ops.segment_sum, *extremes))
    made = op(x, at, 4, mode=d.choice((None, "clip", "drop")))
    return d.small(jnp.where(jnp.isfinite(made), made, 0), max(x.shape[0], 1))


def masked(d: Draw) -> Value:
    x = d.pick("fi", 1)
    return jnp.where(lax.broadcasted_iota(jnp.int32, x.shape, d.axis(x)) < d.indices((), 8), x, jnp.asarray(1, x.dtype))


CHEAP = (
    *(gather, gather, gather, scatter, scatter, scatter, indexed, indexed, taken, sliced, sliced, updated, updated),
    *(mapped_slices, mapped_slices, cached, one_hot, segments, masked),
)
