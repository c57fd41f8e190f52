"""Segments: a flat forward pass, cut where least crosses, between layers."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from autoshard.ir.saved_values import ForwardPass

_DEEP = 3.0  # so many times as much crosses between two cuts at least: more than a norm's, less than an MLP's


class Life(NamedTuple):
    """A value of a pass: the step that makes it, the last step that reads it, and its bytes."""

    made: int
    last: int
    nbytes: int


def valleys(crossing: Sequence[int]) -> list[int]:
    """The places that less crosses than what lies on both sides of them, by a factor of `_DEEP` at least."""
    found: list[int] = []
    highest, lowest = 0, -1  # since the last cut: the most that crossed, and the narrowest place behind it
    for k, nbytes in enumerate(crossing):
        if lowest < 0 or crossing[lowest] > nbytes:
            lowest = k
        if 0 < _DEEP * crossing[lowest] <= min(highest, nbytes):
            found.append(lowest)
            highest, lowest = nbytes, k
        elif nbytes > highest:
            highest, lowest = nbytes, k
    return found


def cut(steps: int, lives: Iterable[Life]) -> list[int]:
    """The segment of every step of a pass; a value crosses whatever lies between its maker and its last reader."""
    change = [0] * (steps + 1)  # of the bytes that cross, by step
    for made, last, nbytes in lives:
        change[made + 1] += nbytes
        change[last + 1] -= nbytes
    narrow = set(valleys(list(accumulate(change[:steps]))))
    return list(accumulate(int(k in narrow) for k in range(steps)))


def segments(one: ForwardPass) -> list[int]:
    """The segment of every step of a forward pass. Values that a loop stacks are held anyway, and cross nothing."""
    last = {at: k for k, step in enumerate(one.steps) for at in step.operands if at is not None}
    return cut(
        len(one.steps),
        (
            Life(k, max(last.get(at, k), k), one.value[at].aval.nbytes)
            for k, step in enumerate(one.steps)
            for at in step.results
            if not at.stacked
        ),
    )
