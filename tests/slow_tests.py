"""Slow tests: those that are marked `slow` because of how long they were measured to take.

    pytest -n 2 -m "not slow" --durations=0 -q > durations.log
    python -m tests.slow_tests durations.log

adds to `tests/slow_tests.txt`, one test per line, what takes longest: of a function with parameters the cases over
`OF_SEVERAL` seconds, but for the shortest of all if it takes less than `LONGEST_LEFT`; of others those over `ALONE`
seconds. The first list had 3,284 of the suite's 5,799 seconds.
"""

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

LISTED = Path(__file__).with_suffix(".txt")
OF_SEVERAL, ALONE = 4.0, 8.0
LONGEST_LEFT = 10.0  # seconds of the one case that is left of a function
_LINE = re.compile(r"([\d.]+)s (?:call|setup|teardown)\s+(tests/.+)")


def listed() -> frozenset[str]:
    """The tests that are marked, as pytest names them."""
    return frozenset(LISTED.read_text("utf-8").splitlines())


def seconds(lines: Iterable[str]) -> Mapping[str, float]:
    """Test → seconds, from what `pytest --durations=0` prints."""
    found = defaultdict[str, float](float)
    for match in filter(None, map(_LINE.match, lines)):
        found[match[2].strip()] += float(match[1])
    return found


def slow(taken: Mapping[str, float]) -> Iterator[str]:
    """The tests that take longest."""
    families = defaultdict[str, list[str]](list)
    for name in sorted(taken, key=lambda name: taken[name]):
        families[name.partition("[")[0]].append(name)
    for shortest, *more in families.values():
        if taken[shortest] >= (LONGEST_LEFT if more else ALONE):
            yield shortest
        yield from (name for name in more if taken[name] >= OF_SEVERAL)


if __name__ == "__main__":
    measured = seconds(Path(sys.argv[1]).read_text("utf-8").splitlines())
    LISTED.write_text("".join(f"{name}\n" for name in sorted(listed() | set(slow(measured)))), "utf-8")
