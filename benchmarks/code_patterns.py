"""Train and decode steps in the styles of public code bases, with the layouts that their authors write; what is found.

    python -m benchmarks.code_patterns [--only NAME,NAME] [--hardware h100:1x8,tpu-v5e:4x4] [--tell]

Nothing is wrong with these steps on purpose: each is sharded the way its code base does it. The table in
docs/guides/doctor.md has the findings above a percent of the step; how long each took is written to standard error.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx
from flax.linen import spmd
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.diagnosis.finding import Diagnosis
from autoshard.report.tables import short_place
from benchmarks.hand_sharded import Sharded, Target, diagnosis

WIDTH, FEATURES, LAYERS, VOCABULARY, HEADS, LENGTH = 2048, 8192, 4, 32768, 16, 2048
SEQUENCES = 8  # on each device
HARDWARE = "h100:1x8", "h100:2x8", "tpu-v5e:4x4"
LEAST = 0.01  # of the step

Array = jax.Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """A step as a code base writes it.

    Attributes:
      name: on the command line.
      style: of which code base, and how it shards.
      target: the step and its arguments, for so many devices.
      donate: positions of donated arguments.
    """

    name: str
    style: str
    target: Callable[[int], Target]
    donate: tuple[int, ...] = (0,)


def attention(q: Array, k: Array, v: Array) -> Array:
    """Causal attention of heads: batch, length, head, feature."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / math.sqrt(q.shape[-1])
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(mask, scores, -1e9)).astype(v.dtype), v)


def cross_entropy(logits: Array, labels: Array) -> Array:
    """The mean loss of a batch of tokens."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def normed(x: Array) -> Array:
    """RMS norm without a scale."""
    return (x * jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True) + 1e-6)).astype(x.dtype)


def tokens(on: Sharded, devices: int, *batch: Any) -> tuple[Any, Any]:
    """Tokens and labels, split over mesh axes."""
    one = on.aval(P(batch), devices * SEQUENCES, LENGTH, dtype=jnp.int32)
    return one, one


def like(tree: Any, shardings: Any) -> Any:
    """Abstract arrays of the shapes of a tree, in the layouts of another."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


def adam(init: Callable[[], Any], sharding: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
    """Abstract parameters and Adam's state; `sharding` gives the layout of a leaf by its path."""
    params = jax.eval_shape(init)
    both = params, jax.eval_shape(optax.adam(1e-3).init, params)
    return like(both, jax.tree.map_with_path(sharding, both))


def updated(state: Any, gradients: Any) -> Any:
    """Parameters and Adam's state after a step."""
    params, moments = state
    change, moments = optax.adam(1e-3).update(gradients, moments, params)
    return optax.apply_updates(params, change), moments


def weights(dtype: Any = jnp.float32) -> dict[str, Array]:
    """A stack of layers with attention and a gated block, an embedding and a head."""

    def zeros(*shape: int) -> Array:
        return jnp.zeros(shape, dtype)

    return {
        "embed": zeros(VOCABULARY, WIDTH),
        "qkv": zeros(LAYERS, WIDTH, 3, HEADS, WIDTH // HEADS),
        "out": zeros(LAYERS, HEADS, WIDTH // HEADS, WIDTH),
        "up": zeros(LAYERS, WIDTH, FEATURES),
        "gate": zeros(LAYERS, WIDTH, FEATURES),
        "down": zeros(LAYERS, FEATURES, WIDTH),
        "head": zeros(WIDTH, VOCABULARY),
    }


LOGICAL: Mapping[str, tuple[str | None, ...]] = {
    "embed": ("vocab", "embed"),
    "qkv": ("layers", "embed", "qkv", "heads", "kv"),
    "out": ("layers", "heads", "kv", "embed"),
    "up": ("layers", "embed", "mlp"),
    "gate": ("layers", "embed", "mlp"),
    "down": ("layers", "mlp", "embed"),
    "head": ("embed", "vocab"),
}


def logical_rules(devices: int) -> Target:
    """Scanned, checkpointed layers; names of dimensions become mesh axes by rules, activations' constraints, too."""
    on = Sharded(fsdp=devices // 2, tensor=2)
    rules = {"batch": "fsdp", "embed": "fsdp", "mlp": "tensor", "heads": "tensor", "vocab": "tensor"}

    def spec(*names: str | None) -> P:
        return P(*(None if name is None else rules.get(name) for name in names))

    def pin(x: Array, *names: str | None) -> Array:
        return on.pin(x, *spec(*names))

    def layer(x: Array, w: dict[str, Array]) -> tuple[Array, None]:
        w = {name: value.astype(jnp.bfloat16) for name, value in w.items()}
        qkv = pin(jnp.einsum("bld,dchf->cblhf", normed(x), w["qkv"]), None, "batch", None, "heads")
        x = x + pin(jnp.einsum("blhf,hfd->bld", attention(*qkv), w["out"]), "batch")
        h = normed(x)
        h = pin(jax.nn.silu(h @ w["gate"]) * (h @ w["up"]), "batch", None, "mlp")
        return x + pin(h @ w["down"], "batch"), None

    def loss(params: dict[str, Array], batch: tuple[Array, Array]) -> Array:
        x = pin(params["embed"].astype(jnp.bfloat16)[batch[0]], "batch")
        stacked = {name: params[name] for name in ("qkv", "out", "up", "gate", "down")}
        x = jax.lax.scan(jax.checkpoint(layer), x, stacked)[0]
        return cross_entropy(pin(x @ params["head"].astype(x.dtype), "batch", None, "vocab"), batch[1])

    def step(state: Any, batch: Any) -> Any:
        return updated(state, jax.grad(loss)(state[0], batch))

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        return NamedSharding(on.mesh, spec(*LOGICAL[path[-1].key]) if leaf.ndim else P())

    return step, (adam(weights, sharding), tokens(on, devices, "fsdp"))


def named_axes(devices: int) -> Target:
    """Levanter's way: parameters split over `embed`, a policy that computes in 16 bits, layers folded and gathered."""
    on = Sharded(data=devices)

    def stored(path: Any, leaf: Any) -> NamedSharding:
        names = LOGICAL[path[-1].key] if leaf.ndim else ()
        return NamedSharding(on.mesh, P(*("data" if name == "embed" else None for name in names)))

    def layer(x: Array, w: dict[str, Array]) -> tuple[Array, None]:
        qkv = on.pin(jnp.einsum("bld,dchf->cblhf", normed(x), w["qkv"]), None, "data")
        x = x + on.pin(jnp.einsum("blhf,hfd->bld", attention(*qkv), w["out"]), "data")
        h = normed(x)
        return x + on.pin((jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], "data"), None

    def loss(params: dict[str, Array], batch: tuple[Array, Array]) -> Array:
        compute = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
        x = on.pin(compute["embed"][batch[0]], "data")
        stacked = {name: compute[name] for name in ("qkv", "out", "up", "gate", "down")}
        x = jax.lax.scan(jax.checkpoint(layer), x, stacked)[0]
        return cross_entropy(on.pin(x @ compute["head"], "data"), batch[1])

    def step(state: Any, batch: Any) -> Any:
        return updated(state, jax.grad(loss)(state[0], batch))

    return step, (adam(weights, stored), tokens(on, devices, "data"))


class LinenBlock(nn.Module):
    """A block whose weights have names of dimensions; `rows`: the name of sequences between blocks."""

    mesh: Any
    rows: str

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """The block's result, added to what it takes."""

        def dense(features: int, *names: str) -> nn.Dense:
            init = nn.with_logical_partitioning(nn.initializers.zeros_init(), names)
            return nn.Dense(features, use_bias=False, dtype=jnp.bfloat16, kernel_init=init)

        h = nn.LayerNorm(dtype=jnp.bfloat16, use_bias=False, use_scale=False)(x)
        if self.rows != "batch":
            h = spmd.with_logical_constraint(h, (self.rows, "length", None), mesh=self.mesh)
            h = spmd.with_logical_constraint(h, ("batch", "length", None), mesh=self.mesh)
        h = nn.gelu(dense(FEATURES, "embed", "mlp")(h))
        h = spmd.with_logical_constraint(h, ("batch", "length", "mlp"), mesh=self.mesh)
        x = x + dense(WIDTH, "mlp", "embed")(h)
        return spmd.with_logical_constraint(x, (self.rows, "length", None), mesh=self.mesh)


class LinenModel(nn.Module):
    """Blocks between an embedding and a head."""

    mesh: Any
    rows: str

    @nn.compact
    def __call__(self, ids: Array) -> Array:
        """The logits of tokens."""
        table = nn.with_logical_partitioning(nn.initializers.zeros_init(), ("vocab", "embed"))
        x = nn.Embed(VOCABULARY, WIDTH, embedding_init=table, dtype=jnp.bfloat16)(ids)
        x = spmd.with_logical_constraint(x, (self.rows, "length", None), mesh=self.mesh)
        for _ in range(LAYERS):
            x = nn.remat(LinenBlock)(self.mesh, self.rows)(x)
        head = nn.with_logical_partitioning(nn.initializers.zeros_init(), ("embed", "vocab"))
        logits = nn.Dense(VOCABULARY, use_bias=False, dtype=jnp.bfloat16, kernel_init=head)(x)
        return spmd.with_logical_constraint(logits, ("batch", "length", "vocab"), mesh=self.mesh)


def linen(devices: int, rows: str = "batch") -> Target:
    """Flax Linen with `with_logical_partitioning`: data × model, weights split over `model` alone.

    `rows`: "batch" leaves what is between blocks on all devices of `model` alike; "rows" splits its sequences there.
    """
    on = Sharded(data=devices // 4, model=4)
    rules = [
        ("batch", "data"),
        ("mlp", "model"),
        ("vocab", "model"),
        ("embed", None),
        ("length", None),
        ("rows", ("data", "model")),
    ]
    model = LinenModel(on.mesh, rows)

    def init() -> Any:
        return model.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))

    boxed = jax.eval_shape(init)
    specs = spmd.logical_to_mesh_sharding(nn.get_partition_spec(boxed), cast(Any, on.mesh), rules)
    state = nn.unbox(boxed)
    moments = jax.eval_shape(optax.adam(1e-3).init, state)
    whole = NamedSharding(on.mesh, P())
    laid_out = optax.tree_map_params(
        optax.adam(1e-3),
        lambda _, s: s,
        moments,
        specs,
        transform_non_params=lambda _: whole,
    )

    def step(state: Any, batch: Any) -> Any:
        def loss(params: Any) -> Array:
            with nn.logical_axis_rules(rules):
                logits: Any = model.apply(params, batch[0])
                return cross_entropy(logits, batch[1])

        return updated(state, jax.grad(loss)(state[0]))

    return step, ((like(state, specs), like(moments, laid_out)), tokens(on, devices, "data"))


class NnxModel(nnx.Module):
    """Blocks of two products between an embedding and a head."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        def linear(rows: int, columns: int) -> nnx.Linear:
            return nnx.Linear(rows, columns, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)

        self.embed = nnx.Embed(VOCABULARY, WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.up = nnx.List([linear(WIDTH, FEATURES) for _ in range(LAYERS)])
        self.down = nnx.List([linear(FEATURES, WIDTH) for _ in range(LAYERS)])
        self.head = linear(WIDTH, VOCABULARY)

    def __call__(self, ids: Array) -> Array:
        """The logits of tokens."""
        x = self.embed(ids)
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(nnx.gelu(up(normed(x))))
        return self.head(x)


def nnx_data_parallel(devices: int) -> Target:
    """Flax NNX with a replicated state and a split batch, as its guide's first multi-device example does."""
    on = Sharded(data=devices)

    def create() -> tuple[NnxModel, nnx.Optimizer[NnxModel]]:
        model = NnxModel(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    graph, state = nnx.split(nnx.eval_shape(create))

    def step(state: Any, batch: Any) -> Any:
        model, optimizer = nnx.merge(graph, state)
        optimizer.update(model, nnx.grad(lambda m: cross_entropy(m(batch[0]), batch[1]))(model))
        return nnx.state((model, optimizer))

    whole = jax.tree.map(lambda _: NamedSharding(on.mesh, P()), state)
    return step, (like(state, whole), tokens(on, devices, "data"))


class EquinoxBlock(eqx.Module):
    """A block of two products."""

    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key: Array) -> None:
        self.up = eqx.nn.Linear(WIDTH, FEATURES, use_bias=False, dtype=jnp.bfloat16, key=key)
        self.down = eqx.nn.Linear(FEATURES, WIDTH, use_bias=False, dtype=jnp.bfloat16, key=key)

    def __call__(self, x: Array) -> Array:
        """One row's result."""
        return x + self.down(jax.nn.gelu(self.up(x)))


def equinox_filtered(devices: int) -> Target:
    """Equinox's example: a model that every device has, rows that `filter_shard` splits, all in `vmap`."""
    on = Sharded(data=devices)
    made = eqx.filter_eval_shape(lambda: [EquinoxBlock(jax.random.key(i)) for i in range(LAYERS)])
    arrays, static = eqx.partition(made, lambda x: isinstance(x, jax.ShapeDtypeStruct))

    def step(state: Any, rows: Array) -> Any:
        rows = on.pin(rows, "data")

        def loss(params: Any) -> Array:
            x = rows
            for block in eqx.combine(params, static):
                x = jax.vmap(block)(x)
            return squares(x)

        return updated(state, jax.grad(loss)(state[0]))

    moments = jax.eval_shape(optax.adam(1e-3).init, arrays)
    whole = jax.tree.map(lambda _: NamedSharding(on.mesh, P()), (arrays, moments))
    return step, (like((arrays, moments), whole), on.aval(P("data"), devices * SEQUENCES * LENGTH, WIDTH))


def squares(y: Array) -> Array:
    """The mean square, in float32."""
    return jnp.mean(jnp.square(y.astype(jnp.float32)))


def descended(params: Any, loss: Callable[[Any], Array]) -> Any:
    """The parameters after a step of gradient descent."""
    return jax.tree.map(lambda w, g: w - (1e-3 * g).astype(w.dtype), params, jax.grad(loss)(params))


def megatron(devices: int) -> Target:
    """Megatron by shard_map, with rows of the sequence split between blocks, trained."""
    on = Sharded(data=devices // 4, model=4)
    specs = P(None, "model"), P(None, "model"), P("model")

    def block(gate: Array, up: Array, down: Array, x: Array) -> Array:
        whole = jax.lax.all_gather(normed(x), "model", axis=1, tiled=True)
        h = (jax.nn.silu(whole @ gate) * (whole @ up)) @ down
        return x + jax.lax.psum_scatter(h, "model", scatter_dimension=1, tiled=True)

    rows = P("data", "model")
    apply = jax.shard_map(block, mesh=on.mesh, in_specs=(*specs, rows), out_specs=rows)

    def step(params: list[tuple[Array, ...]], x: Array) -> Any:
        def loss(params: Any) -> Array:
            y = x
            for gate, up, down in params:
                y = apply(gate, up, down, y)
            return squares(y)

        return descended(params, loss)

    shapes = (WIDTH, FEATURES), (WIDTH, FEATURES), (FEATURES, WIDTH)
    layer = tuple(on.aval(spec, *shape) for spec, shape in zip(specs, shapes, strict=True))
    return step, ([layer] * LAYERS, on.aval(rows, devices * SEQUENCES // 4, 4 * LENGTH, WIDTH))


def explicit_axes(devices: int) -> Target:
    """Explicit mode: types carry layouts, weights are resharded to be whole before each product."""
    on = Sharded(AxisType.Explicit, data=devices)

    def step(params: list[tuple[Array, Array]], x: Array) -> Any:
        def whole(w: Array) -> Array:
            return jax.sharding.reshard(w, P())

        def loss(params: Any) -> Array:
            y = x
            for up, down in params:
                y = y + jax.nn.gelu(y @ whole(up)) @ whole(down)
            return squares(y)

        return descended(params, loss)

    layer = on.aval(P("data"), WIDTH, FEATURES), on.aval(P("data"), FEATURES, WIDTH)
    return step, ([layer] * LAYERS, on.aval(P("data"), devices * SEQUENCES * LENGTH, WIDTH))


def experts(devices: int) -> Target:
    """Experts on devices of their own: tokens go there and back by all-to-all in a shard_map, trained."""
    on = Sharded(expert=devices)

    def block(up: Array, down: Array, router: Array, x: Array) -> Array:
        share = x.shape[0] // devices
        order = jnp.argsort(jnp.argmax(x @ router, -1))  # equal shares of tokens, whatever the router says
        sent = jax.lax.all_to_all(x[order].reshape(devices, share, -1), "expert", 0, 0, tiled=True)
        made = jax.nn.silu(sent.reshape(-1, x.shape[-1]) @ up[0]) @ down[0]
        back = jax.lax.all_to_all(made.reshape(devices, share, -1), "expert", 0, 0, tiled=True)
        return x + back.reshape(x.shape)[jnp.argsort(order)]

    specs = P("expert"), P("expert"), P()
    apply = jax.shard_map(block, mesh=on.mesh, in_specs=(*specs, P("expert")), out_specs=P("expert"))

    def step(params: list[tuple[Array, ...]], x: Array) -> Any:
        def loss(params: Any) -> Array:
            y = x
            for up, down, router in params:
                y = apply(up, down, router, y)
            return squares(y)

        return descended(params, loss)

    shapes = (devices, WIDTH, FEATURES), (devices, FEATURES, WIDTH), (WIDTH, devices)
    layer = tuple(on.aval(spec, *shape) for spec, shape in zip(specs, shapes, strict=True))
    return step, ([layer] * LAYERS, on.aval(P("expert"), devices * SEQUENCES * LENGTH, WIDTH))


def decode(devices: int) -> Target:
    """One token for each of 64 sequences, tensor parallel: heads and features on devices, a cache of the same heads."""
    on = Sharded(model=devices)

    def step(cache: tuple[Array, Array], params: tuple[Array, ...], x: Array) -> tuple[Array, tuple[Array, Array]]:
        def layer(x: Array, of: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
            qkv, out, up, down, keys, values = of
            q, k, v = on.pin(jnp.einsum("bd,dchf->cbhf", normed(x), qkv), None, None, "model")
            keys = jax.lax.dynamic_update_slice_in_dim(keys, k[:, None], LENGTH - 1, 1)
            values = jax.lax.dynamic_update_slice_in_dim(values, v[:, None], LENGTH - 1, 1)
            weights = jax.nn.softmax(jnp.einsum("bhf,bkhf->bhk", q, keys).astype(jnp.float32)).astype(x.dtype)
            x = x + on.pin(jnp.einsum("bhf,hfd->bd", jnp.einsum("bhk,bkhf->bhf", weights, values), out))
            return x + on.pin(on.pin(jax.nn.silu(normed(x) @ up), None, "model") @ down), (keys, values)

        return jax.lax.scan(layer, x, (*params, *cache))

    kept = P(None, None, None, "model")
    one = on.aval(kept, LAYERS, 64, LENGTH, HEADS, WIDTH // HEADS)
    params = (
        on.aval(P(None, None, None, "model"), LAYERS, WIDTH, 3, HEADS, WIDTH // HEADS),
        on.aval(P(None, "model"), LAYERS, HEADS, WIDTH // HEADS, WIDTH),
        on.aval(P(None, None, "model"), LAYERS, WIDTH, FEATURES),
        on.aval(P(None, "model"), LAYERS, FEATURES, WIDTH),
    )
    return step, ((one, one), params, on.aval(P(), 64, WIDTH))


PATTERNS: Sequence[Pattern] = (
    Pattern(name="logical-rules", style="MaxText: logical rules, FSDP × tensor", target=logical_rules),
    Pattern(name="named-axes", style="Levanter: FSDP over `embed`, 16-bit policy", target=named_axes),
    Pattern(name="linen", style="Flax Linen: logical constraints, data × model", target=linen),
    Pattern(name="linen-split", style="The same, sequences split between blocks", target=partial(linen, rows="rows")),
    Pattern(name="nnx", style="Flax NNX: replicated state, split batch", target=nnx_data_parallel),
    Pattern(name="equinox", style="Equinox: replicated model, `filter_shard`", target=equinox_filtered),
    Pattern(name="megatron", style="Megatron in `shard_map`, sequence split", target=megatron),
    Pattern(name="explicit", style="Explicit axes: FSDP by `reshard`", target=explicit_axes),
    Pattern(name="experts", style="Expert parallel: `all_to_all` in `shard_map`", target=experts),
    Pattern(name="decode", style="Serving: tensor parallel, one token", target=decode),
)


def found(pattern: Pattern, hardware: str) -> Diagnosis:
    """What the doctor says of a pattern on hardware such as h100:2x8."""
    devices = math.prod(map(int, hardware.rpartition(":")[2].split("x")))
    return diagnosis(pattern.target(devices), hardware, pattern.donate)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of patterns")
    parser.add_argument("--hardware", default=HARDWARE[0], help="chips and topologies")
    parser.add_argument("--tell", action="store_true", help="print the findings, too")
    asked = parser.parse_args()
    print("| pattern | hardware | step, ms | exposed | findings above 1 % of the step |\n|---|---|---|---|---|")
    for pattern in PATTERNS:
        if asked.only and pattern.name not in asked.only.split(","):
            continue
        for hardware in asked.hardware.split(","):
            begin = time.perf_counter()
            said = found(pattern, hardware)
            print(f"{pattern.name} on {hardware}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
            dear = [one for one in said.findings if said.share(one) > LEAST]
            told = "; ".join(f"{one.kind} {said.share(one):.0%}, {short_place(one.where)}" for one in dear) or "none"
            exposed = f"{said.step.exposed_s / said.step_s:.0%}"
            print(f"| {pattern.style} | {hardware} | {1e3 * said.step_s:.1f} | {exposed} | {told} |", flush=True)
            if asked.tell:
                print(said, flush=True)


if __name__ == "__main__":
    main()
