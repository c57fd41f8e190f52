"""Compiled for GPUs and TPUs, a plan's program has the plan's collectives."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.backends import compile, devices, hlo
from autoshard.ir.constraints import Constraints
from autoshard.ir.graph import WHILE_TRIPS
from autoshard.verification.collective_match import agrees
from autoshard.verification.result import Match
from autoshard.verification.verify import MEMORY_TOLERANCE
from tests.installed import needs_gpu_compiler, needs_tpu_compiler
from tests.verification.test_verify import MESH, check, planned


@needs_gpu_compiler
@pytest.mark.parametrize(
    ("name", "fields", "memory"),
    [
        pytest.param("linear-8k", {}, MEMORY_TOLERANCE, marks=pytest.mark.slow),
        ("mlp-8k", {}, MEMORY_TOLERANCE),
        # Gradients wait for their reductions, of a large batch, and of a small one for the last of them.
        ("mlp-8k", {"batch": 65536}, 0.2),
        pytest.param("gpt2-small", {}, MEMORY_TOLERANCE, marks=pytest.mark.slow),
        pytest.param(
            "gpt2-small", {"vocab": 50_304, "layers": 2, "batch": 1, "sequence": 128}, 0.25, marks=pytest.mark.slow
        ),
        pytest.param(
            "llama3-8b", {"layers": 4, "batch": 8, "sequence": 2048}, MEMORY_TOLERANCE, marks=pytest.mark.slow
        ),
        ("llama3-8b", {"layers": 1, "batch": 1, "sequence": 128}, MEMORY_TOLERANCE),
    ],
    ids=str,
)
def test_the_h100_compiler_follows_the_plan(name: str, fields: dict[str, int], memory: float) -> None:
    check(planned(name, "h100:1x8", **fields).verify("gpu"), memory=memory)


@needs_gpu_compiler
@pytest.mark.parametrize(
    ("kind", "trips", "nbytes"), [("branch", 1, 4), ("loop", WHILE_TRIPS, 4), ("loops", WHILE_TRIPS, 1)]
)
def test_what_decides_is_reduced_over_devices(kind: str, trips: int, nbytes: int) -> None:
    """Whether every sequence is done, each trip, or any of several loops'; what is largest, before a branch."""

    def loop(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda x: jnp.max(x) < 9.0, lambda x: jnp.sin(x) * x, x)

    def branch(x: jax.Array) -> jax.Array:
        return jax.lax.cond(jnp.max(x) < 9.0, jnp.sin, jnp.cos, x)

    plan = autoshard.plan(
        {"branch": branch, "loop": loop, "loops": jax.vmap(loop)}[kind],
        jax.ShapeDtypeStruct((1 << 20, 256), jnp.float32),
        hardware="h100:1x8",
        in_shardings=P("data"),
        out_shardings=P("data"),
    )
    (row,) = plan.record.collectives
    assert (row.kind, row.nbytes, row.trips) == ("all-reduce", nbytes, trips)
    found = plan.verify()
    assert found.ok, str(found)


@needs_gpu_compiler
@pytest.mark.parametrize(("rows", "remat"), [(1024, False), pytest.param(65536, True, marks=pytest.mark.slow)])
def test_a_scan_over_layers_is_followed_trip_by_trip(rows: int, *, remat: bool) -> None:
    """Small batch: two reductions of activations per layer. Large: weights gathered twice, gradients scattered."""
    layers, width, hidden = 8, 4096, 16384

    def layer(h: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        return h + jax.nn.gelu(h @ w["up"].astype(h.dtype)) @ w["down"].astype(h.dtype), None

    def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        h, _ = jax.lax.scan(jax.checkpoint(layer) if remat else layer, x.astype(jnp.bfloat16), params)
        return jnp.mean(jnp.square(h.astype(jnp.float32)))

    def step(params: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        value, gradient = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), value

    shapes = {"up": (layers, width, hidden), "down": (layers, hidden, width)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    found = autoshard.plan(step, params, x, mesh=MESH, hardware="h100:1x8", donate_argnums=0).verify("gpu")
    check(found)
    moved = {row.kind: row.emitted_bytes for row in found.by_kind()}
    weights = 2 * layers * width * hidden * 2  # both matrices of every layer, in bf16
    if rows == 65536:
        assert moved["all-gather"] == 2 * weights
        assert moved["reduce-scatter"] == weights
    else:
        reduced = moved.get("all-reduce", 4) - 4 + moved.get("reduce-scatter", 0)  # less the loss
        assert reduced == pytest.approx(2 * layers * rows * width * 2, rel=1e-3)


@needs_gpu_compiler
def test_two_nodes() -> None:
    check(planned("mlp-8k", "h100:2x4").verify("gpu"))


@needs_gpu_compiler
@pytest.mark.parametrize(
    ("product", "out"),
    [
        ("bsc,bcd->bsd", P(("data", "model"))),
        ("bsc,bcd->sbd", P(None, ("data", "model"))),
        ("bsc,bcd->bsd", P("data", "model")),
        ("bsc,cd->bsd", P(("data", "model"))),
    ],
    ids=str,
)
def test_a_sum_is_scattered_onto_the_batch_of_its_contraction(product: str, out: P) -> None:
    """One reduce-scatter, also where the batch is split already: XLA would all-reduce and gather, not told how."""
    *_, weight = product.partition("->")[0].split(",")
    x = jax.ShapeDtypeStruct((16, 512, 1024), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((16, 1024, 512) if weight == "bcd" else (1024, 512), jnp.bfloat16)
    found = autoshard.plan(
        lambda x, w: jnp.einsum(product, x, w),
        x,
        w,
        mesh=MESH,
        hardware="h100:1x8",
        in_shardings=(P("data", None, "model"), P("data", "model") if weight == "bcd" else P("model")),
        out_shardings=out,
        for_grad=False,
    ).verify("gpu")
    assert agrees(found.rows, found.tolerance), str(found)
    assert [(c.kind, c.nbytes) for c in found.emitted] == [("reduce-scatter", 16 // 2 * 512 * 512 * 2)]


@needs_gpu_compiler
@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("out", [P("model", "data"), P(None, "data"), P("model")], ids=str)
def test_sums_over_two_axes_are_finished_as_planned(terms: int, out: P) -> None:
    """Onto two dimensions, or scattered over one axis and summed over the other; of two terms, added first."""
    x, w = jax.ShapeDtypeStruct((2, 4, 4096), jnp.bfloat16), jax.ShapeDtypeStruct((4096, 511), jnp.bfloat16)
    found = autoshard.plan(
        lambda x, w, *more: jnp.sin(x @ w + more[0] @ more[1] if more else x @ w),
        *(x, w) * terms,
        mesh={"data": 4, "model": 2},
        hardware="h100:1x8",
        in_shardings=(P(None, None, ("data", "model")), P(("data", "model"))) * terms,
        out_shardings=out,
        for_grad=False,
    ).verify("gpu")
    assert found.emitted
    assert agrees(found.rows, found.tolerance), str(found)


@needs_gpu_compiler
@pytest.mark.parametrize(
    ("tokens", "out"),
    [(P("model"), P("model", "data")), (P(None, "model"), P("data", "model")), (P(), P(None, "data"))],
    ids=str,
)
def test_the_sums_of_a_lookup_are_scattered_as_planned(tokens: P, out: P) -> None:
    """Pinned whole where it is made; else XLA:GPU makes it in other layouts, all-reduces, and moves that."""
    found = autoshard.plan(
        lambda table, tokens: jnp.sin(table[tokens]),
        jax.ShapeDtypeStruct((32_768, 3072), jnp.bfloat16),
        jax.ShapeDtypeStruct((16, 1024), jnp.int32),
        mesh={"data": 4, "model": 2},
        hardware="h100:1x8",
        in_shardings=(P("data"), tokens),
        out_shardings=out,
        for_grad=False,
    ).verify("gpu")
    assert "reduce-scatter" in {row.kind for row in found.rows}
    assert agrees(found.rows, found.tolerance), str(found)


@pytest.mark.slow
@needs_tpu_compiler
@pytest.mark.parametrize("name", ["linear-8k", "mlp-8k"])
def test_the_v5e_compiler_follows_the_plan(name: str) -> None:
    check(planned(name, "tpu-v5e:2x4").verify("tpu"))


@needs_gpu_compiler
def test_what_libraries_multiply_is_counted() -> None:
    """Patches, then a layer with bias and gelu, as image models have them: cuDNN's and cuBLAS's, with epilogues."""

    def loss(params: Any, images: Any) -> Any:
        x = jax.lax.conv_general_dilated(
            images, params["patch"], (16, 16), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = x.reshape(len(images), -1, x.shape[-1])
        x = x + jax.nn.gelu(x @ params["up"] + params["bias"]) @ params["down"]
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def step(params: Any, images: Any) -> Any:
        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params, images))

    shapes = {"patch": (16, 16, 3, 256), "up": (256, 1024), "bias": (1024,), "down": (1024, 256)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    images = jax.ShapeDtypeStruct((32, 128, 128, 3), jnp.bfloat16)
    plan = autoshard.plan(step, params, images, mesh={"data": 8}, hardware="h100:1x8", donate_argnums=0)
    found = plan.verify("gpu", compiler_options={"xla_gpu_enable_triton_gemm": False})
    assert found.compute is not None
    assert found.timeline is not None
    assert found.compute.predicted_flops is not None
    assert found.compute.compiled_flops == pytest.approx(found.compute.predicted_flops, rel=0.02)
    assert not found.timeline.uncounted


@needs_tpu_compiler
@pytest.mark.parametrize(
    ("hardware", "flags", "kind"),
    [
        ("tpu-v5p:2x2x2", compile.TPU_PLAIN_OPTIONS, "all-reduce"),
        ("tpu-v5p:2x2x2", {}, "reduce-scatter"),
        ("tpu-v5p:2x2x1", compile.TPU_PLAIN_OPTIONS, "reduce-scatter"),
    ],
)
def test_a_sum_over_a_whole_cube_is_all_reduced_unless_it_is_made_in_a_ring(
    hardware: str, flags: Any, kind: str
) -> None:
    """See `Machine.unscattered_axes`, which says what libtpu does without windowed einsum."""
    place = devices.place({"data": 4 if "x1" in hardware else 8}, hardware)
    made, split = (NamedSharding(devices.abstract(place.axes), spec) for spec in (P("data"), P("data", None)))
    x, y = (jax.ShapeDtypeStruct((8192, width), jnp.bfloat16, sharding=made) for width in (768, 3072))
    product = jax.jit(lambda x, y: jnp.einsum("bk,bn->kn", x, y), in_shardings=(made, made), out_shardings=split)
    compiled = compile.compile(
        product.trace(x, y),
        topology=hardware,
        mesh=place.axes,
        device_order=place.machine.device_order.ravel().tolist(),
        compiler_options=flags,
    )
    found = hlo.collectives(hlo.read(compiled.hlo_text), place.axes)
    assert [row.kind for row in found] == [kind]
    if flags:
        assert (not place.machine.unscattered_axes) == (kind == "reduce-scatter")


@needs_gpu_compiler
def test_a_plan_that_is_not_followed_fails() -> None:
    """Constraints left out: the partitioner decides otherwise, and the table says so."""
    plan = planned("mlp-8k", "h100:1x8")
    nothing = Constraints(made={}, taken={}, inputs={}, outputs={})
    bare = plan.pinned(nothing)
    found = bare.verify("gpu")
    assert not found.ok
    assert {row.status for row in found.rows} & {Match.EXTRA, Match.MISSING, Match.DIFFERS}
