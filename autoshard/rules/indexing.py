"""Indexing: gather, scatter, dynamic slices, sorts: where an element goes depends on data.

An indexed dimension may be split if the primitive takes one row at a time from it. The
compiler's partitioner masks the rows that a shard does not hold: a gather then leaves
partial sums (the vocabulary-parallel embedding lookup), and a scatter drops the updates
of foreign rows, without communication. A window of several rows, but not all, would
cross shard boundaries: such a dimension must be whole.

A scatter whose updates are split leaves partial results. Its operand does not contain
the split factor and would count once per shard; it counts *once*: the partitioner gives
all shards but the first the operation's identity in its place.
"""

from collections.abc import Sequence

import numpy as np
from jax import numpy as jnp

from autoshard.ir.graph import Aval, Eqn
from autoshard.rules.rule import Dim, FactorKind, RuleBuilder, ShardingRule, register

SCATTERS = {
    "scatter-add": "sum",
    "scatter-max": "max",
    "scatter-min": "min",
    "scatter-mul": "prod",
    "scatter-sub": "sum",
}


@register("dynamic_slice")
def dynamic_slice(eqn: Eqn) -> ShardingRule:
    """Dimensions taken in full pass; sliced ones must be whole. Starts are scalars."""
    (operand, *starts), (out,) = eqn.operands, eqn.results
    build = RuleBuilder()
    pairs = [_full_or_whole(build, size, window) for size, window in zip(operand.shape, out.shape, strict=True)]
    scalars: list[list[Dim]] = [[] for _ in starts]
    return build.rule([[pair[0] for pair in pairs], *scalars], [[pair[1] for pair in pairs]], (frozenset({0}),))


@register("dynamic_update_slice")
def dynamic_update_slice(eqn: Eqn) -> ShardingRule:
    """A dimension passes if it is replaced in full, or if a single row of it is replaced.

    The row's owner writes it, the other shards write nothing (a token's keys and values
    go into a cache that is split along the sequence). Longer windows must be whole.
    """
    operand, update, *starts = eqn.operands
    build = RuleBuilder()
    pairs = [
        [*build.dims((size,)), ()] if window == 1 else _full_or_whole(build, size, window)
        for size, window in zip(operand.shape, update.shape, strict=True)
    ]
    dims = [pair[0] for pair in pairs]
    scalars: list[list[Dim]] = [[] for _ in starts]
    return build.rule([dims, [pair[1] for pair in pairs], *scalars], [dims], (frozenset({0, 1}),))


@register("gather")
def gather(eqn: Eqn) -> ShardingRule:
    """Index and full window dimensions pass; single indexed rows sum over shards.

    A dimension from which one row is taken without an index (the first row) must be whole.
    A gather that fills out-of-bounds rows keeps partial sums where the fill value is its
    own sum: NaN (the default of inexact types) and zero.
    """
    (operand, indices), (out,) = eqn.operands, eqn.results
    numbers = eqn.params["dimension_numbers"]
    build = RuleBuilder()
    dims_operand: list[Dim] = [()] * operand.ndim
    dims_indices = build.dims(indices.shape[:-1]) + _index_vector(build, indices)
    _share(dims_operand, numbers.operand_batching_dims, dims_indices, numbers.start_indices_batching_dims)
    dims_out: list[Dim] = [()] * out.ndim
    _place(dims_out, numbers.offset_dims, dims_indices[:-1])
    windows = _windows(operand, (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims))
    indexed = [d for d in numbers.start_index_map if eqn.params["slice_sizes"][d] == 1]
    for d, position in zip(windows, numbers.offset_dims, strict=True):
        if d not in indexed:
            dims_operand[d], dims_out[position] = _full_or_whole(build, operand.shape[d], out.shape[position])
    for d in indexed:
        dims_operand[d] = build.dims((operand.shape[d],), FactorKind.REDUCTION, "sum")[0]
    for d in set(numbers.collapsed_slice_dims) - set(indexed):
        dims_operand[d] = build.dims((operand.shape[d],), FactorKind.REPLICATE)[0]
    linear = (frozenset({0}),) if _fill_is_its_own_sum(eqn) else ()
    return build.rule([dims_operand, dims_indices], [dims_out], linear)


@register("scatter", *SCATTERS)
def scatter(eqn: Eqn) -> ShardingRule:
    """Indexed rows and full window dimensions pass; update dimensions reduce.

    A dimension in which one row is updated without an index (the first row) must be whole.
    Updates that overwrite (`scatter`) have no reduction: their dimensions must be whole.
    """
    operand, indices, updates = eqn.operands
    numbers = eqn.params["dimension_numbers"]
    operation = SCATTERS.get(eqn.primitive, "")
    kind = FactorKind.REDUCTION if operation else FactorKind.REPLICATE
    build = RuleBuilder()
    batching = set(numbers.scatter_indices_batching_dims)
    dims_indices = [
        build.dims((size,))[0] if d in batching else build.dims((size,), kind, operation)[0]
        for d, size in enumerate(indices.shape[:-1])
    ] + _index_vector(build, indices)
    dims_operand: list[Dim] = [()] * operand.ndim
    _share(dims_operand, numbers.operand_batching_dims, dims_indices, numbers.scatter_indices_batching_dims)
    dims_updates: list[Dim] = [()] * updates.ndim
    _place(dims_updates, numbers.update_window_dims, dims_indices[:-1])
    windows = dict(
        zip(
            _windows(operand, (*numbers.inserted_window_dims, *numbers.operand_batching_dims)),
            numbers.update_window_dims,
            strict=True,
        )
    )
    for d in set(range(operand.ndim)) - set(numbers.operand_batching_dims):
        window = updates.shape[windows[d]] if d in windows else 1
        if window != 1:
            dims_operand[d], dims_updates[windows[d]] = _full_or_whole(build, operand.shape[d], window)
        elif d in numbers.scatter_dims_to_operand_dims:
            dims_operand[d] = build.dims((operand.shape[d],))[0]
        else:
            dims_operand[d] = build.dims((operand.shape[d],), FactorKind.REPLICATE)[0]
    linear = {"sum": (frozenset({0, 2}),), "": (frozenset({0, 2}),), "prod": (frozenset({0}),)}.get(operation, ())
    return build.rule([dims_operand, dims_indices, dims_updates], [dims_operand], linear)


@register("sort")
def sort(eqn: Eqn) -> ShardingRule:
    """The sorted dimension must be whole; the others pass, in all operands alike."""
    build = RuleBuilder()
    dims = [
        build.dims((size,), FactorKind.REPLICATE if d == eqn.params["dimension"] else FactorKind.PASS)[0]
        for d, size in enumerate(eqn.operands[0].shape)
    ]
    return build.rule([dims for _ in eqn.operands], [dims for _ in eqn.results])


@register("approx_top_k", "top_k")
def top_k(eqn: Eqn) -> ShardingRule:
    """The searched dimension and its winners must be whole; the others pass.

    XLA:GPU and XLA:TPU partition the batch of a `top_k`; XLA:CPU gathers it.
    """
    (operand,), (out, *_) = eqn.operands, eqn.results
    key = "reduction_dimension" if eqn.primitive == "approx_top_k" else "axis"
    axis = eqn.params.get(key, operand.ndim - 1) % operand.ndim
    build = RuleBuilder()
    pairs = [
        [*build.dims((size, out.shape[d]), FactorKind.REPLICATE)] if d == axis else [*build.dims((size,))] * 2
        for d, size in enumerate(operand.shape)
    ]
    winners = [pair[1] for pair in pairs]
    return build.rule([[pair[0] for pair in pairs]], [winners for _ in eqn.results])


def _full_or_whole(build: RuleBuilder, size: int, window: int) -> list[Dim]:
    """A dimension and its window: one passing factor if equal, else both must be whole."""
    return [*build.dims((size,))] * 2 if size == window else build.dims((size, window), FactorKind.REPLICATE)


def _index_vector(build: RuleBuilder, indices: Aval) -> list[Dim]:
    """The last dimension of the indices: the coordinates of one position."""
    return build.dims(indices.shape[-1:], FactorKind.REPLICATE)


def _windows(operand: Aval, absent: Sequence[int]) -> list[int]:
    """Operand dimensions that have a window dimension, in order."""
    return [d for d in range(operand.ndim) if d not in absent]


def _share(target: list[Dim], positions: Sequence[int], source: list[Dim], origins: Sequence[int]) -> None:
    for position, origin in zip(positions, origins, strict=True):
        target[position] = source[origin]


def _place(target: list[Dim], taken: Sequence[int], source: list[Dim]) -> None:
    """Puts `source` in order into the positions that are not `taken`."""
    free = [position for position in range(len(target)) if position not in taken]
    _share(target, free, source, range(len(source)))


def _fill_is_its_own_sum(eqn: Eqn) -> bool:
    """Whether an out-of-bounds row is the same before and after summing over shards."""
    if getattr(eqn.params["mode"], "name", "") != "FILL_OR_DROP":
        return True
    fill = eqn.params["fill_value"]
    inexact = jnp.issubdtype(eqn.operands[0].dtype, np.inexact)
    return fill == 0 or (inexact and (fill is None or bool(np.isnan(fill))))
