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
      chunks: the loss of a part of a micro-batch.
      parts: into how many parts a micro-batch is split, which chunks work on side by side.
      aux: the structure of its other results.
      microbatch: abstract values of the leaves of a part of a micro-batch.
      whole: those of the inputs that are no micro-batch's.
    """

    chunks: Chunks
    parts: int
    aux: Any
    microbatch: tuple[Any, ...]
    whole: tuple[Any, ...]


def chunked(
    loss: Callable[..., Any],
    arguments: tuple[Any, Any, tuple[Any, ...]],
    *,
    steps: int,
    parts: int,
    chunks: int,
    layers: Sequence[int] | None,
    has_aux: bool,
) -> ChunkedLoss:
    """Traces a loss for a micro-batch, shows that micro-batches may be taken one by one, and cuts it.

    Args:
      loss: as of `in_stages`.
      arguments: the parameters; the batch, whose leading dimension is divided; what every micro-batch is given: pytrees
        of arrays or their shapes.
      steps: micro-batches.
      parts: into how many parts each is split.
      chunks: how many chunks there are.
      layers: how many layers each has, of which the first and the last may have none; None: the same, and where that
        does not go, one less at the ends.
      has_aux: as of `jax.value_and_grad`.

    Raises:
      SpecError: something does not divide.
      StageError: the loss has no stack of layers, or is neither mean nor sum of its examples' losses.
    """
    params, batch, rest = arguments
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise ArgumentError(
                f"params{jax.tree_util.keystr(path)} is {leaf.dtype}, which has no gradient; pass it after the batch"
            )
    times = steps * parts
    micro = jax.tree.map(lambda x: _part(x, steps, parts), batch)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, batch, rest))
    scale = times_weight(loss, (params, micro, rest), shapes, times, has_aux=has_aux)
    traced = traced_loss(loss, params, micro, rest, has_aux=has_aux)
    leaves = jax.tree.leaves((params, micro, rest))
    of_params = tuple(i < len(jax.tree.leaves(params)) for i in range(len(leaves)))
    pieces = cut(traced.closed, traced.of_batch, 1)
    found = Chunks(
        cut=pieces,
        params=of_params,
        batch=traced.of_batch,
        layers=_layers(pieces.length, chunks, layers),
        scale=float(scale) / times,
    )
    return ChunkedLoss(
        chunks=found,
        parts=parts,
        aux=traced.aux,
        microbatch=tuple(x for x, own in zip(leaves, traced.of_batch, strict=True) if own),
        whole=tuple(x for x, own in zip(leaves, traced.of_batch, strict=True) if not own),
    )


def _part(x: Any, steps: int, parts: int) -> Any:
    if not x.shape:
        raise SpecError(f"the batch holds a scalar, {x}, which does not split; pass it after the batch, in *rest")
    times = steps * parts
    if not x.shape[0] or x.shape[0] % times:
        of_parts = f" of {parts} parts" if parts > 1 else ""
        raise SpecError(
            f"a batch of {x.shape[0]} does not split into {steps} micro-batches{of_parts}: {times} must divide it"
        )
    return jax.ShapeDtypeStruct((x.shape[0] // times, *x.shape[1:]), x.dtype)


def _layers(length: int, chunks: int, layers: Sequence[int] | None) -> tuple[int, ...]:
    """How many layers each chunk has."""
    if layers is not None:
        own = tuple(layers)
        if len(own) != chunks or sum(own) != length or min(own) < 0 or 0 in own[1:-1]:
            raise SpecError(
                f"layers={own}: {chunks} chunks (stages · repeats) have {length} layers in all, and each has one or "
                "more, but for the first and the last, which may have none"
            )
        return own
    if length < max(chunks - 2, 1):
        raise SpecError(f"{length} layers are not enough for {chunks} chunks (stages · repeats): take fewer stages")
    least, more = divmod(length, chunks)
    middle_first = sorted(range(chunks), key=lambda c: (c == chunks - 1, c == 0, c))  # the ends have embedding and head
    return tuple(least + (c in middle_first[:more]) for c in range(chunks))
