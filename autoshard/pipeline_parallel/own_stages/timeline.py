"""Timeline: when every task of a table runs, if each takes so long."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autoshard.pipeline_parallel.own_stages.table import Table, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A simulated step.

    Attributes:
      table: the tasks.
      begins: seconds from the begin of the step at which each task begins.
      ends: those at which it ends.
    """

    table: Table
    begins: Mapping[Task, float]
    ends: Mapping[Task, float]

    @property
    def step_s(self) -> float:
        """Seconds until the last task ends."""
        return max(self.ends.values())

    def busy_s(self, stage: int) -> float:
        """Seconds in which a stage works."""
        return sum(self.ends[task] - self.begins[task] for task in self.table.orders[stage])

    @property
    def bubble(self) -> float:
        """The share of the stages' time in which they wait."""
        stages = self.table.stages
        return 1 - sum(map(self.busy_s, range(stages))) / (stages * self.step_s)


def simulate(table: Table, seconds: Callable[[Task], float], *, hop_s: float = 0.0) -> Timeline:
    """Runs a table on paper.

    Args:
      table: the tasks.
      seconds: what a task takes.
      hop_s: what it takes to hand a result to another stage; it hides behind other tasks of both.
    """
    begins: dict[Task, float] = {}
    ends: dict[Task, float] = {}
    free = [0.0] * table.stages
    for task in table.in_order():
        stage = table.stage_of(task.chunk)
        waits = (ends[need] + hop_s * (table.stage_of(need.chunk) != stage) for need in table.needs(task))
        begins[task] = max(free[stage], *waits, 0.0)
        free[stage] = ends[task] = begins[task] + seconds(task)
    return Timeline(table=table, begins=begins, ends=ends)
