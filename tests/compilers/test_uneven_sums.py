"""Contractions that XLA:GPU cuts into sums of equal length: what is filled up for that takes time and memory."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from autoshard.api.evaluate import evaluate
from tests.installed import needs_gpu_compiler


@needs_gpu_compiler
@pytest.mark.parametrize(
    ("m", "k", "n", "dtype", "filled"),
    [
        (2048, 50_257, 1024, jnp.bfloat16, True),
        (1024, 30_522, 768, jnp.bfloat16, True),
        (2048, 50_265, 1024, jnp.float32, True),
        (2048, 50_260, 1024, jnp.float32, True),
        (2048, 50_304, 1024, jnp.bfloat16, False),
        (2048, 50_272, 1024, jnp.float32, False),
    ],
)
def test_what_is_filled_up_is_priced(m: int, k: int, n: int, dtype: jnp.dtype, *, filled: bool) -> None:
    """The gradient of what a head takes contracts its vocabulary: 50,257 is no multiple of two parts of 8 elements."""
    arguments = jax.ShapeDtypeStruct((m, k), dtype), jax.ShapeDtypeStruct((k, n), dtype)
    found = evaluate(
        lambda a, b: a @ b, *arguments, mesh={"data": 8}, hardware="h100:1x8", in_specs=(P(), P()), out_specs=P()
    )
    verified = found.verify()
    assert verified.compute is not None
    assert verified.timeline is not None
    assert verified.memory.compiled is not None
    assert any("pad" in event.instruction for event in verified.timeline.events) == filled
    assert verified.compute.predicted_s == pytest.approx(verified.compute.compiled_s, rel=0.02)
    assert verified.memory.predicted.peak == pytest.approx(verified.memory.compiled.peak, rel=0.02)
