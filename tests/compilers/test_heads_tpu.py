"""Heads of language models by XLA:TPU: what lies in memory of scores over a vocabulary, and of their gradient."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import autoshard
from tests.installed import needs_tpu_compiler

ROWS, LENGTH, WIDTH, VOCABULARY = 8, 512, 1024, 50_304  # sequences on a device


def labels_loss(scores: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores.astype(jnp.float32), labels))


def plain(weight: jax.Array, bias: jax.Array, x: jax.Array, labels: jax.Array) -> jax.Array:
    return labels_loss(x @ weight, labels)


def biased(weight: jax.Array, bias: jax.Array, x: jax.Array, labels: jax.Array) -> jax.Array:
    return labels_loss(x @ weight + bias, labels)


def capped(weight: jax.Array, bias: jax.Array, x: jax.Array, labels: jax.Array) -> jax.Array:
    return labels_loss(30 * jnp.tanh((x @ weight).astype(jnp.float32) / 30), labels)


def sliced(weight: jax.Array, bias: jax.Array, x: jax.Array, labels: jax.Array) -> jax.Array:
    return labels_loss((x @ weight)[:, :-1], labels[:, 1:])


def logarithms(weight: jax.Array, bias: jax.Array, x: jax.Array, labels: jax.Array) -> jax.Array:
    taken = jnp.take_along_axis(jax.nn.log_softmax((x @ weight).astype(jnp.float32)), labels[..., None], -1)
    return -jnp.mean(taken)


def smoothed(weight: jax.Array, bias: jax.Array, x: jax.Array, labels: jax.Array) -> jax.Array:
    targets = optax.smooth_labels(jax.nn.one_hot(labels[:, 1:], VOCABULARY), 0.1)
    return jnp.mean(optax.softmax_cross_entropy((x @ weight)[:, :-1].astype(jnp.float32), targets))


@needs_tpu_compiler
@pytest.mark.parametrize(
    ("head", "dtype", "hardware"),
    [
        (plain, jnp.bfloat16, "tpu-v5e:4x4"),
        (biased, jnp.bfloat16, "tpu-v5e:4x4"),
        (capped, jnp.bfloat16, "tpu-v5e:4x4"),
        (sliced, jnp.bfloat16, "tpu-v5e:4x4"),
        (logarithms, jnp.bfloat16, "tpu-v5e:4x4"),
        (smoothed, jnp.bfloat16, "tpu-v5e:4x4"),
        (biased, jnp.float32, "tpu-v5e:4x4"),
        (sliced, jnp.float32, "tpu-v5e:4x4"),
        (biased, jnp.bfloat16, "tpu-v5p:4x4x2"),
        (sliced, jnp.float32, "tpu-v5p:4x4x2"),
    ],
)
def test_scores_of_a_vocabulary(head: Callable[..., jax.Array], dtype: Any, hardware: str) -> None:
    """Peak and compute of the loss and its gradients."""

    def step(weight: jax.Array, bias: jax.Array, x: jax.Array, labels: jax.Array) -> Any:
        return jax.value_and_grad(lambda *args: head(*args, labels), (0, 1, 2))(weight, bias, jnp.tanh(x))

    mesh = {"tpu-v5e:4x4": {"data": 4, "model": 4}, "tpu-v5p:4x4x2": {"data": 8, "model": 4}}[hardware]
    batch = ROWS * mesh["data"] * mesh["model"]
    arguments = (
        jax.ShapeDtypeStruct((WIDTH, VOCABULARY), dtype),
        jax.ShapeDtypeStruct((VOCABULARY,), dtype),
        jax.ShapeDtypeStruct((batch, LENGTH, WIDTH), dtype),
        jax.ShapeDtypeStruct((batch, LENGTH), jnp.int32),
    )
    plan = autoshard.plan(step, *arguments, mesh=mesh, hardware=hardware, for_grad=False)
    found = plan.verify()
    memory, compute = found.memory, found.compute
    assert memory.compiled is not None
    assert memory.predicted.peak == pytest.approx(memory.compiled.peak, rel=0.06)
    assert compute is not None
    assert compute.predicted_s == pytest.approx(compute.compiled_s, rel=0.12)


@needs_tpu_compiler
@pytest.mark.parametrize(("dtype", "hardware"), [(jnp.bfloat16, "tpu-v5e:4x4"), (jnp.float32, "tpu-v5p:4x4x2")])
def test_the_error_function_is_computed_once(dtype: Any, hardware: str) -> None:
    """It lies in memory for the backward pass, beside the product that it is computed from: a third of the peak."""

    def step(up: jax.Array, down: jax.Array, x: jax.Array) -> Any:
        def loss(up: jax.Array, down: jax.Array, x: jax.Array) -> jax.Array:
            mixed = jax.nn.gelu(x @ up, approximate=False) @ down
            return jnp.mean(jnp.square(mixed.astype(jnp.float32)))

        return jax.value_and_grad(loss, (0, 1, 2))(up, down, x)

    mesh = {"tpu-v5e:4x4": {"data": 16}, "tpu-v5p:4x4x2": {"data": 32}}[hardware]
    arguments = (
        jax.ShapeDtypeStruct((2048, 8192), dtype),
        jax.ShapeDtypeStruct((8192, 2048), dtype),
        jax.ShapeDtypeStruct((8192 * mesh["data"], 2048), dtype),
    )
    memory = autoshard.plan(step, *arguments, mesh=mesh, hardware=hardware, for_grad=False).verify().memory
    assert memory.compiled is not None
    assert memory.predicted.peak == pytest.approx(memory.compiled.peak, rel=0.1)
