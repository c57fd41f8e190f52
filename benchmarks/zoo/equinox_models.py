"""Programs in Equinox: a module is a pytree; its arrays are the state."""
# ruff: noqa: D101, D103 (`subjects` says what each program is)

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from benchmarks.zoo.program import Program, Size, cross_entropy, images, labels, tokens


def _trained(
    make: Callable[[], Any],
    loss: Callable[..., jax.Array],
    batch: Callable[[], tuple[Any, ...]],
    optimizer: optax.GradientTransformation,
) -> Program:
    """Equinox's own train step; parts of the model that are no arrays (functions, sizes) stay outside the state."""
    static = eqx.partition(eqx.filter_eval_shape(make), lambda x: isinstance(x, jax.ShapeDtypeStruct))[1]

    def step(state: Any, *batch: Any) -> Any:
        arrays, opt = state
        model = eqx.combine(arrays, static)
        value, gradients = eqx.filter_value_and_grad(loss)(model, *batch)
        updates, opt = optimizer.update(gradients, opt, eqx.filter(model, eqx.is_inexact_array))
        return (eqx.filter(eqx.apply_updates(model, updates), eqx.is_array), opt), value

    def arguments() -> tuple[Any, ...]:
        model = make()
        return ((eqx.filter(model, eqx.is_array), optimizer.init(eqx.filter(model, eqx.is_inexact_array))), *batch())

    return Program(step=step, arguments=arguments)


def mlp(size: Size) -> Program:
    def rows() -> jax.Array:
        return jax.random.normal(jax.random.key(1), (size.batch, size.width))

    return _trained(
        lambda: eqx.nn.MLP(size.width, 16, 4 * size.width, size.layers, key=jax.random.key(0)),
        lambda model, x, y: cross_entropy(jax.vmap(model)(x), y),
        lambda: (rows(), labels(size)),
        optax.adamw(1e-3),
    )


class CNN(eqx.Module):
    convolutions: list[eqx.nn.Conv2d]
    pool: eqx.nn.MaxPool2d
    head: eqx.nn.Linear

    def __init__(self, size: Size, key: jax.Array) -> None:
        width = min(size.width, 256)
        keys = jax.random.split(key, size.layers + 1)
        inputs = (3,) + (width,) * (size.layers - 1)
        self.convolutions = [eqx.nn.Conv2d(i, width, 3, padding=1, key=k) for i, k in zip(inputs, keys, strict=False)]
        self.pool = eqx.nn.MaxPool2d(2, 2)
        self.head = eqx.nn.Linear(width, 16, key=keys[-1])

    def __call__(self, x: jax.Array) -> jax.Array:
        for convolution in self.convolutions:
            x = self.pool(jax.nn.relu(convolution(x)))
        return self.head(x.mean(axis=(1, 2)))


def cnn(size: Size) -> Program:
    return _trained(
        lambda: CNN(size, jax.random.key(0)),
        lambda model, x, y: cross_entropy(jax.vmap(model)(x), y),
        lambda: (images(size, first=True), labels(size)),
        optax.sgd(0.1),
    )


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    norms: list[eqx.nn.LayerNorm]
    mlp: eqx.nn.MLP

    def __init__(self, size: Size, key: jax.Array) -> None:
        first, second = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(size.heads, size.width, dropout_p=0.1, key=first)
        self.norms = [eqx.nn.LayerNorm(size.width) for _ in range(2)]
        self.mlp = eqx.nn.MLP(size.width, size.width, 4 * size.width, 1, jax.nn.gelu, key=second)

    def __call__(self, x: jax.Array, key: jax.Array) -> jax.Array:
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y, mask=jnp.tri(x.shape[0], dtype=bool), key=key)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


class Decoder(eqx.Module):
    embed: eqx.nn.Embedding
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, size: Size, key: jax.Array) -> None:
        first, last, *rest = jax.random.split(key, size.layers + 2)
        self.embed = eqx.nn.Embedding(size.vocab, size.width, key=first)
        self.blocks = [Block(size, k) for k in rest]
        self.head = eqx.nn.Linear(size.width, size.vocab, use_bias=False, key=last)

    def __call__(self, ids: jax.Array, key: jax.Array) -> jax.Array:
        x = jax.vmap(self.embed)(ids)
        for block, k in zip(self.blocks, jax.random.split(key, len(self.blocks)), strict=True):
            x = block(x, k)
        return jax.vmap(self.head)(x)


def transformer(size: Size) -> Program:
    def loss(model: Decoder, ids: jax.Array, key: jax.Array) -> jax.Array:
        logits = jax.vmap(model)(ids, jax.random.split(key, ids.shape[0]))
        return cross_entropy(logits[:, :-1], ids[:, 1:])

    return _trained(
        lambda: Decoder(size, jax.random.key(0)),
        loss,
        lambda: (tokens(size), jax.random.key(3)),
        optax.adamw(1e-3),
    )


class GRU(eqx.Module):
    embed: eqx.nn.Embedding
    cell: eqx.nn.GRUCell
    head: eqx.nn.Linear

    def __init__(self, size: Size, key: jax.Array) -> None:
        first, second, third = jax.random.split(key, 3)
        self.embed = eqx.nn.Embedding(size.vocab, size.width, key=first)
        self.cell = eqx.nn.GRUCell(size.width, size.width, key=second)
        self.head = eqx.nn.Linear(size.width, size.vocab, key=third)

    def __call__(self, ids: jax.Array) -> jax.Array:
        def one(hidden: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            hidden = self.cell(x, hidden)
            return hidden, hidden

        _, hidden = jax.lax.scan(one, jnp.zeros(self.cell.hidden_size), jax.vmap(self.embed)(ids))
        return jax.vmap(self.head)(hidden)


def gru(size: Size) -> Program:
    return _trained(
        lambda: GRU(size, jax.random.key(0)),
        lambda model, ids: cross_entropy(jax.vmap(model)(ids)[:, :-1], ids[:, 1:]),
        lambda: (tokens(size),),
        optax.adam(1e-3),
    )
