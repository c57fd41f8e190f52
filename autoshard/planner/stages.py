"""Stages: tells observers of every stage of planning: timing, the log, a spinner, files.

    def watch(stage: Stage) -> None:
        print(stage.name, stage.seconds, stage.made)

    with observed(watch):
        autoshard.plan(step, state, batch, mesh=mesh)

Every stage is logged when it is done. If the variable AUTOSHARD_DUMP names a directory, the result of each stage is
written there (`planner.dump`).
"""

import logging
import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from autoshard import deadline
from autoshard.planner.dump import dump

log = logging.getLogger("autoshard")

DUMP = "AUTOSHARD_DUMP"

# Stage → what is done in it, in an error that time ended there. A plan that is solved is not given up.
_BEFORE_A_PLAN = {
    "trace": "tracing the program",
    "graph": "reading the program",
    "strategies": "listing and pricing its splits",
    "price": "pricing its moves",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage that is done.

    Attributes:
      name: name of the stage.
      of: program, mesh and hardware, in words.
      made: the result; `planner/pipeline.py` lists the stages and their results.
      seconds: wall-clock seconds.
    """

    name: str
    of: str
    made: Any
    seconds: float


Observer = Callable[[Stage], None]
_observers: ContextVar[tuple[Observer, ...]] = ContextVar("observers", default=())
Made = TypeVar("Made")


@contextmanager
def observed(observer: Observer) -> Generator[None]:
    """A context in which `observer` is told of every stage that is done."""
    token = _observers.set((*_observers.get(), observer))
    try:
        yield
    finally:
        _observers.reset(token)


class Stages:
    """The stages of one run: takes the time of each, and tells the observers."""

    def __init__(self, of: str) -> None:
        self.seconds: dict[str, float] = {}
        self._of = of
        self._last = time.perf_counter()

    def done(self, name: str, made: Made, *, also_s: float = 0.0) -> Made:
        """Ends a stage and returns its result; `also_s` was spent on it before the run."""
        if name in _BEFORE_A_PLAN:
            deadline.check(_BEFORE_A_PLAN[name])
        seconds = time.perf_counter() - self._last + also_s
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        stage = Stage(name=name, of=self._of, made=made, seconds=seconds)
        _log(stage)
        return self._tell(stage, made)

    def passed(self, name: str, made: Made) -> Made:
        """Reports a stage that takes no time, except to the log, and returns its result."""
        return self._tell(Stage(name=name, of=self._of, made=made, seconds=0.0), made)

    def _tell(self, stage: Stage, made: Made) -> Made:
        for observer in (_dump, *_observers.get()):
            observer(stage)
        self._last = time.perf_counter()  # the time of observers belongs to no stage
        return made


def _log(stage: Stage) -> None:
    log.debug("%s: %.3f s", stage.name, stage.seconds, extra={"stage": stage.name})


def _dump(stage: Stage) -> None:
    directory = os.environ.get(DUMP)
    if directory:
        dump(directory, stage.of, stage.made)
