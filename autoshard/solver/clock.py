"""Clocks: how every step learns how much time is left, and how much was worked."""

import math
import threading
import time
from collections.abc import Callable

from autoshard import deadline

Clock = Callable[[], float]  # seconds left; not positive once the time is over

# The unit of counted work: about the seconds that one core of a server takes. `python -m benchmarks.settling`
# prints both. They are no tuning: other numbers would change after how much work every solve settles.
STEP_S = 8e-6  # a step of the interpreter, over a few small arrays
CELL_S = 1e-9  # a cell read or written by a compiled loop or an array operation
MIP_S = 0.025  # HiGHS on a thousand cells; seen: 0.04 to 0.12 s, and 0.6 to 4.3 s on ten thousand


def endless() -> float:
    """Tells of a time that never ends."""
    return math.inf


class Compilation(threading.local):
    """Time spent on compiling the solver itself, once per installation, and on loading it, once per process.

    `spent_s` is that time, without what is not done yet. `worked_s` is a clock that stands still meanwhile.
    Every thread has its own clock; its times are to be compared within the thread.
    """

    def __init__(self) -> None:
        self.spent_s = 0.0
        self._depth = 0  # functions compile those that they call
        self._since = 0.0

    def begin(self) -> None:
        if self._depth == 0:
            self._since = time.perf_counter()
        self._depth += 1

    def end(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            spent_s = time.perf_counter() - self._since
            self.spent_s += spent_s
            deadline.uncounted(spent_s)

    def worked_s(self) -> float:
        """Returns the seconds of a clock that stands still while the solver is compiled or loaded."""
        now = self._since if self._depth else time.perf_counter()
        return now - self.spent_s


class Effort(threading.local):
    """Work that was done, counted in about seconds; no clock is asked.

    What is decided by work is decided alike on every machine, whatever else that machine does. Every thread
    has its own count.
    """

    def __init__(self) -> None:
        self.spent_s = 0.0

    def spend(self, *, steps: int = 0, cells: int = 0, seconds: float = 0.0) -> None:
        """Adds steps of the interpreter, cells of arrays, and seconds that were estimated elsewhere."""
        self.spent_s += STEP_S * steps + CELL_S * cells + seconds


def mip_s(cells: int) -> float:
    """Returns about the seconds that HiGHS takes for a program of so many finite cells."""
    return MIP_S * (cells / 1000) ** 2


def mip_cells(seconds: float) -> int:
    """Returns the finite cells of the largest program whose estimate is so many seconds."""
    return int(1000 * math.sqrt(max(seconds, 0.0) / MIP_S))


compilation = Compilation()
effort = Effort()
