"""A decoder-only transformer: GPT-2, Llama 3 and Gemma, by configuration.

GPT-2 (Radford et al. 2019): LayerNorm, learned positions, GELU, biases, tied
embeddings. Llama 3 (Grattafiori et al. 2024): RMSNorm, rotary positions, SwiGLU,
grouped-query attention, no biases. No dropout; no rescaling of rotary frequencies
(Llama 3.1's, for contexts beyond 8,192).

Shapes: B batch, S and T sequence (queries, keys), V vocabulary, D width, N query
heads, K key/value heads, G = N/K queries per key/value head, H head, F hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from models import attention as kernels
from models.annotate import name
from models.layers import Remat, apply_layers, new_layers
from models.training import Batch, Params, State, TrainStep, ValueAndGrad, make_train_step, new_state


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A decoder; the letters are the shapes above."""

    layers: int
    vocab: int  # V
    context: int  # the longest sequence
    width: int  # D
    heads: int  # N
    kv_heads: int  # K, divides N
    head_dim: int  # H
    hidden: int  # F
    norm: Literal["layernorm", "rmsnorm"]
    norm_epsilon: float = 1e-5
    positions: Literal["learned", "rotary"]
    rotary_base: float = 10_000.0
    activation: Literal["gelu", "swiglu", "geglu"]
    biases: bool
    tied: bool  # the embedding is also the output projection
    scale_embedding: bool = False  # by √D, as in Gemma
    compute_dtype: str = "bfloat16"
    learning_rate: float = 3e-4
    attention: Literal["xla", "flash", "cudnn"] = "xla"  # of a sequence to itself; the others are `models.attention`
    scan: bool = False  # layers stacked on a leading dimension, and looped over
    remat: Remat = "none"


def gpt2(*, layers: int, width: int, heads: int, vocab: int = 50_257, context: int = 1024) -> Config:
    """GPT-2; sizes from Radford et al. 2019, table 2."""
    return Config(
        layers=layers,
        vocab=vocab,
        context=context,
        width=width,
        heads=heads,
        kv_heads=heads,
        head_dim=width // heads,
        hidden=4 * width,
        norm="layernorm",
        positions="learned",
        activation="gelu",
        biases=True,
        tied=True,
    )


def llama3(
    *,
    layers: int,
    width: int,
    heads: int,
    hidden: int,
    kv_heads: int = 8,
    vocab: int = 128_256,
    context: int = 8192,
) -> Config:
    """Llama 3; sizes from Grattafiori et al. 2024, table 3."""
    return Config(
        layers=layers,
        vocab=vocab,
        context=context,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=width // heads,
        hidden=hidden,
        norm="rmsnorm",
        positions="rotary",
        rotary_base=500_000.0,
        activation="swiglu",
        biases=False,
        tied=False,
    )


CONFIGS = {
    "tiny-gpt2": gpt2(layers=2, width=64, heads=8, vocab=256, context=32),
    "gpt2-small": gpt2(layers=12, width=768, heads=12),
    "gpt2-medium": gpt2(layers=24, width=1024, heads=16),
    "gpt2-large": gpt2(layers=36, width=1280, heads=20),
    "gpt2-xl": gpt2(layers=48, width=1600, heads=25),
    "tiny-llama": llama3(layers=2, width=64, heads=8, kv_heads=4, hidden=128, vocab=256, context=32),
    "llama3-8b": llama3(layers=32, width=4096, heads=32, hidden=14_336),
    "llama3-70b": llama3(layers=80, width=8192, heads=64, hidden=28_672),
    "llama3-405b": llama3(layers=126, width=16_384, heads=128, hidden=53_248),
    "gemma-7b": Config(  # Gemma Team 2024, table 1
        layers=28,
        vocab=256_000,
        context=8192,
        width=3072,
        heads=16,
        kv_heads=16,
        head_dim=256,
        hidden=24_576,
        norm="rmsnorm",
        norm_epsilon=1e-6,
        positions="rotary",
        activation="geglu",
        biases=False,
        tied=True,
        scale_embedding=True,
    ),
}


def normal(key: jax.Array, *shape: int, deviation: float = 0.02) -> jax.Array:
    """GPT-2's initializer."""
    return deviation * jax.random.normal(key, shape)


def branch_end(config: Config) -> float:
    """The deviation where a residual branch ends: smaller, for there are 2L of them."""
    return 0.02 * (2 * config.layers) ** -0.5


def new_norm(config: Config) -> Params:
    """Scale 1, and for LayerNorm bias 0."""
    scale = {"scale": jnp.ones(config.width)}
    return scale | {"bias": jnp.zeros(config.width)} if config.norm == "layernorm" else scale


def new_attention(config: Config, key: jax.Array) -> Params:
    """Heads are a dimension of their own."""
    D, N, K, H = config.width, config.heads, config.kv_heads, config.head_dim
    q, k, v, o = jax.random.split(key, 4)
    weights = {
        "wq": normal(q, D, N, H),
        "wk": normal(k, D, K, H),
        "wv": normal(v, D, K, H),
        "wo": normal(o, N, H, D, deviation=branch_end(config)),
    }
    biases = {"bq": jnp.zeros((N, H)), "bk": jnp.zeros((K, H)), "bv": jnp.zeros((K, H)), "bo": jnp.zeros(D)}
    return weights | biases if config.biases else weights


def new_mlp(config: Config, key: jax.Array) -> Params:
    """Two matrices, and a gate if the activation has one."""
    D, F = config.width, config.hidden
    up, down, gate = jax.random.split(key, 3)
    weights = {"w_up": normal(up, D, F), "w_down": normal(down, F, D, deviation=branch_end(config))}
    biases = {"b_up": jnp.zeros(F), "b_down": jnp.zeros(D)}
    if config.activation != "gelu":
        weights["w_gate"] = normal(gate, D, F)
        biases["b_gate"] = jnp.zeros(F)
    return weights | biases if config.biases else weights


def init_params(config: Config, key: jax.Array, new_mlp: Callable[[Any, jax.Array], Params] = new_mlp) -> Params:
    """Embedding, layers, final norm; `new_mlp` makes the weights of a layer's second half."""
    embed_key, position_key, head_key, layers_key = jax.random.split(key, 4)

    def new_layer(key: jax.Array) -> Params:
        attention_key, mlp_key = jax.random.split(key)
        norms = {"attention_norm": new_norm(config), "mlp_norm": new_norm(config)}
        return norms | new_attention(config, attention_key) | new_mlp(config, mlp_key)

    params: Params = {
        "embed": normal(embed_key, config.vocab, config.width),
        "layers": new_layers(new_layer, layers_key, config.layers, scan=config.scan),
        "final_norm": new_norm(config),
    }
    if config.positions == "learned":
        params["pos_embed"] = normal(position_key, config.context, config.width)
    if not config.tied:
        params["lm_head"] = normal(head_key, config.width, config.vocab)
    return params


def init(config: Config, key: jax.Array) -> State:
    """Parameters, AdamW state and step 0, in float32."""
    return new_state(init_params(config, key), config.learning_rate)


def project(letters: str, x: jax.Array, layer: Params, weight: str, bias: str) -> jax.Array:
    """Einsum of an activation and a weight, plus the bias if there is one, in `x`'s dtype.

    A weight in int8 has a scale per output channel beside it, applied to the product.
    """
    out = jnp.einsum(letters, x, layer[weight].astype(x.dtype))
    if (scale := f"{weight}_scale") in layer:
        out = out * layer[scale].astype(x.dtype)
    return out + layer[bias].astype(x.dtype) if bias in layer else out


def normalize(config: Config, norm: Params, x: jax.Array) -> jax.Array:
    """LayerNorm or RMSNorm over the last dimension, in float32."""
    y = x.astype(jnp.float32)
    if config.norm == "layernorm":
        y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + config.norm_epsilon)
    y = y * norm["scale"]
    if config.norm == "layernorm":
        y = y + norm["bias"]
    return y.astype(x.dtype)


def branch(config: Config, norm: Params, x: jax.Array) -> jax.Array:
    """The branch of the residual stream into attention or MLP; two names, so that a layout can move it there."""
    return name(name(normalize(config, norm, x), "residual"), "branch")


def rotation(config: Config, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of the angles of positions [..., S]: [..., S, 1, H/2] each."""
    exponent = jnp.arange(0, config.head_dim, 2) / config.head_dim
    angle = positions[..., None, None] * config.rotary_base**-exponent
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns each pair (x[i], x[i + H/2]) of [B, S, N, H] by its angle (Su et al. 2021)."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def queries_keys_values(
    config: Config, layer: Params, x: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """[B, S, N, H] and twice [B, S, K, H] of tokens [B, S, D] at positions [S] or [B, S]."""
    q = project("bsd,dnh->bsnh", x, layer, "wq", "bq")
    k = project("btd,dkh->btkh", x, layer, "wk", "bk")
    v = project("btd,dkh->btkh", x, layer, "wv", "bv")
    if config.positions == "rotary":
        cos, sin = rotation(config, positions)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    return name(q, "queries"), name(k, "keys"), name(v, "keys")


def attend(config: Config, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Softmax attention, [B, S, N, H] with K/V [B, T, K, H] -> [B, S, N, H].

    Each key/value head serves G query heads.

    Args:
      config: of the model.
      q: queries.
      k: keys.
      v: values.
      mask: which keys a query sees, [..., S, 1, T] against [B, K, S, G, T].
    """
    B, S, N, H = q.shape
    K = config.kv_heads
    q = q.reshape(B, S, K, N // K, H) * H**-0.5
    scores = jnp.einsum("bskgh,btkh->bksgt", q, k).astype(jnp.float32)
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)).astype(q.dtype)
    return jnp.einsum("bksgt,btkh->bskgh", weights, v).reshape(B, S, N, H)


def attend_again(config: Config) -> Callable[..., jax.Array]:
    """`attend` of a model, recomputed in the backward pass if its `remat` is "attention"."""
    mix = partial(attend, config)
    return jax.checkpoint(mix, prevent_cse=not config.scan) if config.remat == "attention" else mix


def attention(config: Config, layer: Params, x: jax.Array) -> jax.Array:
    """Causal attention of a sequence to itself, [B, S, D] -> [B, S, D]."""
    positions = jnp.arange(x.shape[1])
    q, k, v = queries_keys_values(config, layer, x, positions)
    if config.attention == "xla":
        mixed = attend_again(config)(q, k, v, positions[:, None, None] >= positions)
    else:
        mixed = kernels.attention(config.attention)(q, k, v)
    return project_mixed(layer, mixed)


def project_mixed(layer: Params, mixed: jax.Array) -> jax.Array:
    """Projects the heads' results, [B, S, N, H] -> [B, S, D]."""
    mixed = name(name(mixed, "queries"), "mixed")
    return project("bsnh,nhd->bsd", mixed, layer, "wo", "bo")


def mlp(config: Config, layer: Params, x: jax.Array) -> jax.Array:
    """Up, activate (gated or not), down: [B, S, D] -> [B, S, D]."""
    hidden = project("bsd,df->bsf", x, layer, "w_up", "b_up")
    if config.activation == "gelu":
        hidden = jax.nn.gelu(hidden)
    else:
        activation = {"swiglu": jax.nn.silu, "geglu": jax.nn.gelu}[config.activation]
        hidden = hidden * activation(project("bsd,df->bsf", x, layer, "w_gate", "b_gate"))
    hidden = name(name(hidden, "hidden"), "contracted")
    return project("bsf,fd->bsd", hidden, layer, "w_down", "b_down")


MLP = Callable[[Any, Params, jax.Array], jax.Array]
"""The second half of a layer, `(config, layer, x) -> x`; `moe.py` has another."""


def block(config: Config, layer: Params, x: jax.Array, mlp: MLP = mlp) -> jax.Array:
    """One pre-norm layer: [B, S, D] -> [B, S, D]."""
    x = name(x + attention(config, layer, branch(config, layer["attention_norm"], x)), "residual")
    return name(x + mlp(config, layer, branch(config, layer["mlp_norm"], x)), "residual")


def embed(config: Config, params: Params, tokens: jax.Array, positions: slice | jax.Array) -> jax.Array:
    """Tokens [B, S] at positions S or [B, S] -> [B, S, D] in the compute dtype."""
    x = params["embed"][tokens]
    if config.scale_embedding:
        x = x * config.width**0.5
    if config.positions == "learned":
        x = x + params["pos_embed"][positions]
    return name(x.astype(config.compute_dtype), "residual")


def logits(config: Config, params: Params, x: jax.Array) -> jax.Array:
    """The last layer's output [B, S, D] -> [B, S, V] in float32."""
    x = normalize(config, params["final_norm"], x)
    if config.tied:
        out = jnp.einsum("bsd,vd->bsv", x, params["embed"].astype(x.dtype))
    else:
        out = jnp.einsum("bsd,dv->bsv", x, params["lm_head"].astype(x.dtype))
    return name(out, "logits").astype(jnp.float32)


def forward(config: Config, params: Params, tokens: jax.Array, mlp: MLP = mlp) -> jax.Array:
    """Tokens [B, S] -> logits [B, S, V] in float32."""
    x = embed(config, params, tokens, slice(tokens.shape[1]))
    x = apply_layers(lambda layer, x: block(config, layer, x, mlp), params["layers"], x, config.remat)
    return logits(config, params, x)


def loss(config: Config, params: Params, batch: Batch, mlp: MLP = mlp) -> jax.Array:
    """Mean cross-entropy of the next token, in nats."""
    log_probs = jax.nn.log_softmax(forward(config, params, batch["tokens"], mlp))
    return -jnp.mean(jnp.take_along_axis(log_probs, batch["targets"][..., None], axis=-1))


def train_step(config: Config, value_and_grad: ValueAndGrad = jax.value_and_grad) -> TrainStep:
    """`(state, batch) -> (state, loss)`."""
    return make_train_step(partial(loss, config), config.learning_rate, value_and_grad)


def example_batch(config: Config, *, batch: int = 8, sequence: int | None = None, seed: int = 0) -> Batch:
    """Random tokens and, as targets, the same tokens one to the left: [B, S] each."""
    length = config.context if sequence is None else sequence
    if length > config.context:
        raise ValueError(f"a sequence of {length} is longer than the context of {config.context}")
    tokens = jax.random.randint(jax.random.key(seed), (batch, length + 1), 0, config.vocab)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def example_args(config: Config, *, batch: int = 8, sequence: int | None = None) -> tuple[State, Batch]:
    """`(state, batch)` as ShapeDtypeStructs; nothing is allocated."""
    state = jax.eval_shape(partial(init, config), jax.random.key(0))
    return state, jax.eval_shape(partial(example_batch, config, batch=batch, sequence=sequence))
