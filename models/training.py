"""One AdamW train step for any loss, shared by all models here.

Parameters and optimizer state are float32; the loss computes in the dtype that the
model's configuration names (mixed precision as in Micikevicius et al. 2018, with
bfloat16 and so without loss scaling).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from models.annotate import name

Params = dict[str, Any]
Batch = dict[str, jax.Array]


class State(NamedTuple):
    """The state of training: updated whole, so that it can be donated."""

    params: Params
    opt_state: optax.OptState
    step: jax.Array  # int32 scalar


TrainStep = Callable[[State, Batch], tuple[State, jax.Array]]

ValueAndGrad = Callable[[Callable[..., jax.Array]], Callable[..., tuple[jax.Array, Any]]]
"""`jax.value_and_grad`, or what takes its place, such as one that accumulates over micro-batches."""


def adamw(learning_rate: float) -> optax.GradientTransformation:
    """AdamW with the betas and the decay of GPT-3 and Llama."""
    return optax.adamw(learning_rate, b1=0.9, b2=0.95, weight_decay=0.1)


def new_state(params: Params, learning_rate: float) -> State:
    """The state before the first step."""
    return State(params, adamw(learning_rate).init(params), jnp.zeros((), jnp.int32))


def make_train_step(
    loss: Callable[[Params, Batch], jax.Array], learning_rate: float, value_and_grad: ValueAndGrad = jax.value_and_grad
) -> TrainStep:
    """`(state, batch) -> (state, loss)`: gradient of `loss`, then AdamW.

    Each gradient has a name: `gradients.` and the path of its parameter.
    """
    optimizer = adamw(learning_rate)

    def train_step(state: State, batch: Batch) -> tuple[State, jax.Array]:
        value, gradients = value_and_grad(loss)(state.params, batch)
        gradients = jax.tree.map_with_path(
            lambda path, x: name(x, f"gradients.{jax.tree_util.keystr(path, simple=True, separator='.')}"), gradients
        )
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        return State(params, opt_state, state.step + 1), value

    return train_step
