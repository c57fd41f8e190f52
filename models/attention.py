"""Causal attention by a kernel of its own, in the place of the products that XLA compiles.

    flash   jax's Pallas kernel for TPU (Dao et al. 2022, arXiv:2205.14135; Dao 2023, arXiv:2307.08691)
    cudnn   cuDNN's, through `jax.nn.dot_product_attention`

Shapes: queries [B, S, N, H], keys and values [B, S, K, H] with K dividing N -> [B, S, N, H].
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def flash(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """By the TPU kernel, which takes heads before positions, and as many of keys as of queries."""
    groups = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, groups, axis=2) if groups > 1 else x for x in (k, v))
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    return flash_attention(q, k, v, causal=True, sm_scale=q.shape[-1] ** -0.5).swapaxes(1, 2)


def cudnn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """By cuDNN, which knows grouped queries."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


_KERNELS: dict[str, Attention] = {"flash": flash, "cudnn": cudnn}


def attention(name: str) -> Attention:
    """The kernel of a name.

    Raises:
      KeyError: there is no kernel of this name.
    """
    if name not in _KERNELS:
        raise KeyError(f"no attention kernel named {name!r}; there are: {', '.join(_KERNELS)}")
    return _KERNELS[name]
