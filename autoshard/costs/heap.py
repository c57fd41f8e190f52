"""Heap: how high XLA:TPU's heap of temporaries reaches, gaps between its buffers included.

libtpu lays buffers into one heap in the order of the schedule: each where the smallest gap is that holds it, or else
behind the last one, when it is made; until its last reader has run nothing is moved (openxla/xla has it as
`LazyBestFitHeap`). So what lives long and was made late lies high, and the gaps below it are lost. Laid out again in
this way from libtpu's own live ranges, its heap is as large (libtpu 0.0.52, `tests/compilers/test_memory_tpu.py`: 2.68
GB where no more than 1.88 live at once). Buffers begin at multiples of 16 KiB there, which is not counted.
"""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def occupied(start: Ints, end: Ints, nbytes: Ints, length: int) -> Ints:
    """The end of the highest buffer, in bytes from the heap's beginning, at each of `length` positions.

    Args:
      start: the position at which each buffer is made.
      end: the first position at which it is gone.
      nbytes: its size. Of those that are made together the largest is laid first.
      length: how many positions there are.
    """
    high = np.zeros(length, np.int64)
    offsets, stops, ends = (np.zeros(0, np.int64) for _ in range(3))  # of the buffers in the heap, by offset
    top = 0  # of the heap so far
    for i in np.lexsort((-nbytes, start)):
        first, size = int(start[i]), int(nbytes[i])
        last = min(int(end[i]), length)
        if size <= 0 or first >= last:
            continue
        if len(ends) and ends.min() <= first:
            left = ends > first
            offsets, stops, ends = offsets[left], stops[left], ends[left]
        begins = np.append(0, stops)
        gaps = np.append(offsets, top) - begins
        fitting = np.flatnonzero(gaps >= size)
        at = int(fitting[gaps[fitting].argmin()]) if len(fitting) else len(stops)
        offset = int(begins[at])
        offsets, stops = np.insert(offsets, at, offset), np.insert(stops, at, offset + size)
        ends = np.insert(ends, at, last)
        top = max(top, offset + size)
        high[first:last] = np.maximum(high[first:last], offset + size)
    return high
