"""Recomputation: which values of a program its backward passes find kept, as a record; the rest they repeat."""

from dataclasses import dataclass
from typing import Literal

Remat = Literal["written", "add", "free"]
"""The meaning of a program's own `jax.checkpoint`s.

`written`: they say all, nothing else is repeated. `add`: what they repeat stays so, other values may
be. `free`: they are hints; what they repeat may be kept.
"""

WRITTEN: Literal["written"] = "written"
ADD: Literal["add"] = "add"
FREE: Literal["free"] = "free"
NO_OFFLOAD: Literal["none"] = "none"
RESIDUALS: Literal["residuals"] = "residuals"
STATE: Literal["state"] = "state"
AUTO_OFFLOAD: Literal["auto"] = "auto"

Offload = Literal["none", "residuals", "state", "auto"]
"""What the host's memory may hold, beside what the program itself puts there.

`none`: nothing. `residuals`: what loops stack for backward passes. `state`: what a step's update alone reads and
writes, such as the moments of AdamW. `auto`: both. Each lies there only where that is faster than the plan without it,
or where nothing fits without.
"""


def offloads_residuals(asked: Offload) -> bool:
    """Whether the host's memory may hold what loops stack for backward passes."""
    return asked in (RESIDUALS, AUTO_OFFLOAD)


def offloads_state(asked: Offload) -> bool:
    """Whether the host's memory may hold a step's state."""
    return asked in (STATE, AUTO_OFFLOAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """The values that a program keeps for its backward passes.

    Attributes:
      remat: what became of the program's own `jax.checkpoint`s: "add" or "free".
      kept: the values by their places (`saved_values.ValueId`), as text, sorted.
      offloaded: which of them lie in the host's memory, sorted.
      group: of how many trips of a scan one carry is kept; what else a trip keeps lives as long as its group. With 1,
        every trip's is (see `ir/grouping.py`).
    """

    remat: Remat
    kept: tuple[str, ...]
    offloaded: tuple[str, ...] = ()
    group: int = 1
