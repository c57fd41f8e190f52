"""Clocks: how every step learns how much time is left."""

import math
import time
from collections.abc import Callable

Clock = Callable[[], float]  # seconds left; not positive once the time is over


def endless() -> float:
    """Tells of a time that never ends."""
    return math.inf


class Compilation:
    """Time spent on compiling the solver itself, which happens once per installation."""

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
        """Seconds of a clock that stands still meanwhile."""
        now = self._since if self._depth else time.perf_counter()
        return now - self._spent_s


compilation = Compilation()
