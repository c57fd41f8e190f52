"""Amounts: bytes, elements, seconds and counts that a caller gives: never negative, never unknown."""

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cost_models.errors import CostModelError


def amounts(given: ArrayLike, what: str) -> NDArray[np.float64]:
    """Amounts as floats.

    Raises:
        CostModelError: One is negative, not a number, or infinite.
    """
    try:
        found = np.asarray(given, float)
    except (TypeError, ValueError, OverflowError) as error:
        raise CostModelError(f"{what} must be numbers, not {str(given)[:80]!r}") from error
    least, most = (found.item(),) * 2 if found.ndim == 0 else (found.min(initial=0.0), found.max(initial=0.0))
    if not (least >= 0 and most < math.inf):
        wrong = found[~((found >= 0) & (found < np.inf))].ravel()[0]
        raise CostModelError(f"{what} cannot be {wrong}: they are 0 or more, and finite")
    return found


def count(given: Any, what: str, *, least: int = 1, error: type[CostModelError] = CostModelError) -> int:
    """A whole number.

    Raises:
        CostModelError: It is none, or less than `least`; or another `error` of the family.
    """
    whole = isinstance(given, int | np.integer) or (isinstance(given, float) and given.is_integer())
    if isinstance(given, bool) or not whole or given < least:
        raise error(f"{what} cannot be {str(given)[:80]}: it is a whole number from {least} on")
    return int(given)


def positive(given: Any, what: str) -> float:
    """A number above 0.

    Raises:
        CostModelError: It is none, or not finite.
    """
    try:
        found = float(given)
    except (TypeError, ValueError, OverflowError) as error:
        raise CostModelError(f"{what} must be a number, not {str(given)[:80]!r}") from error
    if not (found > 0 and math.isfinite(found)):
        raise CostModelError(f"{what} cannot be {found}: it is more than 0, and finite")
    return found
