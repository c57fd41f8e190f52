"""A stack of two-layer perceptrons, the example of Megatron's column and row splits.

Per layer: up-projection, GELU or ReLU, down-projection, and a residual connection
if the configuration asks for it. No norms, no biases.

Shapes: B rows, D width, F hidden.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from models.annotate import name
from models.layers import Remat, apply_layers, new_layers
from models.training import Batch, Params, State, TrainStep, ValueAndGrad, make_train_step, new_state


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A stack of L perceptrons."""

    layers: int
    width: int  # D
    hidden: int  # F
    activation: Literal["gelu", "relu"] = "gelu"
    residual: bool = True
    compute_dtype: str = "bfloat16"
    learning_rate: float = 3e-4
    scan: bool = False  # layers stacked on a leading dimension, and looped over
    remat: Remat = "none"


CONFIGS = {
    "mlp-tiny": Config(layers=2, width=64, hidden=128),
    "mlp-1k": Config(layers=4, width=1024, hidden=4096),
    "mlp-8k": Config(layers=4, width=8192, hidden=32768),
    "mlp-16k": Config(layers=8, width=16384, hidden=65536),
}


def init_params(config: Config, key: jax.Array) -> Params:
    """Random weights of variance 1/fan-in."""

    def layer(key: jax.Array) -> Params:
        up, down = jax.random.split(key)
        return {
            "w_up": config.width**-0.5 * jax.random.normal(up, (config.width, config.hidden)),
            "w_down": config.hidden**-0.5 * jax.random.normal(down, (config.hidden, config.width)),
        }

    return {"layers": new_layers(layer, key, config.layers, scan=config.scan)}


def init(config: Config, key: jax.Array) -> State:
    """Parameters, AdamW state and step 0, in float32."""
    return new_state(init_params(config, key), config.learning_rate)


def block(config: Config, layer: Params, x: jax.Array) -> jax.Array:
    """One perceptron: [B, D] -> [B, D]."""
    activation = {"gelu": jax.nn.gelu, "relu": jax.nn.relu}[config.activation]
    hidden = name(activation(name(x, "branch") @ layer["w_up"].astype(x.dtype)), "hidden")
    out = name(hidden, "contracted") @ layer["w_down"].astype(x.dtype)
    return name(x + out if config.residual else out, "residual")


def forward(config: Config, params: Params, x: jax.Array) -> jax.Array:
    """[B, D] -> [B, D]."""
    x = name(x.astype(config.compute_dtype), "residual")
    return apply_layers(partial(block, config), params["layers"], x, config.remat)


def loss(config: Config, params: Params, batch: Batch) -> jax.Array:
    """Mean squared error against the targets, in float32."""
    return jnp.mean(jnp.square(forward(config, params, batch["x"]).astype(jnp.float32) - batch["y"]))


def train_step(config: Config, value_and_grad: ValueAndGrad = jax.value_and_grad) -> TrainStep:
    """`(state, batch) -> (state, loss)`."""
    return make_train_step(partial(loss, config), config.learning_rate, value_and_grad)


def example_batch(config: Config, *, batch: int = 1024, seed: int = 0) -> Batch:
    """Random rows and targets: x, y [B, D]."""
    x, y = jax.random.normal(jax.random.key(seed), (2, batch, config.width))
    return {"x": x, "y": y}


def example_args(config: Config, *, batch: int = 1024) -> tuple[State, Batch]:
    """`(state, batch)` as ShapeDtypeStructs; nothing is allocated."""
    state = jax.eval_shape(partial(init, config), jax.random.key(0))
    return state, jax.eval_shape(partial(example_batch, config, batch=batch))
