"""Collective: one that a plan expects, what it moves and its price."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective that the plan expects, per device.

    `nbytes` are logical: an all-gather's result, every other collective's operand. `trips` counts its
    runs, `seconds` is the price of one run, `window` the window in which it may hide, `work_s` the
    seconds of the work around one run: transposes, or the kernel that runs because the value moves.
    """

    kind: str
    axes: tuple[str, ...]
    nbytes: int
    dtype: str
    trips: int
    seconds: float
    window: int | None
    where: str
    value: str
    work_s: float = 0.0
