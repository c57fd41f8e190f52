"""Programs in Flax Linen."""
# ruff: noqa: D101, D103 (`subjects` says what each program is)

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training import train_state

from benchmarks.zoo.program import Program, Size, cross_entropy, images, labels, tokens, trained


class MLP(nn.Module):
    width: int
    layers: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(self.layers):
            x = nn.relu(nn.Dense(self.width)(x))
        return nn.Dense(16)(x)


def mlp(size: Size) -> Program:
    model = MLP(size.width, size.layers)

    def rows() -> jax.Array:
        return jax.random.normal(jax.random.key(1), (size.batch, size.width))

    def arguments() -> tuple[Any, ...]:
        params = model.init(jax.random.key(0), rows())["params"]
        state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))
        return state, rows(), labels(size)

    def step(state: Any, x: jax.Array, y: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(lambda p: cross_entropy(state.apply_fn({"params": p}, x), y))(state.params)
        return state.apply_gradients(grads=gradients), loss

    return Program(step=step, arguments=arguments)


class CNN(nn.Module):
    width: int
    layers: int

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        for i in range(self.layers):
            x = nn.Conv(self.width * 2**i, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        return nn.Dense(16)(x.mean(axis=(1, 2)))


def cnn(size: Size) -> Program:
    model = CNN(min(size.width, 256), size.layers)
    optimizer = optax.sgd(0.1, momentum=0.9)

    def arguments() -> tuple[Any, ...]:
        variables = model.init(jax.random.key(0), images(size), train=False)
        state = (variables["params"], variables["batch_stats"], optimizer.init(variables["params"]))
        return state, images(size), labels(size)

    def step(state: Any, x: jax.Array, y: jax.Array) -> Any:
        params, statistics, opt = state

        def loss(params: Any) -> Any:
            variables = {"params": params, "batch_stats": statistics}
            logits, changed = model.apply(variables, x, train=True, mutable=["batch_stats"])
            return cross_entropy(logits, y), changed["batch_stats"]

        (value, new), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt = optimizer.update(gradients, opt, params)
        return (optax.apply_updates(params, updates), new, opt), value

    return Program(step=step, arguments=arguments)


class Block(nn.Module):
    size: Size
    causal: bool = True
    dropout: float = 0.0
    dtype: Any = jnp.float32
    decode: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, memory: jax.Array | None = None, *, train: bool = False) -> jax.Array:
        attention = {"num_heads": self.size.heads, "dtype": self.dtype}
        y = nn.LayerNorm(dtype=self.dtype)(x)
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2])) if self.causal and not self.decode else None
        x = x + nn.MultiHeadDotProductAttention(
            **attention, dropout_rate=self.dropout, deterministic=not train, decode=self.decode
        )(y, y, mask=mask)
        if memory is not None:
            y = nn.LayerNorm(dtype=self.dtype)(x)
            x = x + nn.MultiHeadDotProductAttention(**attention)(y, memory)
        y = nn.Dense(4 * self.size.width, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
        y = nn.Dense(self.size.width, dtype=self.dtype)(nn.gelu(y))
        return x + nn.Dropout(self.dropout, deterministic=not train)(y)


class Decoder(nn.Module):
    size: Size
    dropout: float = 0.0
    dtype: Any = jnp.float32
    decode: bool = False

    @nn.compact
    def __call__(self, ids: jax.Array, *, train: bool = False) -> jax.Array:
        embed = nn.Embed(self.size.vocab, self.size.width, dtype=self.dtype)
        x = embed(ids)
        for _ in range(self.size.layers):
            x = Block(self.size, dropout=self.dropout, dtype=self.dtype, decode=self.decode)(x, train=train)
        return embed.attend(nn.LayerNorm(dtype=self.dtype)(x))


def transformer(size: Size) -> Program:
    model = Decoder(size, dropout=0.1)

    def loss(params: Any, ids: jax.Array, key: jax.Array) -> jax.Array:
        logits = model.apply(params, ids, train=True, rngs={"dropout": key})
        return cross_entropy(logits[:, :-1], ids[:, 1:])

    return trained(
        loss,
        lambda: model.init(jax.random.key(0), tokens(size)),
        lambda: (tokens(size), jax.random.key(3)),
        optax.adamw(1e-3),
    )


class Scanned(nn.Module):
    size: Size

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        embed = nn.Embed(self.size.vocab, self.size.width)
        layers = nn.scan(
            nn.remat(_Carried, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.size.layers,
        )
        x, _ = layers(self.size)(embed(ids), None)
        return embed.attend(nn.LayerNorm()(x))


class _Carried(nn.Module):
    size: Size

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return Block(self.size)(x), None


def scan_remat(size: Size) -> Program:
    model = Scanned(size)
    return trained(
        lambda params, ids: cross_entropy(model.apply(params, ids)[:, :-1], ids[:, 1:]),
        lambda: model.init(jax.random.key(0), tokens(size)),
        lambda: (tokens(size),),
        optax.lion(1e-3),
    )


class LSTM(nn.Module):
    size: Size

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        x = nn.Embed(self.size.vocab, self.size.width)(ids)
        x = nn.RNN(nn.LSTMCell(self.size.width))(x)
        return nn.Dense(self.size.vocab)(x)


def lstm(size: Size) -> Program:
    model = LSTM(size)
    return trained(
        lambda params, ids: cross_entropy(model.apply(params, ids)[:, :-1], ids[:, 1:]),
        lambda: model.init(jax.random.key(0), tokens(size)),
        lambda: (tokens(size),),
        optax.adam(1e-3),
    )


class SequenceToSequence(nn.Module):
    size: Size

    @nn.compact
    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        embed = nn.Embed(self.size.vocab, self.size.width)
        memory, x = embed(source), embed(target)
        for _ in range(self.size.layers):
            memory = Block(self.size, causal=False)(memory)
        for _ in range(self.size.layers):
            x = Block(self.size)(x, memory)
        return embed.attend(x)


def seq2seq(size: Size) -> Program:
    model = SequenceToSequence(size)
    return trained(
        lambda params, source, target: cross_entropy(model.apply(params, source, target)[:, :-1], target[:, 1:]),
        lambda: model.init(jax.random.key(0), tokens(size), tokens(size, 1)),
        lambda: (tokens(size), tokens(size, 1)),
        optax.adafactor(1e-3),
    )


class ViT(nn.Module):
    size: Size

    @nn.compact
    def __call__(self, pixels: jax.Array) -> jax.Array:
        x = nn.Conv(self.size.width, (8, 8), strides=(8, 8), padding="VALID")(pixels)
        x = x.reshape(x.shape[0], -1, self.size.width)
        start = self.param("class", nn.initializers.zeros, (1, 1, self.size.width))
        x = jnp.concatenate([jnp.broadcast_to(start, (x.shape[0], 1, self.size.width)), x], axis=1)
        x = x + self.param("position", nn.initializers.normal(0.02), (1, *x.shape[1:]))
        for _ in range(self.size.layers):
            x = Block(self.size, causal=False)(x)
        return nn.Dense(16)(nn.LayerNorm()(x)[:, 0])


def vit(size: Size) -> Program:
    model = ViT(size)
    return trained(
        lambda params, x, y: cross_entropy(model.apply(params, x), y),
        lambda: model.init(jax.random.key(0), images(size)),
        lambda: (images(size), labels(size)),
        optax.adamw(1e-3),
    )


class Residual(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        y = nn.Conv(self.width, (3, 3))(nn.swish(nn.GroupNorm(8)(x)))
        y = y + nn.Dense(self.width)(nn.swish(time))[:, None, None]
        y = nn.Conv(self.width, (3, 3))(nn.swish(nn.GroupNorm(8)(y)))
        return y + (x if x.shape[-1] == self.width else nn.Conv(self.width, (1, 1))(x))


class UNet(nn.Module):
    width: int
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array, t: jax.Array) -> jax.Array:
        frequencies = jnp.exp(-jnp.arange(self.width // 2) * (jnp.log(1e4) / (self.width // 2)))
        angles = t[:, None] * frequencies
        time = nn.Dense(4 * self.width)(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1))
        x = nn.Conv(self.width, (3, 3))(x)
        skips = []
        for level in (1, 2):
            x = Residual(self.width * level)(x, time)
            skips.append(x)
            x = nn.Conv(self.width * level, (3, 3), strides=(2, 2))(x)
        n, h, w, c = x.shape
        flat = nn.GroupNorm(8)(x).reshape(n, h * w, c)
        x = x + nn.MultiHeadDotProductAttention(self.heads)(flat, flat).reshape(n, h, w, c)
        for level in (2, 1):
            n, h, w, c = x.shape
            x = jax.image.resize(x, (n, 2 * h, 2 * w, c), "nearest")
            x = jnp.concatenate([nn.Conv(self.width * level, (3, 3))(x), skips.pop()], axis=-1)
            x = Residual(self.width * level)(x, time)
        return nn.Conv(3, (3, 3))(nn.swish(nn.GroupNorm(8)(x)))


def unet(size: Size) -> Program:
    model = UNet(min(size.width, 256), size.heads)
    optimizer = optax.adamw(1e-4)

    def arguments() -> tuple[Any, ...]:
        params = model.init(jax.random.key(0), images(size), jnp.zeros(size.batch))
        average = jax.tree.map(jnp.copy, params)
        return (params, average, optimizer.init(params)), images(size), jax.random.key(3)

    def step(state: Any, clean: jax.Array, key: jax.Array) -> Any:
        params, average, opt = state
        for_time, for_noise = jax.random.split(key)
        time = jax.random.uniform(for_time, (size.batch,))
        noise = jax.random.normal(for_noise, clean.shape)
        alpha = jnp.cos(0.5 * jnp.pi * time)[:, None, None, None]
        sigma = jnp.sin(0.5 * jnp.pi * time)[:, None, None, None]

        def loss(params: Any) -> jax.Array:
            return jnp.mean((model.apply(params, alpha * clean + sigma * noise, 1000 * time) - noise) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        updates, opt = optimizer.update(gradients, opt, params)
        params = optax.apply_updates(params, updates)
        return (params, optax.incremental_update(params, average, 1e-3), opt), value

    return Program(step=step, arguments=arguments)


def mixed(size: Size) -> Program:
    """Master weights in float32; the loss is scaled up, and a step with infinities is skipped."""
    optimizer = optax.adamw(1e-3)

    def arguments() -> tuple[Any, ...]:
        params = Decoder(size, dtype=jnp.bfloat16).init(jax.random.key(0), tokens(size))
        return (params, optimizer.init(params), jnp.float32(2**15), jnp.int32(0)), tokens(size)

    def step(dtype: Any, state: Any, ids: jax.Array) -> Any:
        params, opt, scale, good = state
        model = Decoder(size, dtype=dtype)

        def loss(params: Any) -> jax.Array:
            return scale * cross_entropy(model.apply(params, ids)[:, :-1], ids[:, 1:])

        value, gradients = jax.value_and_grad(loss)(params)
        gradients = jax.tree.map(lambda g: g / scale, gradients)
        finite = jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(gradients)]).all()

        def update(_: None) -> Any:
            updates, new = optimizer.update(gradients, opt, params)
            return optax.apply_updates(params, updates), new

        params, opt = jax.lax.cond(finite, update, lambda _: (params, opt), None)
        grow = finite & (good >= 1999)
        scale = jnp.where(finite, jnp.where(grow, 2 * scale, scale), scale / 2)
        return (params, opt, scale, jnp.where(finite & ~grow, good + 1, 0)), value / scale

    return Program(step=partial(step, jnp.bfloat16), arguments=arguments, exact=partial(step, jnp.float32))


def decode(size: Size) -> Program:
    model = Decoder(size, decode=True)

    def arguments() -> tuple[Any, ...]:
        variables = model.init(jax.random.key(0), tokens(size))
        return variables["cache"], variables["params"], tokens(size)[:, :1]

    def step(cache: Any, params: Any, ids: jax.Array) -> Any:
        logits, changed = model.apply({"params": params, "cache": cache}, ids, mutable=["cache"])
        return changed["cache"], jnp.argmax(logits[:, -1], axis=-1)

    return Program(step=step, arguments=arguments)
