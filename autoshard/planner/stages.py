"""Stages: what planning makes, step by step, for whoever watches: timing, the log, a spinner, files.

    def watch(stage: Stage) -> None:
        print(stage.name, stage.seconds, stage.made)

    with observed(watch):
        autoshard.plan(step, state, batch, mesh=mesh)

Every stage is logged when it is done. Where the variable AUTOSHARD_DUMP names a directory, what each stage made is
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

from autoshard.planner.dump import dump

log = logging.getLogger("autoshard")

DUMP = "AUTOSHARD_DUMP"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage that is done.

    Attributes:
      name: of the stage.
      of: which program on which mesh and hardware, in words.
      made: its result; `planner/pipeline.py` lists which stage makes what.
      seconds: wall-clock.
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
        """Ends a stage and returns what it made; `also_s` was spent on it before the run."""
        seconds = time.perf_counter() - self._last + also_s
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        return self._tell(Stage(name=name, of=self._of, made=made, seconds=seconds), made)

    def passed(self, name: str, made: Made) -> Made:
        """Returns what a stage made that takes no time worth telling."""
        return self._tell(Stage(name=name, of=self._of, made=made, seconds=0.0), made)

    def _tell(self, stage: Stage, made: Made) -> Made:
        for observer in (_log, _dump, *_observers.get()):
            observer(stage)
        self._last = time.perf_counter()  # what observers take is no stage's
        return made


def _log(stage: Stage) -> None:
    log.debug("%s: %.3f s", stage.name, stage.seconds, extra={"stage": stage.name})


def _dump(stage: Stage) -> None:
    directory = os.environ.get(DUMP)
    if directory:
        dump(directory, stage.of, stage.made)
