"""Replica groups: XLA's notations as device positions, and as the mesh axes that they span.

Ids in the text of a program are positions in `mesh.devices.flat`, never device ids.
"""

import re
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autoshard.errors import HloError
from autoshard.ir.mesh import MeshAxes

Groups = tuple[tuple[int, ...], ...]


def axes_of_groups(groups: Groups, mesh: MeshAxes) -> tuple[str, ...] | None:
    """The mesh axes whose product each group is, or None where groups are no such thing.

    XLA may split an axis: the 2-way major half of `model=4` is `model:(1)2`, as Shardy writes it.
    """
    return _axes(groups, mesh.names, mesh.sizes)


@lru_cache(maxsize=4096)
def parse_groups(text: str, devices: int) -> Groups:
    """Groups of device positions from any of XLA's notations.

    `{{0,1},{2,3}}`, `{}` (all devices), `[2,4]<=[8]`, `[4,2]<=[2,4]T(1,0)`, and
    `mesh['a'=2,'b'=4], device_ids=([2,4]T(1,0)) {'b'}` with sub-axes `'b':(1)2`.

    Raises:
      HloError: none of these, or not over `devices` devices.
    """
    if text in ("{}", "{{}}"):
        return (tuple(range(devices)),)
    if text.startswith("{"):
        return tuple(
            tuple(int(x) for x in group.split(",") if x.strip()) for group in re.findall(r"\{([^{}]*)\}", text)
        )
    if text.startswith("mesh["):
        return _mesh_groups(text)
    if parsed := re.fullmatch(r"\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", text):
        shape = _integers(parsed[1])
        return _as_groups(iota(parsed[2]).reshape(shape[0], -1))
    raise HloError(f"cannot read the replica groups {text!r}")


@lru_cache(maxsize=4096)
def parse_pairs(text: str) -> tuple[tuple[int, int], ...]:
    """`{{0,1},{1,0}}` as pairs of source and target positions."""
    return tuple((int(source), int(target)) for source, target in re.findall(r"\{(\d+),(\d+)\}", text))


def axes_of_pairs(pairs: Groups, mesh: MeshAxes) -> tuple[str, ...]:
    """The mesh axes along which any pair's source and target differ."""
    if not pairs:
        return ()
    ends = np.array(np.unravel_index(np.array(pairs), mesh.sizes))
    moved = (ends[:, :, 0] != ends[:, :, 1]).any(axis=1)
    return tuple(name for name, moves in zip(mesh.names, moved, strict=True) if moves)


def cycles(pairs: tuple[tuple[int, int], ...]) -> Groups:
    """The cycles of a permutation."""
    target = dict(pairs)
    found: list[tuple[int, ...]] = []
    while target:
        start = next(iter(target))
        cycle = [start]
        at = target.pop(start)
        while at in target:
            cycle.append(at)
            at = target.pop(at)
        found.append(tuple(cycle))
    return tuple(found)


def _mesh_groups(text: str) -> Groups:
    """Groups over named axes of a mesh of XLA's own (its names are not the user's)."""
    parsed = re.fullmatch(r"mesh\[([^\]]*)\](?:, device_ids=\(([^{]*)\))? \{([^}]*)\}", text)
    if parsed is None:
        raise HloError(f"cannot read the replica groups {text!r}")
    names, sizes = zip(*re.findall(r"'([^']*)'=(\d+)", parsed[1]), strict=True)
    shape = [int(size) for size in sizes]
    ids = np.arange(int(np.prod(shape))) if parsed[2] is None else _device_ids(parsed[2])
    # An axis that is split for a sub-axis `'a':(before)size` becomes before × size × after.
    asked: dict[str, str] = dict(re.findall(r"'([^']*)'(:\(\d+\)\d+)?", parsed[3]))
    split: list[int] = []
    inner: list[int] = []
    for name, size in zip(names, shape, strict=True):
        if name not in asked:
            split.append(size)
        elif not asked[name]:
            inner.append(len(split))
            split.append(size)
        else:
            before, taken = _integers(asked[name].replace(":(", "").replace(")", ","))
            inner.append(len(split) + 1)
            split += [before, taken, size // before // taken]
    grid = np.moveaxis(ids.reshape(split), inner, range(-len(inner), 0))
    return _as_groups(grid.reshape(-1, int(np.prod([split[i] for i in inner]))))


def _device_ids(text: str) -> NDArray[np.int64]:
    return iota(text) if text.startswith("[") else np.array(_integers(text))


def iota(text: str) -> NDArray[np.int64]:
    """`[8]` or `[2,4]T(1,0)`: consecutive ids of that shape, transposed, flat."""
    parsed = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if parsed is None:
        raise HloError(f"cannot read the device ids {text!r}")
    shape = _integers(parsed[1])
    ids = np.arange(int(np.prod(shape))).reshape(shape)
    return (ids.transpose(_integers(parsed[2])) if parsed[2] else ids).reshape(-1)


def _integers(text: str) -> list[int]:
    return [int(x) for x in text.split(",")]


def _as_groups(array: NDArray[np.int64]) -> Groups:
    return tuple(tuple(int(x) for x in row) for row in array)


@lru_cache(maxsize=1024)
def _axes(groups: Groups, names: tuple[str, ...], sizes: tuple[int, ...]) -> tuple[str, ...] | None:
    """Axes, and parts of axes, whose product every group is."""
    parts = [(name, before, prime) for name, size in zip(names, sizes, strict=True) for before, prime in _factors(size)]
    digits = [prime for _, _, prime in parts]
    varying: set[tuple[int, ...]] = set()
    for group in groups:
        coordinates = np.array(np.unravel_index(np.array(sorted(group)), digits or (1,)))
        moved = tuple(int(i) for i in np.flatnonzero((coordinates != coordinates[:, :1]).any(axis=1)))
        if len(set(group)) != len(group) or len(group) != int(np.prod([digits[i] for i in moved])):
            return None
        varying.add(moved)
    if len(varying) != 1:
        return None
    runs: list[tuple[str, int, int]] = []
    for name, before, prime in (parts[i] for i in varying.pop()):
        if runs and runs[-1][0] == name and runs[-1][1] * runs[-1][2] == before:
            runs[-1] = (name, runs[-1][1], runs[-1][2] * prime)
        else:
            runs.append((name, before, prime))
    whole = dict(zip(names, sizes, strict=True))
    return tuple(name if size == whole[name] else f"{name}:({before}){size}" for name, before, size in runs)


def _factors(size: int) -> list[tuple[int, int]]:
    """Prime factors of an axis, major to minor, each with the product of those before it."""
    found: list[tuple[int, int]] = []
    before, prime = 1, 2
    while before < size:
        if size // before % prime == 0:
            found.append((before, prime))
            before *= prime
        else:
            prime += 1
    return found
