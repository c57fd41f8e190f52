"""Stage search: the parts of a micro-batch, and the layouts between stages, with which a step is fastest.

Layouts of what stages hand on are chosen by the chunk that takes it, as if it had the stage's memory alone and got it
for nothing. Where that does not fit, or a step waits for what is handed on, layouts are tried with which it does, or
waits for less, and the faster step is taken.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from autoshard.api.stage_plans import (
    ACTIVATIONS,
    ChunkPlan,
    StageLayouts,
    StagePlanner,
    bytes_of,
    layouts_to_hold,
    peak_bytes,
    plan_chunks,
    plan_last,
)
from autoshard.backends.devices import Target
from autoshard.errors import InfeasibleError, SpecError, StageError
from autoshard.ir.accumulation import Parts, choices, count_of
from autoshard.ir.mesh import MeshAxes
from autoshard.pipeline_parallel.own_stages.loss import ChunkedLoss
from autoshard.pipeline_parallel.own_stages.table import Table
from autoshard.pipeline_parallel.own_stages.tasks import STATE
from autoshard.pipeline_parallel.own_stages.timeline import Timeline, simulate
from autoshard.planner.leaf_rows import local_bytes

WAITS = 0.02  # a step that waits for a smaller share of its time for what is handed on keeps its layouts
MOST_HELD = 2**30  # places of an array that an int32 counts
FILLED = 0.9  # of a stage's free memory, by states that are split over all of its devices


def part_counts(parts: Parts, axes: MeshAxes, examples: int) -> list[int]:
    """The numbers of parts to choose among.

    Args:
      parts: as of `in_own_stages`.
      axes: the mesh of a stage.
      examples: in a micro-batch.

    Raises:
      SpecError: an axis is not one of a stage's mesh.
    """
    if parts is not None:
        return [count_of(parts, axes.shape)]
    return [count for count in choices(axes) if examples % count == 0]


def best_parts(
    in_parts: Callable[[int], ChunkedLoss], counts: Sequence[int], table: Table, planner: StagePlanner
) -> tuple[ChunkedLoss, ChunkPlan]:
    """The loss in the number of parts with which its last chunk is fastest, and the plan of that chunk.

    Args:
      in_parts: the chunks, of a number of parts.
      counts: the numbers to choose among, rising; of equal ones the first.
      table: what runs when.
      planner: the mesh of a stage, and how programs are planned on it.

    Raises:
      InfeasibleError: the last chunk fits into the memory of a stage with none of them.
      StageError: its layers do not run side by side, and no other number is left.
    """
    found: list[tuple[float, ChunkedLoss, ChunkPlan]] = []
    refused: list[SpecError | InfeasibleError] = []
    for count in counts:
        try:
            loss = in_parts(count)
            plan = plan_last(loss, table, planner, StageLayouts())
        except (InfeasibleError, StageError) as error:
            refused.append(error)
            continue
        found.append((table.steps * plan.whole.cost + _once_s(plan, planner, count), loss, plan))
    if not found:
        raise refused[0]
    _, loss, plan = min(found, key=lambda one: one[0])
    return loss, plan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageSearch:
    """A pipeline whose programs are to be planned.

    Attributes:
      loss: the chunks.
      table: what runs when.
      planner: the mesh of a stage, and how programs are planned on it.
      keep: as of `in_own_stages`.
      whole: all devices.
      axis: the mesh axis of the stages.
    """

    loss: ChunkedLoss
    table: Table
    planner: StagePlanner
    keep: str
    whole: Target
    axis: str

    def best(self, end: ChunkPlan) -> tuple[tuple[ChunkPlan, ...], Timeline]:
        """The plans of all chunks, and when they run.

        Args:
          end: the plan of the last chunk.

        Raises:
          InfeasibleError: a stage does not fit into its memory.
        """
        try:
            plans = plan_chunks(self.loss, self.table, self.planner, self.keep, end, StageLayouts())
        except InfeasibleError as error:
            if self.keep == ACTIVATIONS:
                raise
            try:
                plans = self._with(max(map(self.table.held, range(self.table.stages))))
            except InfeasibleError:
                raise error from None
            return plans, self.timeline(plans)
        timeline = self.timeline(plans)
        if timeline.step_s <= (1 + WAITS) * self.timeline(plans, waiting=False).step_s:
            return plans, timeline
        try:
            others = self._with(self._held_if_split(plans))
        except InfeasibleError:
            return plans, timeline
        return min((plans, timeline), (others, self.timeline(others)), key=lambda found: found[1].step_s)

    def timeline(self, plans: Sequence[ChunkPlan], *, waiting: bool = True) -> Timeline:
        """When tasks run, by the predicted seconds of their plans.

        Args:
          plans: of the chunks.
          waiting: whether it takes time to hand on a state.
        """
        hop_s = max((self._hop_s(plan) for plan in plans[1:]), default=0.0) if waiting else 0.0
        return simulate(self.table, lambda task: plans[task.chunk].seconds(task.work), hop_s=hop_s)

    def _with(self, held: int) -> tuple[ChunkPlan, ...]:
        given = layouts_to_hold(self.loss, self.table, self.planner, held)
        end = plan_last(self.loss, self.table, self.planner, given)
        return plan_chunks(self.loss, self.table, self.planner, self.keep, end, given)

    def _held_if_split(self, plans: Sequence[ChunkPlan]) -> int:
        """How many states a stage could hold if each was split over all of its devices, and hardly in other layouts."""
        plan = plans[self.loss.chunks.layered or -1]  # the first chunk takes no state
        devices = prod(plan.whole.record.mesh.sizes)
        split = sum(prod(x.shape) * x.dtype.itemsize for x in plan.avals(STATE)) // devices
        free = plan.whole.record.memory.limit_bytes - peak_bytes(plans, self.table, self.table.stages - 1)
        return min(max(int(free / (split or 1) * FILLED), 1), MOST_HELD)

    def _hop_s(self, plan: ChunkPlan) -> float:
        """Seconds to hand a state from one stage to the next."""
        machine = self.whole.machine
        return float(machine.collective_s("collective-permute", (self.axis,), bytes_of(plan.whole, STATE)))


def _once_s(plan: ChunkPlan, planner: StagePlanner, parts: int) -> float:
    """Seconds in which the sums of parts' gradients are reduced, each device keeping its share.

    Weights are brought together once a step with one part, too, as far as sums of their gradients are split otherwise.
    """
    if parts == 1:
        return 0.0
    record, traced = plan.whole.record, plan.whole.traced
    seconds = 0.0
    for leaf, path in zip(record.inputs, traced.in_paths, strict=True):
        axes = leaf.spec[0] if path.startswith(("total['weights']", "total['shared']")) and leaf.spec else None
        if axes:
            names = (axes,) if isinstance(axes, str) else tuple(axes)
            nbytes = local_bytes(leaf, record.mesh)
            seconds += float(planner.target.machine.collective_s("reduce-scatter", names, nbytes))
    return seconds
