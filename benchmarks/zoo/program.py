"""The result of a builder: a step, and its arguments at a size."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Layers and widths that every builder scales with."""

    layers: int
    width: int
    heads: int
    batch: int
    sequence: int
    vocab: int
    image: int

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


# Small enough to run eight times over on a CPU; every dimension divides by a mesh of 2 × 4.
TINY = Size(layers=2, width=32, heads=4, batch=8, sequence=16, vocab=64, image=32)
# Large enough that the layouts matter: two layers of a one-billion-parameter decoder's width.
LARGE = Size(layers=2, width=2048, heads=16, batch=32, sequence=1024, vocab=32768, image=128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """`step(*arguments())`; `arguments` is jittable, so that nothing need be allocated.

    `exact`, if given, is the same step in float32 throughout, by which the rounding of a step that
    computes in fewer bits is known.
    """

    step: Callable[..., Any]
    arguments: Callable[[], tuple[Any, ...]]
    donate: tuple[int, ...] = (0,)
    exact: Callable[..., Any] | None = None


def tokens(size: Size, seed: int = 0) -> jax.Array:
    """[batch, sequence] token ids."""
    return jax.random.randint(jax.random.key(seed), (size.batch, size.sequence), 0, size.vocab)


def images(size: Size, channels: int = 3, *, first: bool = False) -> jax.Array:
    """[batch, image, image, channels], or with the channels `first`."""
    side = (size.image, size.image)
    shape = (size.batch, channels, *side) if first else (size.batch, *side, channels)
    return jax.random.normal(jax.random.key(7), shape)


def labels(size: Size, classes: int = 16) -> jax.Array:
    """[batch] class ids."""
    return jax.random.randint(jax.random.key(9), (size.batch,), 0, classes)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean over all targets, in float32."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets).mean()


def trained(
    loss: Callable[..., jax.Array],
    init: Callable[[], Any],
    batch: Callable[[], tuple[Any, ...]],
    optimizer: optax.GradientTransformation,
) -> Program:
    """The usual train step: state = (parameters, optimizer state)."""

    def step(state: Any, *batch: Any) -> Any:
        params, opt = state
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        updates, opt = optimizer.update(gradients, opt, params)
        return (optax.apply_updates(params, updates), opt), value

    def arguments() -> tuple[Any, ...]:
        params = init()
        return ((params, optimizer.init(params)), *batch())

    return Program(step=step, arguments=arguments)
