"""Train steps of decoders and encoders that no price was fitted to: many vocabularies, heads, norms and optimizers.

Plain JAX; nothing says how it is sharded, and nothing is allocated: states and batches are abstract arrays.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.zoo.program import cross_entropy

Array = jax.Array
Weights = dict[str, Any]

EXPERTS_PER_TOKEN = 2
CAPACITY = 1.25  # places of an expert, by tokens that it gets on average
MASKED = -1e30
EPSILON = 1e-6
ROTATION = 1e4  # the longest wave of positions, by the shortest

OPTIMIZERS: Mapping[str, Callable[[], optax.GradientTransformation]] = {
    "adamw": lambda: optax.adamw(1e-3),
    "sgd": lambda: optax.sgd(1e-2),
    "adafactor": lambda: optax.adafactor(1e-3),
    "muon": lambda: optax.contrib.muon(1e-3),
    "lamb": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(1e-3)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What a step trains, and on how many tokens.

    Attributes:
      groups: heads of keys and values.
      gated: the feed-forward block multiplies a gate (SwiGLU).
      norms_after: norms follow the residual sums (BERT) and do not precede the blocks.
      experts: of each feed-forward block; none where it is dense.
      ragged: tokens are sorted by expert, and multiplied by `jax.lax.ragged_dot`; none is left out.
      tied: scores are products with the embedding.
      padded: some positions are masked by an argument.
      normed_heads: queries and keys are normed.
      rotated: queries and keys are rotated by their positions, in halves.
      biases: queries and the feed-forward block add some.
      weights: the dtype that parameters are stored in.
      compute: the dtype of products.
      scan: layers are stacked and scanned.
      remat: each layer is under `jax.checkpoint`.
      micro_batches: whose gradients a loop adds up.
      updates: of the weights, which a loop makes, each with its part of the batch.
      tokens: of the batch, on each device.
      length: of a sequence.
    """

    layers: int
    width: int
    heads: int
    groups: int
    head_width: int
    features: int
    vocabulary: int
    gated: bool = True
    norms_after: bool = False
    experts: int = 0
    ragged: bool = False
    tied: bool = False
    causal: bool = True
    padded: bool = False
    normed_heads: bool = False
    rotated: bool = False
    biases: bool = False
    weights: str = "float32"
    compute: str = "bfloat16"
    optimizer: str = "adamw"
    scan: bool = False
    remat: bool = False
    micro_batches: int = 1
    updates: int = 1
    tokens: int = 2048
    length: int = 1024

    def program(self, devices: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The train step and its abstract arguments: state, ids, labels, mask."""
        optimizer = OPTIMIZERS[self.optimizer]()

        def update(state: Any, batch: tuple[Array, ...]) -> Any:
            params, moments = state
            value, gradients = self.gradients(params, batch)
            updates, moments = optimizer.update(gradients, moments, params)
            return (optax.apply_updates(params, updates), moments), value

        def step(state: Any, ids: Array, labels: Array, mask: Array) -> Any:
            batch = ids, labels, mask
            if self.updates == 1:
                return update(state, batch)
            state, values = jax.lax.scan(update, state, parts(batch, self.updates))
            return state, values.mean()

        params = self.parameters()
        batch = jax.ShapeDtypeStruct((self.tokens * devices // self.length, self.length), jnp.int32)
        return step, ((params, jax.eval_shape(optimizer.init, params)), batch, batch, batch)

    def gradients(self, params: Weights, batch: tuple[Array, ...]) -> tuple[Array, Weights]:
        """The loss and its gradients, of all micro-batches."""
        if self.micro_batches == 1:
            return jax.value_and_grad(self.loss)(params, *batch)

        def add(total: Any, part: tuple[Array, ...]) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(self.loss)(params, *part)), None

        zeros = jnp.zeros(()), jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)
        total, _ = jax.lax.scan(add, zeros, parts(batch, self.micro_batches))
        return jax.tree.map(lambda x: x / self.micro_batches, total)

    def parameters(self) -> Weights:
        """Abstract weights."""

        def abstract(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.dtype(self.weights))

        stack = (self.layers,) if self.scan else ()
        layer = {name: abstract((*stack, *shape)) for name, shape in self._layer_shapes().items()}
        params: Weights = {
            "embed": abstract((self.vocabulary, self.width)),
            "layers": layer if self.scan else [layer] * self.layers,
            "norm": abstract((self.width,)),
        }
        return params if self.tied else {**params, "head": abstract((self.width, self.vocabulary))}

    def _layer_shapes(self) -> dict[str, tuple[int, ...]]:
        width, features, heads, groups, head = self.width, self.features, self.heads, self.groups, self.head_width
        each = (self.experts,) if self.experts else ()
        shapes: dict[str, tuple[int, ...]] = {
            "query": (width, heads, head),
            "key": (width, groups, head),
            "value": (width, groups, head),
            "out": (heads, head, width),
            "attention_norm": (width,),
            "mlp_norm": (width,),
            "up": (*each, width, features),
            "down": (*each, features, width),
        }
        if self.gated:
            shapes["gate"] = (*each, width, features)
        if self.experts:
            shapes["router"] = (width, self.experts)
        if self.biases:
            shapes |= {"query_bias": (heads, head), "up_bias": (features,), "down_bias": (width,)}
        if self.normed_heads:
            shapes |= {"query_norm": (head,), "key_norm": (head,)}
        return shapes

    def loss(self, params: Weights, ids: Array, labels: Array, mask: Array) -> Array:
        """The mean over all tokens."""
        compute = jnp.dtype(self.compute)

        def layer(weights: Weights, x: Array) -> Array:
            return self.layer(weights, x, mask)

        apply = jax.checkpoint(layer) if self.remat else layer
        x = params["embed"].astype(compute)[ids]
        if self.scan:
            x, _ = jax.lax.scan(lambda x, weights: (apply(weights, x), None), x, params["layers"])
        else:
            for weights in params["layers"]:
                x = apply(weights, x)
        head = params["embed"].T if self.tied else params["head"]
        return cross_entropy(normed(x, params["norm"]) @ head.astype(compute), labels)

    def layer(self, weights: Weights, x: Array, mask: Array) -> Array:
        """Attention and a feed-forward block, each with its norm."""
        weights = {name: weight.astype(x.dtype) for name, weight in weights.items()}
        block = self.grouped if self.ragged else self.routed if self.experts else self.dense
        if self.norms_after:
            x = normed(x + self.attention(weights, x, mask), weights["attention_norm"])
            return normed(x + block(weights, x), weights["mlp_norm"])
        x = x + self.attention(weights, normed(x, weights["attention_norm"]), mask)
        return x + block(weights, normed(x, weights["mlp_norm"]))

    def attention(self, weights: Weights, x: Array, mask: Array) -> Array:
        """Grouped heads by einsum, with the softmax in float32."""
        query, key, value = (jnp.einsum("bsd,dhk->bshk", x, weights[name]) for name in ("query", "key", "value"))
        if self.biases:
            query = query + weights["query_bias"]
        if self.normed_heads:
            query, key = normed(query, weights["query_norm"]), normed(key, weights["key_norm"])
        if self.rotated:
            query, key = rotated(query), rotated(key)
        batch, length = x.shape[:2]
        query = query.reshape(batch, length, self.groups, self.heads // self.groups, self.head_width)
        scores = jnp.einsum("bskgd,btkd->bkgst", query, key).astype(jnp.float32) / self.head_width**0.5
        if self.causal:
            place = jnp.arange(length)
            scores = jnp.where(place[:, None] >= place[None, :], scores, MASKED)
        if self.padded:
            scores = jnp.where(mask[:, None, None, None, :] > 0, scores, MASKED)
        shares = jax.nn.softmax(scores, -1).astype(x.dtype)
        mixed = jnp.einsum("bkgst,btkd->bskgd", shares, value).reshape(batch, length, self.heads, self.head_width)
        return jnp.einsum("bshk,hkd->bsd", mixed, weights["out"])

    def dense(self, weights: Weights, x: Array) -> Array:
        """A feed-forward block."""
        up = x @ weights["up"]
        if self.biases:
            up = up + weights["up_bias"]
        down = (jax.nn.silu(x @ weights["gate"]) * up if self.gated else jax.nn.gelu(up)) @ weights["down"]
        return down + weights["down_bias"] if self.biases else down

    def routed(self, weights: Weights, x: Array) -> Array:
        """Experts with places, to which one-hot products send tokens."""
        top, chosen = best_experts(x, weights["router"])
        places = int(x.shape[1] * EXPERTS_PER_TOKEN / self.experts * CAPACITY)
        expert = jax.nn.one_hot(chosen, self.experts)
        place = jnp.cumsum(expert.sum(2), 1)[:, :, None, :] * expert - 1
        at = jax.nn.one_hot(place.max(-1).astype(jnp.int32), places, dtype=x.dtype)
        sent = at[:, :, :, None, :] * expert[..., None].astype(x.dtype)
        combined = (sent * top[..., None, None].astype(x.dtype)).sum(2)
        inputs = jnp.einsum("bsd,bsec->ebcd", x, sent.sum(2))
        gate = jax.nn.silu(jnp.einsum("ebcd,edf->ebcf", inputs, weights["gate"]))
        hidden = gate * jnp.einsum("ebcd,edf->ebcf", inputs, weights["up"])
        return jnp.einsum("bsec,ebcd->bsd", combined, jnp.einsum("ebcf,efd->ebcd", hidden, weights["down"]))

    def grouped(self, weights: Weights, x: Array) -> Array:
        """Experts of which each has as many tokens as chose it."""
        rows = x.reshape(-1, self.width)
        top, chosen = best_experts(rows, weights["router"])
        order = jnp.argsort(chosen.ravel())
        sizes = jnp.bincount(chosen.ravel(), length=self.experts).astype(jnp.int32)
        inputs = rows[order // EXPERTS_PER_TOKEN]
        gate = jax.nn.silu(jax.lax.ragged_dot(inputs, weights["gate"], sizes))
        hidden = gate * jax.lax.ragged_dot(inputs, weights["up"], sizes)
        outputs = jax.lax.ragged_dot(hidden, weights["down"], sizes)
        back = jnp.zeros_like(outputs).at[order].set(outputs).reshape(-1, EXPERTS_PER_TOKEN, self.width)
        return jnp.einsum("tkd,tk->td", back, top.astype(x.dtype)).reshape(x.shape)


def best_experts(x: Array, router: Array) -> tuple[Array, Array]:
    """Of every token, the largest shares, and whose they are."""
    shares = jax.nn.softmax((x @ router).astype(jnp.float32), -1)
    top, chosen = jax.lax.top_k(shares, EXPERTS_PER_TOKEN)
    return top, chosen


def parts(batch: tuple[Array, ...], count: int) -> tuple[Array, ...]:
    """A batch in parts, stacked."""
    return tuple(x.reshape(-1, count, x.shape[-1]).swapaxes(0, 1) for x in batch)


def normed(x: Array, scale: Array) -> Array:
    """RMS norm, in float32."""
    wide = x.astype(jnp.float32)
    unit = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + EPSILON)
    return unit.astype(x.dtype) * scale.astype(x.dtype)


def rotated(x: Array) -> Array:
    """Rotations of pairs, one of each half, by positions; in float32."""
    length, width = x.shape[1], x.shape[-1]
    angles = jnp.arange(length)[:, None, None] * ROTATION ** (-jnp.arange(0, width, 2) / width)
    one, other = jnp.split(x.astype(jnp.float32), 2, -1)
    turned = one * jnp.cos(angles) - other * jnp.sin(angles), other * jnp.cos(angles) + one * jnp.sin(angles)
    return jnp.concatenate(turned, -1).astype(x.dtype)


MODELS: Mapping[str, Model] = {
    "gated-51k": Model(layers=3, width=1536, heads=12, groups=4, head_width=128, features=4096, vocabulary=51_200),
    "norms-after-tied-30k": Model(
        layers=4,
        width=1280,
        heads=20,
        groups=20,
        head_width=64,
        features=5120,
        vocabulary=30_522,
        gated=False,
        norms_after=True,
        tied=True,
        biases=True,
        padded=True,
        causal=False,
    ),
    "one-group-tied-250k": Model(
        layers=2,
        width=2048,
        heads=8,
        groups=1,
        head_width=256,
        features=8192,
        vocabulary=250_880,
        tied=True,
        tokens=1024,
    ),
    "experts-32k": Model(
        layers=2,
        width=1024,
        heads=16,
        groups=8,
        head_width=64,
        features=3584,
        vocabulary=32_000,
        experts=8,
    ),
    "sgd-bf16-100k": Model(
        layers=2,
        width=3072,
        heads=24,
        groups=8,
        head_width=128,
        features=8192,
        vocabulary=100_352,
        weights="bfloat16",
        optimizer="sgd",
        tokens=4096,
    ),
    "adafactor-64k": Model(
        layers=4,
        width=1024,
        heads=16,
        groups=16,
        head_width=64,
        features=4096,
        vocabulary=64_000,
        gated=False,
        optimizer="adafactor",
    ),
    "lamb-64k": Model(
        layers=4,
        width=1024,
        heads=16,
        groups=16,
        head_width=64,
        features=4096,
        vocabulary=64_000,
        gated=False,
        optimizer="lamb",
    ),
    "muon-64k": Model(
        layers=4,
        width=1536,
        heads=12,
        groups=12,
        head_width=128,
        features=4096,
        vocabulary=64_000,
        optimizer="muon",
    ),
    "normed-heads-few": Model(
        layers=4,
        width=2560,
        heads=20,
        groups=4,
        head_width=128,
        features=6912,
        vocabulary=32_000,
        normed_heads=True,
        tokens=512,
        length=512,
    ),
    "scan-remat": Model(
        layers=4,
        width=3072,
        heads=24,
        groups=8,
        head_width=128,
        features=8192,
        vocabulary=64_000,
        scan=True,
        remat=True,
        tokens=4096,
        length=4096,
    ),
    "scan-float32-tied": Model(
        layers=4,
        width=1600,
        heads=25,
        groups=25,
        head_width=64,
        features=6400,
        vocabulary=50_257,
        gated=False,
        tied=True,
        biases=True,
        compute="float32",
        scan=True,
    ),
    "scan-norms-after-few": Model(
        layers=4,
        width=2048,
        heads=16,
        groups=16,
        head_width=128,
        features=8192,
        vocabulary=50_000,
        gated=False,
        norms_after=True,
        biases=True,
        scan=True,
        tokens=512,
        length=512,
    ),
    "long-remat-152k": Model(
        layers=2,
        width=2048,
        heads=16,
        groups=2,
        head_width=128,
        features=6144,
        vocabulary=152_064,
        remat=True,
        tokens=8192,
        length=8192,
    ),
    "rotated-128k": Model(
        layers=3,
        width=2048,
        heads=16,
        groups=4,
        head_width=128,
        features=7168,
        vocabulary=128_256,
        rotated=True,
    ),
    "rotated-in-parts-32k": Model(
        layers=3,
        width=2048,
        heads=16,
        groups=8,
        head_width=128,
        features=5632,
        vocabulary=32_000,
        rotated=True,
        micro_batches=4,
        tokens=4096,
    ),
    "ragged-experts-32k": Model(
        layers=2,
        width=1024,
        heads=16,
        groups=8,
        head_width=64,
        features=3584,
        vocabulary=32_000,
        experts=8,
        ragged=True,
    ),
    "updates-in-a-loop-32k": Model(
        layers=3,
        width=2048,
        heads=16,
        groups=16,
        head_width=128,
        features=5632,
        vocabulary=32_000,
        updates=4,
        tokens=4096,
    ),
}
