"""Two models for `benchmarks.recomputation` that `models` does not have: a vision transformer and a state-space model.

Both say nothing about sharding; their layers are made and applied as those of `models`.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from models.layers import Remat, apply_layers, new_layers
from models.training import Batch, Params, make_train_step, new_state
from models.transformer import (
    CONFIGS,
    Config,
    attend_again,
    branch,
    mlp,
    new_attention,
    new_mlp,
    new_norm,
    normal,
    normalize,
    project_mixed,
    queries_keys_values,
)

Target = tuple[Any, tuple[Any, ...]]

RATE = 3e-4
CLASSES = 1024


def vit(*, layers: int = 24, batch: int = 512, remat: Remat = "none") -> Target:
    """A train step of ViT-L/14 (Dosovitskiy et al. 2020, table 1) on 224 × 224 pixels: 256 patches; unrolled.

    The mean of the patches is classified.
    """
    config = replace(CONFIGS["gpt2-medium"], layers=layers, remat=remat)
    patches, pixels = 256, 3 * 14 * 14

    def new_layer(key: jax.Array) -> Params:
        one, two = jax.random.split(key)
        norms = {"attention_norm": new_norm(config), "mlp_norm": new_norm(config)}
        return norms | new_attention(config, one) | new_mlp(config, two)

    def init(key: jax.Array) -> Any:
        patch, position, head, stack = jax.random.split(key, 4)
        params = {
            "patch": normal(patch, pixels, config.width),
            "position": normal(position, patches, config.width),
            "head": normal(head, config.width, CLASSES),
            "final_norm": new_norm(config),
            "layers": new_layers(new_layer, stack, layers, scan=False),
        }
        return new_state(params, RATE)

    def loss(params: Params, batch: Batch) -> jax.Array:
        x = batch["pixels"].astype(config.compute_dtype) @ params["patch"].astype(config.compute_dtype)
        x = x + params["position"].astype(x.dtype)
        x = apply_layers(partial(_vision_block, config), params["layers"], x, remat)
        scores = jnp.mean(normalize(config, params["final_norm"], x), axis=1) @ params["head"].astype(x.dtype)
        return _cross_entropy(scores, batch["labels"])

    examples = {
        "pixels": jax.ShapeDtypeStruct((batch, patches, pixels), jnp.float32),
        "labels": jax.ShapeDtypeStruct((batch,), jnp.int32),
    }
    return make_train_step(loss, RATE), (jax.eval_shape(init, jax.random.key(0)), examples)


def _vision_block(config: Config, layer: Params, x: jax.Array) -> jax.Array:
    """One layer; every patch sees every other."""
    q, k, v = queries_keys_values(config, layer, branch(config, layer["attention_norm"], x), jnp.arange(x.shape[1]))
    x = x + project_mixed(layer, attend_again(config)(q, k, v, jnp.array(True)))
    return x + mlp(config, layer, branch(config, layer["mlp_norm"], x))


def ssm(*, layers: int = 24, width: int = 2048, batch: int = 64, sequence: int = 1024, remat: Remat = "none") -> Target:
    """A train step of a diagonal linear recurrence in every layer, as S5's (Smith et al. 2023); layers are scanned."""
    vocab = 32_768

    def new_layer(key: jax.Array) -> Params:
        into, out, skip = jax.random.split(key, 3)
        return {
            "decay": jnp.linspace(-4.0, 4.0, 2 * width),
            "b": normal(into, width, 2 * width),
            "c": normal(out, 2 * width, width),
            "d": normal(skip, width, width),
        }

    def init(key: jax.Array) -> Any:
        embed, stack = jax.random.split(key)
        layer = new_layers(new_layer, stack, layers, scan=True)
        return new_state({"embed": normal(embed, vocab, width), "layers": layer}, RATE)

    def loss(params: Params, batch: Batch) -> jax.Array:
        embed = params["embed"].astype(jnp.bfloat16)
        x = apply_layers(_recurrence, params["layers"], embed[batch["tokens"]], remat)
        return _cross_entropy(x @ embed.T, batch["targets"])

    tokens = jax.ShapeDtypeStruct((batch, sequence), jnp.int32)
    state = jax.eval_shape(init, jax.random.key(0))
    return make_train_step(loss, RATE), (state, {"tokens": tokens, "targets": tokens})


def _recurrence(layer: Params, x: jax.Array) -> jax.Array:
    """One layer: h[t] = a·h[t−1] + u[t] along the sequence, and a gate."""
    u = x @ layer["b"].astype(x.dtype)
    a = jnp.broadcast_to(jax.nn.sigmoid(layer["decay"]).astype(x.dtype), u.shape)

    def join(left: Any, right: Any) -> Any:
        return left[0] * right[0], right[0] * left[1] + right[1]

    _, h = jax.lax.associative_scan(join, (a, u), axis=1)
    gate = jax.nn.sigmoid(x @ layer["d"].astype(x.dtype))
    return x + jax.nn.gelu(h @ layer["c"].astype(x.dtype)) * gate


def _cross_entropy(scores: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean over all labels, in float32."""
    log_probs = jax.nn.log_softmax(scores.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(log_probs, labels[..., None], axis=-1))
