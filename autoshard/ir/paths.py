"""Paths: dotted names of pytree leaves, and the patterns that match them."""

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase


def dotted(path: str) -> str:
    """`state.params['layers'][0]['wq']` → `state.params.layers.0.wq`."""
    return re.sub(r"\[['\"]?([^\]'\"]*)['\"]?\]", r".\1", path).strip(".")


def matches(pattern: str, path: str) -> bool:
    """Whether a path, written either way, matches: `*` within a segment, `**` any number of segments."""
    segments = dotted(path).split(".")
    ends = {0}  # how many segments the pattern so far may stand for
    for part in dotted(pattern).split("."):
        if part == "**":
            ends = set(range(min(ends), len(segments) + 1)) if ends else set()
        else:
            ends = {end + 1 for end in ends if end < len(segments) and fnmatchcase(segments[end], part)}
    return len(segments) in ends


def indexed(segment: str) -> tuple[str, int | None]:
    """A segment's name without its index: `("", 3)` of a list's `3`, `("Block_", 3)` of Linen's `Block_3`; or None."""
    found = re.fullmatch(r"(|.*_)([0-9]+)", segment)
    return (segment, None) if found is None else (found[1], int(found[2]))


def pattern_of(path: Sequence[str]) -> tuple[str, ...]:
    """The segments of a path with `*` for every index: equal for the same leaf of equal layers."""
    return tuple(name if index is None else f"{name}*" for name, index in map(indexed, path))


def joined(paths: Sequence[Sequence[str]]) -> str:
    """One path for those that differ in indices alone: `layers.0…11.wq`, `Block_0…11.Dense_0.kernel`."""
    told: list[str] = []
    for segments in zip(*paths, strict=True):
        name, _ = indexed(segments[0])
        indices = {index for _, index in map(indexed, segments) if index is not None}
        told.append(segments[0] if len(set(segments)) == 1 else name + ranges(indices))
    return ".".join(told)


def ranges(numbers: Iterable[int]) -> str:
    """`0…3,7` for 0, 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for n in sorted(set(numbers)):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a},{b}" if b == a + 1 else f"{a}…{b}" for a, b in runs)
