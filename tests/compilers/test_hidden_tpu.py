"""What XLA:TPU runs beside products, and how long plans say that steps take."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.backends import compile, devices, hlo
from autoshard.ir.mesh import MeshAxes
from tests.installed import needs_tpu_compiler

LAYERS, WIDTH, FEATURES = 4, 2048, 8192


def blocks(weights: Any, x: jax.Array) -> Any:
    def loss(weights: Any) -> jax.Array:
        h = x
        for up, down in weights:
            h = h + jnp.tanh(h @ up.astype(h.dtype)) @ down.astype(h.dtype)
        return jnp.mean(h.astype(jnp.float32) ** 2)

    return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, jax.grad(loss)(weights))


def scanned(weights: Any, x: jax.Array) -> Any:
    @jax.checkpoint
    def block(h: jax.Array, w: Any) -> Any:
        up, down = w
        return h + jnp.tanh(h @ up.astype(h.dtype)) @ down.astype(h.dtype), None

    def loss(weights: Any) -> jax.Array:
        return jnp.mean(jax.lax.scan(block, x, weights)[0].astype(jnp.float32) ** 2)

    return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, jax.grad(loss)(weights))


@needs_tpu_compiler
@pytest.mark.parametrize(
    "split", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["weights-split", "weights-whole"]
)
@pytest.mark.parametrize(
    ("hardware", "devices"),
    [("tpu-v5e:4x4", 16), pytest.param("tpu-v5p:2x2x2", 8, marks=pytest.mark.slow)],
    ids=["gathers-ahead", "waits-for-all"],
)
@pytest.mark.parametrize("program", [blocks, pytest.param(scanned, marks=pytest.mark.slow)])
def test_gathers_alone_run_beside_products(program: Any, hardware: str, devices: int, *, split: bool) -> None:
    """And only of v5e, but for the first of a trip; steps take as long as planned."""
    stacked = program is scanned
    up, down = (
        jax.ShapeDtypeStruct((LAYERS,) * stacked + shape, jnp.float32)
        for shape in ((WIDTH, FEATURES), (FEATURES, WIDTH))
    )
    spec = (P(None, "x") if stacked else P("x")) if split else P()
    weights, specs = ((up, down), (spec, spec)) if stacked else ([(up, down)] * LAYERS, [(spec, spec)] * LAYERS)
    plan = autoshard.plan(
        program,
        weights,
        jax.ShapeDtypeStruct((2048 * devices, WIDTH), jnp.bfloat16),
        mesh={"x": devices},
        hardware=hardware,
        in_shardings=(specs, P("x")),
        out_shardings=specs,
        donate_argnums=0,
    )
    verified = plan.verify(compiler_options=compile.TPU_PLAIN_OPTIONS)
    assert verified.timeline is not None
    assert verified.cost.step_s == pytest.approx(verified.timeline.step_s, rel=0.05)
    gathered = [e for e in verified.timeline.events if e.stream == "communication" and e.name.startswith("all-gather")]
    gathers_s = sum(e.duration_s * e.trips for e in gathered)
    if devices == 16:
        assert 0.4 * gathers_s * split <= verified.timeline.hidden_s <= gathers_s + 1e-9
    else:
        assert verified.timeline.hidden_s == pytest.approx(0.0, abs=1e-9)


@needs_tpu_compiler
@pytest.mark.parametrize(
    ("vocabulary", "beside", "waited"),
    [
        (51_200, False, {0}),
        pytest.param(51_200, True, {0, 4}, marks=pytest.mark.slow),
        pytest.param(32_768, True, {0}, marks=pytest.mark.slow),
    ],
    ids=["head", "head-beside-activations", "shorter-head-beside-activations"],
)
def test_a_product_carries_the_gather_of_the_next(vocabulary: int, waited: set[int], *, beside: bool) -> None:
    """Not the first's, and none that takes twice as long while activations are gathered, too (`costs.carriers`)."""
    mesh = MeshAxes(("data", "model"), (4, 4))
    width, features = 1536, 4096
    half = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    weights = [half((width, features)), half((features, width))] * 2 + [half((width, vocabulary))]

    def pinned(x: jax.Array, *spec: str | None) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(devices.abstract(mesh), P(*spec)))

    def program(weights: Sequence[jax.Array], x: jax.Array) -> jax.Array:
        for i, weight in enumerate(weights[:-1]):
            if i % 2 == 0:
                x = pinned(jnp.tanh(x @ pinned(weight, None, "model")), "data", None, "model")
            else:
                x = pinned(x @ pinned(weight, "model"), "data", "model" if beside and i == 3 else None)
        return pinned(pinned(x, "data") @ pinned(weights[-1], None, "model"), "data", None, "model")

    spec = [P("data", "model"), P("model", "data")] * 2 + [P("data", "model")]
    split = [NamedSharding(devices.abstract(mesh), one) for one in (*spec, P("data"))]
    step = jax.jit(program, in_shardings=(split[:-1], split[-1]))
    traced = step.trace(weights, half((32, 1024, width)))
    compiled = compile.compile(traced, topology="tpu-v5e:4x4", mesh=mesh, compiler_options=compile.TPU_PLAIN_OPTIONS)
    gathers = [c for c in hlo.collectives(hlo.read(compiled.hlo_text), mesh) if c.op_name.startswith("weights[")]
    assert len(gathers) == len(weights)
    assert {int(c.op_name[8]) for c in gathers if not c.asynchronous} == waited
