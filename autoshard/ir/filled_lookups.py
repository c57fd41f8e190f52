"""Filled lookups: a `gather` that fills what lies outside of its operand, in its two parts.

`jnp.take` and indexing out of bounds give a number of their own where an index has no row (NaN, usually). Such a
lookup is lowered as one that clips its indices, and a select behind it. Where the operand's rows are split, every
device looks up what it has, and the lookup's result is a sum over the devices. XLA makes a reduce-scatter of a sum
and the cut right behind it; a select between the two keeps it from that, and the sum is all-reduced whole: twice the
bytes. So the cut is put between the parts, and what is filled is filled in it.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode as Mode

GATHER = "gather"


def fills(eqn: Any) -> bool:
    """Whether an equation is a lookup that fills, in numbers that can be selected among."""
    if eqn.primitive.name != GATHER or Mode.from_any(eqn.params["mode"]) != Mode.FILL_OR_DROP:
        return False
    known = eqn.params["fill_value"] is not None
    return known and not jnp.issubdtype(eqn.outvars[0].aval.dtype, jax.dtypes.extended)


def clipped(eqn: Any) -> Any:
    """The same lookup, with every index clipped to the nearest place that its operand has."""
    return eqn.replace(params={**eqn.params, "mode": Mode.CLIP, "fill_value": None})


def filled(eqn: Any, indices: Any, found: Any) -> Any:
    """What a filling lookup gives, of what it finds with its indices clipped: as JAX lowers it.

    Args:
      eqn: the lookup.
      indices: its second operand.
      found: what `clipped` gives, in any layout.
    """
    return lax.select(_inside(eqn, indices), found, lax.full_like(found, eqn.params["fill_value"]))


def _inside(eqn: Any, indices: Any) -> Any:
    """Of every place of the result, whether its index has a slice in the operand."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    operand, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    last = np.array([operand[d] - sizes[d] for d in numbers.start_index_map], np.int32)
    at = jnp.asarray(indices).astype(jnp.int64 if _is_wide(indices) else jnp.int32)
    inside = jnp.all((at >= 0) & (at <= last), axis=-1)
    batch = [d for d in range(len(out)) if d not in numbers.offset_dims]
    return lax.broadcast_in_dim(inside, out, batch)


def _is_wide(indices: Any) -> bool:
    return jnp.dtype(indices.dtype).itemsize == jnp.dtype(jnp.int64).itemsize
