"""Memory profile: what a choice per decision holds over time, and its highest point."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from autoshard.problem.decisions import Decisions


def peak(decisions: Decisions, choice: NDArray[np.int64]) -> tuple[int, int, Mapping[str, int]]:
    """(bytes, time point, bytes by kind at that point): the highest point of memory."""
    end = len(decisions.graph.eqns) + 2
    change = np.zeros(end, np.int64)
    for use in decisions.usages:
        nbytes = int(use.nbytes[choice[use.node]])
        change[use.start] += nbytes
        change[min(use.end, end - 1)] -= nbytes
    held = np.cumsum(change)
    at = int(held.argmax())
    kinds: dict[str, int] = {}
    for use in decisions.usages:
        if use.start <= at < use.end:
            kinds[use.kind] = kinds.get(use.kind, 0) + int(use.nbytes[choice[use.node]])
    return int(held[at]), at, dict(sorted(kinds.items()))
