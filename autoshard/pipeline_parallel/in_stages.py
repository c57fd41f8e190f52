"""In stages: value and gradients of a batch, the layers in stages on micro-batches that follow each other."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from autoshard import _jax
from autoshard.errors import SpecError
from autoshard.ir.accumulation import (
    AUTO,
    Parts,
    Steps,
    accumulate,
    axis_size,
    check_numbers,
    in_microbatches,
    split_batch,
    tried_stages,
)
from autoshard.pipeline_parallel.cut import cut
from autoshard.pipeline_parallel.microbatch_loss import times_weight, traced_loss
from autoshard.pipeline_parallel.program import Staged
from autoshard.pipeline_parallel.schedule import Schedule
from autoshard.pipeline_parallel.side_by_side import side_by_side

_jax.hide_frames(__file__)  # its equations stand where the user calls it


def in_stages(
    loss: Callable[..., Any],
    *,
    stages: int | str,
    steps: Steps,
    repeats: int = 1,
    parts: Parts = None,
    has_aux: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """`jax.value_and_grad(loss)` with the loss's layers in stages: pipeline parallelism in one program.

    The result is used in a train step, planned or not, as that of `autoshard.accumulate`:

        value_and_grad = autoshard.in_stages(loss, stages="stage", steps=16)

        plan = autoshard.plan(train_step, state, batch, mesh={"stage": 4, "data": 2}, hardware="h100:1x8")

    `loss(params, batch, *rest)` is the mean or the sum over the examples, the batch's leading
    dimension; its layers are a `jax.lax.scan` over stacked weights, or equal layers one after the
    other. Both are shown on its traced program before anything runs; what would change numbers
    is refused at its line.
    Parameters keep their pytree and their shapes.

    Args:
      loss: `(params, batch, *rest) → scalar`, or `(scalar, aux)`; differentiated with respect to `params`.
      stages: a number, or the mesh axis that each stage's layers and micro-batch are split over (of the mesh in
        context). With a number the planner chooses axes that split the stages, as it does for any dimension.
        "auto" lets `autoshard.plan` choose: it plans the loss in one stage, without a pipeline and in as many
        micro-batches as are best, and in stages over each axis of the mesh, and keeps the fastest. Elsewhere it is 1.
      steps: micro-batches, or "auto" as in `autoshard.accumulate`. The more, the smaller the bubble: stages − 1 of
        steps · repeats + stages − 1 trips.
      repeats: how often a micro-batch goes round the stages (a circular, or interleaved, schedule); stages · repeats
        must divide the layers, and `stages` the steps if there are several.
      parts: as in `autoshard.accumulate`.
      has_aux: as in `jax.value_and_grad`; leaves of aux get a leading dimension of steps × parts.

    Raises:
      SpecError: when called, if the batch, the steps or the layers do not divide.
      StageError: when called, if the loss has no stack of layers, or is neither mean nor sum of its examples' losses.
    """
    check_numbers(steps, parts)
    if isinstance(stages, int) and steps != AUTO:
        Schedule(stages=stages, repeats=repeats, steps=steps)
    chosen = stages == AUTO

    def value_and_gradients(params: Any, batch: Any, *rest: Any) -> tuple[Any, Any]:
        axis = (tried_stages.value or "") if chosen else stages if isinstance(stages, str) else ""
        count = axis_size(axis, "stages") if axis else 1 if isinstance(stages, str) else stages
        number = AUTO if chosen and not (axis or has_aux) else steps
        whole = chosen and not axis and number == AUTO and not _is_separable(loss, params, batch, rest, has_aux=has_aux)

        def run(steps: int, parts: int) -> Any:
            if chosen and not axis:
                return _in_one_stage(loss, params, batch, rest, steps=steps, parts=parts, has_aux=has_aux)
            schedule = Schedule(stages=count, repeats=repeats, steps=steps)
            return _run(loss, params, batch, rest, schedule=schedule, axis=axis, parts=parts, has_aux=has_aux)

        return in_microbatches(
            run,
            batch,
            steps=1 if whole else number,
            parts=1 if whole else parts,
            by_mesh=chosen or bool(axis),
            stages=count,
            open_stages=chosen,
            multiple=count if repeats > 1 else 1,
        )

    return value_and_gradients


def _in_one_stage(
    loss: Callable[..., Any],
    params: Any,
    batch: Any,
    rest: tuple[Any, ...],
    *,
    steps: int,
    parts: int,
    has_aux: bool,
) -> tuple[Any, Any]:
    """Value and gradients without a pipeline: of the batch at once, or of micro-batches one after the other."""
    times = steps * parts
    if times == 1 and not has_aux:
        return jax.value_and_grad(loss)(params, batch, *rest)
    found, gradients = accumulate(loss, steps=steps, parts=parts, has_aux=has_aux)(params, batch, *rest)
    value, aux = found if has_aux else (found, None)
    scale = times_weight(loss, (params, _part(batch, times), rest), (params, batch, rest), times, has_aux=has_aux)
    if scale != 1:
        value, gradients = jax.tree.map(lambda x: x * jnp.asarray(scale, x.dtype), (value, gradients))
    return ((value, aux) if has_aux else value), gradients


def _is_separable(loss: Callable[..., Any], params: Any, batch: Any, rest: tuple[Any, ...], *, has_aux: bool) -> bool:
    """Whether the batch may be taken in micro-batches."""
    examples = {x.shape[0] for x in jax.tree.leaves(batch) if x.shape}
    (size,) = examples if len(examples) == 1 else (1,)
    times = next((n for n in range(2, size + 1) if size % n == 0), 1)
    try:
        times_weight(loss, (params, _part(batch, times), rest), (params, batch, rest), times, has_aux=has_aux)
    except SpecError:
        return False
    return times > 1


def _part(batch: Any, times: int) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((x.shape[0] // times, *x.shape[1:]), x.dtype), batch)


def _run(
    loss: Callable[..., Any],
    params: Any,
    batch: Any,
    rest: tuple[Any, ...],
    *,
    schedule: Schedule,
    axis: str,
    parts: int,
    has_aux: bool,
) -> tuple[Any, Any]:
    times = schedule.steps * parts
    chunks = jax.tree.map(lambda x: jnp.swapaxes(split_batch(x, schedule.steps, parts), 0, 1), batch)
    micro = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), chunks)
    scale = times_weight(loss, (params, micro, rest), (params, batch, rest), times, has_aux=has_aux)
    traced = traced_loss(loss, params, micro, rest, has_aux=has_aux)
    parted = cut(traced.closed, traced.of_batch, schedule.stages * schedule.repeats)
    staged = Staged(cut=parted, schedule=schedule, batch=traced.of_batch, axis=axis)

    def of_part(params: Any, chunk: Any, rest: Any) -> Any:
        def mean(params: Any) -> tuple[Any, Any]:
            value, others = staged(jax.tree.leaves((params, chunk, rest)))
            return value * jnp.asarray(scale, value.dtype), jax.tree.unflatten(traced.aux, others)

        return side_by_side(
            lambda: jax.value_and_grad(mean, has_aux=True)(params),
            alone=lambda: jax.eval_shape(jax.grad(loss, has_aux=has_aux), params, micro, *rest),
            what="its layers",
            where=parted.where,
            otherwise="plan without stages",
        )

    if parts == 1:
        (value, aux), gradients = of_part(params, jax.tree.map(lambda x: x[0], chunks), rest)
    else:
        (values, aux), gradients = jax.vmap(of_part, (None, 0, None))(params, chunks, rest)
        value, gradients = values.mean(), jax.tree.map(_mean_over_parts, gradients)
        aux = jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(times, *x.shape[2:]), aux)
    return ((value, aux) if has_aux else value), gradients


def _mean_over_parts(gradients: Any) -> Any:
    wide = jnp.promote_types(gradients.dtype, jnp.float32)
    return gradients.astype(wide).mean(0).astype(gradients.dtype)
