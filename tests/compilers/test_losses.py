"""Seconds of losses over large vocabularies: what a plan counts of scores, beside the compiled kernels."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from tests.installed import needs_gpu_compiler

Loss = Callable[[Any, Any], Any]


def scattered_onto_a_softmax(scores: Any, labels: Any) -> Any:
    """As optax has it: the gradient is written, scattered onto, and read again to be cast."""
    taken = jnp.take_along_axis(scores, labels[:, None], axis=-1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(scores, axis=-1) - taken)


def scattered_onto_zeros(scores: Any, labels: Any) -> Any:
    """The labels' part of the gradient is summed by one kernel, which alone reads what makes its operand."""
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(scores), labels[:, None], axis=-1))


def compared(scores: Any, labels: Any) -> Any:
    """By one-hot labels: the kernel of the gradient sums the loss, too."""
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(scores) * jax.nn.one_hot(labels, scores.shape[-1]), axis=-1))


@needs_gpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "vocabulary", "width"),
    [
        (scattered_onto_a_softmax, 96_000, 256),
        (scattered_onto_zeros, 40_000, 512),
        (compared, 160_000, 128),
        (scattered_onto_zeros, 200_000, 128),
        (compared, 24_000, 512),
    ],
)
def test_the_kernels_of_a_loss_take_what_they_are_said_to(loss: Loss, vocabulary: int, width: int) -> None:
    """The scores' passes are nearly all of the step: one pass of float32 more or less is 15 to 30 % of it."""

    def step(head: Any, x: Any, labels: Any) -> Any:
        def mean(head: Any) -> Any:
            scores = (x.astype(jnp.bfloat16) @ head.astype(jnp.bfloat16)).astype(jnp.float32)
            return loss(scores, labels)

        value, gradient = jax.value_and_grad(mean)(head)
        return head - 1e-3 * gradient, value

    args = (
        jax.ShapeDtypeStruct((width, vocabulary), jnp.float32),
        jax.ShapeDtypeStruct((16_384, width), jnp.float32),
        jax.ShapeDtypeStruct((16_384,), jnp.int32),
    )
    pins = {"head": P(), "x": P("data"), "labels": P("data")}
    plan = autoshard.plan(
        step, *args, mesh={"data": 8}, hardware="h100:1x8", donate_argnums=0, pins=pins, for_grad=False
    )
    compute = plan.verify().compute
    assert compute is not None
    assert compute.compiled_s == pytest.approx(compute.predicted_s, rel=0.06)


@needs_gpu_compiler
def test_of_scores_with_a_bias_the_labels_read_their_own() -> None:
    """Each kernel adds the bias for itself; taking one score per row is no kernel that reads them all."""

    def step(head: Any, bias: Any, x: Any, labels: Any) -> Any:
        value, gradients = jax.value_and_grad(
            lambda head, bias: scattered_onto_a_softmax(x @ head + bias, labels), argnums=(0, 1)
        )(head, bias)
        return *(w - 1e-3 * g for w, g in zip((head, bias), gradients, strict=True)), value

    shapes = {"head": (128, 64_000), "bias": (64_000,), "x": (16_384, 128)}
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes.values()]
    labels = jax.ShapeDtypeStruct((16_384,), jnp.int32)
    pins = {"head": P(), "bias": P(), "x": P("data"), "labels": P("data")}
    plan = autoshard.plan(
        step, *args, labels, mesh={"data": 8}, hardware="h100:1x8", donate_argnums=(0, 1), pins=pins, for_grad=False
    )
    compute = plan.verify().compute
    assert compute is not None
    assert compute.compiled_s == pytest.approx(compute.predicted_s, rel=0.06)
