"""Stage plans: the programs of a pipeline's chunks, each planned on the mesh of a stage."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from autoshard import _jax
from autoshard.api.options import Options
from autoshard.api.planning import plan_or_load
from autoshard.api.solved_plan import SolvedPlan
from autoshard.backends.devices import Target
from autoshard.errors import InfeasibleError
from autoshard.ir.mesh import MeshAxes
from autoshard.pipeline_parallel.own_stages.loss import ChunkedLoss
from autoshard.pipeline_parallel.own_stages.table import Table
from autoshard.planner.leaf_rows import local_bytes
from autoshard.planner.record import Leaf
from autoshard.planner.request import requests_of
from autoshard.planner.requested_shardings import AUTO

_jax.hide_frames(__file__)

Leaves = list[Any]
Specs = list[PartitionSpec]

# The arguments of a backward pass, by position; a forward pass has those between the first and `COTANGENTS`.
TOTAL, WEIGHTS, SHARED, MICROBATCH, STATE, COTANGENTS, AT = range(7)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPlan:
    """The plans of a chunk.

    Attributes:
      backward: of (total, weights, shared, microbatch, state, cotangents, at) → (total, cotangents).
      forward: of (weights, shared, microbatch, state, at) → state; None of the last chunk.
    """

    backward: SolvedPlan
    forward: SolvedPlan | None

    def specs(self, argument: int) -> Any:
        """The layouts of an argument of the backward pass."""
        return self.backward.specs[argument]

    def leaves(self, argument: int) -> list[Leaf]:
        """Its leaves."""
        traced = self.backward.traced
        pairs = zip(traced.argument_of, self.backward.record.inputs, strict=True)
        return [leaf for at, leaf in pairs if at == argument]

    def bytes_of(self, *arguments: int) -> int:
        """Bytes per device of arguments of the backward pass."""
        mesh = self.backward.record.mesh
        return sum(local_bytes(leaf, mesh) for argument in arguments for leaf in self.leaves(argument))


def plan_chunks(loss: ChunkedLoss, table: Table, target: Target, options: Options) -> tuple[ChunkPlan, ...]:
    """Plans every chunk: first the last one, whose layouts of the state, and of the layers' weights, the others take.

    Chunks of the same program have one plan.

    Args:
      loss: the chunks.
      table: what runs when.
      target: the mesh of a stage on the hardware of all.
      options: of `plan`.

    Raises:
      InfeasibleError: a chunk does not fit into the memory of its stage.
    """
    last = loss.chunks.count - 1
    found: dict[tuple[int, bool, bool], ChunkPlan] = {}
    plans: list[ChunkPlan] = []
    for chunk in range(last, -1, -1):
        key = loss.chunks.layers[chunk], chunk == 0, chunk == last
        if key not in found:
            found[key] = _plan_chunk(loss, chunk, table, target, options, plans[:1])
        plans.append(found[key])
    return tuple(plans[::-1])


def _plan_chunk(
    loss: ChunkedLoss,
    chunk: int,
    table: Table,
    target: Target,
    options: Options,
    end: Sequence[ChunkPlan],
) -> ChunkPlan:
    arguments = _arguments(loss, chunk, table)
    name = f"stage_{table.stage_of(chunk)}"
    if not end:
        shardings: list[Any] = [AUTO] * len(arguments)
        outs: Any = AUTO
    else:
        state, cotangents = end[0].specs(STATE), end[0].backward.out_specs[1]
        weights, total = end[0].specs(WEIGHTS), end[0].specs(TOTAL)["weights"]
        shardings = [
            {**dict.fromkeys(arguments[TOTAL], AUTO), "weights": total},
            weights,
            AUTO,
            AUTO,
            state if chunk else AUTO,
            cotangents,
            AUTO,
        ]
        outs = (AUTO, cotangents if chunk else AUTO)
    run = _backward(loss, chunk)
    try:
        backward = _plan(run, f"{name}_backward", arguments, target, options, shardings, outs, donate=TOTAL)
    except InfeasibleError:
        if not end:
            raise
        shardings[TOTAL] = shardings[WEIGHTS] = AUTO  # in other layouts than those of the last stage it may fit
        backward = _plan(run, f"{name}_backward", arguments, target, options, shardings, outs, donate=TOTAL)
    if not end:
        return ChunkPlan(backward=backward, forward=None)
    places = (WEIGHTS, SHARED, MICROBATCH, STATE, AT)
    taken = [backward.specs[i] for i in places]
    forward = _plan(
        _forward(loss, chunk),
        f"{name}_forward",
        [arguments[i] for i in places],
        target,
        options,
        taken,
        end[0].specs(STATE),
    )
    return ChunkPlan(backward=backward, forward=forward)


def _plan(
    fn: Callable[..., Any],
    name: str,
    arguments: Sequence[Any],
    target: Target,
    options: Options,
    shardings: Sequence[Any],
    outs: Any,
    *,
    donate: int | None = None,
) -> SolvedPlan:
    fn.__name__ = name
    own = replace(options, in_shardings=tuple(shardings), out_shardings=outs, donate_argnums=donate)
    call = own.call(fn, arguments, {})
    return plan_or_load(tuple(requests_of(call, target, own.request)), own)


def _arguments(loss: ChunkedLoss, chunk: int, table: Table) -> list[Any]:
    """Abstract values of the arguments of a chunk's backward pass."""
    chunks, last = loss.chunks, loss.chunks.count - 1
    weights = [_abstract((chunks.layers[chunk], *v.aval.shape[1:]), v.aval.dtype) for v in chunks.slices]
    variables = [chunks.shared[i] for i in chunks.shared_of(chunk)]
    shared = [_abstract(v.aval.shape, v.aval.dtype) for v in variables]
    micro = [_stacked(loss.microbatch[i], table.steps) for i in chunks.microbatch_of(chunk)]
    total: dict[str, Any] = {
        "weights": [_wide(weights[i]) for i in chunks.trained(chunks.slices)],
        "shared": [_wide(shared[i]) for i in chunks.trained(variables)],
    }
    if chunk == last:
        value = chunks.value
        total |= {"value": _wide(value), "others": [_stacked(x, table.steps) for x in chunks.others]}
    cotangents = [] if chunk == last else [chunks.state[i] for i in chunks.differentiable]
    return [total, weights, shared, micro, chunks.state if chunk else [], cotangents, _abstract((), jnp.int32)]


def _backward(loss: ChunkedLoss, chunk: int) -> Callable[..., Any]:
    chunks, last = loss.chunks, loss.chunks.count - 1

    def backward(
        total: Any, weights: Leaves, shared: Leaves, microbatch: Leaves, state: Leaves, cotangents: Leaves, at: Any
    ) -> tuple[Any, Leaves]:
        own = [jax.lax.dynamic_index_in_dim(x, at, keepdims=False) for x in microbatch]
        of_weights, of_shared, before, results = chunks.backward(chunk, weights, shared, own, state, cotangents)
        new = {"weights": _added(total["weights"], of_weights), "shared": _added(total["shared"], of_shared)}
        if chunk == last:
            value, *others = results
            new["value"] = total["value"] + value.astype(total["value"].dtype) * chunks.scale
            pairs = zip(total["others"], others, strict=True)
            new["others"] = [jax.lax.dynamic_update_index_in_dim(x, y, at, 0) for x, y in pairs]
        return new, before

    return backward


def _forward(loss: ChunkedLoss, chunk: int) -> Callable[..., Any]:
    chunks = loss.chunks

    def forward(weights: Leaves, shared: Leaves, microbatch: Leaves, state: Leaves, at: Any) -> Leaves:
        own = [jax.lax.dynamic_index_in_dim(x, at, keepdims=False) for x in microbatch]
        return chunks.forward(chunk, weights, shared, own, state)

    return forward


def _added(total: Leaves, more: Leaves) -> Leaves:
    return [t + g.astype(t.dtype) for t, g in zip(total, more, strict=True)]


def _abstract(shape: Sequence[int], dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def _stacked(x: Any, steps: int) -> Any:
    return _abstract((steps, *x.shape), x.dtype)


def _wide(x: Any) -> Any:
    """Gradients are added up in float32 at least."""
    return _abstract(x.shape, jnp.promote_types(x.dtype, jnp.float32))


def stage_target(whole: Target, stage: str) -> Target:
    """The mesh of one stage, on the hardware of all and where it is among them."""
    others = {name: size for name, size in whole.axes.shape.items() if name != stage}
    return replace(whole, axes=MeshAxes.of(others or {"data" if stage != "data" else "device": 1}), own=None)
