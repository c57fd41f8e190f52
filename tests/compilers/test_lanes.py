"""What fills no lanes of a TPU takes whole ones: attention over odd lengths, and tables of narrow rows."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.api.evaluate import evaluate
from autoshard.costs.lanes import share_in_lanes
from autoshard.costs.matrices import Matrix, matrices
from autoshard.costs.strategies import WHOLE, encode
from autoshard.ir.graph import build
from autoshard.ir.mesh import MeshAxes
from autoshard.rules import rules_of
from tests.installed import needs_tpu_compiler


def layers(length: int, heads: int, width: int, batch: int) -> tuple[Any, tuple[Any, ...]]:
    """A train step of three blocks in bfloat16, and its arguments: weights and inputs."""
    features = heads * width

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        for query, key, value, out, up, down in weights:
            q, k, v = ((x @ w).reshape(batch, length, heads, width) for w in (query, key, value))
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) * width**-0.5
            mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(x.dtype), v)
            x = x + mixed.reshape(x.shape) @ out
            x = x + jax.nn.gelu(x @ up) @ down
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    def step(weights: Any, x: jax.Array) -> Any:
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, x))

    def half(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    square = half(features, features)
    block = [square] * 4 + [half(features, 4 * features), half(4 * features, features)]
    return step, ([block] * 3, half(batch, length, features))


@needs_tpu_compiler
@pytest.mark.parametrize(
    ("hardware", "sizes"),
    [
        ("tpu-v5e:2x4", (49, 12, 32, 16_384)),
        pytest.param("tpu-v5e:2x4", (197, 12, 64, 2048), marks=pytest.mark.slow),
        pytest.param("tpu-v5e:2x4", (257, 8, 80, 2048), marks=pytest.mark.slow),
        pytest.param("tpu-v5p:2x2x2", (160, 8, 64, 1024), marks=pytest.mark.slow),
    ],
    ids=["windows", "patches", "large-patches", "divided-twice"],
)
def test_odd_lengths_lie_in_whole_lanes(hardware: str, sizes: tuple[int, int, int, int]) -> None:
    step, arguments = layers(*sizes)
    specs = jax.tree.map(lambda _: P(), arguments[0])
    found = evaluate(
        step, *arguments, mesh={"data": 8}, hardware=hardware, in_specs=(specs, P("data")), out_specs=specs
    )
    memory = found.verify().memory
    assert memory.compiled is not None
    assert memory.predicted.peak == pytest.approx(memory.compiled.peak, rel=0.1)


def test_matrices_of_attention() -> None:
    """Queries, keys, values and scores; of what each is cut from, and computed to: not of the weights."""
    step, arguments = layers(49, 12, 32, 8)
    graph = build(jax.make_jaxpr(step)(*arguments), "tpu")
    found = matrices(graph, rules_of(graph.eqns))
    shapes = {graph.avals[v].shape: matrix for v, matrix in found.items()}
    assert shapes[8, 12, 49, 49] == Matrix((2, 3), (49, 49))
    assert shapes[8, 49, 12 * 32].dims in {(1, 2), (2, 1)}
    assert not {(384, 384), (384, 1536), (8, 49, 1536)} & shapes.keys()


@pytest.mark.parametrize(
    ("sizes", "share"),
    [
        ((49, 49), 56 * 128 / 49**2),
        ((49, 32), 32 * 128 / (49 * 32)),
        ((196, 64), 64 * 256 / (196 * 64)),
        ((100, 128), 104 * 128 / (100 * 128)),
        ((1024, 64), 1.0),
        ((1, 1500), 1.0),
        ((0, 64), 1.0),
    ],
)
def test_the_order_that_takes_less(sizes: tuple[int, int], share: float) -> None:
    """Rows or columns lie along the lanes; single rows are no matrix."""
    mesh = MeshAxes.of({"data": 4})
    shape = 8, *sizes
    whole = encode(np.full((1, 1), WHOLE), len(shape))
    assert share_in_lanes(Matrix((1, 2), sizes), shape, whole, mesh) == pytest.approx(share)


def test_of_heads_that_are_split_each_is_as_wide() -> None:
    """Eight of 32 in one dimension, over eight devices: one of them has 49 × 32 elements in 32 × 128."""
    mesh = MeshAxes.of({"data": 8})
    split = encode(np.full((1, 1), 2), 3)
    assert share_in_lanes(Matrix((1, 2), (49, 32)), (4, 49, 8 * 32), split, mesh) == pytest.approx(128 / 49)


def update(table: jax.Array, ids: jax.Array, weight: jax.Array) -> jax.Array:
    def loss(table: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(jnp.tanh(table[ids] @ weight)))

    return table - 0.1 * jax.grad(loss)(table)


@needs_tpu_compiler
def test_tables_of_narrow_rows_are_copied() -> None:
    """For the gather, and behind the scatter; 64 columns on each device fill half of the lanes."""
    arguments = (
        jax.ShapeDtypeStruct((800_000, 1024), jnp.bfloat16),
        jax.ShapeDtypeStruct((16_384,), jnp.int32),
        jax.ShapeDtypeStruct((1024, 256), jnp.bfloat16),
    )
    specs = P(None, "model"), P(), P("model")
    found = evaluate(update, *arguments, mesh={"model": 16}, hardware="tpu-v5e:4x4", in_specs=specs, out_specs=specs[0])
    verified = found.verify()
    assert verified.compute is not None
    assert verified.memory.compiled is not None
    # Filling and reading what is no data is paid for, too, and not counted in the compiled schedule.
    assert 1.0 <= verified.compute.predicted_s / verified.compute.compiled_s <= 1.4
    # What is computed of the scattered gradient is planned beside the output that it is.
    assert 1.0 <= verified.memory.predicted.peak / verified.memory.compiled.peak <= 1.25


def test_no_plan_has_rows_of_a_few_elements() -> None:
    """A million rows, split over sixteen devices along their 128 elements, would take 16 times their bytes."""
    arguments = (
        jax.ShapeDtypeStruct((1_000_000, 128), jnp.float32),
        jax.ShapeDtypeStruct((16_384,), jnp.int32),
        jax.ShapeDtypeStruct((128, 256), jnp.float32),
    )
    plan = autoshard.plan(update, *arguments, mesh={"data": 4, "model": 4}, hardware="tpu-v5e:4x4", donate_argnums=0)
    assert plan.record.inputs[0].spec == P(("data", "model"))
