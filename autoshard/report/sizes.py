"""Sizes: numbers of bytes as people write them."""

import re
from math import nan
from numbers import Real

from autoshard.errors import SpecError

LARGEST = 2**63 - 1

_UNITS = (
    {"": 1, "B": 1}
    | {f"{p}B": 10 ** (3 * i) for i, p in enumerate("kMGT", 1)}
    | {f"{p}iB": 2 ** (10 * i) for i, p in enumerate("KMGT", 1)}
)


def byte_count(written: object, what: str) -> int:
    """`64GB`, `60GiB`, `1.5e9`, or a number → bytes.

    Raises:
      SpecError: the text is no number of bytes; the message begins with `what`.
    """
    count = nan
    if isinstance(written, str):
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?(?:e[0-9]+)?)\s*(\w*)", written.strip())
        unit = next((u for u in _UNITS if match is not None and u.lower() == match[2].lower()), None)
        if match is not None and unit is not None:
            count = float(match[1]) * _UNITS[unit]
    elif not isinstance(written, bool) and isinstance(written, Real):
        count = written if isinstance(written, int) else float(written)
    if not 0 <= count <= LARGEST:  # also refuses NaN
        raise SpecError(f"cannot read {what}: write a number of bytes, as in 64GB or 60GiB")
    return int(written) if isinstance(written, int) else int(count)
