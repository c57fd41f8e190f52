"""Optax's optimizers, each on the same decoder-like network of plain JAX."""
# ruff: noqa: D103 (`subjects` says what each program is)

from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.zoo.program import Program, Size, cross_entropy, tokens, trained


def parameters(size: Size) -> Any:
    """Embedding, and per layer a gated block with a norm."""
    keys = iter(jax.random.split(jax.random.key(0), 2 + 3 * size.layers))

    def matrix(rows: int, columns: int) -> jax.Array:
        return jax.random.normal(next(keys), (rows, columns)) / rows**0.5

    return {
        "embed": matrix(size.vocab, size.width),
        "layers": [
            {
                "norm": jnp.ones(size.width),
                "gate": matrix(size.width, 4 * size.width),
                "up": matrix(size.width, 4 * size.width),
                "down": matrix(4 * size.width, size.width),
            }
            for _ in range(size.layers)
        ],
    }


def forward(params: Any, ids: jax.Array) -> jax.Array:
    x = params["embed"][ids]
    for layer in params["layers"]:
        y = layer["norm"] * x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)
        y = jnp.cumsum(y, axis=1) / jnp.arange(1, ids.shape[1] + 1)[:, None]  # looks back, as attention would
        x = x + (jax.nn.silu(y @ layer["gate"]) * (y @ layer["up"])) @ layer["down"]
    return x @ params["embed"].T


def loss(params: Any, ids: jax.Array) -> jax.Array:
    return cross_entropy(forward(params, ids)[:, :-1], ids[:, 1:])


def _with(size: Size, optimizer: optax.GradientTransformation) -> Program:
    return trained(loss, lambda: parameters(size), lambda: (tokens(size),), optimizer)


def adamw(size: Size) -> Program:
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 100, 1000)
    return _with(size, optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule)))


def adafactor(size: Size) -> Program:
    return _with(size, optax.adafactor(1e-3, min_dim_size_to_factor=16))


def lion(size: Size) -> Program:
    return _with(size, optax.lion(1e-3))


def sgd(size: Size) -> Program:
    return _with(size, optax.sgd(0.1, momentum=0.9, nesterov=True))


def muon(size: Size) -> Program:
    return _with(size, optax.contrib.muon(1e-3))


def masked(size: Size) -> Program:
    decay = optax.masked(optax.add_decayed_weights(1e-2), lambda params: jax.tree.map(lambda p: p.ndim > 1, params))
    return _with(size, optax.chain(optax.scale_by_adam(), decay, optax.scale(-1e-3)))


def multisteps(size: Size) -> Program:
    return _with(size, optax.MultiSteps(optax.adamw(1e-3), every_k_schedule=4).gradient_transformation())
