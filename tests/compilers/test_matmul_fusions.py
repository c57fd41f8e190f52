"""What XLA:GPU's matmuls compute of their operands, and how they write their products."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.verification.result import Verification
from tests.installed import needs_gpu_compiler

F32 = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
Block = Callable[[Any, Any, Any, Any], Any]


def verified(block: Block, *, layers: int = 1, rows: tuple[int, ...] = (65_536,), dtype: Any = jnp.bfloat16) -> Any:
    """A train step of perceptrons, planned and compiled for 8 H100."""

    def loss(params: Any, h: Any) -> Any:
        for layer in params:
            up, down, bias = (layer[k].astype(dtype) for k in ("up", "down", "bias"))
            h = h + block(h, up, down, bias)
        return jnp.mean(h.astype(jnp.float32) ** 2)

    def step(params: Any, h: Any) -> Any:
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, jax.grad(loss)(params, h))

    params = [{"up": F32((512, 2048)), "down": F32((2048, 512)), "bias": F32((2048,))}] * layers
    h = jax.ShapeDtypeStruct((*rows, 512), dtype)
    return autoshard.plan(step, params, h, mesh={"data": 8}, hardware="h100:1x8", donate_argnums=0).verify("gpu")


def compute(found: Verification) -> float:
    """Predicted over compiled seconds of compute."""
    assert found.predicted is not None
    assert found.timeline is not None
    return found.predicted.compute_s / found.timeline.compute_s


def peak(found: Verification) -> float:
    """Predicted over compiled peak."""
    assert found.memory.compiled is not None
    return found.memory.predicted.peak / found.memory.compiled.peak


MADE: dict[str, Callable[[Any, Any], Any]] = {
    "relu": lambda x, _: jax.nn.relu(x),
    "abs": lambda x, _: jnp.abs(x),
    "scaled": lambda x, _: x * 0.125,
    "tanh": lambda x, _: jnp.tanh(x),
    "two in a row": lambda x, _: jnp.sqrt(jnp.abs(x) + 1),
}
WRITTEN: dict[str, Callable[[Any, Any], Any]] = {
    "squared": lambda x, _: jnp.square(jax.nn.relu(x)),
    "clamped": lambda x, _: jnp.clip(x, -1, 1),
    "selected": lambda x, _: jnp.where(x > 1, x, 0),
    "silu": lambda x, _: jax.nn.silu(x),
    "by a vector": lambda x, vector: x * vector,
}


@needs_gpu_compiler
@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float32, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("function", [*MADE.values(), *WRITTEN.values()], ids=[*MADE, *WRITTEN])
def test_what_a_matmul_computes_of_its_operand_is_not_stored(function: Callable[[Any, Any], Any], dtype: Any) -> None:
    """What it computes takes a tenth of the compute where it is stored, and what is stored does where it is not."""
    found = verified(lambda h, up, down, bias: function(h @ up, bias) @ down, layers=4, dtype=dtype)
    assert compute(found) == pytest.approx(1, abs=0.02)


@needs_gpu_compiler
@pytest.mark.parametrize("rows", [(65_536,), (64, 1024)], ids=str)
@pytest.mark.parametrize(
    "function", [jax.nn.silu, partial(jax.nn.gelu, approximate=False)], ids=["silu", "gelu of several kernels"]
)
def test_a_product_that_is_narrowed_is_stored_narrow(function: Callable[[Any], Any], rows: tuple[int, ...]) -> None:
    """In float32 it would be a quarter to a half more of the compute and of the peak."""

    def block(h: Any, up: Any, down: Any, _: Any) -> Any:
        x = jax.lax.dot_general(h, up, (((h.ndim - 1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        return function(x.astype(jnp.bfloat16)) @ down

    found = verified(block, layers=4, rows=rows)
    assert compute(found) == pytest.approx(1, abs=0.02)
    assert peak(found) == pytest.approx(1, abs=0.08)
