"""Pipeline parallelism: plans a share of the layers on its part of the devices, as one stage.

A stack of equal layers that p stages share evenly is p times the same program: the train
step of ⌈L/p⌉ layers, its gradients accumulated over M micro-batches. That program is
planned on the mesh of one stage, whose links are those it has among all devices. Its
seconds have three parts: the layers, the ends of the model (embedding and logits), and the
work that a step does once (the sums of gradients, the optimizer)::

    step = M · busy · (1 + (p − 1) / (v · M)) + once + hand-overs that did not hide

`busy` is one micro-batch in the busiest stage: a stage of layers alone, or the last one,
which has the ends too, and a layer less if p does not divide L. v chunks of layers per
stage shorten the bubble and lengthen the hand-overs. A device holds the saved values of
every micro-batch in flight.

Sources: Huang et al. 2019 (GPipe, arXiv:1811.06965); Narayanan et al. 2021 (1F1B and
interleaving, arXiv:2104.04473); Korthikanti et al. 2022, section 4.2.3 (activations in
flight of an interleaved schedule, arXiv:2205.05198).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from autoshard import deadline
from autoshard.backends import devices
from autoshard.backends.devices import Target
from autoshard.costs.strategies import layout_of
from autoshard.errors import InfeasibleError, SpecError, StoppedError
from autoshard.explore.builder import load_target
from autoshard.explore.trial import SEARCH_REL_GAP
from autoshard.ir.accumulation import accumulate
from autoshard.ir.mesh import MeshAxes
from autoshard.ir.op_traits import LOOP_CARRY, LOOP_SLICE
from autoshard.planner import pipeline
from autoshard.planner.budget import Budget
from autoshard.planner.planning_result import PlanningResult
from autoshard.planner.program import bind
from autoshard.planner.record import PlanRecord
from autoshard.planner.request import RequestOptions, request_of
from autoshard.planner.search_space import build_search_space
from autoshard.problem import bill
from autoshard.problem.assignment import Assignment
from autoshard.problem.decisions import Decisions
from autoshard.problem.ports import Usage
from autoshard.report.progress import counted
from cost_models import Hardware, Machine
from cost_models.closed_forms.layout_search import Priced
from cost_models.closed_forms.training_layout import TrainingLayout

STAGE_TIME_LIMIT_S = 60.0  # three times a plan's own: a stage has loops in a loop, and nobody waits at a prompt

Schedule = Literal["no pipeline", "GPipe", "1F1B", "interleaved"]

CHUNKS = (2, 4, 8)  # of an interleaved schedule
STAGE_AXIS = "pipeline"  # as TrainingLayout.mesh names it

# A closed form's recomputation → the program's: "minimal" keeps results of matmuls, like the
# policy `dots`. In order of kept bytes, the least last.
REMATS: Mapping[str, tuple[str, ...]] = {
    "none": ("none", "dots", "full"),
    "minimal": ("dots", "full"),
    "mlp": ("dots", "full"),
    "full": ("full",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The parts of a stage program's seconds, over all micro-batches, and the bytes in flight.

    Attributes:
      layers_s: seconds in the loops over layers, forward and backward.
      ends_s: seconds in the rest of the loop over micro-batches.
      once_s: seconds outside of that loop.
      saved_bytes: bytes kept for backward of one micro-batch, per device.
      in_flight: micro-batches whose saved bytes count in the plan's memory.
      handed_bytes: bytes that a stage hands to the next per micro-batch and device.
    """

    layers_s: float
    ends_s: float
    once_s: float
    saved_bytes: int
    in_flight: float
    handed_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A pipeline of planned stages.

    Attributes:
      priced: the closed form's layout and step, which it was planned for.
      record: the plan of one stage's program.
      schedule: the schedule of the pipeline.
      chunks: chunks of layers per stage; 1 except in an interleaved schedule.
      microbatches: micro-batches of one step.
      remat: the program's rematerialization.
      step_s: predicted seconds of a step.
      parts: the parts of the step; they add up to it.
      peak_bytes: peak bytes per device of the fullest stage.
    """

    priced: Priced
    record: PlanRecord
    schedule: Schedule
    chunks: int
    microbatches: int
    remat: str
    step_s: float
    parts: Mapping[str, float]
    peak_bytes: int

    @property
    def stages(self) -> int:
        return self.priced.layout.pipeline

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization, with the closed form's model FLOPs (causal half of attention)."""
        step = self.priced.step
        return step.model_flops / (self.step_s * step.devices * step.peak_flops_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Builder:
    """How stage programs are made.

    `target` names a builder that takes `layers`, `batch`, `sequence`, `remat` and
    `value_and_grad` (which takes the place of `jax.value_and_grad`); `keywords` are
    further arguments. Its layers are in a loop.
    """

    target: str
    keywords: Mapping[str, Any]
    layers: int
    sequences: int
    sequence: int


def pipelined(
    builder: Builder,
    priced: Sequence[Priced],
    hardware: Hardware,
    *,
    memory_bytes: float | None = None,
    time_limit_s: float = STAGE_TIME_LIMIT_S,
    rel_gap: float = SEARCH_REL_GAP,
) -> tuple[Staged, ...]:
    """Plans the stages of each layout that a closed form proposes; the fastest first.

    Args:
      builder: the builder of stage programs.
      priced: the proposals. Only their mesh, micro-batch and recomputation are used; proposals
        that agree in these are planned once.
      hardware: all devices.
      memory_bytes: per device; None: the usable bytes of the hardware's file.
      time_limit_s: the solver's limit per plan.
      rel_gap: the solver's gap.

    Raises:
      InfeasibleError: no stage of any proposal fits.
      SpecError: the program's layers are in no loop.
    """
    limit = int(hardware.usable_memory_bytes if memory_bytes is None else memory_bytes)
    found: list[Staged] = []
    alike: dict[tuple[Any, ...], Priced] = {}
    for one in priced:
        alike.setdefault(_proposal(one.layout), one)
    for one in counted(list(alike.values()), "layout"):
        budget = Budget(time_limit_s=time_limit_s, rel_gap=rel_gap)
        fitting: list[Staged] = []
        try:
            for remat in REMATS[one.layout.remat]:
                more = list(_with_remat(builder, one, hardware, remat, limit, budget))
                fitting += more
                if len(more) == len(_parts(one.layout)):
                    break  # recomputing more only takes longer
        except StoppedError:
            if not found and not fitting:
                raise
        if found and deadline.is_stopped():
            break  # an interrupted plan is not compared with whole ones
        if fitting:
            found.append(min(fitting, key=_order))
    if not found:
        raise InfeasibleError(
            f"none of {len(alike)} layouts fits with planned stages\n"
            "  take more chips (--chips), more proposals (--rows), or raise --memory"
        )
    return tuple(sorted(found, key=_order))


def _order(staged: Staged) -> tuple[float, int]:
    return staged.step_s, staged.peak_bytes


def _proposal(layout: TrainingLayout) -> tuple[Any, ...]:
    """Equal for layouts whose stages are the same program on the same mesh."""
    shards = layout.data * layout.fsdp
    return (layout.tensor, layout.context, layout.expert, layout.pipeline, shards, layout.microbatch, layout.remat)


def _parts(layout: TrainingLayout) -> list[int]:
    """In how many parts gradients are accumulated: in one, reduced every trip, or in one per shard, reduced once."""
    return sorted({1, layout.data_shards})


def _with_remat(
    builder: Builder, one: Priced, hardware: Hardware, remat: str, limit: int, budget: Budget
) -> Iterator[Staged]:
    """The best schedule with gradients that are reduced every trip, and with such as are reduced once."""
    layout = one.layout
    count = int(layout.microbatches(builder.sequences))
    for parts in _parts(layout):
        try:
            planned, machine, shares = _planned(builder, layout, hardware, remat, parts, limit, budget)
        except InfeasibleError:
            continue
        options = schedules(one, planned.record, shares, machine, builder.layers, count, remat)
        fits = [staged for staged in options if staged.peak_bytes <= limit]
        yield min(fits, key=_order)  # the plan's own micro-batches fit


def in_flight(stages: int, chunks: int, microbatches: int) -> float:
    """Micro-batches whose activations the first stage holds at once, 1F1B or interleaved."""
    if chunks > 1:
        return stages + (stages - 1) / chunks
    return float(min(stages, microbatches))


def _planned(
    builder: Builder, layout: TrainingLayout, hardware: Hardware, remat: str, parts: int, limit: int, budget: Budget
) -> tuple[PlanningResult, Machine, Shares]:
    """The plan of one stage's program, the machine with every axis on it, and where the seconds go."""
    tori = any(d.medium == "torus" for d in hardware.topology.dimensions)
    whole = layout.mesh(slices_outermost=tori)
    machine = hardware.place(whole)
    axes = MeshAxes.of({name: n for name, n in whole.items() if n > 1 and name != STAGE_AXIS} or {"data": 1})
    fn, args = load_target(
        builder.target,
        {
            **builder.keywords,
            "layers": -(-builder.layers // layout.pipeline),
            "batch": builder.sequences,
            "sequence": builder.sequence,
            "remat": remat,
            "value_and_grad": partial(accumulate, steps=int(layout.microbatches(builder.sequences)), parts=parts),
        },
    )
    target = Target(axes=axes, hardware=hardware, machine=machine, compiler=devices.compiler_of(hardware))
    call = replace(bind(fn, args, {}, donate_argnums=0), name="stage")
    space = build_search_space(request_of(call, target, RequestOptions(memory_bytes=limit)))
    count, per_stage = int(layout.microbatches(builder.sequences)), -(-builder.layers // layout.pipeline)
    loops = Loops.of(space.decisions, count, per_stage)
    times = in_flight(layout.pipeline, layout.virtual_stages, count)
    held = replace(space, decisions=loops.held(space.decisions, times))
    planned = pipeline.solve_space(held, budget, constraints="all")
    return planned, machine, divided(planned, loops, times)


def schedules(
    one: Priced, record: PlanRecord, shares: Shares, machine: Machine, layers: int, count: int, remat: str
) -> Iterator[Staged]:
    """The stage under every schedule that its layers and micro-batches allow."""
    p = one.layout.pipeline
    per_stage = -(-layers // p)
    last = per_stage - (layers < p * per_stage)  # layers of the stage that has the ends
    layers_s, ends_s = max(
        (shares.layers_s * last / per_stage, shares.ends_s), (shares.layers_s, shares.ends_s * (p == 1)), key=sum
    )
    busy_s = layers_s + ends_s
    kinds: dict[tuple[Schedule, int], float] = {("no pipeline", 1): 1.0}
    if p > 1:
        kinds = {("1F1B", 1): in_flight(p, 1, count), ("GPipe", 1): float(count)}
        if count % p == 0:
            kinds |= {("interleaved", v): in_flight(p, v, count) for v in CHUNKS if per_stage % v == 0}
    for (schedule, chunks), times in kinds.items():
        hops = 2 * count * chunks if p > 1 else 0
        handed_s = hops * float(machine.collective_s("collective-permute", (STAGE_AXIS,), shares.handed_bytes))
        parts = {
            "layers": layers_s,
            "ends": ends_s,
            "bubble": busy_s / count * (p - 1) / chunks,
            "hand-over": float(machine.exposed_s(handed_s, busy_s)),
            "once": shares.once_s,
        }
        yield Staged(
            priced=one,
            record=record,
            schedule=schedule,
            chunks=chunks,
            microbatches=count,
            remat=remat,
            step_s=sum(parts.values()),
            parts=parts,
            peak_bytes=record.memory.peak_bytes + int((times - shares.in_flight) * shares.saved_bytes),
        )


def divided(planned: PlanningResult, loops: "Loops", times: float) -> Shares:
    """Divides a stage program's seconds among its loops.

    Args:
      planned: the plan of the program, with saved values counted `times` times.
      loops: the loops of the program.
      times: micro-batches in flight.
    """
    assignment = planned.assignment
    d = assignment.decisions
    spent: dict[str, float] = {"layers": 0.0, "ends": 0.0, "once": 0.0}
    for n, node in enumerate(d.nodes):
        if node.equations:
            spent[loops.share(d.graph.eqn_loop[node.equations[0]])] += bill.node_s(assignment, n)
    for row, waited_s in bill.waits(assignment):
        by_trips, window = loops.share_of_trips(row.trips), row.window
        spent[by_trips if window is None else loops.share(d.windows.loops[window])] += waited_s + row.work_s * row.trips
    saved = sum(int(use.nbytes[assignment.choice[use.node]]) for use in loops.saved(d))
    return Shares(
        layers_s=spent["layers"],
        ends_s=spent["ends"],
        once_s=planned.record.cost.step_s - spent["layers"] - spent["ends"],
        saved_bytes=int(saved / times),
        in_flight=times,
        handed_bytes=loops.handed_bytes(assignment),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Loops:
    """The loops of a stage program, and which of its values follow from the batch.

    Attributes:
      outer: the loop over micro-batches.
      inner: the loops over layers in it, forward first.
      inside: loop → the one that it lies in, 0: none.
      spans: loop → its first and last equation.
      of_batch: values of the outer loop's body that follow from the micro-batch.
      microbatches: trips of the outer loop.
      layers: trips of an inner loop.
    """

    outer: int
    inner: tuple[int, ...]
    inside: Mapping[int, int]
    spans: Mapping[int, tuple[int, int]]
    of_batch: frozenset[int]
    microbatches: int
    layers: int

    @classmethod
    def of(cls, decisions: Decisions, microbatches: int, layers: int) -> "Loops":
        """Finds them.

        Raises:
          SpecError: the program has no such loops.
        """
        graph = decisions.graph
        inside: dict[int, int] = {}
        trips: dict[int, int] = {}
        spans: dict[int, tuple[int, int]] = {}
        for e, loop in enumerate(graph.eqn_loop):
            if loop:
                spans[loop] = (spans.get(loop, (e, e))[0], e)
                trips[loop] = graph.runs(e)
            if graph.eqns[e].traits.enters_loop:
                inside[loop] = graph.value_loop[graph.operands[e][0]]
        outer = next((k for k, n in sorted(trips.items()) if not inside.get(k) and n == microbatches), 0)
        inner = tuple(k for k, n in sorted(trips.items()) if inside.get(k) == outer and n == microbatches * layers)
        if not outer or len(inner) < 2:
            raise SpecError(
                "stages need the layers in a loop, forward and backward, inside a loop over micro-batches: "
                "write --set scan=True, or give a builder that applies its layers by jax.lax.scan"
            )
        of_batch: set[int] = set()
        for e, eqn in enumerate(graph.eqns):
            begins = eqn.primitive == LOOP_SLICE and graph.eqn_loop[e] == outer
            if begins or any(v in of_batch for v in graph.operands[e]):
                of_batch.update(graph.results[e])
        return cls(
            outer=outer,
            inner=inner,
            inside=inside,
            spans=spans,
            of_batch=frozenset(v for v in of_batch if graph.value_loop[v] == outer),
            microbatches=microbatches,
            layers=layers,
        )

    def share(self, loop: int) -> str:
        """The part that a loop's seconds belong to."""
        while loop and loop != self.outer and loop not in self.inner:
            loop = self.inside.get(loop, 0)
        return "once" if not loop else "ends" if loop == self.outer else "layers"

    def share_of_trips(self, trips: int) -> str:
        """The part of seconds that are known to run a number of trips."""
        if trips % self.microbatches:
            return "once"
        return "layers" if trips % (self.microbatches * self.layers) == 0 else "ends"

    def saved(self, decisions: Decisions) -> list[Usage]:
        """The values of a micro-batch that are kept from forward to backward."""
        first, last = self.spans[self.inner[0]][1], self.spans[self.inner[1]][0]
        begin = self.spans[self.outer][0]
        of_batch = {
            port.node for value, port in (*decisions.made.items(), *decisions.kept.items()) if value in self.of_batch
        }
        return [
            use for use in decisions.usages if begin <= use.start <= first and use.end > last and use.node in of_batch
        ]

    def held(self, decisions: Decisions, times: float) -> Decisions:
        """The same decisions, with saved values counted a number of times."""
        saved = set(map(id, self.saved(decisions)))

        def counted(nbytes: NDArray[np.int64]) -> NDArray[np.int64]:
            return np.ceil(nbytes * times).astype(np.int64)

        usages = (
            replace(use, nbytes=counted(use.nbytes), parts={part: counted(n) for part, n in use.parts.items()})
            if id(use) in saved
            else use
            for use in decisions.usages
        )
        return replace(decisions, usages=tuple(usages))

    def handed_bytes(self, assignment: Assignment) -> int:
        """Bytes on one device that go from layer to layer."""
        d = assignment.decisions
        graph = d.graph
        carried = [
            graph.results[e][0]
            for e, eqn in enumerate(graph.eqns)
            if eqn.primitive == LOOP_CARRY and graph.eqn_loop[e] == self.inner[0]
        ]
        value = max(carried, key=lambda v: graph.avals[v].nbytes)
        code = assignment.made(value)
        if code is None:
            return graph.avals[value].nbytes
        layout = layout_of(code, graph.avals[value].ndim, d.mesh)
        return graph.avals[value].nbytes // prod(d.mesh.shape[axis] for dim in layout.dims for axis in dim)
