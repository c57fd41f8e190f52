"""Ports: where a value leaves or enters a decision, and the memory that a decision holds, per choice."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autoshard.costs.strategies import Codes

KEPT = "kept for backward"  # of the forward pass, alive when a backward one runs
REPEATED = "repeated in backward"


@dataclass(frozen=True, slots=True, eq=False)
class Port:
    """Where a value leaves or enters a decision: its code under each choice.

    `off`: under which choices it is not made or taken; None: under none. `loose`: it is taken as it is.
    """

    node: int
    codes: Codes
    off: NDArray[np.bool_] | None = None
    loose: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Usage:
    """Bytes per device and choice of one decision, alive over [start, end).

    `parts`: of some of these bytes, what they are there for (`KEPT`, `REPEATED`).
    """

    node: int
    start: int
    end: int
    nbytes: NDArray[np.int64]
    kind: str
    parts: Mapping[str, NDArray[np.int64]] = field(default_factory=dict[str, NDArray[np.int64]])
