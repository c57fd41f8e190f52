"""Garbage: Python's search for cycles to free is rare while a program is traced, priced and probed.

Planning makes hundreds of thousands of objects and drops few in cycles, and every full search visits all that jax has
imported. With Python's own thresholds that is a tenth of planning or more.
"""

import gc
import threading
from collections.abc import Generator
from contextlib import contextmanager

RARE = (100_000, 20, 100)  # as in `gc.set_threshold`: objects that are new before the young are searched, and so on


class _Thresholds:
    """The process's thresholds, which the first of several contexts sets and the last one resets."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._contexts = 0
        self._before = gc.get_threshold()

    def enter(self) -> None:
        """Sets the thresholds, unless a caller's are rarer, or never."""
        with self._lock:
            self._contexts += 1
            if self._contexts == 1:
                self._before = gc.get_threshold()
                if 0 < self._before[0] < RARE[0]:
                    gc.set_threshold(*RARE)

    def leave(self) -> None:
        """Resets them after the last context."""
        with self._lock:
            self._contexts -= 1
            if not self._contexts:
                gc.set_threshold(*self._before)


_thresholds = _Thresholds()


@contextmanager
def collected_rarely() -> Generator[None]:
    """A context in which garbage is collected rarely, or a decorator; the caller's thresholds come back at its end."""
    _thresholds.enter()
    try:
        yield
    finally:
        _thresholds.leave()
