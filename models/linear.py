"""A chain of square matrix multiplications: the workload one can cost by hand.

Per layer `x @ w`, and no nonlinearity. With B rows, width D and L layers, one train
step is `6·B·D²·L` FLOPs in matrix multiplications less `2·B·D²` (the first layer
needs no gradient of its input). Data parallelism all-reduces D² gradient elements per
layer; tensor parallelism, column and row split in turn, all-reduces B·D elements per
pair of layers forward and B·D backward. Counted in elements the two cross at B = D.

Shapes: B rows, D width.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from models.annotate import name
from models.training import Batch, Params, State, TrainStep, ValueAndGrad, make_train_step, new_state


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A chain of L square matrices."""

    layers: int
    width: int  # D
    compute_dtype: str = "bfloat16"
    learning_rate: float = 3e-4


CONFIGS = {
    "linear-tiny": Config(layers=4, width=64),
    "linear-1k": Config(layers=4, width=1024),
    "linear-8k": Config(layers=4, width=8192),
    "linear-16k": Config(layers=8, width=16384),
}


def init_params(config: Config, key: jax.Array) -> Params:
    """Random weights of variance 1/D, so that activations keep their scale."""
    shape, scale = (config.width, config.width), config.width**-0.5
    return {"layers": [{"w": scale * jax.random.normal(k, shape)} for k in jax.random.split(key, config.layers)]}


def init(config: Config, key: jax.Array) -> State:
    """Parameters, AdamW state and step 0, in float32."""
    return new_state(init_params(config, key), config.learning_rate)


def forward(config: Config, params: Params, x: jax.Array) -> jax.Array:
    """[B, D] -> [B, D]."""
    x = x.astype(config.compute_dtype)
    for i, layer in enumerate(params["layers"]):
        x = name(x @ layer["w"].astype(x.dtype), f"layers.{i}")
    return x


def loss(config: Config, params: Params, batch: Batch) -> jax.Array:
    """Mean square of the output, in float32."""
    return jnp.mean(jnp.square(forward(config, params, batch["x"]).astype(jnp.float32)))


def train_step(config: Config, value_and_grad: ValueAndGrad = jax.value_and_grad) -> TrainStep:
    """`(state, batch) -> (state, loss)`."""
    return make_train_step(partial(loss, config), config.learning_rate, value_and_grad)


def example_batch(config: Config, *, batch: int = 1024, seed: int = 0) -> Batch:
    """Random rows: x [B, D]."""
    return {"x": jax.random.normal(jax.random.key(seed), (batch, config.width))}


def example_args(config: Config, *, batch: int = 1024) -> tuple[State, Batch]:
    """`(state, batch)` as ShapeDtypeStructs; nothing is allocated."""
    state = jax.eval_shape(partial(init, config), jax.random.key(0))
    return state, jax.eval_shape(partial(example_batch, config, batch=batch))
