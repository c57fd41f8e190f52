"""Kinds of findings: the table of what the doctor looks for."""

from collections.abc import Callable, Iterator

from autoshard.diagnosis import copies, layouts, memory
from autoshard.diagnosis.collectives import PATTERNS, of_collectives
from autoshard.diagnosis.evidence import Evidence
from autoshard.diagnosis.finding import Finding

LOOKS: tuple[Callable[[Evidence], Iterator[Finding]], ...] = (
    memory.out_of_memory,
    of_collectives,
    layouts.done_alike,
    layouts.whole_states,
    copies.reordered,
    memory.kept_gathers,
)

# The names that findings have, for scripts.
KINDS: tuple[str, ...] = (
    "out of memory",
    *(pattern.kind for pattern in PATTERNS),
    *(one.kind for one in layouts.ALIKE),
    "optimizer state whole",
    "copied to another order",
    "gathered and kept",
    "flag",
)
