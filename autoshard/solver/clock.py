"""Clocks: how every step learns how much time is left, and how much was worked."""

import math
import threading
import time
from collections.abc import Callable

Clock = Callable[[], float]  # seconds left; not positive once the time is over

# About what one core of a server takes (`python -m benchmarks.settling` prints both).
STEP_S = 8e-6  # a step of the interpreter, over a few small arrays
CELL_S = 1e-9  # a cell read or written by a compiled loop or an array operation
MIP_S = 0.025  # HiGHS on a thousand cells; seen: 0.04 to 0.12 s, and 0.6 to 4.3 s on ten thousand


def endless() -> float:
    """Tells of a time that never ends."""
    return math.inf


class Compilation(threading.local):
    """Time spent on compiling the solver itself, once per installation, and on loading it, once per process.

    `worked_s` is a clock that stands still meanwhile. Every thread has its own: the times are to be
    compared within one thread.
    """

    def __init__(self) -> None:
        self._spent_s = 0.0
        self._depth = 0  # functions compile those that they call
        self._since = 0.0

    def begin(self) -> None:
        if self._depth == 0:
            self._since = time.perf_counter()
        self._depth += 1

    def end(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._spent_s += time.perf_counter() - self._since

    def worked_s(self) -> float:
        """Seconds of a clock."""
        now = self._since if self._depth else time.perf_counter()
        return now - self._spent_s


class Effort(threading.local):
    """Work that was done, told in about seconds, but counted: no clock is asked.

    What is settled by it is settled alike on every machine, whatever else that does. Every thread
    has its own.
    """

    def __init__(self) -> None:
        self.spent_s = 0.0

    def spend(self, *, steps: int = 0, cells: int = 0, seconds: float = 0.0) -> None:
        """Counts steps of the interpreter, cells of arrays, and seconds that were counted elsewhere."""
        self.spent_s += STEP_S * steps + CELL_S * cells + seconds


def mip_s(cells: int) -> float:
    """Seconds that HiGHS takes for a program of so many cells, about."""
    return MIP_S * (cells / 1000) ** 2


compilation = Compilation()
effort = Effort()
