"""Tasks: the programs that stages run as tasks: chunks on one micro-batch of a batch, with sums of gradients.

Where micro-batches are split into parts, a task works on all parts of one side by side (`jax.vmap`), so that
what it takes of the micro-batch, states, cotangents, what is kept and sums of gradients have a leading dimension of
parts. Weights have none: their gradients are added up part by part, and parts once a step.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autoshard import _jax
from autoshard.pipeline_parallel.own_stages.keeping import Keeping, keeping
from autoshard.pipeline_parallel.own_stages.loss import ChunkedLoss
from autoshard.pipeline_parallel.side_by_side import side_by_side

_jax.hide_frames(__file__)  # its equations stand where the user wrote them

Leaves = list[Any]

# The arguments of a backward pass, by position; the last one only where activations are kept.
TOTAL, WEIGHTS, SHARED, MICROBATCH, STATE, COTANGENTS, AT, KEPT = range(8)
RESULTS = ("others", "value")  # parts of the total that are no sums of gradients
FORWARD = (WEIGHTS, SHARED, MICROBATCH, STATE, AT)  # those of a forward pass


def arguments_of(loss: ChunkedLoss, chunk: int, steps: int) -> list[Any]:
    """Abstract values of the arguments of a chunk's backward pass, but for what is kept.

    Args:
      loss: the chunks.
      chunk: which of them.
      steps: micro-batches.
    """
    chunks, last = loss.chunks, loss.chunks.count - 1
    weights, shared, micro, state = _of_part(loss, chunk)
    variables = [chunks.shared[i] for i in chunks.shared_of(chunk)]
    total: dict[str, Any] = {
        "weights": in_parts([_wide(weights[i]) for i in chunks.trained(chunks.slices_of(chunk))], loss.parts),
        "shared": in_parts([_wide(shared[i]) for i in chunks.trained(variables)], loss.parts),
    }
    if chunk == last:
        others = in_stack(in_parts(chunks.others, loss.parts), steps)
        total |= {"value": in_parts([_wide(chunks.value)], loss.parts)[0], "others": others}
    cotangents = [] if chunk == last else [chunks.state[i] for i in chunks.differentiable]
    micro, state, cotangents = (in_parts(x, loss.parts) for x in (micro, state, cotangents))
    return [total, weights, shared, in_stack(micro, steps), state, cotangents, _abstract((), jnp.int32)]


def in_parts(values: Sequence[Any], parts: int) -> Leaves:
    """Abstract values of all parts."""
    return list(values) if parts == 1 else in_stack(values, parts)


def in_stack(values: Sequence[Any], count: int) -> Leaves:
    """Abstract values of arrays of so many of them."""
    return [_abstract((count, *x.shape), x.dtype) for x in values]


def forward_task(loss: ChunkedLoss, chunk: int) -> Callable[..., Any]:
    """(weights, shared, microbatch, state, at) → state."""

    def of_part(weights: Leaves, shared: Leaves, microbatch: Leaves, state: Leaves) -> Leaves:
        return loss.chunks.forward(chunk, weights, shared, microbatch, state)

    def forward(weights: Leaves, shared: Leaves, microbatch: Leaves, state: Leaves, at: Any) -> Leaves:
        return _of_parts(loss, of_part)(weights, shared, _of_microbatch(microbatch, at), state)

    return forward


def backward_task(loss: ChunkedLoss, chunk: int) -> Callable[..., Any]:
    """(total, weights, shared, microbatch, state, cotangents, at) → (total, cotangents)."""
    chunks, last = loss.chunks, loss.chunks.count - 1

    def of_part(weights: Leaves, shared: Leaves, microbatch: Leaves, state: Leaves, cotangents: Leaves) -> Any:
        return chunks.backward(chunk, weights, shared, microbatch, state, cotangents)

    def backward(
        total: Any, weights: Leaves, shared: Leaves, microbatch: Leaves, state: Leaves, cotangents: Leaves, at: Any
    ) -> tuple[Any, Leaves]:
        own = _of_microbatch(microbatch, at)
        run = _of_parts(loss, of_part)
        of_weights, of_shared, before, results = run(weights, shared, own, state, cotangents)
        new = {"weights": _added(total["weights"], of_weights), "shared": _added(total["shared"], of_shared)}
        if chunk == last:
            value, *others = results
            new["value"] = total["value"] + value.astype(total["value"].dtype) * chunks.scale
            pairs = zip(total["others"], others, strict=True)
            new["others"] = [jax.lax.dynamic_update_index_in_dim(x, y, at, 0) for x, y in pairs]
        return new, before

    return backward


def passes_of(loss: ChunkedLoss, chunk: int) -> Keeping:
    """The passes of a chunk on a part of a micro-batch, with kept activations."""
    return keeping(loss.chunks, chunk, _of_part(loss, chunk))


def keeping_forward_task(loss: ChunkedLoss, passes: Keeping) -> Callable[..., Any]:
    """(weights, shared, microbatch, state, at) → (state, kept)."""

    def forward(weights: Leaves, shared: Leaves, microbatch: Leaves, state: Leaves, at: Any) -> tuple[Leaves, Leaves]:
        return _of_parts(loss, passes.forward)(weights, shared, _of_microbatch(microbatch, at), state)

    return forward


def keeping_backward_task(loss: ChunkedLoss, passes: Keeping) -> Callable[..., Any]:
    """(total, weights, shared, microbatch, held, cotangents, at, kept) → (total, cotangents)."""

    def backward(
        total: Any,
        weights: Leaves,
        shared: Leaves,
        microbatch: Leaves,
        state: Leaves,
        cotangents: Leaves,
        at: Any,
        kept: Leaves,
    ) -> tuple[Any, Leaves]:
        own = _of_microbatch(microbatch, at)
        run = _of_parts(loss, passes.backward)
        of_weights, of_shared, before = run(weights, shared, own, state, kept, cotangents)
        return {"weights": _added(total["weights"], of_weights), "shared": _added(total["shared"], of_shared)}, before

    return backward


def _of_parts(loss: ChunkedLoss, of_part: Callable[..., Any]) -> Callable[..., Any]:
    """A function of weights, shared values and what belongs to a part of a micro-batch, of all parts."""
    if loss.parts == 1:
        return of_part

    def of_all(weights: Leaves, shared: Leaves, *others: Leaves) -> Any:
        first = [[_abstract(x.shape[1:], x.dtype) for x in leaves] for leaves in others]
        return side_by_side(
            lambda: jax.vmap(of_part, (None, None, *(0 for _ in others)))(weights, shared, *others),
            alone=lambda: jax.eval_shape(of_part, weights, shared, *first),
            what="parts of a micro-batch",
            where=loss.chunks.cut.where,
            otherwise="take parts=1",
        )

    return of_all


def _of_part(loss: ChunkedLoss, chunk: int) -> tuple[Leaves, Leaves, Leaves, Leaves]:
    """Abstract weights and shared values of a chunk, and what it takes of a part of a micro-batch and of its state."""
    chunks = loss.chunks
    weights = [_abstract((chunks.layers[chunk], *v.aval.shape[1:]), v.aval.dtype) for v in chunks.slices_of(chunk)]
    shared = [_abstract(v.aval.shape, v.aval.dtype) for v in (chunks.shared[i] for i in chunks.shared_of(chunk))]
    micro = [loss.microbatch[i] for i in chunks.microbatch_of(chunk)]
    return weights, shared, micro, chunks.state if chunk else []


def _of_microbatch(batch: Leaves, at: Any) -> Leaves:
    return [jax.lax.dynamic_index_in_dim(x, at, keepdims=False) for x in batch]


def _added(total: Leaves, more: Leaves) -> Leaves:
    return [t + g.astype(t.dtype) for t, g in zip(total, more, strict=True)]


def _abstract(shape: Sequence[int], dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def _wide(x: Any) -> Any:
    """Gradients are added up in float32 at least."""
    return _abstract(x.shape, jnp.promote_types(x.dtype, jnp.float32))
