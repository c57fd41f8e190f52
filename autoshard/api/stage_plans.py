"""Stage plans: the programs of a pipeline's chunks, each planned on the mesh of a stage."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Any

import jax
from jax.sharding import PartitionSpec

from autoshard import _jax
from autoshard.api.multihost import Peers
from autoshard.api.options import Options
from autoshard.api.planning import plan_or_load
from autoshard.api.solved_plan import SolvedPlan
from autoshard.backends.devices import Target
from autoshard.errors import InfeasibleError
from autoshard.ir.mesh import MeshAxes
from autoshard.ir.recomputation import WRITTEN
from autoshard.ir.rewrite import Hooks, evaluate
from autoshard.pipeline_parallel.own_stages.keeping import Keeping
from autoshard.pipeline_parallel.own_stages.loss import ChunkedLoss
from autoshard.pipeline_parallel.own_stages.split import Split, split
from autoshard.pipeline_parallel.own_stages.table import Table, Work
from autoshard.pipeline_parallel.own_stages.tasks import (
    COTANGENTS,
    FORWARD,
    KEPT,
    RESULTS,
    STATE,
    TOTAL,
    WEIGHTS,
    arguments_of,
    backward_task,
    forward_task,
    in_parts,
    in_stack,
    keeping_backward_task,
    keeping_forward_task,
    passes_of,
)
from autoshard.planner.leaf_rows import local_bytes
from autoshard.planner.request import requests_of
from autoshard.planner.requested_shardings import AUTO
from autoshard.report.tables import bytes_text

_jax.hide_frames(__file__)

ACTIVATIONS, STATES, FIT = KEEPS = ("activations", "states", "fit")

Leaves = list[Any]
_OWN = Hooks(own=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPlan:
    """The plans of a chunk.

    Attributes:
      whole: both passes in one program, (total, weights, shared, microbatch, state, cotangents, at) → (total,
        cotangents): what the layouts of its arguments come from, and the backward pass that repeats the forward one.
        Where micro-batches are split into parts, all but weights, shared values and `at` have a dimension of parts.
      forward: (weights, shared, microbatch, state, at) → state; None of the last chunk, and where more is kept.
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

    def seconds(self, work: Work) -> float:
        """Predicted seconds of a task; the last chunk's forward pass is part of its backward pass."""
        made = self.program(work)
        return 0.0 if made is None else made.cost

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
        """The plan of a program; process 0 makes it for all.

        It is planned as it is written, and only where that does not fit with repeated values: a chunk works on one
        micro-batch, whose activations are few.
        """
        fn.__name__ = name
        options = replace(self.options, in_shardings=tuple(shardings), out_shardings=outs, donate_argnums=donate)
        try:
            return self._planned(fn, arguments, replace(options, remat=WRITTEN))
        except InfeasibleError:
            return self._planned(fn, arguments, options)

    def _planned(self, fn: Callable[..., Any], arguments: Sequence[Any], options: Options) -> SolvedPlan:
        requests = requests_of(options.call(fn, arguments, {}), self.target, options.request)
        return plan_or_load(tuple(requests), options, peers=self.peers)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayouts:
    """Layouts that the chunks of a stage share: of states, of layers' weights and of the sums of their gradients.

    Those that are not given are those of the chunk that is planned first.
    """

    states: Any = AUTO
    weights: Any = AUTO
    sums: Any = AUTO


def plan_last(loss: ChunkedLoss, table: Table, planner: StagePlanner, given: StageLayouts) -> ChunkPlan:
    """Plans the last chunk, whose layouts of the state, and of the layers' weights, the others take.

    Args:
      loss: the chunks.
      table: what runs when.
      planner: the mesh of a stage, and how programs are planned on it.
      given: layouts that it has to have.

    Raises:
      InfeasibleError: it does not fit into the memory of a stage.
    """
    last = loss.chunks.count - 1
    arguments = arguments_of(loss, last, table.steps)
    shardings = _shardings(loss, last, arguments, given, AUTO)
    name = f"stage_{table.stages - 1}_backward"
    return ChunkPlan(
        whole=planner.plan(backward_task(loss, last), name, arguments, shardings, AUTO, donate=TOTAL), forward=None
    )


def layouts_to_hold(loss: ChunkedLoss, table: Table, planner: StagePlanner, held: int) -> StageLayouts:
    """The cheapest layouts with which a stage's memory holds all its chunks, and a number of states.

    They are those of one program: a chunk that takes its weights and its sums from arrays of all the chunks of a
    stage, and its state from an array of all that are held.

    Args:
      loss: the chunks.
      table: what runs when.
      planner: the mesh of a stage, and how programs are planned on it.
      held: states.

    Raises:
      InfeasibleError: there are none.
    """
    chunk = loss.chunks.layered or loss.chunks.count - 1  # the first chunk takes no state
    arguments = arguments_of(loss, chunk, table.steps)
    run = backward_task(loss, chunk)
    chunks, states = (_whole_on_all(count, planner.target.axes) for count in (table.repeats, held))

    def of_all(total: Any, weights: Leaves, shared: Leaves, micro: Leaves, given: Leaves, *rest: Any) -> Any:
        def one(x: Any) -> Any:
            return jax.lax.dynamic_index_in_dim(x, rest[-1], keepdims=False)

        own = {**total, "weights": [one(x) for x in total["weights"]]}
        new, before = run(own, [one(x) for x in weights], shared, micro, [one(x) for x in given], *rest)
        pairs = zip(total["weights"], new["weights"], strict=True)
        updated = [jax.lax.dynamic_update_index_in_dim(x, y, rest[-1], 0) for x, y in pairs]
        return {**new, "weights": updated}, before

    arguments[TOTAL] = {**arguments[TOTAL], "weights": in_stack(arguments[TOTAL]["weights"], chunks)}
    arguments[WEIGHTS] = in_stack(arguments[WEIGHTS], chunks)
    arguments[STATE] = in_stack(arguments[STATE], states)
    plan = planner.plan(of_all, "stage_with_all_it_holds", arguments, [AUTO] * len(arguments), AUTO, donate=TOTAL)

    def inside(specs: Any) -> list[PartitionSpec]:
        return [PartitionSpec(*spec[1:]) for spec in specs]

    total, weights, given = (plan.specs[i] for i in (TOTAL, WEIGHTS, STATE))
    if not loss.chunks.layers[chunk]:
        return StageLayouts(states=inside(given))
    return StageLayouts(states=inside(given), weights=inside(weights), sums=inside(total["weights"]))


def _whole_on_all(count: int, axes: MeshAxes) -> int:
    """At least so many, in a number that no axis divides, so that each lies where the others do."""
    while gcd(count, prod(axes.sizes)) > 1:
        count += 1
    return count


def plan_chunks(
    loss: ChunkedLoss, table: Table, planner: StagePlanner, keep: str, end: ChunkPlan, given: StageLayouts
) -> tuple[ChunkPlan, ...]:
    """Plans every chunk.

    Chunks of the same program have one plan. "fit" keeps a stage's activations where they fit into its memory.

    Args:
      loss: the chunks.
      table: what runs when.
      planner: the mesh of a stage, and how programs are planned on it.
      keep: "activations", "states" or "fit".
      end: the plan of the last chunk.
      given: layouts that chunks have to have.

    Raises:
      InfeasibleError: a stage does not fit into its memory.
    """
    last = loss.chunks.count - 1
    chunks = loss.chunks
    if chunks.layered == last:
        given = replace(given, weights=end.specs(WEIGHTS), sums=end.specs(TOTAL)["weights"])
    found: dict[tuple[int, bool], ChunkPlan] = {}
    for chunk in (chunks.layered, *range(last)):
        key = chunks.layers[chunk], chunk == 0
        if chunk < last and key not in found:
            found[key] = _plan_chunk(loss, chunk, table, planner, end, given)
        if chunk == chunks.layered < last:
            first = found[key]
            given = replace(given, weights=first.specs(WEIGHTS), sums=first.specs(TOTAL)["weights"])
    plans = [found[count, chunk == 0] for chunk, count in enumerate(chunks.layers[:last])] + [end]
    kept: dict[int, ChunkPlan | None] = {}  # by the identity of the plan without them; None: they do not fit
    for stage in range(table.stages) if keep != STATES else ():
        own = [c for c in range(stage, table.chunks, table.stages) if c < last]
        for c in own:
            if id(plans[c]) in kept:
                continue
            try:
                kept[id(plans[c])] = _keeping(loss, c, table, planner, plans[c], end.specs(STATE))
            except InfeasibleError:
                if keep == ACTIVATIONS:
                    raise
                kept[id(plans[c])] = None
        more = [(kept[id(plan)] or plan) if c in own else plan for c, plan in enumerate(plans)]
        if keep == ACTIVATIONS or peak_bytes(more, table, stage) <= plans[0].whole.record.memory.limit_bytes:
            plans = more
    alone = {id(plan): c for c, plan in enumerate(plans[:last]) if plan.kept is None}
    with_forward = {key: _with_forward(loss, c, table, planner, plans[c], end.specs(STATE)) for key, c in alone.items()}
    plans = [with_forward.get(id(plan), plan) for plan in plans]
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
    loss: ChunkedLoss, chunk: int, table: Table, planner: StagePlanner, plan: ChunkPlan, states: Any
) -> ChunkPlan:
    """A chunk with kept activations."""
    arguments = arguments_of(loss, chunk, table.steps)
    passes = passes_of(loss, chunk)
    name, specs = f"stage_{table.stage_of(chunk)}", plan.whole.specs
    forward = planner.plan(
        keeping_forward_task(loss, passes),
        f"{name}_forward",
        [arguments[i] for i in FORWARD],
        [specs[i] for i in FORWARD],
        (states, AUTO),
    )
    backward = planner.plan(
        keeping_backward_task(loss, passes),
        f"{name}_backward",
        [
            *arguments[:STATE],
            [arguments[STATE][i] for i in passes.held],
            *arguments[STATE + 1 :],
            in_parts(passes.kept, loss.parts),
        ],
        [*specs[:STATE], [specs[STATE][i] for i in passes.held], *specs[STATE + 1 :], forward.out_specs[1]],
        plan.whole.out_specs,
        donate=TOTAL,
    )
    return replace(plan, kept=KeptPlan(passes=passes, forward=forward, backward=backward))


def _split(loss: ChunkedLoss, chunk: int, table: Table, planner: StagePlanner, plan: ChunkPlan) -> ChunkPlan:
    """A chunk whose backward pass is two programs."""
    arguments = arguments_of(loss, chunk, table.steps)
    fn = backward_task(loss, chunk)
    if plan.kept is not None:
        passes = plan.kept.passes
        arguments[STATE] = [arguments[STATE][i] for i in passes.held]
        arguments.append(in_parts(passes.kept, loss.parts))
        fn = keeping_backward_task(loss, passes)
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
    stash = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in halves.stash]
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
    loss: ChunkedLoss, chunk: int, table: Table, planner: StagePlanner, end: ChunkPlan, given: StageLayouts
) -> ChunkPlan:
    """Plans a chunk but the last, `end`, in its layouts of the state."""
    arguments = arguments_of(loss, chunk, table.steps)
    name, state, cotangents = f"stage_{table.stage_of(chunk)}", end.specs(STATE), end.whole.out_specs[1]
    shardings = _shardings(loss, chunk, arguments, replace(given, states=state), cotangents)
    outs = (AUTO, cotangents if chunk else AUTO)
    run = backward_task(loss, chunk)
    try:
        whole = planner.plan(run, f"{name}_backward", arguments, shardings, outs, donate=TOTAL)
    except InfeasibleError:
        shardings[TOTAL] = shardings[WEIGHTS] = AUTO  # in other layouts than those of the last stage it may fit
        whole = planner.plan(run, f"{name}_backward", arguments, shardings, outs, donate=TOTAL)
    return ChunkPlan(whole=whole, forward=None)


def _with_forward(
    loss: ChunkedLoss, chunk: int, table: Table, planner: StagePlanner, plan: ChunkPlan, states: Any
) -> ChunkPlan:
    """A chunk that keeps nothing but what came in, with its forward pass."""
    arguments, specs = arguments_of(loss, chunk, table.steps), plan.whole.specs
    forward = planner.plan(
        forward_task(loss, chunk),
        f"stage_{table.stage_of(chunk)}_forward",
        [arguments[i] for i in FORWARD],
        [specs[i] for i in FORWARD],
        states,
    )
    return replace(plan, forward=forward)


def _shardings(
    loss: ChunkedLoss, chunk: int, arguments: Sequence[Any], given: StageLayouts, cotangents: Any
) -> list[Any]:
    """The layouts of a backward pass's arguments, as far as they are given."""
    shardings: list[Any] = [AUTO] * len(arguments)
    sums, weights = (given.sums, given.weights) if loss.chunks.layers[chunk] else ([], [])
    shardings[TOTAL] = {**dict.fromkeys(arguments[TOTAL], AUTO), "weights": sums}
    shardings[WEIGHTS] = weights
    shardings[STATE] = given.states if chunk else AUTO
    shardings[COTANGENTS] = cotangents
    return shardings


def stage_target(whole: Target, stage: str) -> Target:
    """The mesh of one stage, on the hardware of all and where it is among them."""
    others = {name: size for name, size in whole.axes.shape.items() if name != stage}
    return replace(whole, axes=MeshAxes.of(others or {"data" if stage != "data" else "device": 1}), own=None)
