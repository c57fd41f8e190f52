"""Ranking: the plans of a search, best first, with cost, Pareto front and scaling."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import log

from autoshard.explore.candidates import Candidate
from autoshard.planner.record import PlanRecord
from autoshard.report.tables import time_text

SECONDS_PER_DAY = 86_400.0
SECONDS_PER_HOUR = 3_600.0

# The knee of a scaling curve: up to there, more chips raise the rate by at least this share
# of the speed-up if they shared the work perfectly (log-log slope; 1 is perfect).
KNEE_SLOPE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedPlan:
    """One candidate with the best plan that was found for it.

    `flops` are the contractions' FLOPs of the whole step without rematerialization,
    `device_flops` the FLOPs that one device executes, `tokens` the tokens of a step (0: unknown). `stages` is the
    mesh axis over which the layers are in stages, empty for one stage; None where the program leaves no choice.
    """

    candidate: Candidate
    record: PlanRecord
    flops: float
    device_flops: float
    peak_flops_per_s: float
    tokens: int
    parameters: int
    stages: str | None = None

    @property
    def step_s(self) -> float:
        return self.record.cost.step_s

    @property
    def devices(self) -> int:
        return self.record.mesh.size

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all devices together; 0 if a step has no tokens."""
        return self.tokens / self.step_s

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: the program's matmuls, recomputation left out, against the peak."""
        return self.flops / (self.step_s * self.devices * self.peak_flops_per_s)

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilization: matmuls that a device executes, against its peak."""
        return self.device_flops / (self.step_s * self.peak_flops_per_s)

    @property
    def order(self) -> tuple[float, float, int, str]:
        """The sort key; less is better: seconds per token (per FLOP if unknown), then exposed seconds, then axes."""
        each = self.step_s / (self.tokens or self.flops or 1.0)
        return (each, self.record.cost.exposed_s, len(self.candidate.mesh), str(self.candidate))


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A candidate without a plan, and why."""

    candidate: Candidate
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a search is: told when it begins, without an answer, and after every candidate."""

    done: int
    total: int
    answer: RankedPlan | LeftOut | None
    best: RankedPlan | None

    def __str__(self) -> str:
        best = "" if self.best is None else f"; best {time_text(self.best.step_s)}: {self.best.candidate}"
        return f"{self.done} of {self.total} candidates{best}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One number of chips on a scaling curve, with its best row's rank."""

    chips: int
    rank: int
    per_s: float  # tokens, or steps where tokens are unknown
    slope: float | None  # log-log, from the point before; 1 is perfect


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Strong scaling: the same work on more chips of a kind. The knee is a number of chips."""

    name: str
    points: tuple[Point, ...]
    knee: int


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The result of a search.

    Attributes:
      name: name of the function.
      rows: the planned candidates, the best first.
      left_out: candidates without a plan, and why.
      twins: meshes left out because no link tells them from a planned one.
      missing: candidates that an interruption left unplanned.
      budget_tokens: tokens of the whole training, or 0.
      prices: dollars per chip and hour, by chip name.
      wall_s: seconds of the search.
      notes: assumptions made for the user.
    """

    name: str
    rows: tuple[RankedPlan, ...]
    left_out: tuple[LeftOut, ...]
    twins: int
    missing: int
    budget_tokens: float
    prices: Mapping[str, float]
    wall_s: float
    notes: tuple[str, ...]

    @property
    def best(self) -> RankedPlan:
        return self.rows[0]

    def days(self, row: RankedPlan) -> float | None:
        """Days for the token budget; None without one."""
        if not self.budget_tokens or not row.tokens:
            return None
        return self.budget_tokens / row.tokens_per_s / SECONDS_PER_DAY

    def price(self, row: RankedPlan) -> float | None:
        """Dollars per chip and hour; None where none was given."""
        return self.prices.get(row.candidate.hardware.partition(":")[0])

    def dollars(self, row: RankedPlan) -> float | None:
        """Dollars for the token budget; of a step where there is no budget; None without a price."""
        price, days = self.price(row), self.days(row)
        if price is None:
            return None
        seconds = row.step_s if days is None else days * SECONDS_PER_DAY
        return price * row.candidate.chips * seconds / SECONDS_PER_HOUR

    @cached_property
    def pareto(self) -> tuple[int, ...]:
        """Ranks (from 0) of rows that no other row beats in time, memory and chips at once."""
        points = [(row.order[0], float(row.record.memory.peak_bytes), float(row.candidate.chips)) for row in self.rows]
        return tuple(
            i
            for i, p in enumerate(points)
            if not any(
                (q != p and all(a <= b for a, b in zip(q, p, strict=True))) or (q == p and j < i)
                for j, q in enumerate(points)
            )
        )

    @cached_property
    def scaling(self) -> tuple[Curve, ...]:
        """A curve per kind of chip and choice that was planned on several numbers of chips."""
        best: dict[str, dict[int, int]] = {}
        for rank, row in enumerate(self.rows):
            varied = ", ".join(f"{key}={value}" for key, value in row.candidate.choice)
            name = row.candidate.hardware.partition(":")[0] + (f", {varied}" if varied else "")
            best.setdefault(name, {}).setdefault(row.candidate.chips, rank)
        return tuple(self._curve(name, ranks) for name, ranks in sorted(best.items()) if len(ranks) > 1)

    def _curve(self, name: str, ranks: Mapping[int, int]) -> Curve:
        chips = sorted(ranks)
        rates = [self.rows[ranks[n]].tokens_per_s or 1 / self.rows[ranks[n]].step_s for n in chips]
        slopes = [log(b / a) / log(n / m) for (m, n), (a, b) in zip(pairwise(chips), pairwise(rates), strict=True)]
        held = next((i for i, slope in enumerate(slopes) if slope < KNEE_SLOPE), len(slopes))
        points = tuple(
            Point(chips=n, rank=ranks[n], per_s=rate, slope=slope)
            for n, rate, slope in zip(chips, rates, [None, *slopes], strict=True)
        )
        return Curve(name=name, points=points, knee=chips[held])
