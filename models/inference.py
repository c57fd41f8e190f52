"""Prefill, one-token decoding and a generator, with a KV cache, for the transformers.

Weights are in the compute dtype, or in int8 with a float32 scale per output channel
(Dettmers et al. 2022, arXiv:2208.07339, section 2; the embedding and the output
projection stay whole). The cache holds the keys, after rotation, and values of L
layers, in the compute dtype, or in int8 with a scale per position and head (Pope et al.
2022, arXiv:2211.05102; JetStream). Each sequence of a batch has its own position, or,
`aligned`, all have one. Decoding is greedy.

Shapes: as in `transformer.py`; S the prompt, T the cache's positions.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from models import transformer
from models.annotate import name
from models.training import Params

__all__ = ["CONFIGS", "Config", "Decoding", "decode", "example_args", "generate", "init", "prefill", "step"]

Cache = Any
"""`{"k", "v"}` and in int8 their scales: a list of L such, or one with a leading dimension L."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(transformer.Config):
    """A decoder, and how it serves."""

    task: Literal["prefill", "decode", "generate"]
    length: int  # T, positions in the cache
    int8_weights: bool = False
    int8_cache: bool = False
    aligned: bool = False  # one position for all sequences


class Decoding(NamedTuple):
    """The state of decoding: updated whole, so that it can be donated."""

    cache: Cache
    tokens: jax.Array  # [B] int32, the next to read
    positions: jax.Array  # [B] or [] int32, where they go


def serving(config: transformer.Config, task: Literal["prefill", "decode", "generate"]) -> Config:
    """A model that serves with a cache of its whole context."""
    same = {field.name: getattr(config, field.name) for field in fields(transformer.Config)}
    return Config(**same, task=task, length=config.context)


CONFIGS = {
    f"{model}-{task}": serving(config, task)
    for model, config in transformer.CONFIGS.items()
    for task in ("prefill", "decode", "generate")
}


# --- Weights and cache -------------------------------------------------------------

CONTRACTED = {"wq": 1, "wk": 1, "wv": 1, "wo": 2, "w_up": 1, "w_gate": 1, "w_down": 1}
"""Of each matrix of a layer, how many of its leading dimensions are contracted."""


def quantized(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """`x` in int8 and float32 scales without `axes`, `x` ≈ int8 · scale: symmetric, by the largest."""
    largest = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=axes, keepdims=True)
    scale = jnp.maximum(largest, 1e-30) / 127
    return jnp.round(x / scale).astype(jnp.int8), jnp.squeeze(scale, axes)


def init(config: Config, key: jax.Array) -> Params:
    """Random parameters as they are served."""
    params = transformer.init_params(config, key)

    def served(weight: str, x: jax.Array, lead: int) -> Params:
        if config.int8_weights and weight in CONTRACTED:
            whole, scale = quantized(x, tuple(range(lead, lead + CONTRACTED[weight])))
            return {weight: whole, f"{weight}_scale": scale}
        return {weight: jax.tree.map(lambda leaf: leaf.astype(config.compute_dtype), x)}

    def layer(weights: Params, lead: int) -> Params:
        return {key: leaf for weight, x in weights.items() for key, leaf in served(weight, x, lead).items()}

    layers = params["layers"]
    whole = layer(layers, 1) if config.scan else [layer(weights, 0) for weights in layers]
    rest = {key: x for key, x in params.items() if key != "layers"}
    return layer(rest, 0) | {"layers": whole}


def init_cache(config: Config, batch: int) -> Cache:
    """An empty cache of `batch` sequences."""
    shape = (batch, config.length, config.kv_heads, config.head_dim)

    def layer(lead: tuple[int, ...]) -> Params:
        if config.int8_cache:
            scales = jnp.zeros((*lead, *shape[:-1]), jnp.float32)
            whole = jnp.zeros((*lead, *shape), jnp.int8)
            return {"k": whole, "v": whole, "k_scale": scales, "v_scale": scales}
        whole = jnp.zeros((*lead, *shape), config.compute_dtype)
        return {"k": whole, "v": whole}

    return layer((config.layers,)) if config.scan else [layer(()) for _ in range(config.layers)]


def to_cache(config: Config, k: jax.Array, v: jax.Array) -> Params:
    """Keys and values [B, S, K, H] as the cache holds them."""
    if not config.int8_cache:
        return {"k": k, "v": v}
    (k, k_scale), (v, v_scale) = quantized(k, (3,)), quantized(v, (3,))
    return {"k": k, "v": v, "k_scale": k_scale, "v_scale": v_scale}


def write(cache: Params, new: Params, positions: jax.Array) -> Params:
    """The cache with `new` [B, S, …] from `positions` on: [B], or [] for all sequences."""

    def one(cache: jax.Array, new: jax.Array, position: jax.Array, lead: tuple[int, ...]) -> jax.Array:
        rest = (0,) * (new.ndim - len(lead) - 1)
        return jax.lax.dynamic_update_slice(cache, new, (*lead, position, *rest))

    update = partial(one, lead=(0,)) if positions.ndim == 0 else jax.vmap(partial(one, lead=()))
    return {part: name(update(cache[part], new[part], positions), f"cache.{part}") for part in cache}


def read(config: Config, cache: Params) -> tuple[jax.Array, jax.Array]:
    """Keys and values [B, T, K, H] in the compute dtype."""

    def part(which: str) -> jax.Array:
        x = cache[which].astype(config.compute_dtype)
        return x * cache[f"{which}_scale"][..., None].astype(x.dtype) if config.int8_cache else x

    return part("k"), part("v")


# --- Layers ------------------------------------------------------------------------

Block = Callable[[Params, jax.Array, Params], tuple[jax.Array, Params]]
"""One layer, `(layer, x, cache) -> (x, cache)`."""


def block(config: Config, attend: Block, layer: Params, x: jax.Array, cache: Params) -> tuple[jax.Array, Params]:
    """One pre-norm layer whose attention is `attend`, on heads before the output projection."""
    mixed, cache = attend(layer, transformer.branch(config, layer["attention_norm"], x), cache)
    x = name(x + transformer.project_mixed(layer, mixed), "residual")
    out = transformer.mlp(config, layer, transformer.branch(config, layer["mlp_norm"], x))
    return name(x + out, "residual"), cache


def apply_layers(config: Config, apply: Block, layers: Any, x: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
    """The last layer's output, and every layer's cache."""
    if config.scan:
        return jax.lax.scan(lambda x, xs: apply(xs[0], x, xs[1]), x, (layers, cache))
    new: list[Params] = []
    for layer, layer_cache in zip(layers, cache, strict=True):
        x, layer_cache = apply(layer, x, layer_cache)
        new.append(layer_cache)
    return x, new


# --- Prefill, decode, generate -----------------------------------------------------


def prefill(config: Config, params: Params, prompt: dict[str, jax.Array]) -> tuple[Decoding, jax.Array]:
    """Reads prompts into a new cache.

    Args:
      config: of the model.
      params: as `init` makes them.
      prompt: `tokens` [B, S], padded at the end, and `lengths` [B] or [], how many are real.

    Returns:
      What `decode` goes on from, and the logits [B, V] of each prompt's last token.
    """
    tokens, lengths = prompt["tokens"], prompt["lengths"]
    B, S = tokens.shape
    positions = jnp.arange(S)

    def attend(layer: Params, x: jax.Array, cache: Params) -> tuple[jax.Array, Params]:
        q, k, v = transformer.queries_keys_values(config, layer, x, positions)
        mixed = transformer.attend(config, q, k, v, positions[:, None, None] >= positions)
        return mixed, write(cache, to_cache(config, k, v), jnp.zeros((), jnp.int32))

    x = transformer.embed(config, params, tokens, slice(S))
    x, cache = apply_layers(config, partial(block, config, attend), params["layers"], x, init_cache(config, B))
    ends = jnp.broadcast_to(lengths, (B,))[:, None, None] - 1
    x = jnp.take_along_axis(x, ends, axis=1, mode="promise_in_bounds")
    logits = transformer.logits(config, params, x)[:, 0]
    return Decoding(cache, jnp.argmax(logits, axis=-1).astype(jnp.int32), lengths), logits


def decode(config: Config, params: Params, state: Decoding) -> tuple[Decoding, jax.Array]:
    """Reads one token of each sequence: the state one token on, and logits [B, V]."""
    positions = jnp.broadcast_to(state.positions, state.tokens.shape)[:, None]  # [B, 1]

    def attend(layer: Params, x: jax.Array, cache: Params) -> tuple[jax.Array, Params]:
        q, k, v = transformer.queries_keys_values(config, layer, x, positions)
        cache = write(cache, to_cache(config, k, v), state.positions)
        seen = jnp.arange(config.length) <= positions  # [B, T]
        return transformer.attend(config, q, *read(config, cache), seen[:, None, None, None, :]), cache

    x = transformer.embed(config, params, state.tokens[:, None], positions)
    x, cache = apply_layers(config, partial(block, config, attend), params["layers"], x, state.cache)
    logits = transformer.logits(config, params, x)[:, 0]
    return Decoding(cache, jnp.argmax(logits, axis=-1).astype(jnp.int32), state.positions + 1), logits


_Loop = tuple[Decoding, jax.Array, jax.Array]
"""State, tokens by position, which sequences have ended."""


def generate(config: Config, params: Params, state: Decoding, end: jax.Array) -> tuple[Decoding, jax.Array]:
    """Decodes until every sequence has said `end` or one has filled the cache.

    Args:
      config: of the model.
      params: as `init` makes them.
      state: from `prefill`.
      end: int32 scalar, the token that ends a sequence.

    Returns:
      The state after the last token, and tokens [B, T] by position: those read from
      `state` on, zero elsewhere. Tokens after a sequence's `end` mean nothing.
    """
    B = state.tokens.shape[0]

    def go_on(loop: _Loop) -> jax.Array:
        state, _, ended = loop
        return ~jnp.all(ended) & (jnp.max(state.positions) < config.length)

    def one_more(loop: _Loop) -> _Loop:
        state, said, ended = loop
        here = jnp.arange(config.length) == state.positions[..., None]
        said, ended = jnp.where(here, state.tokens[:, None], said), ended | (state.tokens == end)
        return decode(config, params, state)[0], said, ended

    said, ended = jnp.zeros((B, config.length), jnp.int32), jnp.zeros(B, bool)
    state, said, _ = jax.lax.while_loop(go_on, one_more, (state, said, ended))
    return state, said


TASKS: dict[str, Callable[..., Any]] = {"prefill": prefill, "decode": decode, "generate": generate}


def step(config: Config) -> Callable[..., Any]:
    """The program of `config.task`, a function of arrays."""
    program = partial(TASKS[config.task], config)
    program.__name__ = config.task  # pyright: ignore[reportAttributeAccessIssue]
    return program


def example_prompt(config: Config, *, batch: int = 8, sequence: int | None = None) -> dict[str, jax.Array]:
    """Random `tokens` [B, S] and `lengths`, [B] from S/2 on, or where aligned [], S."""
    S = config.length if sequence is None else sequence
    if config.length < S:
        raise ValueError(f"a prompt of {S} is longer than the cache of {config.length}")
    tokens, lengths = jax.random.split(jax.random.key(0))
    lengths = jnp.int32(S) if config.aligned else jax.random.randint(lengths, (batch,), (S + 1) // 2, S + 1)
    return {"tokens": jax.random.randint(tokens, (batch, S), 0, config.vocab), "lengths": lengths}


def example_decoding(config: Config, *, batch: int = 8) -> Decoding:
    """Sequences that have said nothing yet."""
    positions = jnp.zeros(() if config.aligned else batch, jnp.int32)
    return Decoding(init_cache(config, batch), jnp.zeros(batch, jnp.int32), positions)


def example_args(config: Config, *, batch: int = 8, sequence: int | None = None) -> tuple[Any, ...]:
    """The arguments of `step(config)` as ShapeDtypeStructs; `sequence` is the prompt's length, of prefill alone."""
    params = jax.eval_shape(partial(init, config), jax.random.key(0))
    if config.task == "prefill":
        return params, jax.eval_shape(partial(example_prompt, config, batch=batch, sequence=sequence))
    if sequence is not None:
        raise TypeError(f"{config.task} takes no sequence; the length of its cache is `length=`")
    state = jax.eval_shape(partial(example_decoding, config, batch=batch))
    return (params, state) if config.task == "decode" else (params, state, jax.ShapeDtypeStruct((), jnp.int32))
