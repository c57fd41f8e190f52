"""Sums over a loop's trips that are finished once: a state-space model, planned, compiled and compared.

    python -m benchmarks.loop_sums [--layers 24] [--width 2048] [--batch 32] [--sequence 1024] [--hardware h100:1x8]
    autoshard compare benchmarks.loop_sums:mamba --layouts benchmarks.loop_sums:layouts --hardware h100:1x8

The model is Mamba's selective scan (Gu & Dao 2023, algorithm 2) with one step of time per trip, 16 states per channel
and `jax.checkpoint` in every layer: in the backward pass, every step adds to the gradient of `a`, a weight that all
steps share. Three layouts are compiled for the hardware, without a device, and their schedules priced by the same
model: the best plan of the program as it is written, the best plan, and data parallelism as a hand writes it.
"""

import argparse
import os
from collections.abc import Mapping
from functools import partial
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard import Hand, Template
from autoshard.api.options import Options
from autoshard.api.planning import requests_of
from autoshard.api.solved_plan import SolvedPlan
from autoshard.planner import pipeline
from autoshard.planner.budget import Budget
from autoshard.planner.search_space import build_search_space
from models.layers import apply_layers, new_layers
from models.training import Batch, Params, make_train_step, new_state
from models.transformer import normal

RATE = 3e-4
STATES = 16
VOCAB = 32_768
REL_GAP = 0.01

Target = tuple[Any, tuple[Any, ...]]


def mamba(
    *, layers: int = 24, width: int = 2048, batch: int = 32, sequence: int = 1024, scan: bool = True, vocab: int = VOCAB
) -> Target:
    """A train step; the layers are scanned, or unrolled."""

    def new_layer(key: jax.Array) -> Params:
        keys = jax.random.split(key, 5)
        rows = jnp.arange(1.0, STATES + 1)
        return {
            "into": normal(keys[0], width, 2 * width),
            "delta": normal(keys[1], width, width),
            "b": normal(keys[2], width, STATES),
            "c": normal(keys[3], width, STATES),
            "a": jnp.log(jnp.broadcast_to(rows, (width, STATES))),
            "skip": jnp.ones(width),
            "out": normal(keys[4], width, width),
        }

    def init(key: jax.Array) -> Any:
        embed, stack = jax.random.split(key)
        params = {"embed": normal(embed, vocab, width), "layers": new_layers(new_layer, stack, layers, scan=scan)}
        return new_state(params, RATE)

    def loss(params: Params, batch: Batch) -> jax.Array:
        embed = params["embed"].astype(jnp.bfloat16)
        x = apply_layers(_block, params["layers"], embed[batch["tokens"]], "full")
        log_probs = jax.nn.log_softmax((x @ embed.T).astype(jnp.float32))
        return -jnp.mean(jnp.take_along_axis(log_probs, batch["targets"][..., None], axis=-1))

    tokens = jax.ShapeDtypeStruct((batch, sequence), jnp.int32)
    state = jax.eval_shape(init, jax.random.key(0))
    return make_train_step(loss, RATE), (state, {"tokens": tokens, "targets": tokens})


def _block(layer: Params, x: jax.Array) -> jax.Array:
    """One layer: h[t] = exp(Δ[t]·a)·h[t−1] + Δ[t]·u[t]·b[t], and y[t] = h[t]·c[t], gated."""
    weights = {name: weight.astype(x.dtype) for name, weight in layer.items() if name != "a"}
    u, gate = jnp.split(x @ weights["into"], 2, axis=-1)
    u = jax.nn.silu(u)
    delta = jax.nn.softplus((u @ weights["delta"]).astype(jnp.float32))
    b, c = ((u @ weights[name]).astype(jnp.float32) for name in ("b", "c"))
    a = -jnp.exp(layer["a"])

    def step(h: jax.Array, now: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        u, delta, b, c = now
        h = jnp.exp(delta[..., None] * a) * h + (delta * u)[..., None] * b[:, None]
        return h, jnp.einsum("bdn,bn->bd", h, c)

    over_time = tuple(jnp.moveaxis(one, 1, 0) for one in (u.astype(jnp.float32), delta, b, c))
    y = jnp.moveaxis(jax.lax.scan(step, jnp.zeros((x.shape[0], *a.shape)), over_time)[1], 0, 1)
    return x + ((y.astype(x.dtype) + u * weights["skip"]) * jax.nn.silu(gate)) @ weights["out"]


def layouts() -> Mapping[str, Template]:
    """The layouts of a hand."""
    return {"data parallel": Template(axes=("data",), write=lambda _: Hand(in_specs=(P(), P("data"))))}


def _as_written(fn: Any, args: tuple[Any, ...], options: Options) -> SolvedPlan:
    """The best plan of the program as it is."""
    (request,) = requests_of(fn, args, {}, options)
    found = pipeline.solve_space(build_search_space(request), Budget(rel_gap=REL_GAP))
    return SolvedPlan(found.record, place=request.target, traced=found.traced, planned=found)


def _line(name: str, made: Any, compiler: str) -> str:
    found = made.verify(compiler=compiler)
    compiled = found.timeline
    in_loops = sum(e.duration_s * e.trips for e in compiled.events if e.stream == "communication" and e.trips > 1)
    reductions = sum(row.emitted_count for row in found.by_kind() if row.kind in ("all-reduce", "reduce-scatter"))
    seconds = (made.record.cost.step_s, compiled.step_s, compiled.exposed_s, in_loops)
    return f"| {name} | {' | '.join(f'{s * 1e3:.1f}' for s in seconds)} | {reductions:,} |"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 24), ("width", 2048), ("batch", 32), ("sequence", 1024), ("vocab", VOCAB)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--unrolled", action="store_true")
    parser.add_argument("--hardware", default="h100:1x8")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--compiler", default="gpu")
    asked = parser.parse_args()
    sizes = {name: getattr(asked, name) for name in ("layers", "width", "batch", "sequence", "vocab")}
    fn, args = mamba(**sizes, scan=not asked.unrolled)
    options: dict[str, Any] = {"mesh": {"data": asked.devices}, "hardware": asked.hardware}
    hand = layouts()["data parallel"].write(jax.sharding.AbstractMesh((asked.devices,), ("data",)))
    made = {
        "as it is written": partial(_as_written, fn, args, Options(**options, donate_argnums=0, rel_gap=REL_GAP)),
        "planned": partial(autoshard.plan, fn, *args, **options, donate_argnums=0, rel_gap=REL_GAP),
        "data parallel, by hand": partial(
            autoshard.evaluate, fn, *args, **options, donate_argnums=0, in_specs=hand.in_specs
        ),
    }
    print("| | predicted, ms | compiled, ms | of it waiting | communication in loops, ms | sums over devices |")
    print("|---|---|---|---|---|---|")
    for name, make in made.items():
        print(_line(name, make(), asked.compiler), flush=True)


if __name__ == "__main__":
    main()
