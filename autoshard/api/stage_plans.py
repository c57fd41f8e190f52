"""Stage plans: the programs of a pipeline's chunks, each planned on the mesh of a stage."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from autoshard import _jax
from autoshard.api.multihost import Peers
from autoshard.api.options import Options
from autoshard.api.planning import plan_or_load
from autoshard.api.solved_plan import SolvedPlan
from autoshard.backends.devices import Target
from autoshard.errors import InfeasibleError
from autoshard.ir.mesh import MeshAxes
from autoshard.ir.rewrite import Hooks, evaluate
from autoshard.pipeline_parallel.own_stages.keeping import Keeping, keeping
from autoshard.pipeline_parallel.own_stages.loss import ChunkedLoss
from autoshard.pipeline_parallel.own_stages.split import Split, split
from autoshard.pipeline_parallel.own_stages.table import Table, Work
from autoshard.planner.leaf_rows import local_bytes
from autoshard.planner.request import requests_of
from autoshard.planner.requested_shardings import AUTO
from autoshard.report.tables import bytes_text

_jax.hide_frames(__file__)

ACTIVATIONS, STATES, FIT = KEEPS = ("activations", "states", "fit")

Leaves = list[Any]
_OWN = Hooks(own=True)

# The arguments of a backward pass, by position; the last one only where activations are kept.
TOTAL, WEIGHTS, SHARED, MICROBATCH, STATE, COTANGENTS, AT, KEPT = range(8)
RESULTS = ("others", "value")  # parts of the total that are no sums of gradients
FORWARD = (WEIGHTS, SHARED, MICROBATCH, STATE, AT)  # those of a forward pass


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPlan:
    """The plans of a chunk.

    Attributes:
      whole: both passes in one program, (total, weights, shared, microbatch, state, cotangents, at) → (total,
        cotangents): what the layouts of its arguments come from, and the backward pass that repeats the forward one.
      forward: (weights, shared, microbatch, state, at) → state; None of the last chunk.
      kept: the passes with kept activations; None where the backward pass repeats the forward one.
    """

    whole: SolvedPlan
    forward: SolvedPlan | None
    kept: "KeptPlan | None" = None
    halves: "SplitPlan | None" = None

    @property
    def backward(self) -> SolvedPlan:
        """The backward pass, not split."""
        return self.whole if self.kept is None else self.kept.backward

    def program(self, work: Work) -> SolvedPlan | None:
        """What runs as a task; None of the last chunk's forward pass, which is part of its backward pass."""
        if work is Work.FORWARD:
            return self.forward if self.kept is None else self.kept.forward
        if self.halves is None:
            return self.backward
        return self.halves.backward if work is Work.BACKWARD else self.halves.weights

    @property
    def held_bytes(self) -> int:
        """Bytes per device that are held of a micro-batch."""
        held = bytes_of(self.backward, STATE, KEPT)
        return held if self.halves is None else max(held, self.halves.held_bytes)

    @property
    def peak_bytes(self) -> int:
        """Bytes per device at the peak of its programs."""
        return max(made.record.memory.peak_bytes for made in map(self.program, Work) if made is not None)

    def specs(self, argument: int) -> Any:
        """The layouts of an argument."""
        return self.whole.specs[argument]

    def avals(self, argument: int) -> list[Any]:
        """The abstract values of an argument's leaves."""
        traced = self.whole.traced
        return [x for x, at in zip(traced.in_avals, traced.argument_of, strict=True) if at == argument]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPlan:
    """The plans of a chunk whose activations are kept.

    Attributes:
      passes: the programs.
      forward: (weights, shared, microbatch, state, at) → (state, kept).
      backward: as `ChunkPlan.whole`, of what is held of the state, and of what was kept.
    """

    passes: Keeping
    forward: SolvedPlan
    backward: SolvedPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPlan:
    """The plans of a backward pass in two programs.

    Attributes:
      split: the programs, of flat leaves.
      arguments: of every input of the second program, the argument of the backward pass that it is a leaf of.
      backward: as `ChunkPlan.backward`, with results alone in the total → (results, cotangents, stash).
      weights: (sums, inputs, stash) → sums.
    """

    split: Split
    arguments: tuple[int, ...]
    backward: SolvedPlan
    weights: SolvedPlan

    @property
    def held_bytes(self) -> int:
        """Bytes per device that are held of a micro-batch between the two."""
        mesh = self.weights.record.mesh
        pairs = zip(self.weights.traced.argument_of, self.weights.record.inputs, strict=True)
        leaves = [leaf for at, leaf in pairs if at == 1]
        own = (x for x, at in zip(leaves, self.arguments, strict=True) if at in (STATE, COTANGENTS, KEPT))
        return sum(local_bytes(leaf, mesh) for leaf in own) + bytes_of(self.weights, 2)


def bytes_of(plan: SolvedPlan, *arguments: int) -> int:
    """Bytes per device of arguments of a program."""
    pairs = zip(plan.traced.argument_of, plan.record.inputs, strict=True)
    return sum(local_bytes(leaf, plan.record.mesh) for at, leaf in pairs if at in arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlanner:
    """Where the programs of stages are planned, how, and by whom.

    Attributes:
      target: the mesh of a stage on the hardware of all.
      options: of `plan`.
      peers: the processes that have the devices of all stages; None of one.
    """

    target: Target
    options: Options
    peers: Peers | None

    def plan(
        self,
        fn: Callable[..., Any],
        name: str,
        arguments: Sequence[Any],
        shardings: Sequence[Any],
        outs: Any,
        *,
        donate: int | None = None,
    ) -> SolvedPlan:
        """The plan of a program; process 0 makes it for all."""
        fn.__name__ = name
        own = replace(self.options, in_shardings=tuple(shardings), out_shardings=outs, donate_argnums=donate)
        call = own.call(fn, arguments, {})
        return plan_or_load(tuple(requests_of(call, self.target, own.request)), own, peers=self.peers)


def plan_chunks(loss: ChunkedLoss, table: Table, planner: StagePlanner, keep: str) -> tuple[ChunkPlan, ...]:
    """Plans every chunk: first the last one, whose layouts of the state, and of the layers' weights, the others take.

    Chunks of the same program have one plan. "fit" keeps a stage's activations where they fit into its memory.

    Args:
      loss: the chunks.
      table: what runs when.
      planner: the mesh of a stage, and how programs are planned on it.
      keep: "activations", "states" or "fit".

    Raises:
      InfeasibleError: a stage does not fit into its memory.
    """
    last = loss.chunks.count - 1
    found: dict[tuple[int, bool, bool], ChunkPlan] = {}
    plans: list[ChunkPlan] = []
    for chunk in range(last, -1, -1):
        key = loss.chunks.layers[chunk], chunk == 0, chunk == last
        if key not in found:
            found[key] = _plan_chunk(loss, chunk, table, planner, plans[:1])
        plans.append(found[key])
    plans.reverse()
    kept: dict[int, ChunkPlan | None] = {}  # by the plan's identity
    for stage in range(table.stages) if keep != STATES else ():
        own = list(range(stage, table.chunks, table.stages))
        more = list(plans)
        for c in own:
            if c < last:
                if id(plans[c]) not in kept:
                    kept[id(plans[c])] = _keeping(loss, c, table, planner, plans[c], keep)
                more[c] = kept[id(plans[c])] or plans[c]
        if keep == ACTIVATIONS or peak_bytes(more, table, stage) <= plans[0].whole.record.memory.limit_bytes:
            plans = more
    if table.splits:
        halved = {id(plan): _split(loss, c, table, planner, plan) for c, plan in enumerate(plans)}
        plans = [halved[id(plan)] for plan in plans]
    for stage in range(table.stages):
        _check_memory(plans, table, stage)
    return tuple(plans)


def peak_bytes(plans: Sequence[ChunkPlan], table: Table, stage: int) -> int:
    """Bytes per device of a stage at its peak: its programs, what it adds up, and what it holds of micro-batches."""
    own = range(stage, table.chunks, table.stages)
    fixed = {c: bytes_of(plans[c].whole, TOTAL, WEIGHTS) for c in own}
    held = (table.held(stage) - 1) * max(plans[c].held_bytes for c in own)
    return sum(fixed.values()) + held + max(plans[c].peak_bytes - fixed[c] for c in own)


def _check_memory(plans: Sequence[ChunkPlan], table: Table, stage: int) -> None:
    peak, limit = peak_bytes(plans, table, stage), plans[0].whole.record.memory.limit_bytes
    if peak > limit:
        raise InfeasibleError(
            f"stage {stage} needs {bytes_text(peak)} with the {table.held(stage)} micro-batches that {table.name} "
            f"holds, and has {bytes_text(limit)}\n"
            "  take more micro-batches (steps=), schedule='1F1B', keep='states', or more stages",
            peak_bytes=peak,
            limit_bytes=limit,
        )


def _keeping(
    loss: ChunkedLoss, chunk: int, table: Table, planner: StagePlanner, plan: ChunkPlan, keep: str
) -> ChunkPlan | None:
    """A chunk with kept activations; None if it does not fit, and need not."""
    arguments = _arguments(loss, chunk, table)
    micro = [_abstract(x.shape[1:], x.dtype) for x in arguments[MICROBATCH]]
    passes = keeping(loss.chunks, chunk, [arguments[WEIGHTS], arguments[SHARED], micro, arguments[STATE]])
    name, specs = f"stage_{table.stage_of(chunk)}", plan.whole.specs
    assert plan.forward is not None
    try:
        forward = planner.plan(
            _forward_keeping(passes),
            f"{name}_forward",
            [arguments[i] for i in FORWARD],
            [specs[i] for i in FORWARD],
            (plan.forward.out_specs, AUTO),
        )
        backward = planner.plan(
            _backward_of(passes),
            f"{name}_backward",
            [*arguments[:STATE], [arguments[STATE][i] for i in passes.held], *arguments[STATE + 1 :], passes.kept],
            [*specs[:STATE], [specs[STATE][i] for i in passes.held], *specs[STATE + 1 :], forward.out_specs[1]],
            plan.whole.out_specs,
            donate=TOTAL,
        )
    except InfeasibleError:
        if keep == ACTIVATIONS:
            raise
        return None
    return replace(plan, kept=KeptPlan(passes=passes, forward=forward, backward=backward))


def _split(loss: ChunkedLoss, chunk: int, table: Table, planner: StagePlanner, plan: ChunkPlan) -> ChunkPlan:
    """A chunk whose backward pass is two programs."""
    arguments = _arguments(loss, chunk, table)
    fn = _backward(loss, chunk)
    if plan.kept is not None:
        passes = plan.kept.passes
        arguments[STATE] = [arguments[STATE][i] for i in passes.held]
        arguments.append(passes.kept)
        fn = _backward_of(passes)
    closed, (total, before) = jax.make_jaxpr(fn, return_shape=True)(*arguments)
    results = [name for name in sorted(total) if name in RESULTS]
    firsts = {name: jax.tree.map(lambda _, own=name in RESULTS: own, total[name]) for name in total}
    halves = split(closed, jax.tree.leaves((firsts, jax.tree.map(lambda _: True, before))))
    owners = [i for i, argument in enumerate(arguments) for _ in jax.tree.leaves(argument)]
    leaves = jax.tree.leaves(arguments)
    specs = jax.tree.leaves(plan.backward.specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    taken = [i for i in halves.inputs if owners[i] != TOTAL]
    own_total = arguments[TOTAL]
    count = {name: len(jax.tree.leaves(own_total[name])) for name in own_total}

    def backward(own: Any, *rest: Any) -> tuple[Any, Leaves, Leaves]:
        flat: Leaves = []
        for name in sorted(own_total):
            flat += jax.tree.leaves(own[name]) if name in own else [None] * count[name]
        values = evaluate(halves.first, [*flat, *jax.tree.leaves(rest)], _OWN)
        made, stash = values[: halves.results], values[halves.results :]
        new, cotangents = jax.tree.unflatten(jax.tree.structure(({name: own[name] for name in results}, before)), made)
        return new, cotangents, stash

    def weights(sums: Any, inputs: Leaves, stash: Leaves) -> Any:
        flat = iter(jax.tree.leaves(sums))
        given = iter(inputs)
        own = [next(flat) if owners[i] == TOTAL else next(given) for i in halves.inputs]
        return jax.tree.unflatten(jax.tree.structure(sums), evaluate(halves.second, [*own, *stash], _OWN))

    name = f"stage_{table.stage_of(chunk)}"
    of_results = {name: plan.specs(TOTAL)[name] for name in results}
    first = planner.plan(
        backward,
        f"{name}_backward",
        [{name: own_total[name] for name in results}, *arguments[1:]],
        [of_results, *plan.backward.specs[1:]],
        (of_results, plan.whole.out_specs[1], AUTO),
        donate=TOTAL,
    )
    sums = {name: own_total[name] for name in own_total if name not in RESULTS}
    of_sums = {name: plan.specs(TOTAL)[name] for name in sums}
    stash = [_abstract(v.aval.shape, v.aval.dtype) for v in halves.stash]
    second = planner.plan(
        weights,
        f"{name}_weights",
        [sums, [leaves[i] for i in taken], stash],
        [of_sums, [specs[i] for i in taken], first.out_specs[2]],
        of_sums,
        donate=0,
    )
    made = SplitPlan(split=halves, arguments=tuple(owners[i] for i in taken), backward=first, weights=second)
    return replace(plan, halves=made)


def _plan_chunk(
    loss: ChunkedLoss, chunk: int, table: Table, planner: StagePlanner, end: Sequence[ChunkPlan]
) -> ChunkPlan:
    arguments = _arguments(loss, chunk, table)
    name = f"stage_{table.stage_of(chunk)}"
    if not end:
        shardings: list[Any] = [AUTO] * len(arguments)
        outs: Any = AUTO
    else:
        state, cotangents = end[0].specs(STATE), end[0].whole.out_specs[1]
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
        whole = planner.plan(run, f"{name}_backward", arguments, shardings, outs, donate=TOTAL)
    except InfeasibleError:
        if not end:
            raise
        shardings[TOTAL] = shardings[WEIGHTS] = AUTO  # in other layouts than those of the last stage it may fit
        whole = planner.plan(run, f"{name}_backward", arguments, shardings, outs, donate=TOTAL)
    if not end:
        return ChunkPlan(whole=whole, forward=None)
    forward = planner.plan(
        _forward(loss, chunk),
        f"{name}_forward",
        [arguments[i] for i in FORWARD],
        [whole.specs[i] for i in FORWARD],
        end[0].specs(STATE),
    )
    return ChunkPlan(whole=whole, forward=forward)


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
        own = _of_microbatch(microbatch, at)
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
        own = _of_microbatch(microbatch, at)
        return chunks.forward(chunk, weights, shared, own, state)

    return forward


def _forward_keeping(passes: Keeping) -> Callable[..., Any]:
    def forward(weights: Leaves, shared: Leaves, microbatch: Leaves, state: Leaves, at: Any) -> tuple[Leaves, Leaves]:
        return passes.forward(weights, shared, _of_microbatch(microbatch, at), state)

    return forward


def _backward_of(passes: Keeping) -> Callable[..., Any]:
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
        of_weights, of_shared, before = passes.backward(weights, shared, own, state, kept, cotangents)
        return {"weights": _added(total["weights"], of_weights), "shared": _added(total["shared"], of_shared)}, before

    return backward


def _of_microbatch(batch: Leaves, at: Any) -> Leaves:
    return [jax.lax.dynamic_index_in_dim(x, at, keepdims=False) for x in batch]


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
