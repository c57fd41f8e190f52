"""Explanation: the data of an explained decision: its alternatives, and where it turns."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Change:
    """A decision elsewhere that comes out differently, and how many share it."""

    what: str
    before: str
    after: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """The best plan without the choice: its layout, step, certificate and further changes.

    `collectives` are (kind, axes, bytes more, seconds more) per device and step.
    """

    layout: str
    step_s: float
    bound_s: float
    peak_bytes: int
    changes: tuple[Change, ...]
    collectives: tuple[tuple[str, tuple[str, ...], int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One decision: its values, their layout, and the alternatives.

    `others` are further layouts with the step's seconds if nothing else changes.
    """

    what: tuple[str, ...]
    kind: str
    value: str
    where: str
    layout: str
    choices: int
    step_s: float
    runner_up: RunnerUp | None
    others: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall:
    """A value of the forward pass that the backward one reads: kept, or made again.

    Attributes:
      what: its source line.
      value: its type, of one trip.
      trips: how many of them are in memory at once, if it is kept.
      kept: whether the plan keeps it.
      nbytes: what keeping it takes per device; None if that is not told apart.
      more_s: what a step takes longer if it is repeated instead; None if nothing fits then, or it is repeated.
      kept_from_bytes: the memory from which it is kept; None if it is kept, or repeated however much there is.
      on_host: whether the host's memory holds it; `nbytes` is what the device's would.
    """

    what: str
    value: str
    trips: int
    kept: bool
    nbytes: int | None
    more_s: float | None
    kept_from_bytes: int | None
    on_host: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocked:
    """A dimension that a mesh axis does not divide, and the ways out."""

    path: str
    dim: int
    size: int
    axis: str
    ways: int
    padded: int  # the next size that divides
    divides: int  # the largest part of the axis that does


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """Where a decision turns: at `at` it becomes `layout`; None if nothing turns it within the `range` tried.

    It ends where there is no such program, or none whose plan is proven well enough.
    """

    number: str
    now: float
    at: float | None
    layout: str
    range: tuple[float, float]
