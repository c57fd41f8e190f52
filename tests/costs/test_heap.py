"""The heap of libtpu: buffers laid out in the order of the schedule, gaps included."""

from operator import itemgetter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from autoshard.costs.heap import occupied

Buffer = tuple[int, int, int]  # start, end, bytes


def heights(*buffers: Buffer) -> list[int]:
    start, end, nbytes = np.array(buffers, np.int64).reshape(-1, 3).T
    return occupied(start, end, nbytes, 1 + max(stop for _, stop, _ in buffers)).tolist()


def live(buffers: list[Buffer], t: int) -> int:
    return sum(nbytes for start, stop, nbytes in buffers if start <= t < stop)


def laid_out(buffers: list[Buffer]) -> list[tuple[int, Buffer]]:
    """The same by the letter: each into the smallest free stretch that holds it, the first of equal ones."""
    placed: list[tuple[int, Buffer]] = []
    reached = 0
    for buffer in sorted(buffers, key=lambda b: (b[0], -b[2])):
        taken = sorted(((at, at + b[2]) for at, b in placed if b[1] > buffer[0]), key=itemgetter(0))
        free, begin = list[tuple[int, int]](), 0
        for first, last in [*taken, (reached, reached)]:
            if first - begin >= buffer[2]:
                free.append((first - begin, begin))
            begin = max(begin, last)
        at = min(free)[1] if free else max((last for _, last in taken), default=0)
        placed.append((at, buffer))
        reached = max(reached, at + buffer[2])
    return placed


def test_what_lives_on_above_a_gap_keeps_the_heap_high() -> None:
    """The second buffer outlives the first, into whose place the third, which is larger, does not fit."""
    assert heights((0, 2, 10), (1, 5, 4), (3, 4, 11)) == [10, 14, 14, 25, 14, 0]
    assert heights((0, 2, 10), (1, 5, 4), (3, 4, 9)) == [10, 14, 14, 14, 14, 0]


def test_the_smallest_gap_that_holds_a_buffer_takes_it() -> None:
    """Gaps of 10 at the bottom and of 4 in the middle: 4 bytes go into the middle, and 10 still fit below."""
    before = (0, 2, 10), (0, 9, 5), (0, 2, 4), (0, 9, 3)
    assert max(heights(*before, (3, 9, 4), (4, 9, 10))) == 22


def test_the_end_of_the_heap_is_a_gap_of_what_was_there() -> None:
    """What was the last buffer is gone: what is made then begins in its place, and may reach further."""
    assert heights((0, 9, 8), (0, 2, 5), (3, 9, 5))[3] == 13
    assert heights((0, 9, 8), (0, 2, 5), (3, 9, 6))[3] == 14


def test_nothing_is_laid_out_of_no_buffers_or_empty_ones() -> None:
    nothing = np.zeros(0, np.int64)
    assert occupied(nothing, nothing, nothing, 3).tolist() == [0, 0, 0]
    assert heights((0, 3, 0), (2, 2, 7)) == [0, 0, 0, 0]


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9), st.integers(1, 20)), min_size=1, max_size=24))
def test_buffers_are_laid_out_by_the_letter(drawn: list[tuple[int, int, int]]) -> None:
    buffers = [(start, start + steps, nbytes) for start, steps, nbytes in drawn]
    placed, found = laid_out(buffers), heights(*buffers)
    for t, high in enumerate(found):
        there = [(at, b) for at, b in placed if b[0] <= t < b[1]]
        assert high == max((at + b[2] for at, b in there), default=0)
        assert high >= live(buffers, t)
    for i, (at, (start, stop, nbytes)) in enumerate(placed):
        for other, (first, last, size) in placed[:i]:
            assert stop <= first or last <= start or at + nbytes <= other or other + size <= at
