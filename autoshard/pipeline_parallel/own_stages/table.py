"""Table: what every stage of a pipeline does, one task after the other.

The layers are S · R chunks; stage s has the chunks s, S + s, 2S + s, …. A task is one chunk's
forward pass of one micro-batch, its backward pass, or, where a schedule splits the backward
pass, the part of it that makes the gradients of the weights. Tasks wait for each other:

    forward(c, m)   after forward(c − 1, m)
    backward(c, m)  after forward(c, m) and backward(c + 1, m)
    weights(c, m)   after backward(c, m)

A table that does not end, or that leaves a task out, cannot exist.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from autoshard.errors import SpecError


class Work(StrEnum):
    """The kinds of tasks."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHTS = "weights"


@dataclass(frozen=True, slots=True)
class Task:
    """One chunk's work on one micro-batch."""

    work: Work
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.work[0].upper()}{self.chunk}.{self.microbatch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The tasks of every stage, in order.

    Attributes:
      name: of the schedule.
      stages: S.
      repeats: R, the chunks of a stage.
      steps: M, micro-batches.
      orders: the tasks of each stage.
    """

    name: str
    stages: int
    repeats: int
    steps: int
    orders: tuple[tuple[Task, ...], ...]

    def __post_init__(self) -> None:
        for what, count in (("stages", self.stages), ("repeats", self.repeats), ("steps", self.steps)):
            if isinstance(count, bool) or count != int(count) or count < 1:
                raise SpecError(f"{what}={count}: there is at least one")
        if len(self.orders) != self.stages:
            raise SpecError(f"{self.name}: {len(self.orders)} stages have tasks, and there are {self.stages}")
        for stage, order in enumerate(self.orders):
            self._check_tasks(stage, order)
        self.in_order()

    def __str__(self) -> str:
        return "\n".join(f"stage {s}: {' '.join(map(str, order))}" for s, order in enumerate(self.orders))

    @property
    def chunks(self) -> int:
        """How many chunks of layers there are."""
        return self.stages * self.repeats

    @property
    def splits(self) -> bool:
        """Whether gradients of weights are tasks of their own."""
        return any(task.work is Work.WEIGHTS for order in self.orders for task in order)

    def stage_of(self, chunk: int) -> int:
        """The stage that has a chunk."""
        return chunk % self.stages

    def needs(self, task: Task) -> tuple[Task, ...]:
        """The tasks that a task waits for."""
        c, m = task.chunk, task.microbatch
        if task.work is Work.FORWARD:
            return (Task(Work.FORWARD, c - 1, m),) if c else ()
        if task.work is Work.WEIGHTS:
            return (Task(Work.BACKWARD, c, m),)
        behind = (Task(Work.BACKWARD, c + 1, m),) if c + 1 < self.chunks else ()
        return (Task(Work.FORWARD, c, m), *behind)

    def in_order(self) -> tuple[Task, ...]:
        """All tasks, each after those that it waits for; of a stage in the stage's order.

        One process that starts them in this order keeps every stage busy: the n-th tasks of all
        stages stand together, as far as they do not wait.

        Raises:
          SpecError: stages wait for each other for ever.
        """
        done: set[Task] = set()
        at = [0] * self.stages
        found: list[Task] = []
        total = sum(map(len, self.orders))
        while len(found) < total:
            ready = [
                s
                for s, order in enumerate(self.orders)
                if at[s] < len(order) and done.issuperset(self.needs(order[at[s]]))
            ]
            if not ready:
                raise SpecError(f"{self.name} never ends: {'; '.join(self._stuck(at, done))}")
            now = [self.orders[s][at[s]] for s in ready]
            for s in ready:
                at[s] += 1
            found += now
            done.update(now)
        return tuple(found)

    def held(self, stage: int) -> int:
        """For how many pairs of chunk and micro-batch a stage holds activations at once, at most."""
        last = Work.WEIGHTS if self.splits else Work.BACKWARD
        most = now = 0
        for task in self.orders[stage]:
            now += (task.work is Work.FORWARD) - (task.work is last)
            most = max(most, now + (task.work is last))
        return most

    def _check_tasks(self, stage: int, order: Sequence[Task]) -> None:
        works = [work for work in Work if work is not Work.WEIGHTS or self.splits]
        chunks = range(stage, self.chunks, self.stages)
        wanted = {Task(work, c, m) for work in works for c in chunks for m in range(self.steps)}
        if foreign := [task for task in order if task not in wanted]:
            raise SpecError(f"{self.name}: {foreign[0]} is no task of stage {stage}")
        if missing := sorted(map(str, wanted.difference(order))):
            raise SpecError(f"{self.name}: stage {stage} leaves out {', '.join(missing[:3])}")
        if len(order) != len(wanted):
            raise SpecError(f"{self.name}: stage {stage} does a task twice")

    def _stuck(self, at: Sequence[int], done: set[Task]) -> Iterator[str]:
        for s, order in enumerate(self.orders):
            if at[s] < len(order):
                task = order[at[s]]
                waits = next(need for need in self.needs(task) if need not in done)
                yield f"stage {s} waits with {task} for {waits}"
