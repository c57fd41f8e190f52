"""Shardings of HLO instructions as layouts over mesh axes: `{devices=[2,1,4]<=[8] last_tile_dim_replicate}`.

Since JAX 0.12 they name axes: `{mesh['data'=2,'model'=4], [{'data'}, {}]}`. XLA writes them between Shardy's
propagation and partitioning (`…after_shardy-xla…`); the scheduled text of a program no longer has them. See
`HloSharding::ToString` in openxla/xla.
"""

import re
from functools import lru_cache

import numpy as np

from autoshard.backends.hlo.groups import axes_of_groups, iota, parse_groups
from autoshard.backends.hlo.text import Instruction
from autoshard.errors import HloError
from autoshard.ir.layout import Layout
from autoshard.ir.mesh import MeshAxes

_ATTRIBUTE = re.compile(r"\bsharding=\{")
_DEVICES = re.compile(r"devices=\[([\d,]+)\](?:<=(\[[\d,]+\](?:T\([\d,]+\))?)|([\d,]+))(.*)")
_NAMED = re.compile(r"(mesh\[[^\]]*\](?:, device_ids=\([^{]*\))?), \[(.*?)\]")


def shardings_of(instruction: Instruction) -> tuple[str, ...]:
    """The texts of an instruction's shardings, one per array of its result; empty where it has none."""
    found = _ATTRIBUTE.search(instruction.attributes)
    if found is None:
        return ()
    text = _take_balanced(instruction.attributes, found.end() - 1)
    inner = text[1:-1]
    return tuple(_take_balanced(inner, i) for i in _find_open(inner)) if inner.startswith("{") else (text,)


@lru_cache(maxsize=4096)
def layout_of(text: str, ndim: int, mesh: MeshAxes) -> Layout | None:
    """The layout that a sharding stands for; None where its parts are no mesh axes, or on one device.

    Raises:
      HloError: the text is no sharding.
    """
    inner = text[1:-1].partition(" metadata=")[0]
    inner = inner.removeprefix("mesh[], ")
    named = _NAMED.match(inner)
    if named is not None:
        return _of_axes(named[1], named[2], mesh)
    if inner.startswith(("replicated", "manual", "maximal")) or not inner:
        return Layout.replicated(ndim) if inner.startswith("replicated") or not inner else None
    found = _DEVICES.match(inner)
    if found is None:
        raise HloError(f"cannot read the sharding {text!r}")
    shape = [int(n) for n in found[1].split(",")]
    ids = iota(found[2]) if found[2] else np.array([int(n) for n in found[3].split(",")])
    grid = ids.reshape(shape)
    dims: list[tuple[str, ...]] = []
    for d in range(ndim):
        groups = np.moveaxis(grid, d, -1).reshape(-1, shape[d])
        axes = axes_of_groups(tuple(tuple(int(i) for i in group) for group in groups), mesh)
        if axes is None:
            return None
        dims.append(axes)
    return Layout(tuple(dims))


def _of_axes(over: str, dims: str, mesh: MeshAxes) -> Layout | None:
    """The layout of dimensions split over axes `{'data', 'model'}, {}` of a mesh of XLA's."""
    found: list[tuple[str, ...]] = []
    same = over == f"mesh[{','.join(f'{name!r}={size}' for name, size in zip(mesh.names, mesh.sizes, strict=True))}]"
    for asked in re.findall(r"\{([^}]*)\}", dims):
        names = tuple(name + part for name, part in re.findall(r"'([^']*)'(:\(\d+\)\d+)?", asked))
        axes = names if same or not names else axes_of_groups(parse_groups(f"{over} {{{asked}}}", mesh.size), mesh)
        if axes is None:
            return None
        found.append(axes)
    return Layout(tuple(found))


def _take_balanced(text: str, start: int) -> str:
    """The text from an opening brace to the one that closes it."""
    depth = 0
    for end in range(start, len(text)):
        depth += (text[end] == "{") - (text[end] == "}")
        if depth == 0:
            return text[start : end + 1]
    raise HloError(f"braces do not match: {text[start : start + 100]!r}")


def _find_open(text: str) -> list[int]:
    """Where the outermost braces open."""
    depth, found = 0, list[int]()
    for i, character in enumerate(text):
        if character == "{":
            if depth == 0:
                found.append(i)
            depth += 1
        depth -= character == "}"
    return found
