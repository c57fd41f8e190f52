"""Makes the HLO fixtures again: every program below, by every compiler that is installed.

    python tests/data/hlo/make.py [gpu|tpu|cpu …]

Each file, `<jax version>/<program>.<compiler>.txt`, is what the compiler emitted, byte
for byte but for the paths of source files. The mesh is `data=2 × model=4` on h100:1x8,
tpu-v5e:2x4 and cpu:8. Sizes are whole TPU tiles, but for `padded`.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.backends import compile
from autoshard.backends.compile import CompilerName
from autoshard.ir.mesh import MeshAxes

HERE = Path(__file__).parent
AXES = MeshAxes.of({"data": 2, "model": 4})
MESH = AbstractMesh(AXES.sizes, AXES.names, axis_types=(AxisType.Auto,) * 2)
TOPOLOGIES: dict[CompilerName, str] = {"gpu": "h100:1x8", "tpu": "tpu-v5e:2x4", "cpu": "cpu:8"}
VERSION = "jax-" + ".".join(jax.__version__.split(".")[:2])
F32, BF16 = jnp.float32, jnp.bfloat16


def array(*shape: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def pin(x: Any, *spec: Any) -> Any:
    return jax.lax.with_sharding_constraint(x, NamedSharding(MESH, P(*spec)))


def trace(fn: Callable[..., Any], specs: Any, out: Any, *avals: Any) -> Any:
    shardings = partial(jax.tree.map, lambda spec: NamedSharding(MESH, spec), is_leaf=lambda x: isinstance(x, P))
    return jax.jit(fn, in_shardings=shardings(specs), out_shardings=shardings(out)).trace(*avals)


def manual(body: Callable[..., Any], spec: P, out: P) -> Any:
    """A collective written by hand, on one 1024 × 1024 f32 array (4 MiB)."""

    def collective(x: Any) -> Any:
        return jax.shard_map(body, mesh=MESH, in_specs=spec, out_specs=out, check_vma=False)(x * 2) * 3

    return trace(collective, (spec,), out, array(1024, 1024))


def all_gather_data() -> Any:
    """Result per device 1024 × 256: 1 MiB over data."""
    return manual(lambda x: jax.lax.all_gather(x, "data", tiled=True), P("data", "model"), P(None, "model"))


def all_gather_both() -> Any:
    """Result per device 1024 × 1024: 4 MiB over data and model."""
    return manual(lambda x: jax.lax.all_gather(x, ("data", "model"), tiled=True), P(("data", "model")), P())


def reduce_scatter_model() -> Any:
    """Operand per device 512 × 1024: 2 MiB over model."""
    scatter = partial(jax.lax.psum_scatter, axis_name="model", scatter_dimension=1, tiled=True)
    return manual(scatter, P("data"), P("data", "model"))


def all_reduce_model() -> Any:
    """Operand per device 512 × 1024: 2 MiB over model."""
    return manual(lambda x: jax.lax.psum(x, "model"), P("data"), P("data"))


def all_to_all_model() -> Any:
    """Operand per device 512 × 256: 512 KiB over model."""
    swap = partial(jax.lax.all_to_all, axis_name="model", split_axis=0, concat_axis=1, tiled=True)
    return manual(swap, P("data", "model"), P(("data", "model")))


def permute_model() -> Any:
    """Operand per device 512 × 256: 512 KiB round the ring of model."""
    ring = [(i, (i + 1) % 4) for i in range(4)]
    return manual(lambda x: jax.lax.ppermute(x, "model", ring), P("data", "model"), P("data", "model"))


def megatron() -> Any:
    """Gradient step of a tensor-parallel MLP: one all-reduce forward over model, weights' over data."""

    def step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            up, down = weights
            return jnp.square(pin(jax.nn.relu(pin(x @ up, "data", "model")) @ down, "data")).sum()

        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))

    specs = (P(None, "model"), P("model"))
    return trace(step, (specs, P("data")), specs, (array(512, 2048), array(2048, 512)), array(256, 512))


def fsdp_scan() -> Any:
    """Gradient step of 4 scanned layers whose weights are sharded over data: gathers and scatters in loops."""

    def step(weights: Any, x: Any) -> Any:
        def layer(x: Any, weights: Any) -> Any:
            up, down = (pin(pin(w, "data"), None) for w in weights)
            return pin(jnp.tanh(x @ up) @ down + x, "data"), None

        def loss(weights: Any) -> Any:
            return jax.lax.scan(jax.checkpoint(layer), x, weights)[0].astype(F32).sum()

        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))

    specs = (P(None, "data"), P(None, "data"))
    weights = (array(4, 1024, 4096, dtype=BF16), array(4, 4096, 1024, dtype=BF16))
    return trace(step, (specs, P("data")), specs, weights, array(8192, 1024, dtype=BF16))


def resharded_scan() -> Any:
    """The same without pins on the weights: XLA gathers over model, after a permute of the whole mesh."""

    def step(weights: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return pin(jnp.tanh(x @ w), "data"), None

        def loss(weights: Any) -> Any:
            return jax.lax.scan(jax.checkpoint(layer), x, weights)[0].sum()

        return jax.grad(loss)(weights)

    spec = P(None, "data")
    return trace(step, (spec, P("data")), spec, array(4, 512, 512), array(4096, 512))


def nested() -> Any:
    """A scan of 5 within a scan of 3, an all-reduce in each, and one in a branch."""

    def step(x: Any, w: Any) -> Any:
        def inner(x: Any, _: Any) -> Any:
            return pin(jnp.tanh(pin(x @ w, None, "model") @ w.T), None, None), None

        def outer(x: Any, _: Any) -> Any:
            x, _ = jax.lax.scan(inner, x, None, length=5)
            y = jax.lax.cond(x[0, 0] > 0, lambda x: pin(pin(x @ w, None, "model") @ w.T, None, None), jnp.cos, x)
            return y, None

        return jax.lax.scan(outer, x, None, length=3)[0]

    return trace(step, (P(), P(None, "model")), P(), array(64, 128), array(128, 512))


def sequence_parallel() -> Any:
    """A Megatron MLP with sequence parallelism: gather before, scatter after, over model."""

    def mlp(x: Any, up: Any, down: Any) -> Any:
        x = pin(x, "data", "model")
        x = pin(x, "data")
        hidden = pin(jax.nn.relu(x @ up), "data", None, "model")
        return pin(hidden @ down, "data", "model")

    specs = (P("data", "model"), P(None, "model"), P("model"))
    return trace(mlp, specs, P("data", "model"), array(4, 512, 1024), array(1024, 4096), array(4096, 1024))


def experts() -> Any:
    """Expert parallelism over model: dispatch and combine are one all-to-all each."""

    def layer(x: Any, w: Any) -> Any:
        x = pin(x, None, "model")  # expert, token, feature: tokens split
        x = pin(x, "model", None)  # experts split
        y = pin(jnp.einsum("etf,efg->etg", x, w), "model", None)
        return pin(y, None, "model")

    specs = (P(None, "model"), P("model"))
    return trace(layer, specs, P(None, "model"), array(8, 1024, 256), array(8, 256, 256))


def windowed_scan() -> Any:
    """Gradient of 3 scanned layers, fully sharded over all 8 devices, with compute enough to hide rings in loops."""

    def step(weights: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return pin(jnp.tanh(x @ w), ("data", "model")), None

        return jax.grad(lambda weights: jax.lax.scan(layer, x, weights)[0].astype(F32).sum())(weights)

    spec = P(None, ("data", "model"))
    avals = array(3, 4096, 4096, dtype=BF16), array(32768, 4096, dtype=BF16)
    return trace(step, (spec, P(("data", "model"))), spec, *avals)


def unrolled_ring() -> Any:
    """A matmul that ends in a scatter over 4 devices: its ring is one trip, and no loop is left."""

    def project(x: Any, w: Any) -> Any:
        return pin(x @ w, "data", "model")

    specs = (P("data", None, "model"), P("model"))
    return trace(project, specs, P("data", "model"), array(4, 4096, 16384, dtype=BF16), array(16384, 4096, dtype=BF16))


def sharing_rings() -> Any:
    """Three such matmuls, two of one line: their rings begin with zeros, which XLA passes on once for all."""

    def project(x: Any, ups: Any, gate: Any) -> Any:
        first, second = (pin(x @ up, "data", "model") for up in ups)
        third = pin(x @ gate, "data", "model")
        return first * second * third

    weight = array(8192, 4096, dtype=BF16)
    specs = (P("data", None, "model"), (P("model"), P("model")), P("model"))
    return trace(project, specs, P("data", "model"), array(4, 4096, 8192, dtype=BF16), (weight, weight), weight)


def padded() -> Any:
    """A weight's gradient scattered over model, 500 rows to a device: no whole tiles."""

    def step(w: Any, x: Any) -> Any:
        return jax.grad(lambda w: pin(jnp.tanh(x @ w), ("data", "model")).astype(F32).sum())(w)

    specs = (P("model"), P(("data", "model")))
    return trace(step, specs, P("model"), array(2000, 2048, dtype=BF16), array(2048, 2000, dtype=BF16))


PROGRAMS = (
    all_gather_data,
    all_gather_both,
    reduce_scatter_model,
    all_reduce_model,
    all_to_all_model,
    permute_model,
    megatron,
    fsdp_scan,
    resharded_scan,
    nested,
    sequence_parallel,
    experts,
)
TPU_PROGRAMS = (windowed_scan, unrolled_ring, sharing_rings, padded)
WINDOWED = (windowed_scan, unrolled_ring, sharing_rings)


def compiled(program: Callable[[], Any], compiler: CompilerName) -> compile.Compiled:
    """A program on its compiler's topology; without windowed einsums where they are not the point."""
    plain = compiler == "tpu" and program not in WINDOWED
    options = compile.TPU_PLAIN_OPTIONS if plain else {}
    return compile.compile(program(), topology=TOPOLOGIES[compiler], mesh=AXES, compiler_options=options)


def main(names: list[CompilerName]) -> None:
    """Writes the texts of these compilers, or of all that are installed."""
    folder = HERE / VERSION
    folder.mkdir(exist_ok=True)
    for compiler in names or [name for name in TOPOLOGIES if compile.available(name)]:
        for program in PROGRAMS + (TPU_PROGRAMS if compiler == "tpu" else ()):
            text = compiled(program, compiler).hlo_text
            text = text.replace(str(Path(__file__).resolve()), "make.py").replace(f"{HERE.parents[2]}/", "")
            (folder / f"{program.__name__}.{compiler}.txt").write_text(text)


if __name__ == "__main__":
    main([name for name in TOPOLOGIES if name in sys.argv[1:]])
