"""Layouts of a user's choice: the collectives that compilers make of them are those that are priced."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from autoshard.api.evaluate import evaluate
from autoshard.backends import compile
from autoshard.verification.collective_match import agrees
from tests.api.test_evaluation import H100, HIDDEN, MESH, V5E, WIDTH, evaluated, moved
from tests.installed import needs_gpu_compiler

BF16, F32 = 2, 4


@needs_gpu_compiler
@pytest.mark.parametrize("recipe", ["dp", "megatron", "fsdp_megatron"])
def test_the_compiler_emits_what_the_evaluation_predicts(recipe: str) -> None:
    verification = evaluated("mlp-1k", recipe, "shardy").verify()
    assert agrees(verification.rows, verification.tolerance), str(verification)
    for row in verification.rows:
        assert row.emitted_bytes == pytest.approx(row.predicted_bytes, rel=0.10)


@pytest.mark.parametrize(("tokens", "hardware", "gathers"), [(512, H100, 2), (4096, H100, 1), (512, V5E, 1)])
def test_a_weight_is_gathered_once_unless_each_matmul_gathers_it_in_its_groups(
    tokens: int, hardware: str, gathers: int
) -> None:
    """The devices are grouped by the weight where repeating the tokens in every group is less than repeating it.

    XLA:TPU finds the two gathers equal all the same.
    """
    x = jax.ShapeDtypeStruct((tokens, WIDTH), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((WIDTH, HIDDEN), jnp.bfloat16)

    def forward_and_backward(x: Any, weight: Any, cotangent: Any) -> Any:
        out, backward = jax.vjp(lambda x: x @ weight, x)
        return out, backward(cotangent)[0]

    found = evaluate(
        forward_and_backward,
        x,
        weight,
        jax.ShapeDtypeStruct((tokens, HIDDEN), jnp.bfloat16),
        mesh=MESH.shape,
        hardware=hardware,
        in_specs=(P("data", None), P("data", "model"), P("data", "model")),
        out_specs=(P("data", "model"), P("data", None)),
    )
    assert moved(found, "all-gather", "data") == gathers * WIDTH * HIDDEN * BF16 // MESH.shape["model"]
    assert moved(found, "all-reduce", "model") == tokens * WIDTH * BF16 // MESH.shape["data"]
    held = found.record.memory.kinds["copies"]
    assert held >= WIDTH * HIDDEN * BF16 // MESH.shape["model"]
    if hardware != H100 and compile.available("tpu"):
        rows = found.verify(compiler_options=compile.TPU_PLAIN_OPTIONS).rows
        assert [r.emitted_bytes for r in rows] == [r.predicted_bytes for r in rows]
