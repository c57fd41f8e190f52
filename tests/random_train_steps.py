"""Random train steps: layers drawn from a few kinds, in a scan or unrolled, with a loss, its gradient and an update.

A step is its seed: building it again gives the same layers and sizes. Nothing is computed: arguments are shapes.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Layer = Callable[[dict[str, jax.Array], jax.Array], jax.Array]
Program = tuple[Callable[..., Any], tuple[Any, ...]]
F32 = jnp.float32


def perceptron(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"]


def gated(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    h = x @ w["up"]
    return x + (jax.nn.silu(h) * jnp.tanh(h)) @ w["down"]


def attention(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    q, k, v = (x @ w[name] for name in ("query", "key", "value"))
    scores = jnp.einsum("bsd,btd->bst", q, k) / np.sqrt(q.shape[-1])
    return x + jnp.einsum("bst,btd->bsd", jax.nn.softmax(scores), v) @ w["out"]


def normalized(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w["scale"]


def wave(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return x + jnp.sin(x * w["scale"]) * jnp.exp(-x * x)


def mixing(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """A recurrence along the sequence, in a scan of its own."""

    def trip(h: jax.Array, now: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = jnp.tanh(h * w["scale"] + now)
        return h, h

    first = jnp.zeros_like(x[:, 0])
    return x + jnp.swapaxes(jax.lax.scan(trip, first, jnp.swapaxes(x, 0, 1))[1], 0, 1)


WEIGHTS = {
    perceptron: ("up", "down"),
    gated: ("up", "down"),
    attention: ("query", "key", "value", "out"),
    normalized: ("scale",),
    wave: ("scale",),
    mixing: ("scale",),
}


def train_step(seed: int) -> Program:
    """A step of one or two kinds of layers, in a scan of two to eight trips, or one to three times unrolled."""
    rng = np.random.default_rng((seed, 7))
    kinds = [list(WEIGHTS)[i] for i in rng.choice(len(WEIGHTS), int(rng.integers(1, 3)))]
    scanned = bool(rng.random() < 0.7)
    layers = int(rng.integers(2, 9) if scanned else rng.integers(1, 4))
    batch, length, width = (int(2 ** rng.integers(*span)) for span in ((4, 9), (4, 8), (5, 9)))
    hidden = width * int(rng.choice([1, 2, 4]))
    checkpointed = bool(rng.random() < 0.25)
    sizes = {"up": (width, hidden), "down": (hidden, width), "scale": (width,)}
    own = [{name: sizes.get(name, (width, width)) for name in WEIGHTS[kind]} for kind in kinds]

    def block(weights: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
        for kind, w in zip(kinds, weights, strict=True):
            x = (jax.checkpoint(kind) if checkpointed else kind)(w, x)
        return x

    def loss(weights: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
        if scanned:
            x = jax.lax.scan(lambda x, w: (block(w, x), None), x, weights)[0]
        else:
            for i in range(layers):
                x = block(jax.tree.map(lambda w, i=i: w[i], weights), x)
        return jnp.mean(x**2)

    def step(weights: list[dict[str, jax.Array]], x: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    weights = [{name: jax.ShapeDtypeStruct((layers, *size), F32) for name, size in each.items()} for each in own]
    return step, (weights, jax.ShapeDtypeStruct((batch, length, width), F32))
