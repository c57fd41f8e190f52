"""Programs in Haiku."""
# ruff: noqa: D103 (`subjects` says what each program is)

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import optax

from benchmarks.zoo.program import Program, Size, cross_entropy, images, labels, tokens, trained


def mlp(size: Size) -> Program:
    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([size.width] * size.layers + [16])(x)))

    def rows() -> jax.Array:
        return jax.random.normal(jax.random.key(1), (size.batch, size.width))

    return trained(
        lambda params, x, y: cross_entropy(model.apply(params, x), y),
        lambda: model.init(jax.random.key(0), rows()),
        lambda: (rows(), labels(size)),
        optax.adam(1e-3),
    )


def resnet(size: Size) -> Program:
    model = hk.transform_with_state(lambda x: hk.nets.ResNet18(16)(x, is_training=True))
    optimizer = optax.sgd(0.1, momentum=0.9)

    def arguments() -> tuple[Any, ...]:
        params, state = model.init(jax.random.key(0), images(size))
        return (params, state, optimizer.init(params)), images(size), labels(size)

    def step(state: Any, x: jax.Array, y: jax.Array) -> Any:
        params, statistics, opt = state

        def loss(params: Any) -> Any:
            logits, changed = model.apply(params, statistics, None, x)
            return cross_entropy(logits, y), changed

        (value, new), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt = optimizer.update(gradients, opt, params)
        return (optax.apply_updates(params, updates), new, opt), value

    return Program(step=step, arguments=arguments)


def transformer(size: Size) -> Program:
    def forward(ids: jax.Array) -> jax.Array:
        scale = hk.initializers.VarianceScaling(1.0)
        x = hk.Embed(size.vocab, size.width)(ids)
        mask = jnp.tri(ids.shape[1], dtype=bool)[None, None]
        for _ in range(size.layers):
            y = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
            y = hk.MultiHeadAttention(size.heads, size.head_dim, w_init=scale, model_size=size.width)(y, y, y, mask)
            x = x + hk.dropout(hk.next_rng_key(), 0.1, y)
            y = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
            x = x + hk.Linear(size.width)(jax.nn.gelu(hk.Linear(4 * size.width)(y)))
        return hk.Linear(size.vocab)(x)

    model = hk.transform(forward)

    def loss(params: Any, ids: jax.Array, key: jax.Array) -> jax.Array:
        return cross_entropy(model.apply(params, key, ids)[:, :-1], ids[:, 1:])

    return trained(
        loss,
        lambda: model.init(jax.random.key(0), tokens(size)),
        lambda: (tokens(size), jax.random.key(3)),
        optax.adamw(1e-3),
    )


def lstm(size: Size) -> Program:
    def forward(ids: jax.Array) -> jax.Array:
        core = hk.LSTM(size.width)
        x = hk.Embed(size.vocab, size.width)(ids)
        hidden, _ = hk.dynamic_unroll(core, x, core.initial_state(ids.shape[0]), time_major=False)
        return hk.Linear(size.vocab)(hidden)

    model = hk.without_apply_rng(hk.transform(forward))
    return trained(
        lambda params, ids: cross_entropy(model.apply(params, ids)[:, :-1], ids[:, 1:]),
        lambda: model.init(jax.random.key(0), tokens(size)),
        lambda: (tokens(size),),
        optax.adam(1e-3),
    )
