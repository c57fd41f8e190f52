"""Forward passes of the unseen models: what they answer with, and nothing is differentiated.

Losses, scores of the last position, prompts that are written into caches of keys and values, and one token more.
Programs take abstract arguments, like those of `benchmarks.unseen_models`; caches come first, and are donated.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.unseen_models import MASKED, MODELS, Array, Model, Weights, normed

Program = tuple[Callable[..., Any], tuple[Any, ...]]

CACHED = 2048  # positions of a cache
PROMPTS = 2  # on each device, of half as many positions
SEQUENCES = 16  # on each device, that one token is added to


def batch(model: Model, devices: int) -> jax.ShapeDtypeStruct:
    """Token ids."""
    return jax.ShapeDtypeStruct((model.tokens * devices // model.length, model.length), jnp.int32)


def scores(model: Model, params: Weights, x: Array) -> Array:
    """Of every token of the vocabulary."""
    head = params["embed"].T if model.tied else params["head"]
    return normed(x, params["norm"]) @ head.astype(x.dtype)


def loss(model: Model, devices: int) -> Program:
    """The mean over all tokens."""
    ids = batch(model, devices)
    return model.loss, (model.parameters(), ids, ids, ids)


def next_token(model: Model, devices: int) -> Program:
    """The likeliest token behind each sequence: the last of the scores of all positions."""

    def program(params: Weights, ids: Array, mask: Array) -> Array:
        x = params["embed"].astype(model.compute)[ids]
        for weights in params["layers"]:
            x = model.layer(weights, x, mask)
        return scores(model, params, x)[:, -1].argmax(-1)

    ids = batch(model, devices)
    return program, (model.parameters(), ids, ids)


def continued(model: Model, devices: int, *, sequences: int, new: int) -> Program:
    """New positions of all sequences, at one place of their caches; the likeliest token behind them."""

    def attended(weights: Weights, x: Array, cache: tuple[Array, Array], at: Array) -> tuple[Array, Any]:
        query, key, value = (jnp.einsum("bsd,dhk->bshk", x, weights[name]) for name in ("query", "key", "value"))
        keys, values = (
            jax.lax.dynamic_update_slice(old, part, (0, at, 0, 0))
            for old, part in zip(cache, (key, value), strict=True)
        )
        query = query.reshape(*x.shape[:2], model.groups, model.heads // model.groups, model.head_width)
        found = jnp.einsum("bskgd,btkd->bkgst", query, keys).astype(jnp.float32) / model.head_width**0.5
        seen = at + jnp.arange(new)[:, None] >= jnp.arange(CACHED)[None, :]
        shares = jax.nn.softmax(jnp.where(seen, found, MASKED), -1).astype(x.dtype)
        mixed = jnp.einsum("bkgst,btkd->bskgd", shares, values)
        mixed = mixed.reshape(*x.shape[:2], model.heads, model.head_width)
        return jnp.einsum("bshk,hkd->bsd", mixed, weights["out"]), (keys, values)

    def program(caches: Any, params: Weights, ids: Array, at: Array) -> Any:
        x = params["embed"].astype(model.compute)[ids]
        written = []
        for weights, cache in zip(params["layers"], caches, strict=True):
            weights = {name: weight.astype(x.dtype) for name, weight in weights.items()}
            found, cache = attended(weights, normed(x, weights["attention_norm"]), cache, at)
            x = x + found
            x = x + model.dense(weights, normed(x, weights["mlp_norm"]))
            written.append(cache)
        return written, scores(model, params, x[:, -1:]).argmax(-1)

    cache = jax.ShapeDtypeStruct((sequences * devices, CACHED, model.groups, model.head_width), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((sequences * devices, new), jnp.int32)
    caches = [(cache, cache)] * model.layers
    return program, (caches, model.parameters(), ids, jax.ShapeDtypeStruct((), jnp.int32))


prefill = partial(continued, sequences=PROMPTS, new=CACHED // 2)
decode = partial(continued, sequences=SEQUENCES, new=1)


def served(name: str) -> Model:
    """A model whose weights are stored as they are multiplied."""
    return replace(MODELS[name], weights="bfloat16")


def of(program: Callable[[Model, int], Program], model: Model) -> Callable[[int], Program]:
    """A program of a model, by the number of devices."""
    return partial(program, model)


CONTINUED: Mapping[str, Callable[[int], Program]] = {
    "prefill-gated-51k": of(prefill, served("gated-51k")),
    "prefill-sgd-bf16-100k": of(prefill, served("sgd-bf16-100k")),
    "decode-gated-51k": of(decode, served("gated-51k")),
    "decode-sgd-bf16-100k": of(decode, served("sgd-bf16-100k")),
    "decode-norms-after-tied-30k": of(decode, served("norms-after-tied-30k")),
    "decode-one-group-tied-250k": of(decode, served("one-group-tied-250k")),
}
ANSWERS: Mapping[str, Callable[[int], Program]] = {
    "loss-gated-51k": of(loss, MODELS["gated-51k"]),
    "loss-norms-after-tied-30k": of(loss, served("norms-after-tied-30k")),
    "loss-experts-32k": of(loss, MODELS["experts-32k"]),
    "loss-float32-51k": of(loss, replace(MODELS["gated-51k"], compute="float32")),
    "next-gated-51k": of(next_token, MODELS["gated-51k"]),
    "next-rotated-128k": of(next_token, served("rotated-128k")),
    **CONTINUED,
}
