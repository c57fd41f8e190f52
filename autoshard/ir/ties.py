"""Ties: the outputs that take the places of donated inputs: a step's new state, and its old one."""

from typing import Any

from autoshard.ir.trace import Traced


def ties(traced: Traced, donated: frozenset[int]) -> dict[int, int]:
    """Output → the donated input that it replaces: same aval, and its path ends in the input's.

    A donated leaf is not tied if no output has its path. Among several outputs the one with the
    shortest path is tied: `[0]['w']` before `[0].mu['w']`.
    """
    alike: dict[tuple[Any, ...], list[int]] = {}  # shape, dtype and last part of the path → outputs
    for o, (out, path) in enumerate(zip(traced.out_avals, traced.out_paths, strict=True)):
        for last in (_last(path), ""):
            alike.setdefault((out.shape, out.dtype, last), []).append(o)
    tied: dict[int, int] = {}
    for i in sorted(donated):
        aval, path = traced.in_avals[i], traced.in_paths[i]
        begin = min((path.find(c) for c in "[." if c in path), default=len(path))
        suffix = path[begin:]
        fits = [
            o
            for o in alike.get((aval.shape, aval.dtype, _last(suffix)), ())
            if o not in tied and traced.out_paths[o].endswith(suffix)
        ]
        if fits:
            tied[min(fits, key=lambda o: (len(traced.out_paths[o]), o))] = i
    return tied


def _last(path: str) -> str:
    """The last part of a path: `['w']` of `[0]['layers'][3]['w']`."""
    return path[max(path.rfind("["), path.rfind("."), 0) :]
