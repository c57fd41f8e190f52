"""The best choice and the best bound so far, and the clock."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from autoshard import deadline
from autoshard.problem.network import Int, Problem
from autoshard.solver.clock import compilation, effort, mip_s
from autoshard.solver.evaluate import evaluate
from autoshard.solver.solution import Engine, Solution, Status
from autoshard.solver.tuning import TUNED, SolverTuning

Progress = Callable[[int | None, int | None, float], bool | None]  # best, bound, elapsed_s → whether to stop
Cutoff = Callable[[], float]  # the cost from which on, as far as is known now, a choice is of no use
NO_BOUND = -(2**62)


def no_cutoff() -> float:
    """Lets every choice be of use."""
    return math.inf


@dataclass(slots=True, kw_only=True)
class Incumbent:
    """The best choice, the best bound and the clock of one solve.

    Every engine reports here. Nothing is believed of a choice that `evaluate` has not priced.
    """

    problem: Problem
    time_limit_s: float
    rel_gap: float = 0.0
    seed: int = 0
    rounds: int | None = None
    settle_s: float = math.inf
    work_s: float = math.inf
    cutoff: Cutoff = no_cutoff
    on_progress: Progress | None = None
    tuning: SolverTuning = TUNED
    clock: Callable[[], float] = compilation.worked_s
    choice: Int | None = None
    objective: int | None = None
    bound: int = NO_BOUND
    infeasible: bool = False
    forbidden: bool = False
    stopped: bool = False  # by `on_progress`
    smallest_peak_bytes: int | None = None
    peak_bound_bytes: int | None = None
    peak_at: int | None = None
    begin: float = field(init=False)
    begin_effort: float = field(init=False)
    first_effort: float | None = field(init=False, default=None)  # when there was a choice

    def __post_init__(self) -> None:
        self.begin = self.clock()
        self.begin_effort = effort.spent_s

    def elapsed_s(self) -> float:
        return self.clock() - self.begin

    def to_settle_s(self) -> float:
        """Returns how much work, in counted seconds, is left before a larger gap will do; negative after it."""
        return self.settle_s - (effort.spent_s - self.begin_effort)

    def to_end_s(self) -> float:
        """Returns how much work is left before any gap will do, in counted seconds: all until there is a choice."""
        since = effort.spent_s if self.first_effort is None else self.first_effort
        return self.work_s - (effort.spent_s - since)

    def left_s(self) -> float:
        """Returns the seconds that are left, of the solver's limit and of the call that it is part of."""
        if self.stopped:
            return 0.0
        return deadline.left_s(self.time_limit_s - self.elapsed_s())

    def offer(self, choice: Int) -> bool:
        """Keeps `choice` if it is feasible and better; returns whether it is feasible."""
        priced = evaluate(self.problem, choice)
        if not priced.feasible or priced.objective is None:
            return False
        if self.objective is None:
            self.first_effort = effort.spent_s
        if self.objective is None or priced.objective < self.objective:
            self.choice, self.objective = choice, priced.objective
            self._report()
        return True

    def offer_peak(self, choice: Int, bound_bytes: int | None) -> None:
        """Keeps a choice of the smallest peak; for problems that no choice satisfies."""
        peak = evaluate(self.problem, choice)
        if self.smallest_peak_bytes is None or peak.peak_bytes < self.smallest_peak_bytes:
            self.choice, self.smallest_peak_bytes, self.peak_at = choice, peak.peak_bytes, peak.peak_at
        if bound_bytes is not None:
            self.peak_bound_bytes = min(max(bound_bytes, self.peak_bound_bytes or 0), self.smallest_peak_bytes)

    def raise_bound(self, bound: int) -> None:
        if bound > self.bound:
            self.bound = bound if self.objective is None else min(bound, self.objective)
            self._report()

    @property
    def beaten(self) -> bool:
        """Whether it is proven that every choice costs at least the cutoff, which may fall meanwhile."""
        return self.bound >= self.cutoff()

    def closed(self) -> bool:
        """Whether the gap is as small as was asked for.

        After `settle_s` of work, or once beaten, `settled_gaps` times as much will do; after both, or after
        `work_s` of work from the first choice on, any gap; once stopped, nothing is asked for any more.
        """
        if self.stopped:
            return True
        if self.objective is None:
            return self.infeasible
        settled = self.to_settle_s() < 0
        if self.to_end_s() < 0 or (settled and self.beaten):
            return True
        return self.gap() <= self.rel_gap * (self.tuning.stopping.settled_gaps if settled or self.beaten else 1)

    def enough(self) -> bool:
        """Whether an engine that is waited for can be stopped.

        Its work was counted when it began, so that the clock decides here, and not the work.
        """
        return self.closed() or (self.beaten and self.elapsed_s() > self.settle_s)

    @property
    def reached(self) -> bool:
        """Whether nothing more is wanted of an engine that is waited for, however much work was counted meanwhile.

        If so, `closed` says the same: no other engine is begun while this one runs.
        """
        if self.stopped or self.objective is None:
            return self.stopped
        if self.beaten and self.to_settle_s() < 0:
            return True
        return self.gap() <= self.rel_gap * (self.tuning.stopping.settled_gaps if self.beaten else 1)

    @property
    def would_do(self) -> bool:
        """Whether the incumbent will do after `settle_s` of work; of one that is beaten nothing more is asked."""
        return self.gap() <= self.rel_gap * self.tuning.stopping.settled_gaps or self.beaten

    @property
    def counts_work(self) -> bool:
        """Whether work, and not the clock, decides what is still begun."""
        return math.isfinite(self.work_s)

    def room_s(self) -> float:
        """Returns the most work, in counted seconds, that may be begun."""
        return self.to_settle_s() if self.would_do else self.to_end_s()

    def limit_s(self, cells: int, patience_s: float, spare_s: float = 0.0) -> float:
        """Returns the seconds that the MIP of so many cells may take; 0 if it is not to be begun.

        Where work decides, the MIP is begun if its estimated work fits in `room_s`, of which `spare_s` is
        kept for others while the gap is too large; the clock ends it only if it takes `mip_slack` times as
        long. Else it may take `patience_s`.
        """
        if not self.counts_work:
            return min(patience_s, self.left_s())
        if mip_s(cells) > self.room_s() - (0.0 if self.would_do else spare_s):
            return 0.0
        return min(self.tuning.stopping.mip_slack * max(mip_s(cells), 1.0), self.left_s())

    @property
    def repeatable(self) -> bool:
        """Whether a solve must take the same steps every time: those that follow from its work, not from the clock."""
        return self.rounds is not None or self.counts_work

    def gap(self) -> float:
        """(objective − bound) / objective; infinite without a choice."""
        if self.objective is None:
            return math.inf
        return (self.objective - self.bound) / max(abs(self.objective), 1)

    def _report(self) -> None:
        if self.on_progress is not None:
            bound = None if self.bound == NO_BOUND else self.bound
            self.stopped |= self.on_progress(self.objective, bound, self.elapsed_s()) is True

    def solution(self, solver: Engine) -> Solution:
        if self.infeasible:
            status = Status.INFEASIBLE
        elif self.objective is None:
            status = Status.UNKNOWN
        else:
            status = Status.OPTIMAL if self.objective == self.bound else Status.FEASIBLE
        return Solution(
            choice=np.zeros(0, dtype=np.int64) if self.choice is None else self.choice,
            objective=0 if self.objective is None else self.objective,
            bound=self.bound,
            status=status,
            wall_s=self.elapsed_s(),
            solver=solver,
            forbidden=self.forbidden,
            smallest_peak_bytes=self.smallest_peak_bytes,
            peak_bound_bytes=self.peak_bound_bytes,
            peak_at=self.peak_at,
        )
