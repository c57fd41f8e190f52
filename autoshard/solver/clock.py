"""Clocks: how every step learns how much time is left, and how much was worked."""

import math
import threading
import time
from collections.abc import Callable

Clock = Callable[[], float]  # seconds left; not positive once the time is over


def endless() -> float:
    """Tells of a time that never ends."""
    return math.inf


class Compilation(threading.local):
    """Time spent on compiling the solver itself, once per installation, and on loading it, once per process.

    Two clocks stand still meanwhile: `worked_s` tells the time; `effort_s` tells the work, the
    processor time of this thread and of the engines that it waited for, so that what is settled by
    it does not depend on what else the machine does. Every thread has its own: the times are to be
    compared within one thread.
    """

    def __init__(self) -> None:
        self._spent_s = self._spent_cpu_s = 0.0
        self._helped_s = 0.0
        self._depth = 0  # functions compile those that they call
        self._since = self._since_cpu = 0.0

    def begin(self) -> None:
        if self._depth == 0:
            self._since, self._since_cpu = time.perf_counter(), time.thread_time()
        self._depth += 1

    def end(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._spent_s += time.perf_counter() - self._since
            self._spent_cpu_s += time.thread_time() - self._since_cpu

    def helped(self, seconds: float) -> None:
        """Another process has worked so long for this one, which waited."""
        self._helped_s += seconds

    def worked_s(self) -> float:
        """Seconds of a clock."""
        now = self._since if self._depth else time.perf_counter()
        return now - self._spent_s

    def effort_s(self) -> float:
        """Seconds of work."""
        now = self._since_cpu if self._depth else time.thread_time()
        return now - self._spent_cpu_s + self._helped_s


compilation = Compilation()
