"""Loss: a user's loss over a batch as the chunks of one micro-batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from autoshard import _jax
from autoshard.errors import ArgumentError, SpecError
from autoshard.pipeline_parallel.cut import cut
from autoshard.pipeline_parallel.microbatch_loss import times_weight, traced_loss
from autoshard.pipeline_parallel.own_stages.chunks import Chunks

_jax.hide_frames(__file__)  # its equations stand where the user wrote them


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLoss:
    """A loss in chunks, and the pytrees that it had.

    Attributes:
      chunks: the loss of a micro-batch.
      aux: the structure of its other results.
      microbatch: abstract values of a micro-batch's leaves.
      whole: those of the inputs that are no micro-batch's.
    """

    chunks: Chunks
    aux: Any
    microbatch: tuple[Any, ...]
    whole: tuple[Any, ...]


def chunked(
    loss: Callable[..., Any],
    params: Any,
    batch: Any,
    rest: tuple[Any, ...],
    *,
    steps: int,
    chunks: int,
    layers: Sequence[int] | None,
    has_aux: bool,
) -> ChunkedLoss:
    """Traces a loss for a micro-batch, shows that micro-batches may be taken one by one, and cuts it.

    Args:
      loss: as of `in_stages`.
      params: pytrees of arrays or their shapes, as `batch` and `rest`.
      batch: its leading dimension is divided.
      rest: given to every micro-batch.
      steps: micro-batches.
      chunks: how many chunks there are.
      layers: how many layers each has; None: the same, and where that does not go, one less at the ends.
      has_aux: as of `jax.value_and_grad`.

    Raises:
      SpecError: something does not divide.
      StageError: the loss has no stack of layers, or is neither mean nor sum of its examples' losses.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise ArgumentError(
                f"params{jax.tree_util.keystr(path)} is {leaf.dtype}, which has no gradient; pass it after the batch"
            )
    micro = jax.tree.map(lambda x: _part(x, steps), batch)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, batch, rest))
    scale = times_weight(loss, (params, micro, rest), shapes, steps, has_aux=has_aux)
    traced = traced_loss(loss, params, micro, rest, has_aux=has_aux)
    leaves = jax.tree.leaves((params, micro, rest))
    of_params = tuple(i < len(jax.tree.leaves(params)) for i in range(len(leaves)))
    parts = cut(traced.closed, traced.of_batch, 1)
    found = Chunks(
        cut=parts,
        params=of_params,
        batch=traced.of_batch,
        layers=_layers(parts.length, chunks, layers),
        scale=float(scale) / steps,
    )
    return ChunkedLoss(
        chunks=found,
        aux=traced.aux,
        microbatch=tuple(x for x, own in zip(leaves, traced.of_batch, strict=True) if own),
        whole=tuple(x for x, own in zip(leaves, traced.of_batch, strict=True) if not own),
    )


def _part(x: Any, steps: int) -> Any:
    if not x.shape:
        raise SpecError(f"the batch holds a scalar, {x}, which does not split; pass it after the batch, in *rest")
    if not x.shape[0] or x.shape[0] % steps:
        raise SpecError(f"a batch of {x.shape[0]} does not split into {steps} micro-batches: {steps} must divide it")
    return jax.ShapeDtypeStruct((x.shape[0] // steps, *x.shape[1:]), x.dtype)


def _layers(length: int, chunks: int, layers: Sequence[int] | None) -> tuple[int, ...]:
    """How many layers each chunk has."""
    if layers is not None:
        own = tuple(layers)
        if len(own) != chunks or sum(own) != length or min(own) < 1:
            raise SpecError(
                f"layers={own}: {chunks} chunks (stages · repeats) have at least one layer each, and {length} in all"
            )
        return own
    if length < chunks:
        raise SpecError(f"{length} layers are not enough for {chunks} chunks (stages · repeats): take fewer stages")
    least, more = divmod(length, chunks)
    middle_first = sorted(range(chunks), key=lambda c: (c == chunks - 1, c == 0, c))  # the ends have embedding and head
    return tuple(least + (c in middle_first[:more]) for c in range(chunks))
