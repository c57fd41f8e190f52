"""The layers of a model: made, and applied one after the other.

Unrolled they are a list, one entry per layer. Stacked they are one layer whose every
weight has a leading dimension L, applied by `jax.lax.scan`: the program's size does not
grow with L. The numbers are the same. Either way a layer can be rematerialised in the
backward pass (Chen et al. 2016, arXiv:1604.06174).
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
from jax.ad_checkpoint import checkpoint_name

from models.annotate import also

Remat = Literal["none", "full", "dots", "all_dots", "attention", "context"]
"""What the backward pass of a layer recomputes.

`none`: nothing, all that it needs is kept. `full`: everything but the layer's input.
`dots`: everything but its input and the products of activations and weights; attention
scores and experts, whose products have batch dimensions, are recomputed (the policy
`dots_with_no_batch_dims_saveable`). `all_dots`: everything but its input and all products
(`dots_saveable`). `attention`: the inside of attention alone, from scores to their use
(Korthikanti et al. 2022, arXiv:2205.05198, section 5). `context`: everything but its input,
queries, keys, values and what attention makes of them, by their names (as MaxText's
`save_dot_with_context_except_mlp`, which keeps the projection out, too).
"""

CONTEXT = ("queries", "keys", "mixed")

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
    if remat in ("none", "attention"):  # attention itself sees to the latter
        return layer
    if remat == "context":
        kept = jax.checkpoint_policies.save_only_these_names(*CONTEXT)
        return jax.checkpoint(_named(layer), policy=kept, prevent_cse=not in_loop)
    policy = {
        "full": None,
        "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        "all_dots": jax.checkpoint_policies.dots_saveable,
    }[remat]
    return jax.checkpoint(layer, policy=policy, prevent_cse=not in_loop)


def _named(layer: Callable[..., Any]) -> Callable[..., Any]:
    """`layer` whose activations carry their names in the program, where policies find them."""

    def named(*args: Any) -> Any:
        with also(checkpoint_name):
            return layer(*args)

    return named


def apply_layers(apply: Callable[[Any, jax.Array], jax.Array], layers: Layers, x: jax.Array, remat: Remat) -> jax.Array:
    """The last layer's output; `apply(layer, x)` is one layer."""
    stacked = not isinstance(layers, list)
    apply = rematerialised(apply, remat, in_loop=stacked)
    if stacked:
        return jax.lax.scan(lambda x, layer: (apply(layer, x), None), x, layers)[0]
    for layer in layers:
        x = apply(layer, x)
    return x
