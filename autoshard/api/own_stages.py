"""Own stages: value and gradients of a batch, the layers in stages that have devices and programs of their own."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import Any, Unpack

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import cost_models
from autoshard import _jax
from autoshard.api import emit
from autoshard.api.multihost import Peers, peers_of
from autoshard.api.options import WAIT_S, Options, SolvingOptions, listing, refuse_unknown
from autoshard.api.placing import put_whole
from autoshard.api.planning import peers
from autoshard.api.shared_steps import SharedStep, live
from autoshard.api.stage_devices import StageDevices
from autoshard.api.stage_hand_overs import HandOvers
from autoshard.api.stage_homes import Homes, home_specs
from autoshard.api.stage_plans import (
    FIT,
    KEEPS,
    ChunkPlan,
    StagePlanner,
    peak_bytes,
    stage_target,
)
from autoshard.api.stage_search import StageSearch, best_parts, part_counts
from autoshard.backends import devices
from autoshard.backends.devices import MeshLike, Target
from autoshard.errors import ArgumentError, MeshError, SpecError
from autoshard.ir.accumulation import Parts, check_numbers
from autoshard.ir.mesh import MeshAxes
from autoshard.pipeline_parallel.own_stages import schedules
from autoshard.pipeline_parallel.own_stages.loss import ChunkedLoss, chunked
from autoshard.pipeline_parallel.own_stages.run import ChunkPrograms, Run
from autoshard.pipeline_parallel.own_stages.table import Table, Work
from autoshard.pipeline_parallel.own_stages.tasks import COTANGENTS, RESULTS, STATE
from autoshard.pipeline_parallel.own_stages.timeline import Timeline
from autoshard.planner.search_space import shared_prices
from autoshard.report.tables import bytes_text

_jax.hide_frames(__file__)

Leaves = list[Any]


@listing(SolvingOptions)
def in_own_stages(
    loss: Callable[..., Any],
    *,
    stages: str,
    steps: int,
    schedule: str = "1F1B",
    repeats: int = 1,
    layers: Sequence[int] | None = None,
    keep: str = FIT,
    parts: Parts = None,
    mesh: MeshLike = None,
    hardware: str | cost_models.Hardware | None = None,
    has_aux: bool = False,
    wait_s: float = WAIT_S,
    **options: Unpack[SolvingOptions],
) -> "OwnStages":
    """`jax.value_and_grad(loss)` with the layers in stages of their own devices and programs.

    As `in_stages`, the result takes `(params, batch, *rest)`, and refuses the same losses. It is
    called outside of `jax.jit`: it starts the stages' programs, of which each is planned by itself. Where several
    processes have the devices (`jax.distributed`), all of them call it, with the same arguments or with arrays of all
    devices; each starts the programs of its stages, and all return when the step has ended.

        value_and_grad = autoshard.in_own_stages(
            loss, stages="stage", steps=16, schedule="1F1B", mesh={"stage": 4, "data": 2}, hardware="h100:1x8"
        )
        value, gradients = value_and_grad(params, batch)
        params, state = update(params, state, gradients)  # any function, jitted: arrays of all devices

    Args:
      loss: as of `in_stages`.
      stages: the mesh axis of the stages.
      steps: micro-batches.
      schedule: "GPipe", "1F1B", "interleaved" or "zero-bubble", whose gradients of weights are programs of their own.
      repeats: chunks of layers per stage, of an interleaved schedule.
      layers: how many layers each chunk has, in their order, of which the first and the last may have none; None: as
        many each, and where that does not go, one less in the first and the last one.
      keep: what a stage holds of a micro-batch until its backward pass: "activations"; "states", what came in, from
        which the backward pass repeats the forward one; "fit", activations where they fit into the stage's memory.
      parts: into how many parts of a micro-batch gradients are kept apart until the last micro-batch, and reduced then
        once: a number, or the mesh axes over which the batch is split. None: every product of a stage's axes is tried
        on the last stage, and the one that is fastest there is taken.
      mesh: of all devices, `{"stage": 4, "data": 2}`, a Mesh, or None for the mesh in context.
      hardware: all of it, as of `autoshard.plan`.
      has_aux: as of `in_stages`.
      wait_s: how long processes wait for each other's plans, and in a step for one that gives no sign; with 0 each
        plans by itself, and silence is no error.
      **options: memory, unknown, time_limit_s and rel_gap of `autoshard.plan`, for every program.

    Raises:
      SpecError: the numbers do not go together.
      StageRunError: when it is called: a stage failed; every process raises it.
      ProcessError: when it is called: a process did not come to the end of the step, or has another program.
    """
    refuse_unknown(options, tuple(SolvingOptions.__annotations__), "in_own_stages")
    asked = Staging(
        stages=stages,
        steps=steps,
        schedule=schedule,
        repeats=repeats,
        layers=None if layers is None else tuple(layers),
        keep=keep,
        parts=parts,
        has_aux=has_aux,
        mesh=mesh,
    )
    return OwnStages(loss, asked, Options(mesh=mesh, hardware=hardware, wait_s=wait_s, **options))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Staging:
    """The stages that `in_own_stages` is asked for; its arguments say what each is."""

    stages: str
    steps: int
    schedule: str
    repeats: int
    layers: tuple[int, ...] | None
    keep: str
    parts: Parts
    has_aux: bool
    mesh: MeshLike

    def __post_init__(self) -> None:
        check_numbers(self.steps, self.parts)
        if self.keep not in KEEPS:
            raise SpecError(f"keep={self.keep!r}: it is one of {', '.join(map(repr, KEEPS))}")

    def table(self, sizes: Mapping[str, int]) -> Table:
        """The tasks of the stages on a mesh of these axes.

        Raises:
          SpecError: it has no axis of the stages, or the numbers do not go together.
        """
        if self.stages not in sizes:
            raise SpecError(f"stages={self.stages!r}: the mesh has no such axis; it has {', '.join(sizes)}")
        return schedules.table(self.schedule, stages=sizes[self.stages], repeats=self.repeats, steps=self.steps)


@dataclass(frozen=True, kw_only=True, eq=False)
class Pipeline:
    """The plan of a step in own stages.

    Attributes:
      table: the tasks of every stage.
      timeline: when each runs, by the predicted seconds of the plans. What a step does once (weights that go to the
        stages, gradients that come home) is not in it.
      plans: the plans of every chunk of layers.
      layers: how many layers each chunk has.
      specs: the layouts of the parameters between steps, over all devices, in their pytree.
      peaks: bytes per device of every stage: its programs, what it adds up, and what it holds of micro-batches.
        Optimizer state is not in them.
    """

    table: Table
    timeline: Timeline
    plans: tuple[ChunkPlan, ...]
    layers: tuple[int, ...]
    specs: Any
    peaks: tuple[int, ...]
    loss: ChunkedLoss
    target: Target
    stage_axis: str

    @property
    def cost(self) -> float:
        """Predicted seconds of a step."""
        return self.timeline.step_s

    @property
    def bubble(self) -> float:
        """The share of the stages' time in which they wait, as predicted."""
        return self.timeline.bubble

    def mesh(self) -> Mesh:
        """All devices, the stages first.

        Raises:
          MeshError: this process does not have them.
        """
        made = self.target.device_mesh()
        names = [self.stage_axis, *(name for name in made.axis_names if name != self.stage_axis)]
        grid = np.moveaxis(made.devices, made.axis_names.index(self.stage_axis), 0)
        axes = self.axes
        kinds = (jax.sharding.AxisType.Auto,) * axes.ndim
        assert list(axes.names[: len(names)]) == names
        return Mesh(grid.reshape(axes.sizes), axes.names, axis_types=kinds)

    @property
    def axes(self) -> MeshAxes:
        """The mesh of all devices, the stages first."""
        own = self.plans[0].whole.record.mesh.shape
        return MeshAxes.of({self.stage_axis: self.table.stages, **own})

    def shardings(self) -> Any:
        """NamedShardings of the parameters between steps, for `jax.device_put` or `jax.jit`."""
        mesh = self.mesh()
        return jax.tree.map(
            lambda spec: NamedSharding(mesh, spec), self.specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
        )

    def summary(self) -> str:
        """The pipeline as text: its stages, its schedule, its time."""
        t = self.table
        lines = [
            f"{t.name}: {t.stages} stages of {self.plans[0].whole.record.mesh}, {t.steps} micro-batches, "
            f"{self.cost * 1e3:.3g} ms, bubble {self.bubble:.0%}"
        ]
        for s in range(t.stages):
            own = range(s, t.chunks, t.stages)
            count = " + ".join(str(self.layers[c]) for c in own)
            forward = sum(self.plans[c].seconds(Work.FORWARD) for c in own)
            backward = sum(
                self.plans[c].seconds(work) for c in own for work in (Work.BACKWARD, Work.WEIGHTS)[: 1 + t.splits]
            )
            held = max(self.plans[c].held_bytes for c in own)
            lines.append(
                f"  stage {s}: {count} layers, forward {forward * 1e3:.3g} ms, backward {backward * 1e3:.3g} ms, "
                f"holds {t.held(s)} micro-batches of {bytes_text(held)}, peak {bytes_text(self.peaks[s])}"
            )
        return "\n".join(lines)


class OwnStages:
    """The result of `in_own_stages`."""

    def __init__(self, loss: Callable[..., Any], asked: Staging, options: Options) -> None:
        self._loss, self._asked, self._options = loss, asked, options
        self._entries: dict[Any, Entry] = {}

    def plan(self, params: Any, batch: Any, *rest: Any) -> Pipeline:
        """The plan for these arguments (arrays or ShapeDtypeStructs); planned once per shapes."""
        return self._entry(params, batch, rest).pipeline

    def __call__(self, params: Any, batch: Any, *rest: Any) -> tuple[Any, Any]:
        """The loss (with has_aux the other results beside it), and the gradients."""
        if any(map(_jax.is_tracer, jax.tree.leaves((params, batch, rest)))):
            raise ArgumentError(
                "in_own_stages runs several programs, and cannot be part of one: call it outside of jax.jit (and of "
                "jax.grad, jax.vmap); autoshard.in_stages makes one program"
            )
        return self._entry(params, batch, rest)(params, batch, rest)

    def _entry(self, params: Any, batch: Any, rest: tuple[Any, ...]) -> "Entry":
        leaves, tree = jax.tree.flatten((params, batch, rest))
        avals = tuple((x.shape, x.dtype) for x in map(_jax.shaped, leaves))
        key = tree, avals, _jax.context_mesh()
        if key not in self._entries:
            shapes = tree.unflatten([jax.ShapeDtypeStruct(*aval) for aval in avals])
            with _jax.cudnn_if_missing():
                pipeline = self._planned(*shapes)
            self._entries[key] = Entry(pipeline, has_aux=self._asked.has_aux, wait_s=self._options.wait_s)
        return self._entries[key]

    def _planned(self, params: Any, batch: Any, rest: tuple[Any, ...]) -> Pipeline:
        asked = self._asked
        whole = devices.place(asked.mesh, self._options.hardware)
        table = asked.table(whole.axes.shape)

        def in_parts(parts: int) -> ChunkedLoss:
            return chunked(
                self._loss,
                (params, batch, rest),
                steps=asked.steps,
                parts=parts,
                chunks=table.chunks,
                layers=asked.layers,
                has_aux=asked.has_aux,
            )

        elsewhere = asked.mesh is not None and self._options.hardware is not None
        together = peers(whole, self._options, offline=elsewhere)
        if together is not None:
            live(together)
        planner = StagePlanner(target=stage_target(whole, asked.stages), options=self._options, peers=together)
        examples = gcd(*(x.shape[0] // asked.steps for x in jax.tree.leaves(batch) if x.shape))
        counts = part_counts(asked.parts, planner.target.axes, examples)
        with shared_prices():
            loss, end = best_parts(in_parts, counts, table, planner)
            search = StageSearch(
                loss=loss, table=table, planner=planner, keep=asked.keep, whole=whole, axis=asked.stages
            )
            plans, timeline = search.best(end)
        own = plans[0].whole.record.mesh.shape
        specs = home_specs(loss, table, plans, MeshAxes.of({asked.stages: table.stages, **own}))
        return Pipeline(
            table=table,
            timeline=timeline,
            plans=plans,
            layers=loss.chunks.layers,
            specs=jax.tree.unflatten(jax.tree.structure(params), specs),
            peaks=tuple(peak_bytes(plans, table, s) for s in range(table.stages)),
            loss=loss,
            target=whole,
            stage_axis=asked.stages,
        )


class Entry:
    """A planned step: its programs, on their devices."""

    def __init__(self, pipeline: Pipeline, *, has_aux: bool, wait_s: float) -> None:
        self.pipeline = pipeline
        self._has_aux = has_aux
        self._wait_s = wait_s
        self._compiled: dict[tuple[int, Work], Any] = {}
        self.last: Run | None = None

    @cached_property
    def devices(self) -> StageDevices:
        """The devices of the stages.

        Raises:
          MeshError: there are fewer devices.
        """
        return StageDevices(mesh=self.pipeline.mesh(), table=self.pipeline.table)

    @cached_property
    def homes(self) -> Homes:
        """Where values are between steps."""
        p = self.pipeline
        specs = jax.tree.leaves(p.specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
        return Homes(loss=p.loss, plans=p.plans, devices=self.devices, specs=specs)

    @cached_property
    def hand_overs(self) -> HandOvers:
        """The way from stage to stage."""

        def arriving(chunk: int, work: Work) -> tuple[Leaves, Leaves]:
            plan, argument = self.pipeline.plans[chunk], STATE if work is Work.FORWARD else COTANGENTS
            return plan.avals(argument), plan.specs(argument)

        return HandOvers(devices=self.devices, arriving=arriving)

    @cached_property
    def peers(self) -> Peers | None:
        """The processes that have devices of the stages; None of this one alone.

        Raises:
          MeshError: this process has none of them.
          ProcessError: they are some of the processes, and not all.
        """
        devices = self.devices.mesh.devices.ravel().tolist()
        if jax.process_index() not in {device.process_index for device in devices}:
            raise MeshError(f"process {jax.process_index()} has none of the {len(devices)} devices of the stages")
        return peers_of(devices, self._wait_s)

    def __call__(self, params: Any, batch: Any, rest: tuple[Any, ...]) -> tuple[Any, Any]:
        if self.peers is None:
            return self._step(params, batch, rest, None)
        with SharedStep(self.peers) as shared:
            return self._step(params, batch, rest, shared)

    def _step(self, params: Any, batch: Any, rest: tuple[Any, ...], shared: SharedStep | None) -> tuple[Any, Any]:
        homes = self.homes
        leaves, tree = jax.tree.flatten(params)
        given, examples = jax.tree.leaves(rest), jax.tree.leaves(batch)
        if shared is not None:
            shared.compare([*leaves, *given, *examples])
        everywhere = self.devices.at_home(PartitionSpec())
        whole = [put_whole(x, self.devices.at_home(spec)) for x, spec in zip(leaves, homes.specs, strict=True)]
        whole += [put_whole(x, everywhere) for x in given]
        run = self._run(whole, [put_whole(x, everywhere) for x in examples], shared)
        value, others, gradients = homes.take_home(whole, run.totals)
        if shared is not None:
            shared.finish([value, *others, *gradients])
        aux = jax.tree.unflatten(self.pipeline.loss.aux, others)
        return ((value, aux) if self._has_aux else value), tree.unflatten(gradients)

    def _run(self, whole: Leaves, examples: Leaves, shared: SharedStep | None) -> Run:
        """Starts the tasks of a step; where processes share it, all of them have when it returns."""
        given = self.homes.bring(whole, examples)
        programs = [None if own is None else self._programs(c, *own) for c, own in enumerate(given)]
        run = self.last = Run.of(self.pipeline.table, programs, self.homes.zeros(), self.hand_overs)
        run.start()
        if shared is not None:
            shared.start(run.failure)
        if run.failure is not None:
            raise run.failure
        return run

    def _programs(self, chunk: int, weights: Leaves, shared: Leaves, micro: Leaves) -> ChunkPrograms:
        plan = self.pipeline.plans[chunk]
        backward = self._program(chunk, Work.BACKWARD)
        forward: Any = None if plan.program(Work.FORWARD) is None else self._program(chunk, Work.FORWARD)

        passes = None if plan.kept is None else plan.kept.passes

        halves = plan.halves
        of_weights: Any = None if halves is None else self._program(chunk, Work.WEIGHTS)

        def run_backward(total: Any, at: int, held: Any, cotangents: Leaves) -> tuple[Any, Leaves, Any]:
            state, *kept = (held,) if passes is None else held
            rest = weights, shared, micro, state, cotangents, np.int32(at), *kept
            if halves is None:
                return (*backward(total, *rest), None)
            results, out, stash = backward({name: x for name, x in total.items() if name in RESULTS}, *rest)
            leaves = jax.tree.leaves((total, *rest))
            places = [i for i in halves.split.inputs if i >= len(jax.tree.leaves(total))]
            return {**total, **results}, out, ([leaves[i] for i in places], stash)

        def run_weights(total: Any, held: Any) -> Any:
            return {**total, **of_weights({name: x for name, x in total.items() if name not in RESULTS}, *held)}

        def run_forward(at: int, state: Leaves) -> tuple[Leaves, Any]:
            out = forward(weights, shared, micro, state, np.int32(at))
            if passes is None:
                return out, state
            out, kept = out
            return out, ([state[i] for i in passes.held], kept)

        return ChunkPrograms(
            forward=None if forward is None else run_forward,
            backward=run_backward,
            weights=None if halves is None else run_weights,
        )

    def _program(self, chunk: int, work: Work) -> Any:
        if (chunk, work) not in self._compiled:
            plan = self.pipeline.plans[chunk]
            made = plan.program(work)
            assert made is not None
            mesh = self.devices.stages[self.pipeline.table.stage_of(chunk)]
            self._compiled[chunk, work] = emit.jitted(made.record, made.traced, mesh)
        return self._compiled[chunk, work]
