"""Serving result: the planned prefill and decode of one batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from autoshard.explore.candidates import Candidate
from autoshard.planner.record import PlanRecord

Way = Literal["together", "moved", "apart"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One batch served in one way on one mesh.

    Attributes:
      candidate: hardware, mesh and batch.
      way: "together" in one layout of the weights; "moved", in two, the weights moving between
        them; "apart" on devices of their own.
      devices: of one set: prefill and decode together, or decode alone.
      prefill_s: seconds of one prompt.
      token_s: a decoding step: seconds per token of one sequence.
      ttft_s: time to the first token.
      insert_s: bringing one prompt's cache into the layout in which it is decoded.
      move_s: bringing all weights from one phase's layout into the other's.
      send_s: sending one prompt's cache to other devices.
      prefill_per_decode: sets of prefill that keep one set of decode busy; 0 unless apart.
      tokens_per_s_per_device: decoded, all devices counted.
      bound: the largest part of a decoding step: "weights", "cache", "compute" or "links".
      crossover_batch: the batch from which weights multiply for longer than they stream.
      cache_layout: layout of the largest leaf that decoding keeps.
      cache_bytes: bytes that decoding keeps on one device.
      dollars_per_million: per million decoded tokens; None without a price.
      prefill: its plan.
      decode: its plan.
    """

    candidate: Candidate
    way: Way
    devices: int
    prefill_s: float
    token_s: float
    ttft_s: float
    insert_s: float
    move_s: float
    send_s: float
    prefill_per_decode: float
    tokens_per_s_per_device: float
    bound: str
    crossover_batch: float
    cache_layout: str
    cache_bytes: int
    dollars_per_million: float | None
    prefill: PlanRecord
    decode: PlanRecord

    @property
    def batch(self) -> int:
        return int(dict(self.candidate.choice)["batch"])

    @property
    def peak_bytes(self) -> int:
        """Per device, of the fuller phase."""
        return max(record.memory.peak_bytes for record in (self.prefill, self.decode))


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted:
    """A draft model proposes `length` tokens, the target reads them at once (Leviathan et al. 2023, arXiv:2211.17192).

    `accepted` expected tokens per round, `draft_s` a step of the draft, `read_s` the target's reading.
    """

    length: int
    accepted: float
    draft_s: float
    read_s: float
    token_s: float
    speedup: float


def front(found: Sequence[Served]) -> tuple[Served, ...]:
    """Those that no other beats in latency and in tokens per second and device at once."""
    return tuple(
        s
        for s in found
        if not any(
            o.token_s <= s.token_s
            and o.tokens_per_s_per_device >= s.tokens_per_s_per_device
            and (o.token_s < s.token_s or o.tokens_per_s_per_device > s.tokens_per_s_per_device)
            for o in found
        )
    )
