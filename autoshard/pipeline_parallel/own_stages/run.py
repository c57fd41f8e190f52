"""Run: one step of a pipeline, a table's tasks started one after the other.

Starting a task does not wait for its result, so that the stages, which share no device, work at
the same time. From the arrival of a state to its backward pass a chunk holds it, or what it keeps of it.

Several processes start the same tasks in the same order, each the programs of the stages of which it
has devices, and what is handed on from or to them. One whose program fails still hands on what others
wait for, without meaning, so that no device waits for ever; then it says what failed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard.errors import StageRunError
from autoshard.pipeline_parallel.own_stages.table import Table, Task, Work

Leaves = list[Any]

# (chunk, chunk, state or cotangents, values) → the values on the devices of the second chunk. In a process that has no
# device of the first one no values are given, nor where its program failed; without devices of the second, none return.
HandOn = Callable[[int, int, Work, Leaves | None], Leaves | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPrograms:
    """The programs of one chunk, on the devices of its stage.

    Attributes:
      forward: (micro-batch, state) → (state behind the chunk, what is held for the backward pass); None of the last
        chunk, which holds the state, and whose backward pass does it.
      backward: (total, micro-batch, what is held, cotangents) → (total, cotangents of the state, what is held for the
        gradients of weights).
      weights: (total, what is held) → total; None where the backward pass is not split.
    """

    forward: Callable[[int, Leaves], tuple[Leaves, Any]] | None
    backward: Callable[[Any, int, Any, Leaves], tuple[Any, Leaves, Any]]
    weights: Callable[[Any, Any], Any] | None


@dataclass(slots=True, kw_only=True)
class Run:
    """A step while it runs.

    Attributes:
      table: the tasks.
      programs: of every chunk; None of those that other processes run.
      hand_on: brings states and cotangents from chunk to chunk.
      totals: what every chunk adds up; at the end, the result.
      held: for how many pairs of chunk and micro-batch each stage holds something.
      most: the most that it held.
      states: what is held for each pair: the state that came in; after its forward pass, what the backward one reads;
        after a split one, what the gradients of weights read.
      cotangents: those that came in from the chunk behind.
      failure: of a task of this process.
    """

    table: Table
    programs: Sequence[ChunkPrograms | None]
    hand_on: HandOn
    totals: list[Any]
    held: list[int]
    most: list[int]
    states: dict[tuple[int, int], Any]
    cotangents: dict[tuple[int, int], Leaves]
    failure: StageRunError | None = None

    @classmethod
    def of(
        cls, table: Table, programs: Sequence[ChunkPrograms | None], totals: Sequence[Any], hand_on: HandOn
    ) -> "Run":
        """A step that has not begun."""
        none = [0] * table.stages
        return cls(
            table=table,
            programs=programs,
            hand_on=hand_on,
            totals=list(totals),
            held=[*none],
            most=[*none],
            states={},
            cotangents={},
        )

    def start(self) -> None:
        """Starts every task of this process; `failure` says whether one failed."""
        alone = None not in self.programs
        for task in self.table.in_order():
            out: Leaves | None = None
            if self.failure is None and (own := self.programs[task.chunk]) is not None:
                try:
                    out = self._start(task, own)
                except Exception as error:  # noqa: BLE001  (any: it is raised at the end)
                    self._fail(task, error)
                    if alone:
                        break
            try:
                self._hand(task, out)
            except Exception as error:  # noqa: BLE001  (any: others' devices wait for it, and there is no way on)
                self._fail(task, error)
                break
        if self.failure is not None:
            self.states.clear()
            self.cotangents.clear()

    def _fail(self, task: Task, error: Exception) -> None:
        if self.failure is None:
            stage = self.table.stage_of(task.chunk)
            self.failure = StageRunError(stage, task.chunk, task.microbatch, str(task.work), str(error))
            self.failure.__cause__ = error

    def _start(self, task: Task, own: ChunkPrograms) -> Leaves | None:
        """Starts a task; returns what is handed on."""
        chunk, microbatch = task.chunk, task.microbatch
        if task.work is Work.FORWARD:
            if not chunk:
                self._arrive(chunk, microbatch, [])
            if own.forward is None:
                return None
            out, self.states[chunk, microbatch] = own.forward(microbatch, self.states[chunk, microbatch])
            return out
        held = self.states.pop((chunk, microbatch))
        if task.work is Work.WEIGHTS and own.weights is not None:
            self._leave(chunk)
            self.totals[chunk] = own.weights(self.totals[chunk], held)
            return None
        if own.weights is None:
            self._leave(chunk)
        behind = self.cotangents.pop((chunk, microbatch), [])
        self.totals[chunk], out, rest = own.backward(self.totals[chunk], microbatch, held, behind)
        if own.weights is not None:
            self.states[chunk, microbatch] = rest
        return out

    def _hand(self, task: Task, out: Leaves | None) -> None:
        """Hands on what follows from a task, if anything does, wherever it was started."""
        chunk, microbatch = task.chunk, task.microbatch
        if task.work is Work.FORWARD and chunk + 1 < self.table.chunks:
            state = self.hand_on(chunk, chunk + 1, Work.FORWARD, out)
            if state is not None and self.failure is None:
                self._arrive(chunk + 1, microbatch, state)
        if task.work is Work.BACKWARD and chunk:
            cotangents = self.hand_on(chunk, chunk - 1, Work.BACKWARD, out)
            if cotangents is not None and self.failure is None:
                self.cotangents[chunk - 1, microbatch] = cotangents

    def _arrive(self, chunk: int, microbatch: int, state: Leaves) -> None:
        self.states[chunk, microbatch] = state
        stage = self.table.stage_of(chunk)
        self.held[stage] += 1
        self.most[stage] = max(self.most[stage], self.held[stage])

    def _leave(self, chunk: int) -> None:
        self.held[self.table.stage_of(chunk)] -= 1
