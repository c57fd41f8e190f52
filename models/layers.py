"""The layers of a model: made, and applied one after the other.

Unrolled they are a list, one entry per layer. Stacked they are one layer whose every
weight has a leading dimension L, applied by `jax.lax.scan`: the program's size does not
grow with L. The numbers are the same. Either way a layer can be rematerialised in the
backward pass (Chen et al. 2016, arXiv:1604.06174).
"""

from collections.abc import Callable
from typing import Any, Literal

import jax

Remat = Literal["none", "full", "dots"]
"""What the backward pass of a layer recomputes.

`none`: nothing, all that it needs is kept. `full`: everything but the layer's input.
`dots`: everything but its input and the products of activations and weights; attention
scores and experts, whose products have batch dimensions, are recomputed (the policy
`dots_with_no_batch_dims_saveable`).
"""

Layers = list[Any] | dict[str, Any]
"""A list of layers, or one whose leaves are stacked on a leading dimension."""


def new_layers(new_layer: Callable[[jax.Array], Any], key: jax.Array, count: int, *, scan: bool) -> Layers:
    """`count` layers, each of a key of its own; stacked if they will be scanned over."""
    keys = jax.random.split(key, count)
    return jax.vmap(new_layer)(keys) if scan else [new_layer(k) for k in keys]


def rematerialised(layer: Callable[..., Any], remat: Remat, *, in_loop: bool) -> Callable[..., Any]:
    """`layer` with its backward pass by `remat`.

    Args:
      layer: a function of arrays.
      remat: the values to recompute.
      in_loop: whether the layer is the body of a loop, where no other layer's equations
        could be merged with the recomputed ones.
    """
    if remat == "none":
        return layer
    policy = {"full": None, "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}[remat]
    return jax.checkpoint(layer, policy=policy, prevent_cse=not in_loop)


def apply_layers(apply: Callable[[Any, jax.Array], jax.Array], layers: Layers, x: jax.Array, remat: Remat) -> jax.Array:
    """The last layer's output; `apply(layer, x)` is one layer."""
    stacked = not isinstance(layers, list)
    apply = rematerialised(apply, remat, in_loop=stacked)
    if stacked:
        return jax.lax.scan(lambda x, layer: (apply(layer, x), None), x, layers)[0]
    for layer in layers:
        x = apply(layer, x)
    return x
