"""Microbatch loss: the loss of one micro-batch, traced, and what the losses of all of them are for the batch's."""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax

from autoshard import _jax
from autoshard.errors import SpecError
from autoshard.pipeline_parallel.separable import weight_of
from autoshard.pipeline_parallel.stacking import stacked

_jax.hide_frames(__file__)  # its equations stand where the user wrote them


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchLoss:
    """A loss for one micro-batch.

    Attributes:
      closed: its jaxpr, from the leaves of (params, micro-batch, rest) to [loss, *leaves of aux]; equal layers that
        were written one after the other are a scan.
      of_batch: which of its inputs are the micro-batch's.
      aux: the structure of its other results.
    """

    closed: Any
    of_batch: tuple[bool, ...]
    aux: Any


def traced_loss(loss: Callable[..., Any], params: Any, micro: Any, rest: Any, *, has_aux: bool) -> MicrobatchLoss:
    """Traces `loss(params, micro, *rest)`.

    Args:
      loss: as of `in_stages`.
      params: a pytree of arrays or ShapeDtypeStructs, as `micro` and `rest`.
      micro: one micro-batch.
      rest: the loss's further arguments.
      has_aux: as of `in_stages`.

    Raises:
      StageError: some of its layers are equal, and others are not.
    """
    leaves, tree = jax.tree.flatten((params, micro, rest))
    of_aux: list[Any] = []

    def flat(*given: Any) -> Any:
        params, batch, rest = jax.tree.unflatten(tree, given)
        result = loss(params, batch, *rest)
        value, aux = result if has_aux else (result, None)
        others, structure = jax.tree.flatten(aux)
        of_aux[:] = [structure]
        return [value, *others]

    of_batch = _leaves_of_batch((params, micro, rest))
    closed = stacked(jax.make_jaxpr(flat)(*leaves), of_batch)
    return MicrobatchLoss(closed=closed, of_batch=of_batch, aux=of_aux[0])


def times_weight(loss: Callable[..., Any], small: Any, large: Any, times: int, *, has_aux: bool) -> Fraction:
    """By what the mean of the micro-batches' losses is multiplied: 1 if the loss is a mean, `times` if a sum.

    Args:
      loss: as of `in_stages`.
      small: (params, micro-batch, rest), as of `traced_loss`.
      large: (params, batch, rest).
      times: how many micro-batches the batch has.
      has_aux: as of `in_stages`.

    Raises:
      SpecError: the batch's arrays have different leading dimensions.
      StageError: the loss is neither.
    """
    sizes = {x.shape[0] for x in jax.tree.leaves(large[1])}
    if len(sizes) != 1:
        raise SpecError(
            f"the batch's arrays have leading dimensions of {sorted(sizes)}: their examples are not the same"
        )

    def value(params: Any, batch: Any, rest: tuple[Any, ...]) -> Any:
        result = loss(params, batch, *rest)
        return result[0] if has_aux else result

    if times == 1:
        return Fraction(1)
    one, all_of_them = (_jax.without_dead(jax.make_jaxpr(value)(*arguments)) for arguments in (small, large))
    return times * weight_of(one, all_of_them, _leaves_of_batch(small), examples=sizes.pop(), times=times)


def _leaves_of_batch(arguments: tuple[Any, Any, Any]) -> tuple[bool, ...]:
    """Which leaves of (params, batch, rest) are the batch's."""
    return tuple(k == 1 for k, part in enumerate(arguments) for _ in jax.tree.leaves(part))
