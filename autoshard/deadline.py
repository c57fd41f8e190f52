"""Deadline: when a call has to end, in whatever stage it is.

`within` begins a call that has so many seconds, `until` one that ends when it is asked to; a long loop calls `check`
now and then, and `left_s` says how long the solver has. What is done once per installation does not count
(`uncounted`). Without a deadline nothing reads a clock. Nothing else depends on the time: what ends before its deadline
is what it would be without one.
"""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from autoshard.errors import StoppedError, TimeLimitError


@dataclass(slots=True)
class _Deadline:
    """`limit_s` was asked for; the call ends at `end_s` of the clock, later by all that does not count."""

    limit_s: float
    end_s: float
    clock: Callable[[], float]
    around: "_Deadline | None"


_current: ContextVar[_Deadline | None] = ContextVar("deadline", default=None)


@contextmanager
def within(limit_s: float | None, clock: Callable[[], float] = time.monotonic) -> Generator[None]:
    """A context that has so many seconds of a clock, from now; with None, as many as the one around it."""
    if limit_s is None:
        yield
        return
    token = _current.set(_Deadline(limit_s, clock() + limit_s, clock, _current.get()))
    try:
        yield
    finally:
        _current.reset(token)


def uncounted(seconds: float) -> None:
    """Puts off the end of the call, and of those around it, by time that went to what no later call does again."""
    deadline = _current.get()
    while deadline is not None:
        deadline.end_s += seconds
        deadline = deadline.around


_stop: ContextVar[Callable[[], bool] | None] = ContextVar("stop", default=None)


@contextmanager
def until(stop: Callable[[], bool]) -> Generator[None]:
    """A context that ends, as at a deadline, once `stop` says so: with the best plan so far, if there is one."""
    token = _stop.set(stop)
    try:
        yield
    finally:
        _stop.reset(token)


def is_stopped() -> bool:
    """Whether what runs was asked to end."""
    stop = _stop.get()
    return stop is not None and stop()


def check(stage: str) -> None:
    """Goes on if there is time left.

    Args:
      stage: what is being done, for the error.

    Raises:
      TimeLimitError: there is none.
      StoppedError: it was asked to end.
    """
    if is_stopped():
        raise StoppedError(stage)
    deadline = _current.get()
    if deadline is not None and deadline.clock() > deadline.end_s:
        raise TimeLimitError(stage, deadline.limit_s)


def left_s(most: float) -> float:
    """The seconds that are left, at most so many; never less than nought."""
    if is_stopped():
        return 0.0
    deadline = _current.get()
    return most if deadline is None else max(0.0, min(most, deadline.end_s - deadline.clock()))
