"""Programs that are sharded by hand, as people reported them, each with the change that the doctor asks for applied.

    python -m benchmarks.hand_sharded [--only NAME,NAME] [--healthy]

Every `Case` is a small training or serving step with one thing wrong, from a public thread; `mended` is the same step
with the change of the doctor's first finding. The table has the promised milliseconds, those gained by the schedule
of the mended program, compiled for the hardware without a device, and the share of the promise that was kept.
"""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.diagnosis.finding import Diagnosis

Target = tuple[Callable[..., Any], tuple[Any, ...]]
HARDWARE = "h100:1x8"
REL_GAP = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A step with one thing wrong.

    Attributes:
      name: on the command line.
      threads: where it was reported.
      kind: of the finding that must be the first.
      sick: the step as it was written.
      mended: the step with the change applied.
      donate: positions of donated arguments.
      hardware: for which it is compiled.
    """

    name: str
    threads: str
    kind: str
    sick: Callable[[], Target]
    mended: Callable[[], Target]
    donate: tuple[int, ...] = ()
    hardware: str = HARDWARE


def mesh(kind: AxisType = AxisType.Auto, **axes: int) -> AbstractMesh:
    """An abstract mesh of axes of one kind."""
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


class Sharded:
    """Writes shardings over one mesh."""

    def __init__(self, kind: AxisType = AxisType.Auto, **axes: int) -> None:
        self.mesh = mesh(kind, **axes)

    def aval(self, spec: P, *shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        """An argument in a layout."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, spec))

    def pin(self, x: jax.Array, *spec: Any) -> jax.Array:
        """A value constrained to a layout."""
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(*spec)))


def stack(w: jax.Array, x: jax.Array) -> jax.Array:
    """Scanned layers of one product each."""

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ w), None

    return jax.lax.scan(layer, x, w)[0]


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    """A sum of what the stack makes."""
    return jnp.sum(stack(w, x).astype(jnp.float32))


def accumulated(*, parted: bool) -> Target:
    """Gradients of eight micro-batches added up; in parts, one per device, or as they come."""
    on, parts = Sharded(data=8), 8
    gradient = jax.vmap(jax.grad(loss), in_axes=(None, 0)) if parted else jax.grad(loss)

    def step(w: jax.Array, batch: jax.Array) -> jax.Array:
        zero = on.pin(jnp.zeros((parts, *w.shape), w.dtype), "data") if parted else jnp.zeros_like(w)

        def add(total: jax.Array, rows: jax.Array) -> tuple[jax.Array, None]:
            own = on.pin(rows.reshape(parts, -1, rows.shape[-1]), "data") if parted else rows
            total = total + gradient(w, own)
            return (on.pin(total, "data") if parted else total), None

        total = jax.lax.scan(add, zero, batch)[0]
        return jnp.sum(total, 0) if parted else total

    return step, (on.aval(P(), 4, 4096, 4096), on.aval(P(None, "data"), 8, 8192, 4096))


def adam(*, zero: bool) -> Target:
    """Data parallelism with Adam, whose moments lie whole or split."""
    on = Sharded(data=8)
    spec = P(None, "data") if zero else P()

    def step(state: tuple[jax.Array, ...], x: jax.Array) -> tuple[jax.Array, ...]:
        w, m, v = state
        g = jax.grad(loss)(w, x).astype(jnp.float32)
        g = on.pin(g, *spec) if zero else g
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        return on.pin(w - (1e-3 * m / (jnp.sqrt(v) + 1e-8)).astype(w.dtype)), m, v

    moments = [on.aval(spec, 8, 4096, 4096, dtype=jnp.float32) for _ in range(2)]
    return step, ((on.aval(P(), 8, 4096, 4096), *moments), on.aval(P("data"), 32768, 4096))


def moved(*, between: bool) -> Target:
    """A value that goes from one layout to another that the partitioner cannot reach by itself."""
    on = Sharded(x=4, y=2)

    def step(a: jax.Array, b: jax.Array, w: jax.Array) -> jax.Array:
        d = on.pin(jnp.tanh(a + b), "y", None, "x")
        if between:
            d = on.pin(d, "y", "x")
        return jnp.tanh(on.pin(d, None, ("x", "y"))) @ w

    value = on.aval(P("y", None, "x"), 1024, 1024, 1024)
    return step, (value, value, on.aval(P(), 1024, 1024))


def returned(*, between: bool) -> Target:
    """Results of experts, split over experts and features, that go back to tokens, which are split over all devices."""
    on = Sharded(data=4, expert=2)

    def step(w: jax.Array, rows: jax.Array) -> jax.Array:
        y = on.pin(jnp.einsum("etd,edf->etf", rows, w), "expert", None, "data")
        if between:
            y = on.pin(y, "expert", "data")
        return jnp.tanh(on.pin(y, None, ("data", "expert")))

    return step, (on.aval(P("expert", None, "data"), 8, 4096, 4096), on.aval(P("expert"), 8, 8192, 4096))


def small_table(*, between: bool) -> Target:
    """A warning of the partitioner's about a value that is small beside the step: mending it does not pay."""
    on = Sharded(x=4, y=2)

    def step(w: jax.Array, x: jax.Array, table: jax.Array) -> tuple[jax.Array, jax.Array]:
        bias = on.pin(jnp.tanh(table), "y", None, "x")
        if between:
            bias = on.pin(bias, "y", "x")
        bias = on.pin(bias, None, ("x", "y"))
        y = on.pin(jnp.tanh(x @ w), ("x", "y"))
        return on.pin(y, ("x", "y")), bias

    args = on.aval(P(), 8192, 8192), on.aval(P(("x", "y")), 65536, 8192), on.aval(P("y", None, "x"), 16, 64, 64)
    return step, args


def explicit(*, kind: AxisType) -> Target:
    """A language model's head: under Explicit axes gradients are transposed once more than under Auto axes."""
    on = Sharded(kind, data=8)

    def total(params: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in params[:-1]:
            x = jnp.tanh(x @ w)
        return jnp.sum(jax.nn.logsumexp((x @ params[-1]).astype(jnp.float32), -1))

    def step(params: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        return jax.tree.map(lambda w, g: w - 1e-3 * g, params, jax.grad(total)(params, x))

    shapes = (4096, 4096), (4096, 4096), (4096, 32768)
    return step, ([on.aval(P(), *shape) for shape in shapes], on.aval(P("data"), 8192, 4096))


RULES: Mapping[str, str | None] = {"batch": None, "embed": None, "mlp": "tensor"}


def fallen_back(*, right: bool) -> Target:
    """Rules from logical names to mesh axes that say nothing where a name is misspelt: the weights lie whole."""
    on = Sharded(tensor=8)

    def spec(*names: str) -> P:
        return P(*(RULES.get(name) for name in names))

    hidden = "mlp" if right else "mlp_hidden"

    def step(up: jax.Array, down: jax.Array, x: jax.Array) -> jax.Array:
        h = on.pin(jax.nn.silu(x @ up), *spec("batch", hidden))
        return on.pin(h @ down, *spec("batch", "embed"))

    shapes = on.aval(spec("embed", hidden), 8192, 32768), on.aval(spec(hidden, "embed"), 32768, 8192)
    return step, (*shapes, on.aval(P(), 4096, 8192))


def master_weights(*, narrow: bool) -> Target:
    """Master weights of 32 bits that are gathered ahead of the layers, each of which casts its own; or cast before."""
    on = Sharded(fsdp=8)

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return on.pin(jnp.tanh(x @ w.astype(x.dtype)), "fsdp"), None

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        whole = on.pin(on.pin(w.astype(x.dtype), None, "fsdp")) if narrow else on.pin(w)
        return jax.lax.scan(layer, x, whole)[0]

    return step, (on.aval(P(None, "fsdp"), 8, 4096, 4096, dtype=jnp.float32), on.aval(P("fsdp"), 16384, 4096))


def normalised_weights(*, narrow: bool) -> Target:
    """Weights that are gathered in 32 bits, normalised and cast; or normalised where they are stored."""
    on = Sharded(fsdp=8)

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        whole = w if narrow else on.pin(w)
        whole = (whole * jax.lax.rsqrt(jnp.mean(whole * whole, 0, keepdims=True) + 1e-6)).astype(x.dtype)
        return on.pin(jnp.tanh(x @ on.pin(whole)), "fsdp"), None

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(layer, x, w)[0]

    return step, (on.aval(P(None, None, "fsdp"), 8, 4096, 4096, dtype=jnp.float32), on.aval(P("fsdp"), 16384, 4096))


def generated(*, once: bool) -> Target:
    """A loop over tokens by shard_map that gathers the weights for every one of them, or ahead of it."""
    on = Sharded(data=8)

    def body(w: jax.Array, x: jax.Array) -> jax.Array:
        def whole() -> jax.Array:
            return jax.lax.all_gather(w, "data", axis=0, tiled=True)

        ahead = whole() if once else None

        def token(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.tanh(x @ (whole() if ahead is None else ahead)), None

        return jax.lax.scan(token, x, None, length=64)[0]

    step = jax.shard_map(body, mesh=on.mesh, in_specs=(P("data"), P("data")), out_specs=P("data"))
    return step, (on.aval(P("data"), 8192, 8192), on.aval(P("data"), 1024, 8192))


def micro_batched(*, once: bool) -> Target:
    """Scanned layers of FSDP, gathered one by one in every micro-batch of a loop around them; or all ahead of it."""
    on = Sharded(data=8)

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return on.pin(jnp.tanh(x @ (w if once else on.pin(w))), "data"), None

    def total(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.scan(layer, x, w)[0].astype(jnp.float32))

    def step(w: jax.Array, batch: jax.Array) -> jax.Array:
        taken = on.pin(w) if once else w

        def add(sums: jax.Array, rows: jax.Array) -> tuple[jax.Array, None]:
            return on.pin(sums + jax.grad(total)(taken, rows), None, "data"), None

        sums = jax.lax.scan(add, jnp.zeros_like(w), batch)[0]
        return on.pin(w - 1e-3 * sums, None, "data")

    return step, (on.aval(P(None, "data"), 6, 4096, 4096), on.aval(P(None, "data"), 4, 8192, 4096))


def tied(*, once: bool) -> Target:
    """A table that is gathered in 32 bits to look tokens up, and once more in 16 bits to predict them; or once."""
    on = Sharded(data=8)

    def step(table: jax.Array, tokens: jax.Array, w: jax.Array) -> jax.Array:
        narrow = on.pin(table.astype(w.dtype), "data")
        whole = on.pin(narrow) if once else on.pin(table)
        x = on.pin(whole[tokens].astype(w.dtype), "data")
        x = on.pin(jnp.tanh(x @ w), "data")
        return on.pin(x @ (whole.T if once else on.pin(narrow.T)), "data")

    table = on.aval(P("data"), 32768, 4096, dtype=jnp.float32)
    return step, (table, on.aval(P("data"), 8192, dtype=jnp.int32), on.aval(P(), 4096, 4096))


def clipped(*, scattered: bool) -> Target:
    """Gradients that are pinned whole for their norm, of which every device updates a share."""
    on = Sharded(data=8)

    def step(w: jax.Array, m: jax.Array, x: jax.Array) -> jax.Array:
        g = jnp.einsum("bi,bo->io", x, jnp.tanh(x @ w))
        g = on.pin(g, "data") if scattered else on.pin(g)
        norm = jnp.sqrt(jnp.sum(g.astype(jnp.float32) ** 2))
        return on.pin(0.9 * m + (g * jnp.minimum(1, 1 / norm).astype(g.dtype)).astype(m.dtype), "data")

    args = on.aval(P(), 8192, 8192), on.aval(P("data"), 8192, 8192, dtype=jnp.float32), on.aval(P("data"), 32768, 8192)
    return step, args


def summed_by_hand(*, scattered: bool) -> Target:
    """A Megatron block by shard_map that sums whole rows, of which every device keeps some; or scatters the sum."""
    on = Sharded(model=8)

    def block(up: jax.Array, down: jax.Array, x: jax.Array) -> jax.Array:
        y = jnp.tanh(jax.lax.all_gather(x, "model", axis=0, tiled=True) @ up) @ down
        if scattered:
            return jnp.tanh(jax.lax.psum_scatter(y, "model", scatter_dimension=0, tiled=True))
        rows = y.shape[0] // 8
        return jax.lax.dynamic_slice_in_dim(
            jnp.tanh(jax.lax.psum(y, "model")), jax.lax.axis_index("model") * rows, rows
        )

    specs = P(None, "model"), P("model"), P("model")
    step = jax.shard_map(block, mesh=on.mesh, in_specs=specs, out_specs=P("model"), check_vma=False)
    return step, (on.aval(specs[0], 8192, 32768), on.aval(specs[1], 32768, 8192), on.aval(specs[2], 16384, 8192))


def lost_batch(*, split: bool) -> Target:
    """Heads reshaped out of a projection without a constraint, in a serving step whose queries lie whole."""
    on = Sharded(model=8)

    def step(wq: jax.Array, k: jax.Array, x: jax.Array) -> jax.Array:
        q = (x @ wq).reshape(x.shape[0], -1, k.shape[-1])
        q = on.pin(q, None, "model") if split else on.pin(q)
        return on.pin(jax.nn.softmax(jnp.einsum("bhd,shd->bhs", q, k).astype(jnp.float32), -1), None, "model")

    heads = P(None, "model") if split else P()
    return step, (on.aval(heads, 8192, 8192), on.aval(P(None, "model"), 8192, 64, 128), on.aval(P(), 512, 8192))


def pinned_apart(*, together: bool) -> Target:
    """Activations that one line splits over features and the next over rows, for no reason."""
    on = Sharded(data=8)

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        y = jnp.tanh(x @ w)
        y = on.pin(y, "data") if together else on.pin(y, None, "data")
        return on.pin(jnp.tanh(y) @ w, "data")

    return step, (on.aval(P(), 8192, 8192), on.aval(P("data"), 65536, 8192))


def kept_gathers(*, again: bool) -> Target:
    """FSDP, unrolled: what is gathered for the forward pass waits for the backward pass, or is gathered again."""
    on = Sharded(data=8)

    def layer(w: jax.Array, x: jax.Array) -> jax.Array:
        return on.pin(jnp.tanh(x @ on.pin(w)), "data")

    apply = jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable) if again else layer

    def total(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in weights:
            x = apply(w, x)
        return jnp.sum(x.astype(jnp.float32))

    def step(weights: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        return [on.pin(w - 1e-3 * g, "data") for w, g in zip(weights, jax.grad(total)(weights, x), strict=True)]

    return step, ([on.aval(P("data"), 8192, 8192) for _ in range(20)], on.aval(P("data"), 16384, 8192))


CASES: Sequence[Case] = (
    Case(
        name="accumulation",
        threads="maxtext#5056, maxtext#5060",
        kind="sums in every trip",
        sick=lambda: accumulated(parted=False),
        mended=lambda: accumulated(parted=True),
    ),
    Case(
        name="zero",
        threads="maxtext#5104",
        kind="optimizer state whole",
        sick=lambda: adam(zero=False),
        mended=lambda: adam(zero=True),
        donate=(0,),
    ),
    Case(
        name="reshard",
        threads="xla#15207, jax#21562",
        kind="rematerialized",
        sick=lambda: moved(between=False),
        mended=lambda: moved(between=True),
    ),
    Case(
        name="experts",
        threads="marin#7279",
        kind="rematerialized",
        sick=lambda: returned(between=False),
        mended=lambda: returned(between=True),
    ),
    Case(
        name="fallback",
        threads="sglang-jax#953, jax#23936",
        kind="repeated on devices",
        sick=lambda: fallen_back(right=False),
        mended=lambda: fallen_back(right=True),
    ),
    Case(
        name="explicit",
        threads="maxtext#5091",
        kind="copied to another order",
        sick=lambda: explicit(kind=AxisType.Explicit),
        mended=lambda: explicit(kind=AxisType.Auto),
        donate=(0,),
        hardware="tpu-v5e:2x4",
    ),
    Case(
        name="heads",
        threads="",
        kind="repeated on devices",
        sick=lambda: lost_batch(split=False),
        mended=lambda: lost_batch(split=True),
    ),
    Case(
        name="pinned-apart",
        threads="",
        kind="unasked",
        sick=lambda: pinned_apart(together=False),
        mended=lambda: pinned_apart(together=True),
    ),
    Case(
        name="master-weights",
        threads="",
        kind="gathered wide",
        sick=lambda: master_weights(narrow=False),
        mended=lambda: master_weights(narrow=True),
    ),
    Case(
        name="normalised",
        threads="",
        kind="gathered wide",
        sick=lambda: normalised_weights(narrow=False),
        mended=lambda: normalised_weights(narrow=True),
    ),
    Case(
        name="generated",
        threads="",
        kind="gathered in every trip",
        sick=lambda: generated(once=False),
        mended=lambda: generated(once=True),
    ),
    Case(
        name="micro-batches",
        threads="",
        kind="gathered in every trip",
        sick=lambda: micro_batched(once=False),
        mended=lambda: micro_batched(once=True),
        donate=(0,),
    ),
    Case(
        name="tied",
        threads="",
        kind="gathered twice",
        sick=lambda: tied(once=False),
        mended=lambda: tied(once=True),
    ),
    Case(
        name="clipped",
        threads="",
        kind="summed whole",
        sick=lambda: clipped(scattered=False),
        mended=lambda: clipped(scattered=True),
    ),
    Case(
        name="summed-by-hand",
        threads="",
        kind="summed whole",
        sick=lambda: summed_by_hand(scattered=False),
        mended=lambda: summed_by_hand(scattered=True),
    ),
)


def sgd() -> Target:
    """Data parallelism, of a batch that is large enough."""
    on = Sharded(data=8)

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return on.pin(w - 1e-3 * jax.grad(loss)(w, x))

    return step, (on.aval(P(), 8, 4096, 4096), on.aval(P("data"), 262144, 4096))


def fully_sharded() -> Target:
    """FSDP: scanned layers whose weights are stored split, and gathered one by one, twice for a checkpoint."""
    on = Sharded(data=8)
    spec = P(None, "data")

    @jax.checkpoint
    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return on.pin(jnp.tanh(x @ on.pin(w)), "data"), None

    def total(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.scan(layer, x, w)[0].astype(jnp.float32))

    def step(state: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
        w, m = state
        g = on.pin(jax.grad(total)(w, x), *spec)
        m = 0.9 * m + g.astype(m.dtype)
        return w - (1e-3 * m).astype(w.dtype), m

    state = on.aval(spec, 8, 8192, 8192), on.aval(spec, 8, 8192, 8192, dtype=jnp.float32)
    return step, (state, on.aval(P("data"), 131072, 8192))


def megatron(*, manual: bool) -> Target:
    """A block whose weights are split by columns, then by rows, and whose rows are split in between."""
    on = Sharded(data=2, model=4)
    rows = ("data", "model")

    def block(up: jax.Array, down: jax.Array, x: jax.Array) -> jax.Array:
        whole = jax.lax.all_gather(x, "model", axis=0, tiled=True)
        return jax.lax.psum_scatter(jnp.tanh(whole @ up) @ down, "model", scatter_dimension=0, tiled=True)

    def step(up: jax.Array, down: jax.Array, x: jax.Array) -> jax.Array:
        if manual:
            specs = P(None, "model"), P("model"), P(rows)
            return jax.shard_map(block, mesh=on.mesh, in_specs=specs, out_specs=P(rows))(up, down, x)
        h = jnp.tanh(on.pin(x, "data") @ up)
        return on.pin(on.pin(h, "data", "model") @ down, rows)

    shapes = on.aval(P(None, "model"), 8192, 32768), on.aval(P("model"), 32768, 8192), on.aval(P(rows), 32768, 8192)
    return step, shapes


# Steps in which nothing is to be changed for more than a percent of them, and their donated arguments.
HEALTHY: Mapping[str, tuple[Callable[[], Target], tuple[int, ...]]] = {
    "data-parallel": (sgd, (0,)),
    "fsdp": (fully_sharded, (0,)),
    "zero": (lambda: adam(zero=True), (0,)),
    "megatron": (lambda: megatron(manual=False), ()),
    "megatron-manual": (lambda: megatron(manual=True), ()),
    "tensor": (lambda: fallen_back(right=True), ()),
}


def diagnosis(target: Target, hardware: str = HARDWARE, donate: Sequence[int] = ()) -> Diagnosis:
    """What the doctor finds."""
    fn, args = target
    return autoshard.doctor(fn, *args, hardware=hardware, donate_argnums=donate, rel_gap=REL_GAP)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of cases")
    parser.add_argument("--tell", action="store_true", help="print the findings, too")
    parser.add_argument("--healthy", action="store_true", help="what is found in the healthy steps instead")
    asked = parser.parse_args()
    if asked.healthy:
        for name, (target, donate) in HEALTHY.items():
            print(f"--- {name} ---", diagnosis(target(), HARDWARE, donate), sep="\n", flush=True)
        return
    print("| step | reported | first finding | step, ms | promised | gained | kept |\n|---|---|---|---|---|---|---|")
    for case in CASES:
        if asked.only and case.name not in asked.only.split(","):
            continue
        sick = diagnosis(case.sick(), case.hardware, case.donate)
        mended = diagnosis(case.mended(), case.hardware, case.donate)
        if not sick.findings:
            print(f"| {case.name} | nothing found |")
            print(sick)
            continue
        first = sick.findings[0]
        gained_s = sick.step_s - mended.step_s
        numbers = [f"{1e3 * seconds:.2f}" for seconds in (sick.step_s, first.seconds, gained_s)]
        row = (case.name, case.threads, first.kind, *numbers, f"{gained_s / first.seconds:.0%}")
        print(f"| {' | '.join(row)} |", flush=True)
        if asked.tell:
            print(sick, "\n--- mended ---\n", mended, sep="\n", flush=True)


if __name__ == "__main__":
    main()
