"""Clocks: how every step learns how much time is left."""

import math
from collections.abc import Callable

Clock = Callable[[], float]  # seconds left; not positive once the time is over


def endless() -> float:
    """Tells of a time that never ends."""
    return math.inf
