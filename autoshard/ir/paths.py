"""Paths: dotted names of pytree leaves, and the patterns that match them."""

import re
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
