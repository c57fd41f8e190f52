"""Train steps of other kinds that no price was fitted to: images, retrieval, recurrences in pieces, rows of tables.

Plain JAX, as such programs are published; nothing says how they are sharded, and nothing is allocated: states and
batches are abstract arrays. Each builder takes the number of devices and returns a step and its arguments: the state,
which it returns in the same shapes with the loss, and a batch.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.zoo.program import cross_entropy

Array = jax.Array
Weights = dict[str, Any]
Program = tuple[Callable[..., Any], tuple[Any, ...]]

HALF = jnp.bfloat16
MASKED = -1e30


def abstract(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """An array of float32, unless said."""
    return jax.ShapeDtypeStruct(shape, dtype)


def integers(*shape: int) -> jax.ShapeDtypeStruct:
    """Ids, labels, places."""
    return abstract(*shape, dtype=jnp.int32)


def trained(loss: Callable[..., Array], params: Any, batch: tuple[Any, ...], optimizer: Any = None) -> Program:
    """The usual step: state = (parameters, optimizer state)."""
    optimizer = optimizer or optax.adamw(1e-3)

    def step(state: Any, *batch: Any) -> Any:
        params, moments = state
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return step, ((params, jax.eval_shape(optimizer.init, params)), *batch)


def half(weights: Any) -> Any:
    """Weights in the dtype of products."""
    return jax.tree.map(lambda x: x.astype(HALF), weights)


def normed(x: Array, scale: Array | None = None) -> Array:
    """A layer norm in float32."""
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    found = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-6)
    return (found if scale is None else found * scale).astype(x.dtype)


def attended(x: Array, weights: Weights, heads: int, *, causal: bool, bias: Array | None = None) -> Array:
    """Attention of one product for queries, keys and values: (batch, length, width)."""
    batch, length, width = x.shape
    q, k, v = (part.reshape(batch, length, heads, width // heads) for part in jnp.split(x @ weights["qkv"], 3, axis=-1))
    scores = (jnp.einsum("bqhd,bkhd->bhqk", q, k) * (width // heads) ** -0.5).astype(jnp.float32)
    if bias is not None:
        scores = scores + bias
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, MASKED)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1).astype(x.dtype), v)
    return mixed.reshape(x.shape) @ weights["out"]


def fed(x: Array, weights: Weights) -> Array:
    """A feed-forward block."""
    return jax.nn.gelu(x @ weights["up"]) @ weights["down"]


def block_weights(width: int, features: int) -> Weights:
    """Of a block of attention and a feed-forward one."""
    return {
        "qkv": abstract(width, 3 * width),
        "out": abstract(width, width),
        "up": abstract(width, features),
        "down": abstract(features, width),
        "norms": abstract(2, width),
    }


def block(x: Array, weights: Weights, heads: int, *, causal: bool) -> Array:
    """A block with norms ahead."""
    first, second = weights["norms"]
    w = half(weights)
    x = x + attended(normed(x, first), w, heads, causal=causal)
    return x + fed(normed(x, second), w)


def half_depth(devices: int) -> Program:
    """Every other block takes half of each sequence's tokens, the ones that a router likes best (mixture of depths)."""
    width, heads, layers, vocabulary, length, batch = 1024, 16, 4, 32_000, 1024, 8 * devices
    rows = jnp.arange(batch)[:, None]

    def loss(params: Weights, ids: Array, labels: Array) -> Array:
        h = params["embed"].astype(HALF)[ids]
        for i, layer in enumerate(params["layers"]):
            if i % 2 == 0:
                h = block(h, layer["block"], heads, causal=True)
                continue
            liked = (h @ layer["router"].astype(HALF)).astype(jnp.float32)
            places = jnp.sort(jax.lax.top_k(liked, length // 2)[1], axis=-1)
            taken = jnp.take_along_axis(h, places[..., None], axis=1)
            gate = jax.nn.sigmoid(jnp.take_along_axis(liked, places, axis=1))[..., None].astype(HALF)
            h = h.at[rows, places].add((block(taken, layer["block"], heads, causal=True) - taken) * gate)
        return cross_entropy(normed(h, params["norm"]) @ params["embed"].T.astype(HALF), labels)

    layer = {"block": block_weights(width, 4 * width), "router": abstract(width)}
    params = {"embed": abstract(vocabulary, width), "layers": [layer] * layers, "norm": abstract(width)}
    return trained(loss, params, (integers(batch, length), integers(batch, length)))


def dropped(devices: int) -> Program:
    """A decoder with dropout, learned positions and a tied head."""
    width, heads, layers, vocabulary, length, batch = 1024, 16, 4, 50_304, 1024, 4 * devices

    def drop(key: Array, x: Array) -> Array:
        return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0).astype(x.dtype)

    def loss(params: Weights, ids: Array, labels: Array, key: Array) -> Array:
        keys = jax.random.split(key, 2 * layers + 1)
        h = drop(keys[-1], (params["embed"][ids] + params["places"]).astype(HALF))
        for i, layer in enumerate(params["layers"]):
            first, second = layer["norms"]
            w = half(layer)
            h = h + drop(keys[2 * i], attended(normed(h, first), w, heads, causal=True))
            h = h + drop(keys[2 * i + 1], fed(normed(h, second), w))
        return cross_entropy(normed(h, params["norm"]) @ params["embed"].T.astype(HALF), labels)

    params = {
        "embed": abstract(vocabulary, width),
        "places": abstract(length, width),
        "layers": [block_weights(width, 4 * width)] * layers,
        "norm": abstract(width),
    }
    batches = integers(batch, length), integers(batch, length), abstract(2, dtype=jnp.uint32)
    return trained(loss, params, batches)


def diffusion(devices: int) -> Program:
    """A diffusion transformer whose norms are scaled and shifted by time and class."""
    width, heads, layers, length, batch, channels = 1152, 16, 4, 256, 32 * devices, 16

    def loss(params: Weights, clean: Array, noise: Array, time: Array, label: Array) -> Array:
        angle = (time * jnp.pi / 2)[:, None, None]
        noisy = jnp.cos(angle) * clean + jnp.sin(angle) * noise
        waves = time[:, None] * jnp.exp(-9.2 * jnp.arange(128) / 128)
        about = jnp.concatenate([jnp.sin(waves), jnp.cos(waves)], axis=-1)
        about = jax.nn.silu(about @ params["time"]) @ params["time_out"] + params["classes"][label]
        about = jax.nn.silu(about).astype(HALF)
        h = noisy.astype(HALF) @ params["patch"].astype(HALF) + params["places"].astype(HALF)
        for layer in params["layers"]:
            w = half(layer)
            scale, shift, gate, scale2, shift2, gate2 = jnp.split((about @ w["modulation"])[:, None], 6, axis=-1)
            h = h + gate * attended(normed(h) * (1 + scale) + shift, w, heads, causal=False)
            h = h + gate2 * fed(normed(h) * (1 + scale2) + shift2, w)
        found = (normed(h) @ params["unpatch"].astype(HALF)).astype(jnp.float32)
        return jnp.square(found - noise).mean()

    layer = {**block_weights(width, 4 * width), "modulation": abstract(width, 6 * width)}
    params = {
        "patch": abstract(channels, width),
        "places": abstract(length, width),
        "time": abstract(256, width),
        "time_out": abstract(width, width),
        "classes": abstract(1001, width),
        "layers": [layer] * layers,
        "unpatch": abstract(width, channels),
    }
    image = abstract(batch, length, channels)
    return trained(loss, params, (image, image, abstract(batch), integers(batch)))


def mixer(devices: int) -> Program:
    """Perceptrons along patches and along channels; momentum."""
    width, patches, layers, batch = 1024, 196, 6, 64 * devices

    def loss(params: Weights, images: Array, labels: Array) -> Array:
        h = images.astype(HALF) @ params["patch"].astype(HALF)
        for layer in params["layers"]:
            first, second = layer["norms"]
            h = h + fed(normed(h, first).swapaxes(1, 2), half(layer["patches"])).swapaxes(1, 2)
            h = h + fed(normed(h, second), half(layer["channels"]))
        return cross_entropy(normed(h).mean(1) @ params["head"].astype(HALF), labels)

    layer = {
        "patches": {"up": abstract(patches, 512), "down": abstract(512, patches)},
        "channels": {"up": abstract(width, 4 * width), "down": abstract(4 * width, width)},
        "norms": abstract(2, width),
    }
    params = {"patch": abstract(768, width), "layers": [layer] * layers, "head": abstract(width, 1000)}
    optimizer = optax.sgd(1e-2, momentum=0.9)
    return trained(loss, params, (abstract(batch, patches, 768), integers(batch)), optimizer)


def recommender(devices: int) -> Program:
    """Rows of many tables, their products with each other, and perceptrons (DLRM); Adagrad."""
    width, batch, tables = 128, 8192 * devices, 8

    def loss(params: Weights, dense: Array, ids: Array, clicked: Array) -> Array:
        h = dense
        for w in params["bottom"]:
            h = jax.nn.relu(h @ w)
        rows = jnp.stack([h, *(table[ids[:, i]] for i, table in enumerate(params["tables"]))], axis=1)
        left, right = jnp.triu_indices(tables + 1, 1)
        h = jnp.concatenate([h, jnp.einsum("bie,bje->bij", rows, rows)[:, left, right]], axis=-1)
        *hidden, last = params["top"]
        for w in hidden:
            h = jax.nn.relu(h @ w)
        return optax.sigmoid_binary_cross_entropy((h @ last)[:, 0], clicked).mean()

    params = {
        "tables": [abstract(1_000_000 if i < tables // 2 else 10_000, width) for i in range(tables)],
        "bottom": [abstract(13, 512), abstract(512, 256), abstract(256, width)],
        "top": [abstract(width + 36, 1024), abstract(1024, 1024), abstract(1024, 1)],
    }
    batches = abstract(batch, 13), integers(batch, tables), abstract(batch)
    return trained(loss, params, batches, optax.adagrad(1e-2))


def chunked_recurrence(devices: int) -> Program:
    """Linear attention with decays: products within pieces of the sequence, a short scan between them (RetNet)."""
    width, heads, layers, vocabulary, length, batch, piece = 2048, 16, 4, 32_000, 2048, 2 * devices, 128
    pieces, each, features = length // piece, width // heads, 5632
    decay = jnp.log(1 - 2.0 ** (-5 - jnp.arange(heads)))
    at = jnp.arange(piece)

    def mixed(q: Array, k: Array, v: Array) -> Array:
        after = jnp.where(at[:, None] >= at, jnp.exp(decay[:, None, None] * (at[:, None] - at)), 0.0).astype(HALF)
        within = jnp.einsum("bnhij,bnjhd->bnihd", jnp.einsum("bnihd,bnjhd->bnhij", q, k) * after, v)
        faded = k * jnp.exp(decay * (piece - 1 - at)[:, None])[:, :, None].astype(HALF)
        sums = jnp.einsum("bnjhd,bnjhe->bnhde", faded, v).astype(jnp.float32)

        def carry(state: Array, one: Array) -> tuple[Array, Array]:
            return state * jnp.exp(decay * piece)[:, None, None] + one, state

        _, states = jax.lax.scan(carry, jnp.zeros(sums[:, 0].shape), sums.swapaxes(0, 1))
        queries = q * jnp.exp(decay * (at + 1)[:, None])[:, :, None].astype(HALF)
        return within + jnp.einsum("bnihd,bnhde->bnihe", queries, states.swapaxes(0, 1).astype(HALF))

    def loss(params: Weights, ids: Array, labels: Array) -> Array:
        h = params["embed"].astype(HALF)[ids]
        for layer in params["layers"]:
            first, second = layer["norms"]
            w = half(layer)
            x = normed(h, first)
            q, k, v = ((x @ w[name]).reshape(batch, pieces, piece, heads, each) for name in ("q", "k", "v"))
            h = h + (normed(mixed(q, k, v)).reshape(h.shape) * jax.nn.silu(x @ w["gate"])) @ w["out"]
            x = normed(h, second)
            h = h + (jax.nn.silu(x @ w["gated"]) * (x @ w["up"])) @ w["down"]
        return cross_entropy(normed(h, params["norm"]) @ params["head"].astype(HALF), labels)

    layer = {
        **{name: abstract(width, width) for name in ("q", "k", "v", "gate", "out")},
        "gated": abstract(width, features),
        "up": abstract(width, features),
        "down": abstract(features, width),
        "norms": abstract(2, width),
    }
    params = {
        "embed": abstract(vocabulary, width),
        "layers": [layer] * layers,
        "norm": abstract(width),
        "head": abstract(width, vocabulary),
    }
    return trained(loss, params, (integers(batch, length), integers(batch, length)))


def contrastive(devices: int) -> Program:
    """Two towers whose scores are of every image and every text of the batch (CLIP)."""
    width, heads, layers, batch, patches, tokens = 768, 12, 3, 128 * devices, 196, 77

    def tower(weights: Weights, h: Array, *, causal: bool) -> Array:
        h = h + weights["places"].astype(HALF)
        for layer in weights["layers"]:
            h = block(h, layer, heads, causal=causal)
        return h

    def unit(x: Array) -> Array:
        x = x.astype(jnp.float32)
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    def loss(params: Weights, images: Array, texts: Array) -> Array:
        image, text = params["image"], params["text"]
        seen = tower(image, images.astype(HALF) @ image["patch"].astype(HALF), causal=False)
        read = tower(text, text["embed"].astype(HALF)[texts], causal=True)
        seen = unit(seen.mean(1) @ image["out"].astype(HALF))
        read = unit(read[jnp.arange(batch), texts.argmax(-1)] @ text["out"].astype(HALF))
        scores, own = jnp.exp(params["scale"]) * seen @ read.T, jnp.arange(batch)
        return (cross_entropy(scores, own) + cross_entropy(scores.T, own)) / 2

    blocks = [block_weights(width, 4 * width)] * layers
    out = {"layers": blocks, "out": abstract(width, 512)}
    params = {
        "image": {**out, "patch": abstract(768, width), "places": abstract(patches, width)},
        "text": {**out, "embed": abstract(49_408, width), "places": abstract(tokens, width)},
        "scale": abstract(),
    }
    return trained(loss, params, (abstract(batch, patches, 768), integers(batch, tokens)))


def windows(devices: int) -> Program:
    """Attention in windows of an image, shifted in every other block (Swin), with a bias for every pair of places."""
    width, heads, batch, window, layers, side = 384, 12, 64 * devices, 7, 4, 28
    count, places = side // window, window * window

    def loss(params: Weights, images: Array, pairs: Array, labels: Array) -> Array:
        h = images.astype(HALF) @ params["patch"].astype(HALF)
        for i, layer in enumerate(params["layers"]):
            first, second = layer["norms"]
            w, x = half(layer), normed(h, first)
            x = jnp.roll(x, (-3, -3), (1, 2)) if i % 2 else x
            x = x.reshape(batch, count, window, count, window, width).swapaxes(2, 3).reshape(-1, places, width)
            bias = jnp.moveaxis(layer["bias"][pairs], -1, 0)
            x = attended(x, w, heads, causal=False, bias=bias)
            x = x.reshape(batch, count, count, window, window, width).swapaxes(2, 3).reshape(h.shape)
            h = h + (jnp.roll(x, (3, 3), (1, 2)) if i % 2 else x)
            h = h + fed(normed(h, second), w)
        return cross_entropy(normed(h).mean((1, 2)) @ params["head"].astype(HALF), labels)

    layer = {**block_weights(width, 4 * width), "bias": abstract((2 * window - 1) ** 2, heads)}
    params = {"patch": abstract(48, width), "layers": [layer] * layers, "head": abstract(width, 1000)}
    return trained(loss, params, (abstract(batch, side, side, 48), integers(places, places), integers(batch)))


def quantized(devices: int) -> Program:
    """An autoencoder whose codes are the nearest rows of a table (VQ-VAE)."""
    width, batch, patches, codes = 512, 64 * devices, 256, 8192

    def perceptron(weights: list[Array], x: Array) -> Array:
        *hidden, last = half(weights)
        for w in hidden:
            x = jax.nn.gelu(x @ w)
        return x @ last

    def loss(params: Weights, images: Array) -> Array:
        code = perceptron(params["encoder"], images.astype(HALF)).astype(jnp.float32)
        table = params["table"]
        distance = jnp.square(code).sum(-1, keepdims=True) - 2 * code @ table.T + jnp.square(table).sum(-1)
        nearest = table[jnp.argmin(distance, axis=-1)]
        passed = code + jax.lax.stop_gradient(nearest - code)
        again = perceptron(params["decoder"], passed.astype(HALF)).astype(jnp.float32)
        towards = jnp.square(nearest - jax.lax.stop_gradient(code)).mean()
        return (
            jnp.square(again - images).mean() + towards + jnp.square(code - jax.lax.stop_gradient(nearest)).mean() / 4
        )

    params = {
        "encoder": [abstract(768, width), abstract(width, 4 * width), abstract(4 * width, width)],
        "table": abstract(codes, width),
        "decoder": [abstract(width, 4 * width), abstract(4 * width, width), abstract(width, 768)],
    }
    return trained(loss, params, (abstract(batch, patches, 768),))


PROGRAMS: Mapping[str, Callable[[int], Program]] = {
    "half-depth-tied-32k": half_depth,
    "dropped-tied-50k": dropped,
    "diffusion": diffusion,
    "mixer": mixer,
    "recommender": recommender,
    "chunked-recurrence-32k": chunked_recurrence,
    "contrastive": contrastive,
    "windows": windows,
    "quantized": quantized,
}
