"""Programs in Flax NNX, in its functional form: graph definition outside, state as a pytree."""
# ruff: noqa: D101, D103 (`subjects` says what each program is)

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from benchmarks.zoo.program import Program, Size, cross_entropy, images, labels, tokens


def _trained(
    make: Callable[[], nnx.Module],
    loss: Callable[..., jax.Array],
    batch: Callable[[], tuple[Any, ...]],
    transformation: optax.GradientTransformation,
    wrt: Any = nnx.Param,
) -> Program:
    """The train step of NNX's own tutorial, `nnx.split` and `nnx.merge` around it."""
    definition = nnx.graphdef(nnx.eval_shape(lambda: _pair(make, transformation, wrt)))

    def step(state: Any, *batch: Any) -> Any:
        model, optimizer = nnx.merge(definition, state)
        value, gradients = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, wrt))(model, *batch)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), value

    def arguments() -> tuple[Any, ...]:
        return (nnx.state(_pair(make, transformation, wrt)), *batch())

    return Program(step=step, arguments=arguments)


def _pair(make: Callable[[], nnx.Module], transformation: optax.GradientTransformation, wrt: Any) -> Any:
    model = make()
    return model, nnx.Optimizer(model, transformation, wrt=wrt)


class MLP(nnx.Module):
    def __init__(self, size: Size, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(size.width, 4 * size.width, rngs=rngs)
        self.second = nnx.Linear(4 * size.width, 16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(nnx.relu(self.first(x)))


def mlp(size: Size) -> Program:
    def rows() -> jax.Array:
        return jax.random.normal(jax.random.key(1), (size.batch, size.width))

    return _trained(
        lambda: MLP(size, nnx.Rngs(0)),
        lambda model, x, y: cross_entropy(model(x), y),
        lambda: (rows(), labels(size)),
        optax.adamw(1e-3),
    )


class CNN(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(3, width, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(width, 16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.avg_pool(nnx.relu(self.norm(self.conv(x))), (2, 2), (2, 2))
        return self.head(self.dropout(x.mean(axis=(1, 2))))


def cnn(size: Size) -> Program:
    return _trained(
        lambda: CNN(min(size.width, 256), nnx.Rngs(0, dropout=1)),
        lambda model, x, y: cross_entropy(model(x), y),
        lambda: (images(size), labels(size)),
        optax.sgd(0.1),
    )


class Block(nnx.Module):
    def __init__(self, size: Size, rngs: nnx.Rngs) -> None:
        width = size.width
        self.attention = nnx.MultiHeadAttention(size.heads, width, decode=False, rngs=rngs)
        self.norms = nnx.List([nnx.RMSNorm(width, rngs=rngs), nnx.RMSNorm(width, rngs=rngs)])
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norms[0](x), mask=nnx.make_causal_mask(jnp.ones(x.shape[:2])))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Decoder(nnx.Module):
    def __init__(self, size: Size, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(size.vocab, size.width, rngs=rngs)
        self.blocks = nnx.List([Block(size, rngs) for _ in range(size.layers)])

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(x)


def _next_token(model: Any, ids: jax.Array) -> jax.Array:
    return cross_entropy(model(ids)[:, :-1], ids[:, 1:])


def transformer(size: Size) -> Program:
    return _trained(lambda: Decoder(size, nnx.Rngs(0)), _next_token, lambda: (tokens(size),), optax.adamw(1e-3))


class Scanned(nnx.Module):
    def __init__(self, size: Size, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(size.vocab, size.width, rngs=rngs)

        @nnx.split_rngs(splits=size.layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs: nnx.Rngs) -> Block:
            return Block(size, rngs)

        self.blocks = make(rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def layer(x: jax.Array, block: Block) -> jax.Array:
            return block(x)

        return self.embed.attend(layer(self.embed(ids), self.blocks))


def scanned(size: Size) -> Program:
    return _trained(lambda: Scanned(size, nnx.Rngs(0)), _next_token, lambda: (tokens(size),), optax.adamw(1e-3))


class Adapted(nnx.Module):
    def __init__(self, size: Size, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(size.vocab, size.width, rngs=rngs)
        self.layers = nnx.List(
            [nnx.LoRALinear(size.width, size.width, lora_rank=8, rngs=rngs) for _ in range(size.layers)]
        )

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + nnx.gelu(layer(x))
        return self.embed.attend(x)


def lora(size: Size) -> Program:
    return _trained(
        lambda: Adapted(size, nnx.Rngs(0)), _next_token, lambda: (tokens(size),), optax.adamw(1e-3), wrt=nnx.LoRAParam
    )
