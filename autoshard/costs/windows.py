"""Windows: what hides behind what, as data. `overlap` makes them of a program, as a compiler schedules it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autoshard.costs.buckets import Bucket, Filled

EARLY, LATE = 0, 1
OUTSIDE = 2  # windows outside of loops; the body of loop k is window OUTSIDE + k − 1
# The most that hides of communication that contractions wait for: outside of loops (fitted to programs without loops,
# as `overlap.BUSY`), and in a divided trip (fitted to trips, as `overlap.TOGETHER`).
BESIDE = 0.75
BESIDE_WITHIN = 0.6

Shares = tuple[tuple[int, float], ...]  # windows, and how much counts in each


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapWindows:
    """The window in which each value's resharding can hide (or None), and in which each equation's compute counts.

    Attributes:
      of_value: value → window, or None if its resharding cannot hide.
      of_equation: equation → the window in which its compute counts.
      loops: window → its loop; 0 outside of loops.
      whole: window → the window that it is a part of, or itself.
      hides: window → windows in which its hideable communication counts, with shares.
      covers: window → windows in which its compute counts, with shares.
      buckets: window → bytes up to which the compiler merges its collectives; 0: never.
      urgent: values on the way to a contraction that is not late.
      beside: values that hide beside late and idle work; they hide only on the way to an urgent value,
        and are not merged.
      idle: equations other than contractions that hide communication: those that run at any time before
        or after the others of their trip, or before its contractions, and a program's updates.
      merged: value → the bytes up to which its collective is merged, where its window does not say it.
      filled: whole window → the bytes that there are to merge, where that is known.
    """

    of_value: tuple[int | None, ...]
    of_equation: tuple[int, ...]
    loops: tuple[int, ...]
    whole: tuple[int, ...]
    hides: tuple[Shares, ...]
    covers: tuple[Shares, ...]
    buckets: tuple[int, ...]
    urgent: frozenset[int]
    beside: frozenset[int]
    idle: frozenset[int]
    merged: Mapping[int, int] = field(default_factory=dict[int, int])
    filled: Mapping[int, Filled] = field(default_factory=dict[int, Filled])

    @property
    def count(self) -> int:
        return len(self.whole)

    def share(self, value: int) -> float:
        """The share of a value's communication that hides where there is enough to hide it behind."""
        window = self.of_value[value]
        if window is None or value not in self.beside:
            return 1.0
        return BESIDE_WITHIN if self.loops[window] else BESIDE

    def bucket(self, value: int) -> Bucket:
        """The bytes up to which a value's collective is merged with others; 0 if it is not."""
        window = self.of_value[value]
        if value in self.merged:
            return self.merged[value]
        if window is None or value in self.beside:
            return 0
        most = self.buckets[window]
        return self.filled.get(self.whole[window], most) if most else 0

    def with_window(self, *, loop: int, whole: int, hides: Shares, covers: Shares, bucket: int) -> "OverlapWindows":
        """These and one more, whose number is `count`."""
        return replace(
            self,
            loops=(*self.loops, loop),
            whole=(*self.whole, whole),
            hides=(*self.hides, hides),
            covers=(*self.covers, covers),
            buckets=(*self.buckets, bucket),
        )
