"""Segments: a flat forward pass, cut where least crosses, between layers."""

from collections.abc import Sequence

from autoshard.ir.saved_values import ForwardPass

_DEEP = 3.0  # so many times as much crosses between two cuts at least: more than a norm's, less than an MLP's


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


def segments(one: ForwardPass) -> list[int]:
    """The segment of every step of a forward pass."""
    last = {at: k for k, step in enumerate(one.steps) for at in step.operands if at is not None}
    change = [0] * (len(one.steps) + 1)  # of the bytes that cross, by step
    for k, step in enumerate(one.steps):
        for at in step.results:
            if not at.stacked and last.get(at, k) > k:
                change[k + 1] += one.value[at].aval.nbytes
                change[last[at] + 1] -= one.value[at].aval.nbytes
    crossing: list[int] = []
    for delta in change[: len(one.steps)]:
        crossing.append(delta + (crossing[-1] if crossing else 0))
    narrow = set(valleys(crossing))
    found: list[int] = []
    for k in range(len(one.steps)):
        found.append((found[-1] if found else 0) + (k in narrow))
    return found
