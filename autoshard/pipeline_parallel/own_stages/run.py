"""Run: one step of a pipeline, a table's tasks started one after the other.

Starting a task does not wait for its result, so that the stages, which share no device, work at
the same time. From the arrival of a state to its backward pass a chunk holds it, or what it keeps of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard.errors import StageRunError
from autoshard.pipeline_parallel.own_stages.table import Table, Task, Work

Leaves = list[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPrograms:
    """The programs of one chunk, on the devices of its stage.

    Attributes:
      forward: (micro-batch, state) → (state behind the chunk, what is held for the backward pass); None of the last
        chunk, which holds the state, and whose backward pass does it.
      backward: (total, micro-batch, what is held, cotangents) → (total, cotangents of the state, what is held for the
        gradients of weights).
      weights: (total, what is held) → total; None where the backward pass is not split.
      take: brings a state to the devices of this chunk's stage.
      take_back: brings cotangents there.
    """

    forward: Callable[[int, Leaves], tuple[Leaves, Any]] | None
    backward: Callable[[Any, int, Any, Leaves], tuple[Any, Leaves, Any]]
    weights: Callable[[Any, Any], Any] | None
    take: Callable[[Leaves], Leaves]
    take_back: Callable[[Leaves], Leaves]


@dataclass(slots=True)
class Run:
    """A step while it runs.

    Attributes:
      table: the tasks.
      programs: of every chunk.
      totals: what every chunk adds up; at the end, the result.
      held: for how many pairs of chunk and micro-batch each stage holds something.
      most: the most that it held.
      states: what is held for each pair: the state that came in; after its forward pass, what the backward one reads;
        after a split one, what the gradients of weights read.
      cotangents: those that came in from the chunk behind.
    """

    table: Table
    programs: Sequence[ChunkPrograms]
    totals: list[Any]
    held: list[int]
    most: list[int]
    states: dict[tuple[int, int], Any]
    cotangents: dict[tuple[int, int], Leaves]

    @classmethod
    def of(cls, table: Table, programs: Sequence[ChunkPrograms], totals: Sequence[Any]) -> "Run":
        """A step that has not begun."""
        none = [0] * table.stages
        return cls(table, programs, list(totals), [*none], [*none], {}, {})

    def finish(self) -> None:
        """Starts every task.

        Raises:
          StageRunError: one failed.
        """
        for task in self.table.in_order():
            try:
                self._start(task)
            except Exception as error:
                stage = self.table.stage_of(task.chunk)
                raise StageRunError(stage, task.chunk, task.microbatch, str(task.work), str(error)) from error

    def _start(self, task: Task) -> None:
        chunk, microbatch = task.chunk, task.microbatch
        own = self.programs[chunk]
        if task.work is Work.FORWARD:
            if not chunk:
                self._arrive(chunk, microbatch, [])
            if own.forward is not None:
                out, self.states[chunk, microbatch] = own.forward(microbatch, self.states[chunk, microbatch])
                self._arrive(chunk + 1, microbatch, self.programs[chunk + 1].take(out))
            return
        held = self.states.pop((chunk, microbatch))
        if task.work is Work.WEIGHTS and own.weights is not None:
            self._leave(chunk)
            self.totals[chunk] = own.weights(self.totals[chunk], held)
            return
        if own.weights is None:
            self._leave(chunk)
        behind = self.cotangents.pop((chunk, microbatch), [])
        self.totals[chunk], out, rest = own.backward(self.totals[chunk], microbatch, held, behind)
        if own.weights is not None:
            self.states[chunk, microbatch] = rest
        if chunk:
            self.cotangents[chunk - 1, microbatch] = self.programs[chunk - 1].take_back(out)

    def _arrive(self, chunk: int, microbatch: int, state: Leaves) -> None:
        self.states[chunk, microbatch] = state
        stage = self.table.stage_of(chunk)
        self.held[stage] += 1
        self.most[stage] = max(self.most[stage], self.held[stage])

    def _leave(self, chunk: int) -> None:
        self.held[self.table.stage_of(chunk)] -= 1
