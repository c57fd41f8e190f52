"""Small programs with loops, branches, recomputation, experts and accumulation, with concrete arguments in float32."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import models
from autoshard import accumulate
from models import moe
from tests.programs import Program

LAYERS, WIDTH, ROWS = 2, 16, 16


def _weights(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32) / np.sqrt(shape[-2]).astype(np.float32)


X = _weights(ROWS, WIDTH, seed=9)


def _layer(w: Any, x: Any) -> Any:
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def _stack() -> dict[str, Any]:
    return {"up": _weights(LAYERS, WIDTH, 2 * WIDTH), "down": _weights(LAYERS, 2 * WIDTH, WIDTH, seed=1)}


def _scanned(layer: Callable[..., Any]) -> Program:
    def loss(w: Any, x: Any) -> Any:
        x, norms = jax.lax.scan(lambda x, w: (layer(w, x), jnp.mean(x * x)), x, w)
        return jnp.mean(jnp.square(x)) + 0.1 * jnp.sum(norms)

    return Program(fn=jax.value_and_grad(loss), args=(_stack(), X), names=("w", "x"))


def _scan() -> Program:
    """Forward and transposed scan, with stacked inputs, stacked outputs and a carry."""
    return _scanned(_layer)


def _remat() -> Program:
    return _scanned(jax.checkpoint(_layer, prevent_cse=False))


def _remat_dots() -> Program:
    """Unrolled layers of which the products are kept, each twice over: a call inside a call."""
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    layer = jax.checkpoint(lambda w, x: jax.jit(_layer)(w, _layer(w, x)), policy=policy)

    def loss(w: Any, x: Any) -> Any:
        for i in range(LAYERS):
            x = layer(jax.tree.map(lambda leaf: leaf[i], w), x)  # noqa: B023  (used at once)
        return jnp.mean(jnp.square(x))

    return Program(fn=jax.value_and_grad(loss), args=(_stack(), X), names=("w", "x"))


def _cond() -> Program:
    """A branch on a value, and one of several on a number, forward and backward."""

    def loss(w: Any, x: Any, n: Any) -> Any:
        first, second = w["up"][0], w["down"][0]
        h = jax.lax.cond(jnp.sum(x) > 0, lambda x: jnp.tanh(x @ first), lambda x: x @ first * 2, x)
        y = jax.lax.switch(n, [lambda h: h @ second, lambda h: jnp.sin(h) @ second, lambda h: h[:, :WIDTH]], h)
        return jnp.mean(jnp.square(y))

    return Program(fn=jax.value_and_grad(loss), args=(_stack(), X, np.int32(1)), names=("w", "x", "n"))


def _while() -> Program:
    """Power iteration: the vectors go round until a norm settles, and a loop of known length around it."""

    def power(a: Any, v: Any) -> Any:
        def more(state: Any) -> Any:
            _, change, i = state
            return (change > 1e-3) & (i < 5)

        def step(state: Any) -> Any:
            v, _, i = state
            w = a @ v
            w = w / jnp.linalg.norm(w, axis=0, keepdims=True)
            return w, jnp.abs(w - v).max(), i + 1

        v, change, i = jax.lax.while_loop(more, step, (v, jnp.float32(1), 0))
        return jax.lax.fori_loop(0, 2, lambda _, v: a @ v, v), change, i

    a = _weights(ROWS, ROWS)
    return Program(fn=power, args=(a @ a.T, X), names=("a", "v"))


def _experts(dispatch: str) -> Program:
    """A mixture of four experts, two of them for each token, and its router."""
    _, config = models.find("tiny-mixtral", compute_dtype="float32", experts=4, dispatch=dispatch)

    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(jnp.square(moe.mixture(config, w, x)))

    layer = {
        "w_router": _weights(WIDTH, 4),
        **{name: _weights(4, WIDTH, 2 * WIDTH, seed=seed) for seed, name in enumerate(("w_gate", "w_up"))},
        "w_down": _weights(4, 2 * WIDTH, WIDTH, seed=5),
    }
    return Program(fn=jax.value_and_grad(loss), args=(layer, _weights(8, 8, WIDTH, seed=6)), names=("w", "x"))


def _model(name: str, **sizes: Any) -> Program:
    """A whole model's loss and gradient, of random weights."""
    sizes = {"width": 16, "heads": 8, "kv_heads": 4, "head_dim": 2, "hidden": 16, "vocab": 16, "context": 8, **sizes}
    module, config = models.find(name, compute_dtype="float32", **sizes)
    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(partial(module.init, config), jax.random.key(1)).params
    params = jax.tree.map(lambda s: (1 + rng.normal(size=s.shape)).astype(np.float32) / np.float32(4), shapes)
    gradient: Callable[..., Any] = jax.value_and_grad(partial(module.loss, config))
    return Program(fn=gradient, args=(params, module.example_batch(config, batch=8)), names=("params", "batch"))


def _accumulation(parts: int | None) -> Program:
    def loss(w: Any, x: Any) -> Any:
        for i in range(LAYERS):
            x = _layer(jax.tree.map(lambda leaf: leaf[i], w), x)  # noqa: B023  (used at once)
        return jnp.mean(jnp.square(x))

    return Program(fn=accumulate(loss, steps=2, parts=parts), args=(_stack(), X), names=("w", "x"))


def _plain_accumulation() -> Program:
    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(jnp.square(jnp.tanh(x @ w["up"][0]) @ w["down"][0]))

    def accumulated(w: Any, x: Any) -> Any:
        def add(total: Any, chunk: Any) -> Any:
            value, gradients = jax.value_and_grad(loss)(w, chunk)
            return jax.tree.map(jnp.add, total, gradients), value

        total, values = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, w), x.reshape(2, ROWS // 2, WIDTH))
        return values.mean(), total

    return Program(fn=accumulated, args=(_stack(), X), names=("w", "x"))


LOOPS: dict[str, Callable[[], Program]] = {
    "scan": _scan,
    "remat": _remat,
    "remat of products, nested calls": _remat_dots,
    "cond": _cond,
    "while": _while,
    "experts, one-hot": lambda: _experts("one_hot"),
    "experts, ragged": lambda: _experts("ragged"),
    "accumulation": lambda: _accumulation(1),
    "accumulation in parts": lambda: _accumulation(8),
    "plain accumulation": _plain_accumulation,
}

# Whole models, whose compilation takes several seconds each.
LOOPED_MODELS: dict[str, Callable[[], Program]] = {
    "llama, scanned with remat": lambda: _model("tiny-llama", layers=2, scan=True, remat="full"),
    "gpt2, scanned with remat of products": lambda: _model("tiny-gpt2", layers=2, kv_heads=8, scan=True, remat="dots"),
    "mixtral, one-hot": lambda: _model("tiny-mixtral", layers=1, experts=4),
    "mixtral, ragged": lambda: _model("tiny-mixtral", layers=1, experts=4, dispatch="ragged"),
}
