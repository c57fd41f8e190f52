"""Scheduler: the order in which candidates are tried, and the choices that they pass on.

A candidate's turn comes once every coarser mesh on its devices has been tried. Choices on a
coarser mesh are choices on the finer one, too: its search begins with them.
"""

import threading
from collections.abc import Iterable
from math import inf

from autoshard.explore.candidates import Candidate
from autoshard.explore.ranking import RankedPlan
from autoshard.explore.trial import Tried
from autoshard.problem.warm_start import PortableChoice, refined


class Agenda:
    """The candidates left to try, shared by the threads that plan them.

    Attributes:
      count: of all candidates, tried or not.
      chosen: planned candidate → its choice.
    """

    def __init__(self, candidates: Iterable[Candidate]) -> None:
        self._left = list(candidates)
        self.count = len(self._left)
        self._coarser = _coarser(self._left)
        self._pending = set(self._left)  # left, or being tried
        self.chosen: dict[Candidate, PortableChoice] = {}
        self._least_s: dict[object, float] = {}  # step by contest
        self._changed = threading.Condition()

    def take(self) -> tuple[Candidate, tuple[PortableChoice, ...]] | None:
        """The next candidate and the choices on coarser meshes; waits for its turn. None once nothing is left."""
        with self._changed:
            while self._left:
                if (ready := self.ready()) is not None:
                    return ready
                self._changed.wait()
            return None

    def ready(self) -> tuple[Candidate, tuple[PortableChoice, ...]] | None:
        """The same without waiting: None if it is no candidate's turn."""
        with self._changed:
            turns = (c for c in self._left if not self._pending.intersection(self._coarser[c]))
            if (candidate := next(turns, None)) is None:
                return None
            self._left.remove(candidate)
            return candidate, tuple(self.chosen[c] for c in self._coarser[candidate] if c in self.chosen)

    def learn(self, candidate: Candidate, tried: Tried) -> None:
        """Records the outcome of a candidate."""
        with self._changed:
            self._pending.discard(candidate)
            if tried.chosen is not None:
                self.chosen[candidate] = tried.chosen
            if isinstance(tried.answer, RankedPlan):
                self._least_s[candidate.contest] = min(tried.answer.step_s, self.least_s(candidate))
            self._changed.notify_all()

    def least_s(self, candidate: Candidate) -> float:
        """The least step so far in a candidate's contest."""
        return self._least_s.get(candidate.contest, inf)

    def drop(self) -> None:
        """Leaves the rest untried."""
        with self._changed:
            self._left.clear()
            self._changed.notify_all()


def _coarser(candidates: Iterable[Candidate]) -> dict[Candidate, list[Candidate]]:
    """Candidate → those on coarser meshes of the same devices, for the same program."""
    at: dict[object, list[Candidate]] = {}
    for candidate in candidates:
        at.setdefault((candidate.hardware, candidate.choice), []).append(candidate)
    sizes = {candidate: tuple(candidate.shape.values()) for here in at.values() for candidate in here}
    return {
        fine: [c for c in here if c is not fine and refined(sizes[c], sizes[fine]) is not None]
        for here in at.values()
        for fine in here
    }
