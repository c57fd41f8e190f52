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
AUTO_OFFLOAD: Literal["auto"] = "auto"

Offload = Literal["none", "auto"]
"""Whether the host's memory may hold what a program keeps for its backward passes.

`none`: only what the program itself puts there. `auto`: what loops stack may lie there, where that is faster than to
keep it in the device's memory or to repeat it.
"""


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
