"""A mixture-of-experts decoder: Mixtral, the transformer with another second half.

Each token goes to the `top_k` experts that its router scores highest, and their
outputs are mixed by the softmax over those scores (Jiang et al. 2024, arXiv:2401.04088,
section 2.1). Routing is by one-hot dispatch with a capacity per expert and sequence,
as in GShard (Lepikhin et al. 2020, arXiv:2006.16668, algorithm 1): shapes are static,
and tokens beyond an expert's capacity skip it. Mixtral itself drops no token; nor does
this where `capacity_factor` is at least experts/top_k. No load-balancing loss.

Shapes: as in `transformer.py`, and E experts, R = top_k, C capacity.
"""

from dataclasses import dataclass
from functools import partial
from math import ceil

import jax
import jax.numpy as jnp

from models import transformer
from models.annotate import name
from models.training import Batch, Params, State, TrainStep, make_train_step, new_state
from models.transformer import branch_end, example_batch, normal

__all__ = ["CONFIGS", "Config", "example_args", "example_batch", "forward", "init", "loss", "train_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(transformer.Config):
    """A decoder whose layers end in experts, each a SwiGLU."""

    experts: int  # E
    top_k: int  # R
    capacity_factor: float = 1.25  # of an even share; 1.25 as in Fedus et al. 2021, arXiv:2101.03961

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


def route(config: Config, scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where each token goes, by scores [B, S, E] in float32.

    Returns:
      dispatch: [B, S, E, C], 1 where token s has place c at expert e.
      combine: the same, times the weight of that expert for that token.
    """
    B, S, E = scores.shape
    dtype = config.compute_dtype
    top_scores, expert = jax.lax.top_k(scores, config.top_k)  # [B, S, R]
    weights = jax.nn.softmax(top_scores).astype(dtype)
    chosen = jax.nn.one_hot(expert, E, dtype=jnp.int32)  # [B, S, R, E]
    count = jnp.cumsum(chosen.reshape(B, S * config.top_k, E), axis=1).reshape(chosen.shape)
    place = jnp.sum(count * chosen, axis=-1) - 1  # [B, S, R]
    chosen, places = chosen.astype(dtype), jax.nn.one_hot(place, config.capacity(S), dtype=dtype)  # 0 from C on
    dispatch = jnp.einsum("bsre,bsrc->bsec", chosen, places)
    combine = jnp.einsum("bsre,bsrc->bsec", weights[..., None] * chosen, places)
    return dispatch, combine


def mixture(config: Config, layer: Params, x: jax.Array) -> jax.Array:
    """Send to the experts, apply each, bring back and mix: [B, S, D] -> [B, S, D].

    What is sent has two names, one for each end of the way.
    """
    scores = jnp.einsum("bsd,de->bse", x, layer["w_router"].astype(x.dtype)).astype(jnp.float32)
    dispatch, combine = route(config, scores)
    sent = name(jnp.einsum("bsec,bsd->ebcd", dispatch, x), "at_source")
    sent = name(sent, "at_expert")
    gate = jnp.einsum("ebcd,edf->ebcf", sent, layer["w_gate"].astype(x.dtype))
    up = jnp.einsum("ebcd,edf->ebcf", sent, layer["w_up"].astype(x.dtype))
    hidden = name(up * jax.nn.silu(gate), "expert_hidden")
    back = name(jnp.einsum("ebcf,efd->ebcd", hidden, layer["w_down"].astype(x.dtype)), "at_expert")
    back = name(back, "at_source")
    return jnp.einsum("bsec,ebcd->bsd", combine, back)


def init(config: Config, key: jax.Array) -> State:
    """Parameters, AdamW state and step 0, in float32."""
    return new_state(transformer.init_params(config, key, new_experts), config.learning_rate)


def forward(config: Config, params: Params, tokens: jax.Array) -> jax.Array:
    """Tokens [B, S] -> logits [B, S, V] in float32."""
    return transformer.forward(config, params, tokens, mixture)


def loss(config: Config, params: Params, batch: Batch) -> jax.Array:
    """Mean cross-entropy of the next token, in nats."""
    return transformer.loss(config, params, batch, mixture)


def train_step(config: Config) -> TrainStep:
    """`(state, batch) -> (state, loss)`."""
    return make_train_step(partial(loss, config), config.learning_rate)


def example_args(config: Config, *, batch: int = 8, sequence: int | None = None) -> tuple[State, Batch]:
    """`(state, batch)` as ShapeDtypeStructs; nothing is allocated."""
    state = jax.eval_shape(partial(init, config), jax.random.key(0))
    return state, jax.eval_shape(partial(example_batch, config, batch=batch, sequence=sequence))
