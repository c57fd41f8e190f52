"""Program shapes in plain JAX: recurrences, caches, loops, several losses, narrow numbers, graphs, rollouts."""
# ruff: noqa: D103 (`subjects` says what each program is)

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

import models.moe
from benchmarks.zoo import optimizers
from benchmarks.zoo.program import Program, Size, cross_entropy, tokens, trained

# Trained programs.


def lora(size: Size) -> Program:
    """The base is an argument of its own, and is not trained."""
    optimizer = optax.adamw(1e-3)
    rank = 8

    def arguments() -> tuple[Any, ...]:
        base = optimizers.parameters(size)
        adapters = [
            {
                "a": jax.random.normal(jax.random.key(i), (size.width, rank)) / size.width**0.5,
                "b": jnp.zeros((rank, 4 * size.width)),
            }
            for i in range(size.layers)
        ]
        return (adapters, optimizer.init(adapters)), base, tokens(size)

    def step(state: Any, base: Any, ids: jax.Array) -> Any:
        adapters, opt = state

        def loss(adapters: Any) -> jax.Array:
            layers = [
                {**layer, "up": layer["up"] + adapter["a"] @ adapter["b"]}
                for layer, adapter in zip(base["layers"], adapters, strict=True)
            ]
            return optimizers.loss({**base, "layers": layers}, ids)

        value, gradients = jax.value_and_grad(loss)(adapters)
        updates, opt = optimizer.update(gradients, opt, adapters)
        return (optax.apply_updates(adapters, updates), opt), value

    return Program(step=step, arguments=arguments)


def ragged_moe(size: Size) -> Program:
    config = replace(
        models.moe.CONFIGS["tiny-mixtral"],
        layers=size.layers,
        vocab=size.vocab,
        context=size.sequence,
        width=size.width,
        heads=size.heads,
        kv_heads=size.heads,
        head_dim=size.head_dim,
        hidden=2 * size.width,
        experts=4,
        dispatch="ragged",
        compute_dtype="float32",
    )

    def arguments() -> tuple[Any, ...]:
        return models.moe.init(config, jax.random.key(0)), models.moe.example_batch(config, batch=size.batch)

    return Program(step=models.moe.train_step(config), arguments=arguments)


def ssm(size: Size) -> Program:
    """A diagonal linear recurrence, as S5's: h[t] = a·h[t−1] + b·u[t]."""

    def init() -> Any:
        keys = jax.random.split(jax.random.key(0), 2 + 3 * size.layers)

        def matrix(k: int, shape: tuple[int, int]) -> jax.Array:
            return jax.random.normal(keys[k], shape) / shape[0] ** 0.5

        return {
            "embed": matrix(0, (size.vocab, size.width)),
            "layers": [
                {
                    "decay": jnp.linspace(-4.0, 4.0, 2 * size.width),
                    "b": matrix(2 + 3 * i, (size.width, 2 * size.width)),
                    "c": matrix(3 + 3 * i, (2 * size.width, size.width)),
                    "d": matrix(4 + 3 * i, (size.width, size.width)),
                }
                for i in range(size.layers)
            ],
        }

    def loss(params: Any, ids: jax.Array) -> jax.Array:
        x = params["embed"][ids]
        for layer in params["layers"]:
            u = x @ layer["b"]
            a = jnp.broadcast_to(jax.nn.sigmoid(layer["decay"]), u.shape)

            def join(left: Any, right: Any) -> Any:
                return left[0] * right[0], right[0] * left[1] + right[1]

            _, h = lax.associative_scan(join, (a, u), axis=1)
            x = x + jax.nn.gelu(h @ layer["c"]) * jax.nn.sigmoid(x @ layer["d"])
        return cross_entropy((x @ params["embed"].T)[:, :-1], ids[:, 1:])

    return trained(loss, init, lambda: (tokens(size),), optax.adamw(1e-3))


def lstm(size: Size) -> Program:
    def init() -> Any:
        keys = jax.random.split(jax.random.key(0), 3)
        width = size.width
        return {
            "embed": jax.random.normal(keys[0], (size.vocab, width)),
            "w": jax.random.normal(keys[1], (2 * width, 4 * width)) / (2 * width) ** 0.5,
            "b": jnp.zeros(4 * width),
            "out": jax.random.normal(keys[2], (width, size.vocab)) / width**0.5,
        }

    def loss(params: Any, ids: jax.Array) -> jax.Array:
        x = params["embed"][ids].swapaxes(0, 1)

        def cell(carry: Any, x: jax.Array) -> Any:
            h, c = carry
            i, f, g, o = jnp.split(jnp.concatenate([x, h], axis=-1) @ params["w"] + params["b"], 4, axis=-1)
            c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        start = jnp.zeros((ids.shape[0], size.width))
        _, hidden = lax.scan(cell, (start, start), x)
        return cross_entropy((hidden @ params["out"])[:-1], ids.T[1:])

    return trained(loss, init, lambda: (tokens(size),), optax.adam(1e-3))


def two_losses(size: Size) -> Program:
    """A generator and a discriminator, alternately wrong: two gradients in one step."""
    optimizer = optax.adam(2e-4, b1=0.5)
    hidden = 4 * size.width

    def dense(key: int, *widths: int) -> Any:
        keys = jax.random.split(jax.random.key(key), len(widths))
        pairs = zip(keys, widths, widths[1:], strict=False)
        return [{"w": jax.random.normal(k, (i, o)) / i**0.5, "b": jnp.zeros(o)} for k, i, o in pairs]

    def run(params: Any, x: jax.Array) -> jax.Array:
        for layer in params[:-1]:
            x = jax.nn.leaky_relu(x @ layer["w"] + layer["b"])
        return x @ params[-1]["w"] + params[-1]["b"]

    def arguments() -> tuple[Any, ...]:
        g, d = dense(0, size.width, hidden, size.width), dense(1, size.width, hidden, 1)
        real = jax.random.normal(jax.random.key(2), (size.batch, size.width))
        return (g, d, optimizer.init(g), optimizer.init(d)), real, jax.random.key(3)

    def step(state: Any, real: jax.Array, key: jax.Array) -> Any:
        g, d, g_opt, d_opt = state
        noise = jax.random.normal(key, real.shape)

        def of_d(d: Any) -> jax.Array:
            return jax.nn.softplus(-run(d, real)).mean() + jax.nn.softplus(run(d, run(g, noise))).mean()

        def of_g(g: Any) -> jax.Array:
            return jax.nn.softplus(-run(d, run(g, noise))).mean()

        d_loss, d_gradients = jax.value_and_grad(of_d)(d)
        g_loss, g_gradients = jax.value_and_grad(of_g)(g)
        d_updates, d_opt = optimizer.update(d_gradients, d_opt)
        g_updates, g_opt = optimizer.update(g_gradients, g_opt)
        state = (optax.apply_updates(g, g_updates), optax.apply_updates(d, d_updates), g_opt, d_opt)
        return state, (g_loss, d_loss)

    return Program(step=step, arguments=arguments)


def ensemble(size: Size) -> Program:
    """Eight models at once, each on the same batch."""
    members = 8

    def init() -> Any:
        keys = jax.random.split(jax.random.key(0), members)

        def one(key: jax.Array) -> Any:
            first, second = jax.random.split(key)
            return {
                "w": jax.random.normal(first, (size.width, size.width)) / size.width**0.5,
                "v": jax.random.normal(second, (size.width, 1)),
            }

        return jax.vmap(one)(keys)

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        def member(params: Any) -> jax.Array:
            return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2)

        return jax.vmap(member)(params).sum()

    def batch() -> tuple[jax.Array, jax.Array]:
        x = jax.random.normal(jax.random.key(1), (size.batch, size.width))
        return x, x[:, :1]

    return trained(loss, init, batch, optax.adam(1e-3))


def fp8(size: Size) -> Program:
    """Operands of every product in float8_e4m3fn, cotangents in float8_e5m2, scaled by the last step's largest."""
    e4m3, e5m2 = jnp.float8_e4m3fn, jnp.float8_e5m2

    @jax.custom_vjp
    def narrow(x: jax.Array, scale: jax.Array) -> jax.Array:
        return (x / scale).astype(e4m3).astype(x.dtype) * scale

    def forward(x: jax.Array, scale: jax.Array) -> Any:
        return narrow(x, scale), None

    def backward(_: None, g: jax.Array) -> Any:
        scale = jnp.maximum(jnp.abs(g).max(), 1e-12) / 57344.0
        return (g / scale).astype(e5m2).astype(g.dtype) * scale, jnp.zeros(())

    narrow.defvjp(forward, backward)
    optimizer = optax.adamw(1e-3)

    def arguments() -> tuple[Any, ...]:
        params = optimizers.parameters(size)
        scales = [jnp.float32(1 / 64)] * size.layers
        return (params, scales, optimizer.init(params)), tokens(size)

    def step(state: Any, ids: jax.Array) -> Any:
        params, scales, opt = state

        def loss(params: Any) -> jax.Array:
            x = params["embed"][ids]
            for layer, scale in zip(params["layers"], scales, strict=True):
                product = lax.dot_general(
                    (x / scale).astype(e4m3),
                    lax.stop_gradient(layer["gate"] / scale).astype(e4m3),
                    (((2,), (0,)), ((), ())),
                    preferred_element_type=jnp.float32,
                )
                y = narrow(x, scale) @ narrow(layer["up"], scale) + lax.stop_gradient(product) * scale * scale
                x = x + jax.nn.silu(y) @ layer["down"]
            return cross_entropy((x @ params["embed"].T)[:, :-1], ids[:, 1:])

        value, gradients = jax.value_and_grad(loss)(params)
        updates, opt = optimizer.update(gradients, opt, params)
        scales = [jnp.abs(layer["up"]).max() / 448.0 for layer in params["layers"]]
        return (optax.apply_updates(params, updates), scales, opt), value

    return Program(step=step, arguments=arguments)


def gnn(size: Size) -> Program:
    """A graph convolution: messages along edges, summed at their targets."""
    nodes, edges = size.batch * size.sequence, 4 * size.batch * size.sequence

    def init() -> Any:
        keys = jax.random.split(jax.random.key(0), size.layers)
        return [
            {"w": jax.random.normal(k, (2, size.width, size.width)) / size.width**0.5, "b": jnp.zeros(size.width)}
            for k in keys
        ]

    def loss(params: Any, x: jax.Array, source: jax.Array, target: jax.Array, y: jax.Array) -> jax.Array:
        for layer in params:
            messages = jax.nn.relu(x[source] @ layer["w"][0])
            arrived = jax.ops.segment_sum(messages, target, num_segments=nodes)
            degree = jax.ops.segment_sum(jnp.ones(edges), target, num_segments=nodes)
            x = jax.nn.relu(x @ layer["w"][1] + arrived / jnp.maximum(degree, 1)[:, None] + layer["b"])
        return cross_entropy(x, y)

    def batch() -> tuple[jax.Array, ...]:
        keys = jax.random.split(jax.random.key(1), 4)
        return (
            jax.random.normal(keys[0], (nodes, size.width)),
            jax.random.randint(keys[1], (edges,), 0, nodes),
            jax.random.randint(keys[2], (edges,), 0, nodes),
            jax.random.randint(keys[3], (nodes,), 0, size.width),
        )

    return trained(loss, init, batch, optax.adam(1e-3))


def reinforce(size: Size) -> Program:
    """Pendulums pushed one of three ways, for `sequence` steps; returns against a learned baseline."""

    def init() -> Any:
        keys = jax.random.split(jax.random.key(0), 3)
        return {
            "in": jax.random.normal(keys[0], (3, size.width)),
            "policy": jax.random.normal(keys[1], (size.width, 3)) * 0.01,
            "value": jax.random.normal(keys[2], (size.width, 1)) * 0.01,
        }

    def policy(params: Any, angle: jax.Array, speed: jax.Array) -> Any:
        seen = jnp.stack([jnp.cos(angle), jnp.sin(angle), speed], axis=-1)
        hidden = jnp.tanh(seen @ params["in"])
        return hidden @ params["policy"], (hidden @ params["value"])[..., 0]

    def loss(params: Any, angles: jax.Array, key: jax.Array) -> jax.Array:
        def one(carry: Any, key: jax.Array) -> Any:
            angle, speed = carry
            logits, value = policy(params, angle, speed)
            action = jax.random.categorical(key, logits)
            speed = speed + 0.05 * (15 * jnp.sin(angle) + 3 * (action - 1.0))
            angle = angle + 0.05 * speed
            chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], axis=-1)[:, 0]
            return (angle, speed), (chosen, value, -(angle**2) - 0.1 * speed**2)

        keys = jax.random.split(key, size.sequence)
        _, (chosen, value, reward) = lax.scan(one, (angles, jnp.zeros_like(angles)), keys)
        returns = lax.stop_gradient(jnp.cumsum(reward[::-1], axis=0)[::-1])
        advantage = returns - lax.stop_gradient(value)
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
        return -(chosen * advantage).mean() + 1e-3 * ((value - returns) ** 2).mean()

    def batch() -> tuple[jax.Array, jax.Array]:
        return jax.random.normal(jax.random.key(1), (size.batch * 8,)), jax.random.key(3)

    return trained(loss, init, batch, optax.adam(1e-3))


# Programs that only answer.


def _decoder(size: Size, params: Any, ids: jax.Array, caches: Any, position: jax.Array) -> tuple[jax.Array, Any]:
    """New tokens at `position`, attending to the caches [batch, sequence, heads, head_dim] as they are then."""
    x = params["embed"][ids]
    batch, new, width = x.shape
    rows = position + jnp.arange(new)
    seen = jnp.arange(size.sequence)[None, :] <= rows[:, None]
    written = []
    for layer, (keys, values) in zip(params["layers"], caches, strict=True):
        q, k, v = ((x @ layer[name]).reshape(batch, new, size.heads, size.head_dim) for name in ("q", "k", "v"))
        keys = lax.dynamic_update_slice(keys, k, (0, position, 0, 0))
        values = lax.dynamic_update_slice(values, v, (0, position, 0, 0))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, keys) / size.head_dim**0.5
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e9), axis=-1)
        x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, values).reshape(batch, new, width) @ layer["o"]
        x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
        written.append((keys, values))
    return x @ params["embed"].T, written


def _decoder_arguments(size: Size) -> tuple[Any, Any]:
    keys = iter(jax.random.split(jax.random.key(0), 1 + 6 * size.layers))

    def matrix(rows: int, columns: int) -> jax.Array:
        return jax.random.normal(next(keys), (rows, columns)) / rows**0.5

    width = size.width
    params = {
        "embed": matrix(size.vocab, width),
        "layers": [
            {
                **{name: matrix(width, width) for name in ("q", "k", "v", "o")},
                "up": matrix(width, 4 * width),
                "down": matrix(4 * width, width),
            }
            for _ in range(size.layers)
        ],
    }
    shape = (size.batch, size.sequence, size.heads, size.head_dim)
    return params, [(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(size.layers)]


def prefill(size: Size) -> Program:
    def step(caches: Any, params: Any, ids: jax.Array) -> Any:
        logits, caches = _decoder(size, params, ids, caches, jnp.int32(0))
        return caches, logits[:, -1].argmax(-1)

    def arguments() -> tuple[Any, ...]:
        params, caches = _decoder_arguments(size)
        return caches, params, tokens(size)[:, : size.sequence // 2]

    return Program(step=step, arguments=arguments)


def decode(size: Size) -> Program:
    def step(caches: Any, params: Any, ids: jax.Array, position: jax.Array) -> Any:
        logits, caches = _decoder(size, params, ids[:, None], caches, position)
        return caches, logits[:, 0].argmax(-1)

    def arguments() -> tuple[Any, ...]:
        params, caches = _decoder_arguments(size)
        return caches, params, tokens(size)[:, 0], jnp.int32(size.sequence // 2)

    return Program(step=step, arguments=arguments)


def generate(size: Size) -> Program:
    def step(caches: Any, params: Any, ids: jax.Array) -> Any:
        out = jnp.zeros((size.batch, size.sequence), jnp.int32).at[:, 0].set(ids)

        def unfinished(carry: Any) -> jax.Array:
            position, out, _ = carry
            return (position < size.sequence - 1) & (out[:, position] != size.vocab - 1).any()

        def one(carry: Any) -> Any:
            position, out, caches = carry
            last = lax.dynamic_slice(out, (0, position), (size.batch, 1))
            logits, caches = _decoder(size, params, last, caches, position)
            return position + 1, lax.dynamic_update_slice(out, logits.argmax(-1), (0, position + 1)), caches

        _, out, caches = lax.while_loop(unfinished, one, (jnp.int32(0), out, caches))
        return caches, out

    def arguments() -> tuple[Any, ...]:
        params, caches = _decoder_arguments(size)
        return caches, params, tokens(size)[:, 0]

    return Program(step=step, arguments=arguments)


def int8(size: Size) -> Program:
    """Weights in int8 with a scale per output; activations are rounded row by row, products sum in int32."""
    hidden = 4 * size.width

    def product(x: jax.Array, weight: Any) -> jax.Array:
        scale = jnp.abs(x).max(-1, keepdims=True) / 127
        narrow = jnp.round(x / scale).astype(jnp.int8)
        whole = lax.dot_general(narrow, weight["w"], (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32)
        return whole * scale * weight["scale"]

    def step(params: Any, x: jax.Array) -> jax.Array:
        for layer in params:
            x = x + product(jax.nn.gelu(product(x, layer["up"])), layer["down"])
        return x

    def weight(key: jax.Array, rows: int, columns: int) -> Any:
        whole = jax.random.randint(key, (rows, columns), -127, 128).astype(jnp.int8)
        return {"w": whole, "scale": jnp.full(columns, 1 / (127 * rows**0.5))}

    def arguments() -> tuple[Any, ...]:
        keys = jax.random.split(jax.random.key(0), 2 * size.layers)
        params = [
            {
                "up": weight(keys[2 * i], size.width, hidden),
                "down": weight(keys[2 * i + 1], hidden, size.width),
            }
            for i in range(size.layers)
        ]
        return params, jax.random.normal(jax.random.key(1), (size.batch * size.sequence, size.width))

    return Program(step=step, arguments=arguments, donate=())
