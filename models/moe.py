"""A mixture-of-experts decoder: Mixtral, the transformer with another second half.

Each token goes to the `top_k` experts that its router scores highest, and their
outputs are mixed by the softmax over those scores (Jiang et al. 2024, arXiv:2401.04088,
section 2.1). No load-balancing loss. There are two ways for a token to reach its experts:

- `one_hot`: products with one-hot tensors into a fixed capacity per expert and sequence,
  as in GShard (Lepikhin et al. 2020, arXiv:2006.16668, algorithm 1); tokens beyond an
  expert's capacity skip it. It can be split by expert.
- `ragged`: each sequence's tokens are sorted by expert and multiplied by
  `jax.lax.ragged_dot_general`, as in MegaBlocks (Gale et al. 2022, arXiv:2211.15841) and MaxText;
  no token is dropped, as in Mixtral itself.

Where `capacity_factor` is at least experts/top_k, both drop none and agree.

Shapes: as in `transformer.py`, and E experts, R = top_k, C capacity, T = S·R rows.
"""

from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Literal

import jax
import jax.numpy as jnp

from models import transformer
from models.annotate import name
from models.training import Batch, Params, State, TrainStep, ValueAndGrad, make_train_step, new_state
from models.transformer import branch_end, example_batch, normal

__all__ = ["CONFIGS", "Config", "example_args", "example_batch", "forward", "init", "loss", "train_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(transformer.Config):
    """A decoder whose layers end in experts, each a SwiGLU."""

    experts: int  # E
    top_k: int  # R
    dispatch: Literal["one_hot", "ragged"] = "one_hot"
    capacity_factor: float = 1.25  # of an even share; 1.25 as in Fedus et al. 2021, arXiv:2101.03961; one_hot alone

    def capacity(self, sequence: int) -> int:
        """C: the tokens of one sequence that one expert takes."""
        return min(sequence, ceil(self.capacity_factor * self.top_k * sequence / self.experts))


def mixtral(
    *, layers: int, width: int, heads: int, kv_heads: int, hidden: int, vocab: int, context: int, experts: int = 8
) -> Config:
    """Mixtral; sizes from Jiang et al. 2024, table 1, and the published 8x22B."""
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
        rotary_base=1_000_000.0,
        activation="swiglu",
        biases=False,
        tied=False,
        experts=experts,
        top_k=2,
    )


CONFIGS = {
    "tiny-mixtral": mixtral(layers=2, width=64, heads=8, kv_heads=4, hidden=128, vocab=256, context=32),
    "mixtral-8x7b": mixtral(layers=32, width=4096, heads=32, kv_heads=8, hidden=14_336, vocab=32_000, context=32_768),
    "mixtral-8x22b": mixtral(layers=56, width=6144, heads=48, kv_heads=8, hidden=16_384, vocab=32_000, context=65_536),
}


def new_experts(config: Config, key: jax.Array) -> Params:
    """The weights of E gated perceptrons, stacked, and the router's."""
    D, E, F = config.width, config.experts, config.hidden
    up, down, gate, router = jax.random.split(key, 4)
    return {
        "w_router": normal(router, D, E),
        "w_gate": normal(gate, E, D, F),
        "w_up": normal(up, E, D, F),
        "w_down": normal(down, E, F, D, deviation=branch_end(config)),
    }


def best_experts(config: Config, scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The experts of each token and their weights, [B, S, R] each, by scores [B, S, E] in float32."""
    top_scores, expert = jax.lax.top_k(scores, config.top_k)
    return expert, jax.nn.softmax(top_scores).astype(config.compute_dtype)


def route(config: Config, scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where each token goes within the capacities, by scores [B, S, E] in float32.

    Returns:
      dispatch: [B, S, E, C], 1 where token s has place c at expert e.
      combine: the same, times the weight of that expert for that token.
    """
    B, S, E = scores.shape
    dtype = config.compute_dtype
    expert, weights = best_experts(config, scores)
    chosen = jax.nn.one_hot(expert, E, dtype=jnp.int32)  # [B, S, R, E]
    count = jnp.cumsum(chosen.reshape(B, S * config.top_k, E), axis=1).reshape(chosen.shape)
    place = jnp.sum(count * chosen, axis=-1) - 1  # [B, S, R]
    chosen, places = chosen.astype(dtype), jax.nn.one_hot(place, config.capacity(S), dtype=dtype)  # 0 from C on
    dispatch = jnp.einsum("bsre,bsrc->bsec", chosen, places)
    combine = jnp.einsum("bsre,bsrc->bsec", weights[..., None] * chosen, places)
    return dispatch, combine


def one_hot_mixture(config: Config, layer: Params, x: jax.Array, scores: jax.Array) -> jax.Array:
    """[B, S, D] -> [B, S, D]; a sent value has two names, one for each end of the way."""
    dispatch, combine = route(config, scores)
    sent = name(jnp.einsum("bsec,bsd->ebcd", dispatch, x), "at_source")
    sent = name(sent, "at_expert")
    gate = jnp.einsum("ebcd,edf->ebcf", sent, layer["w_gate"].astype(x.dtype))
    up = jnp.einsum("ebcd,edf->ebcf", sent, layer["w_up"].astype(x.dtype))
    hidden = name(up * jax.nn.silu(gate), "expert_hidden")
    back = name(jnp.einsum("ebcf,efd->ebcd", hidden, layer["w_down"].astype(x.dtype)), "at_expert")
    back = name(back, "at_source")
    return jnp.einsum("bsec,ebcd->bsd", combine, back)


BY_SEQUENCE = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(([2], [1]), ([], [])), lhs_ragged_dimensions=[1], rhs_group_dimensions=[0]
)
"""[B, T, D], [E, D, F], [B, E] -> [B, T, F]: row t meets the matrix of its expert; each sequence has its own counts."""


def ragged_mixture(config: Config, layer: Params, x: jax.Array, scores: jax.Array) -> jax.Array:
    """[B, S, D] -> [B, S, D]; each sequence is sorted by itself, so that sequences stay apart."""
    B, S, E = scores.shape
    R = config.top_k
    expert, weights = best_experts(config, scores)
    expert = expert.reshape(B, S * R)
    order = jnp.argsort(expert)  # [B, T]: row t is choice order[t], of token order[t] // R
    rows_of = jnp.sum(jax.nn.one_hot(expert, E, dtype=jnp.int32), axis=1)  # [B, E]

    def rows(x: jax.Array, index: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, index[..., None], axis=1, mode="promise_in_bounds")

    def product(x: jax.Array, weight: str) -> jax.Array:
        return jax.lax.ragged_dot_general(x, layer[weight].astype(x.dtype), rows_of, BY_SEQUENCE)

    sent = name(rows(x, order // R), "sorted")  # [B, T, D]
    hidden = name(product(sent, "w_up") * jax.nn.silu(product(sent, "w_gate")), "sorted_hidden")  # [B, T, F]
    back = name(product(hidden, "w_down"), "sorted")
    back = rows(back, jnp.argsort(order)).reshape(B, S, R, -1)
    return jnp.einsum("bsr,bsrd->bsd", weights, back)


def mixture(config: Config, layer: Params, x: jax.Array) -> jax.Array:
    """Send to the experts, apply each, bring back and mix: [B, S, D] -> [B, S, D]."""
    scores = jnp.einsum("bsd,de->bse", x, layer["w_router"].astype(x.dtype)).astype(jnp.float32)
    way = {"one_hot": one_hot_mixture, "ragged": ragged_mixture}[config.dispatch]
    return way(config, layer, x, scores)


def init(config: Config, key: jax.Array) -> State:
    """Parameters, AdamW state and step 0, in float32."""
    return new_state(transformer.init_params(config, key, new_experts), config.learning_rate)


def forward(config: Config, params: Params, tokens: jax.Array) -> jax.Array:
    """Tokens [B, S] -> logits [B, S, V] in float32."""
    return transformer.forward(config, params, tokens, mixture)


def loss(config: Config, params: Params, batch: Batch) -> jax.Array:
    """Mean cross-entropy of the next token, in nats."""
    return transformer.loss(config, params, batch, mixture)


def train_step(config: Config, value_and_grad: ValueAndGrad = jax.value_and_grad) -> TrainStep:
    """`(state, batch) -> (state, loss)`."""
    return make_train_step(partial(loss, config), config.learning_rate, value_and_grad)


def example_args(config: Config, *, batch: int = 8, sequence: int | None = None) -> tuple[State, Batch]:
    """`(state, batch)` as ShapeDtypeStructs; nothing is allocated."""
    state = jax.eval_shape(partial(init, config), jax.random.key(0))
    return state, jax.eval_shape(partial(example_batch, config, batch=batch, sequence=sequence))
