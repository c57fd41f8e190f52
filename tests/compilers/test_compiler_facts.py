"""Facts of `CompilerModel` that show in a whole step: what is predicted with one is nearer to what is compiled.

Each program is laid out by hand, compiled once, and priced twice: the second time with the fact turned round.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.backends import devices
from benchmarks import verification
from tests.installed import GPU, TPU

COMPILER_OF = devices.compiler_of
F32, BF16 = (lambda *shape, of=dtype: jax.ShapeDtypeStruct(shape, of) for dtype in (jnp.float32, jnp.bfloat16))


def step(state: Any, x: jax.Array) -> Any:
    """One step with momentum of residual perceptrons."""
    params, momentum = state

    def loss(params: Any) -> jax.Array:
        h = x
        for up, down in params:
            h = h + jnp.tanh(h @ up.astype(jnp.bfloat16)) @ down.astype(jnp.bfloat16)
        return jnp.mean(h.astype(jnp.float32) ** 2)

    value, gradient = jax.value_and_grad(loss)(params)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradient)
    return (jax.tree.map(lambda p, m: p - 1e-3 * m, params, momentum), momentum), value


def chain(params: Any, x: jax.Array) -> Any:
    """One step of weights alone."""

    def loss(params: Any) -> jax.Array:
        h = x
        for w in params:
            h = h @ w.astype(jnp.bfloat16)
        return jnp.mean(h.astype(jnp.float32) ** 2)

    value, gradient = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 1e-3 * g, params, gradient), value


def gradients(params: Any, x: jax.Array) -> Any:
    """The gradients of residual perceptrons, and no update, behind which their sums could hide."""

    def loss(params: Any) -> jax.Array:
        h = x
        for up, down in params:
            h = h + jnp.tanh(h @ up) @ down
        return jnp.mean(h.astype(jnp.float32) ** 2)

    value, gradient = jax.value_and_grad(loss)(params)
    return gradient, value


def attention(params: Any, x: jax.Array) -> Any:
    """One step of one attention without a mask, and of its head."""

    def loss(params: Any) -> jax.Array:
        q, k, v = (jnp.einsum("bsd,dnh->bsnh", x, w.astype(jnp.bfloat16)) for w in params[:3])
        weights = jax.nn.softmax(jnp.einsum("bsnh,btnh->bnst", q, k).astype(jnp.float32)).astype(jnp.bfloat16)
        h = x + jnp.einsum("bnst,btnh,nhd->bsd", weights, v, params[3].astype(jnp.bfloat16))
        return jnp.mean((h @ params[4].astype(jnp.bfloat16)).astype(jnp.float32) ** 2)

    value, gradient = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 1e-3 * g, params, gradient), value


LAYERS = [(F32(2048, 4096), F32(4096, 2048))] * 4
WIDE = [(F32(4096, 8192), F32(8192, 4096))] * 4
HEADS = [F32(1024, 8, 128)] * 3 + [F32(8, 128, 1024), F32(1024, 16384)]
MEGATRON = [(P(None, "x"), P("x"))] * 4
# program → its function, its arguments, their specs
PROGRAMS: dict[str, Any] = {
    "data parallel": (step, ((LAYERS, LAYERS), BF16(8192, 2048)), (P(), P("x"))),
    "tensor parallel": (step, ((WIDE, WIDE), BF16(8192, 4096)), ((MEGATRON, MEGATRON), P())),
    "gradients": (gradients, ([(BF16(2048, 4096), BF16(4096, 2048))] * 4, BF16(65536, 2048)), (P(), P("x"))),
    "chain": (chain, ([F32(4096, 4096)] * 4, BF16(65536, 4096)), (P(), P("x"))),
    "fully sharded": (attention, (HEADS, BF16(16, 512, 1024)), (P("x"), P("x"))),
}


def scanned(
    layout: str, hardware: str, mesh: dict[str, int], fields: dict[str, int], model: str = "llama3-8b"
) -> verification.Case:
    """Scanned layers that compute their activations again; a row of `benchmarks.verification`."""
    every = {"scan": True, "remat": "full", **fields}
    return verification.Case(
        group="",
        model=model,
        fields=tuple(every.items()),
        hardware=hardware,
        mesh=tuple(mesh.items()),
        layout=layout,
    )


SCANNED = {
    "two layers": scanned(
        "fsdp_megatron", "tpu-v5e:2x4", {"data": 2, "model": 4}, {"layers": 2, "batch": 8, "sequence": 512}
    ),
    "all layers": scanned("fsdp", "tpu-v5e:4x4", {"data": 4, "model": 4}, {"batch": 16, "sequence": 2048}),
    "large vocabulary": scanned(
        "fsdp", "h100:1x8", {"data": 8}, {"layers": 8, "batch": 16, "sequence": 2048}, model="gemma-7b"
    ),
}

ON_TPU = [  # hardware, fact, program, quantity
    ("tpu-v5e:2x4", "updates_state_early", "chain", "peak"),
    ("tpu-v5e:2x4", "makes_weight_gradients_in_order", "two layers", "peak"),
    ("tpu-v5e:2x4", "renames_sums_for_additions_only", "two layers", "peak"),
    ("tpu-v5e:4x4", "computes_loss_last", "all layers", "peak"),
]
ON_GPU = [  # fact, program, quantity
    ("puts_weight_gradients_last", "data parallel", "peak"),
    ("puts_weight_gradients_last", "tensor parallel", "peak"),
    ("overwrites_last_read", "data parallel", "peak"),
    ("zeroes_stacks_early", "large vocabulary", "peak"),
    ("updates_state_early", "data parallel", "peak"),
    ("computes_loss_last", "data parallel", "peak"),
    ("hides_behind_late_work", "tensor parallel", "seconds"),
    ("waits_at_both_ends", "gradients", "exposed"),
    ("waits_at_both_ends", "fully sharded", "seconds"),
    ("renames_sums_for_additions_only", "fully sharded", "seconds"),
]


def evaluated(program: str, hardware: str) -> Any:
    if program in SCANNED:
        return verification.subject(SCANNED[program])
    fn, args, specs = PROGRAMS[program]
    return autoshard.evaluate(
        fn, *args, mesh={"x": 8}, hardware=hardware, in_specs=specs, out_specs=(specs[0], P()), donate_argnums=0
    )


@cache
def compiled(program: str, hardware: str) -> dict[str, float]:
    """Peak bytes of the compiled step, its seconds, and those of communication that nothing hides."""
    made = evaluated(program, hardware)
    found = made.verify(compiler_options=devices.compiler_named(hardware).ring_free_flags)
    assert found.memory.compiled is not None
    assert found.timeline is not None
    timeline = found.timeline
    return {"peak": found.memory.compiled.peak, "seconds": timeline.step_s, "exposed": timeline.exposed_s}


@pytest.mark.parametrize(
    ("hardware", "fact", "program", "quantity"),
    [
        *(pytest.param("h100:1x8", *row, marks=GPU) for row in ON_GPU),
        *(pytest.param(*row, marks=[*TPU, pytest.mark.slow]) for row in ON_TPU),
    ],
)
def test_what_is_predicted_with_a_fact_is_nearer_than_without(
    hardware: str, fact: str, program: str, quantity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def predicted() -> float:
        made = evaluated(program, hardware)
        cost = made.record.cost
        return {"peak": made.record.memory.peak_bytes, "seconds": cost.step_s, "exposed": cost.exposed_s}[quantity]

    want = compiled(program, hardware)[quantity]
    true = predicted()

    def flipped(found: Any) -> Any:
        model = COMPILER_OF(found)
        return replace(model, **{fact: not getattr(model, fact)})

    monkeypatch.setattr(devices, "compiler_of", flipped)
    false = predicted()
    assert true != false
    assert abs(true - want) < abs(false - want), f"{true:.6g} and {false:.6g} without the fact, {want:.6g} compiled"
    assert quantity == "exposed" or true == pytest.approx(want, rel=0.15)
