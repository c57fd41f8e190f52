"""Fault remedies: binds equations on several devices in forms that avoid the faults of XLA's partitioner.

Every remedy belongs to a row of `ir.partitioner_faults`; it changes no number and adds no
communication. Indices are widened. Starts are clamped as the primitive would clamp them. The
operand of a scatter of few rows stands behind a barrier, so that XLA does not merge the slice
that makes a shard with the slice that the scatter reads; the operand of `lax.reduce` does, too.
A convolution takes no steps where there is one place. A `mulhi` is computed from products of halves.
Where the compiler loses NaN, largest and smallest numbers are found among integers in the same order
(`in_order`), where NaN is the largest or the smallest: as many bytes are reduced.

A program may be differentiated or batched after its emission. What JAX's rules then make of an equation in
another form is bound by this room, too (`_jax.Otherwise`).
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode as Mode

from autoshard import _jax
from autoshard.ir import partitioner_faults
from autoshard.ir.graph import CALLS, INLINED

_IEEE = ("bfloat16", "float16", "float32", "float64")  # floats whose bits are in the order of their values


def bind(eqn: Any, operands: Sequence[Any], devices: int) -> list[Any]:
    """The results of an equation without a body, on a mesh of so many devices."""
    if devices == 1:
        return _jax.bind(eqn, eqn.params, operands)
    if partitioner_faults.HIGH_PRODUCT.of(eqn.primitive.name):
        return [_high_product(*(jnp.asarray(x, aval.aval.dtype) for x, aval in zip(operands, eqn.invars, strict=True)))]
    if partitioner_faults.DILATED_TAP.of(eqn.primitive.name):
        return _jax.bind(eqn, _with_meaning(eqn), operands)
    operands = _operands(eqn, list(operands))
    if _is_merged(eqn, devices) or _loses_nan(eqn):
        params = _jax.without_mesh(eqn, eqn.params)
        return [_OTHERWISE.bind(eqn.primitive, params, operands, devices)]
    return _jax.bind_on_several(eqn, operands)


def _bind_all(closed: Any, args: Sequence[Any], devices: int) -> list[Any]:
    """The results of a closed jaxpr, each of its equations bound by `bind`."""
    jaxpr = _jax.open_jaxpr(closed)
    values = dict(zip(jaxpr.constvars, _jax.consts_of(closed), strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return _jax.literal(atom) if _jax.is_literal(atom) else values[atom]

    for eqn in jaxpr.eqns:
        name, operands = eqn.primitive.name, [read(atom) for atom in eqn.invars]
        inner = name in INLINED
        made = _bind_all(eqn.params[CALLS[name]], operands, devices) if inner else bind(eqn, operands, devices)
        values.update(zip(eqn.outvars, made, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _operands(eqn: Any, operands: list[Any]) -> list[Any]:
    """The operands, changed where a fault is of the equation's primitive."""
    name = eqn.primitive.name
    if partitioner_faults.NARROW_INDICES.of(name):
        first, limits = _starts(eqn)
        apart = name not in partitioner_faults.INDEXED  # every component is an operand
        clamps = _clamps(eqn, limits)
        for i, limit in enumerate(limits if apart else [limits], first):
            starts = _widen(operands[i], eqn.invars[i].aval.dtype)
            operands[i] = _clamp(starts, limit) if clamps else starts
    if partitioner_faults.REPEATED_INITIAL.of(name):
        arrays = len(operands) // 2  # then their initial values, which may have no tangents
        operands[:arrays] = map(lax.optimization_barrier, operands[:arrays])
    return operands


def _with_meaning(eqn: Any) -> dict[str, Any]:
    """The parameters of a convolution, without steps between one place and no other: derivatives dilate by them."""
    params, numbers = dict(eqn.params), eqn.params["dimension_numbers"]
    specs = (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec)
    avals = (*(atom.aval for atom in eqn.invars), eqn.outvars[0].aval)
    image, kernel, out = ([aval.shape[d] for d in spec[2:]] for aval, spec in zip(avals, specs, strict=True))
    params["lhs_dilation"] = tuple(1 if n == 1 else by for n, by in zip(image, params["lhs_dilation"], strict=True))
    params["rhs_dilation"] = tuple(1 if n == 1 else by for n, by in zip(kernel, params["rhs_dilation"], strict=True))
    strides, pads = list(params["window_strides"]), list(params["padding"])
    for d, (places, size, taps) in enumerate(zip(out, image, kernel, strict=True)):
        if places == 1:  # what a stride does not reach is cut off
            before, after = pads[d]
            padded, window = _spread(size, params["lhs_dilation"][d]), _spread(taps, params["rhs_dilation"][d])
            strides[d], pads[d] = 1, (before, after - (before + padded + after - window))
    params["window_strides"], params["padding"] = tuple(strides), tuple(pads)
    return params


def _spread(size: int, dilation: int) -> int:
    """The places that a dilated dimension takes."""
    return (size - 1) * dilation + 1 if size else 0


def _is_merged(eqn: Any, devices: int) -> bool:
    """Whether an equation is a scatter of few rows."""
    is_scatter = partitioner_faults.MERGED_SCATTER.of(eqn.primitive.name)
    return is_scatter and prod(eqn.invars[1].aval.shape[:-1]) <= devices


def _loses_nan(eqn: Any) -> bool:
    """Whether an equation takes the largest or smallest of several floats."""
    operand = eqn.invars[0].aval if partitioner_faults.LOST_NAN.of(eqn.primitive.name) else None
    return operand is not None and jnp.issubdtype(operand.dtype, jnp.floating) and operand.size > 0


def _apart(primitive: Any, params: Mapping[str, Any], operands: Sequence[Any], devices: int) -> Any:
    """The result of an equation; of a scatter of few rows, its operand stands behind a barrier."""
    operands = list(operands)
    if partitioner_faults.MERGED_SCATTER.of(primitive.name) and prod(operands[1].shape[:-1]) <= devices:
        operands[0] = lax.optimization_barrier(operands[0])
    return primitive.bind(*operands, **params)


def _keeping_nan(primitive: Any, params: Mapping[str, Any], operands: Sequence[Any], devices: int) -> Any:
    """As `_apart`; the largest or smallest floats are found among integers."""
    dtype = operands[0].dtype
    if not (partitioner_faults.LOST_NAN.of(primitive.name) and jnp.issubdtype(dtype, jnp.floating)):
        return _apart(primitive, params, operands, devices)
    wide = dtype if dtype in _ORDERED else jnp.dtype("bfloat16")  # floats of eight bits fit
    largest = primitive.name.endswith("max")
    keys = [in_order(x.astype(wide), largest=largest) if x.dtype == dtype else x for x in operands]
    if primitive.name.startswith("reduce"):
        found = primitive.bind(*keys, **params)
    else:
        operand, indices, updates = keys
        if prod(indices.shape[:-1]) <= devices:
            operand = lax.optimization_barrier(operand)
        scatter = lax.scatter_max if largest else lax.scatter_min
        kept = {key: params[key] for key in ("indices_are_sorted", "unique_indices", "mode")}
        found = scatter(operand, indices, updates, params["dimension_numbers"], **kept)
    return out_of_order(found, wide).astype(dtype)


_ORDERED = {jnp.dtype(name): jnp.dtype(f"int{jnp.dtype(name).itemsize * 8}") for name in _IEEE}


def in_order(x: Any, *, largest: bool) -> Any:
    """Integers in the order of floats, as wide; NaN becomes the largest of them, or the smallest."""
    bits = lax.bitcast_convert_type(x, _ORDERED[x.dtype])
    limits = np.iinfo(bits.dtype)
    keys = jnp.where(bits < 0, bits ^ bits.dtype.type(limits.max), bits)
    return jnp.where(jnp.isnan(x), bits.dtype.type(limits.max if largest else limits.min), keys)


def out_of_order(keys: Any, dtype: Any) -> Any:
    """The floats of such integers."""
    bits = jnp.where(keys < 0, keys ^ keys.dtype.type(np.iinfo(keys.dtype).max), keys)
    return lax.bitcast_convert_type(bits, dtype)


_OTHERWISE = _jax.Otherwise(
    "autoshard_otherwise", _apart, dict.fromkeys(partitioner_faults.LOST_NAN.backends, _keeping_nan), _bind_all
)


def _high_product(x: Any, y: Any) -> Any:
    """The upper half of a product of integers, from the products of their halves."""
    bits = x.dtype.itemsize * 4
    unsigned = jnp.dtype(f"uint{2 * bits}")
    a, b = (lax.bitcast_convert_type(value, unsigned) for value in (x, y))
    half, low = (jnp.asarray(n, unsigned) for n in (bits, (1 << bits) - 1))
    (al, ah), (bl, bh) = ((v & low, v >> half) for v in (a, b))
    middle = ((al * bl) >> half) + ((al * bh) & low) + ((ah * bl) & low)
    high = lax.bitcast_convert_type(ah * bh + ((al * bh) >> half) + ((ah * bl) >> half) + (middle >> half), x.dtype)
    if jnp.issubdtype(x.dtype, jnp.unsignedinteger):
        return high
    zero = jnp.zeros((), x.dtype)
    return high - jnp.where(x < zero, y, zero) - jnp.where(y < zero, x, zero)


def _starts(eqn: Any) -> tuple[int, list[int]]:
    """The position of the first operand that holds starts, and the last start in range of every component."""
    shape = eqn.invars[0].aval.shape
    match eqn.primitive.name:
        case "dynamic_slice":
            return 1, [size - window for size, window in zip(shape, eqn.params["slice_sizes"], strict=True)]
        case "dynamic_update_slice":
            return 2, [size - window for size, window in zip(shape, eqn.invars[1].aval.shape, strict=True)]
        case "gather":
            sizes = eqn.params["slice_sizes"]
            return 1, [shape[d] - sizes[d] for d in eqn.params["dimension_numbers"].start_index_map]
        case _:
            numbers, updates = eqn.params["dimension_numbers"], eqn.invars[2].aval.shape
            absent = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
            present = (d for d in range(len(shape)) if d not in absent)
            windows = {d: updates[u] for d, u in zip(present, numbers.update_window_dims, strict=True)}
            return 1, [shape[d] - windows.get(d, 1) for d in numbers.scatter_dims_to_operand_dims]


def _clamps(eqn: Any, limits: list[int]) -> bool:
    """Whether the primitive moves a start that is out of range to the next one in range.

    A gather in fill mode fills rows out of range, a scatter in drop mode drops them. A gather whose
    indices are promised to be in range is left alone: XLA reads it correctly, and its gradient would
    drop rows out of range.
    """
    mode = eqn.params.get("mode")
    if mode is not Mode.PROMISE_IN_BOUNDS:
        return mode in (None, Mode.CLIP)
    shape = eqn.invars[0].aval.shape
    rows = [shape[d] - 1 for d in getattr(eqn.params["dimension_numbers"], "start_index_map", ())]
    return eqn.primitive.name == "gather" and limits != rows


def _widen(starts: Any, dtype: Any) -> Any:
    """Starts of at least 32 bits; a known value as numpy's."""
    starts = starts if _jax.is_tracer(starts) else np.asarray(starts, dtype)
    return starts if dtype.itemsize >= 4 else lax.convert_element_type(starts, jnp.int32)


def _clamp(starts: Any, limit: int | list[int]) -> Any:
    """Starts between zero and a limit; where there are several, one for each along the last dimension."""
    most = np.minimum(limit, np.iinfo(starts.dtype).max).astype(starts.dtype)
    if not _jax.is_tracer(starts) and ((starts >= 0) & (starts <= most)).all():
        return starts
    least = np.zeros_like(most)
    if most.ndim:
        least, most = (lax.broadcast_in_dim(bound, starts.shape, (starts.ndim - 1,)) for bound in (least, most))
    return lax.clamp(least, starts, most)
