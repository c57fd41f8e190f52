"""Products of which no more is planned than the part that is taken, as XLA:TPU computes them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from autoshard.api.evaluate import evaluate
from autoshard.costs.compute import rule_of_part
from autoshard.costs.taken_parts import shares, taken_parts
from autoshard.ir.graph import build
from autoshard.rules import rules_of
from tests.installed import needs_tpu_compiler

F32 = jax.ShapeDtypeStruct


@pytest.mark.parametrize(
    ("take", "shape"),
    [
        (lambda y: y[:, -1:], (8, 1, 64)),
        (lambda y: y[:4, :, 16:], (4, 16, 48)),
        (lambda y: y[:, -1:] + y[:, :1], None),
        (lambda y: y[:, ::2], None),
        (lambda y: jnp.tanh(y)[:, -1:], None),
        (lambda y: (y, y[:, -1:]), None),
    ],
    ids=["rows", "along two dimensions", "two parts", "every other one", "of what is computed of it", "an output, too"],
)
def test_a_part_is_of_the_product_itself_and_all_that_is_taken(
    take: Callable[[jax.Array], Any], shape: tuple[int, ...] | None
) -> None:
    traced = jax.make_jaxpr(lambda x, w: take(x @ w))(F32((8, 16, 32), jnp.float32), F32((32, 64), jnp.float32))
    graph = build(traced, "tpu")
    parts = [part.shape for part in taken_parts(graph).values()]
    assert parts == ([] if shape is None else [shape])


def test_of_operands_what_a_part_needs_is_read() -> None:
    equation = "bik,bkj->bij"
    traced = jax.make_jaxpr(lambda x, w: jnp.einsum(equation, x, w)[:2, :4, :8])(
        F32((8, 16, 32), jnp.float32), F32((8, 32, 64), jnp.float32)
    )
    graph = build(traced, "tpu")
    ((product, part),) = taken_parts(graph).items()
    e, _ = graph.producers[product]
    assert shares(graph.eqns[e], part) == (2 / 8 * 4 / 16, 2 / 8 * 8 / 64)
    rule = rule_of_part(rules_of(graph.eqns)[e], part)
    assert sorted(factor.size for factor in rule.factors) == [2, 4, 8, 32]


@needs_tpu_compiler
@pytest.mark.parametrize("sequences", [1, 4])
def test_scores_of_the_last_position_take_the_time_and_the_memory_that_xla_tpu_needs(sequences: int) -> None:
    """All positions' of a device with one sequence."""
    x, w = F32((4 * sequences, 1024, 1024), jnp.bfloat16), F32((1024, 65536), jnp.bfloat16)
    evaluation = evaluate(
        lambda x, w: (jnp.tanh(x) @ w)[:, -1].argmax(-1),
        x,
        w,
        mesh={"x": 4},
        hardware="tpu-v5e:2x2",
        in_specs=(P("x"), P()),
        out_specs=P("x"),
    )
    found = evaluation.verify()
    assert found.compute is not None
    assert found.compute.predicted_s == pytest.approx(found.compute.compiled_s, rel=0.1)
    assert found.memory.compiled is not None
    assert found.memory.predicted.peak == pytest.approx(found.memory.compiled.peak, rel=0.1)
