"""Folding: the leaves of pytrees as the few rows that a person reads.

Leaves that differ in indices alone, equal in shape and layout, are one row: `state.params.layers.0…31.wq`, or
`params.Block_0…31.Dense_0.kernel`. A subtree that repeats another one leaf by leaf, as the
moments of an optimizer repeat the parameters, is one row too, followed by those of its
leaves whose layout is another.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, takewhile
from math import prod

import jax

from autoshard.ir.layout import Layout
from autoshard.ir.mesh import MeshAxes
from autoshard.ir.paths import dotted, joined, pattern_of
from autoshard.planner.record import Leaf

Segments = tuple[str, ...]

MIRRORED_SHARE = 0.1  # a subtree is worth a row of its own from this share of all leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafRow:
    """Leaves of one shape and layout: the pattern of their paths, and their bytes on one device.

    `shape` is empty in the row of a whole subtree; its leaves follow, `depth` 1.
    """

    depth: int
    path: str
    shape: str
    layout: str
    count: int
    local_bytes: int


@dataclass(frozen=True, slots=True)
class _Member:
    """A leaf, or equal leaves of several subtrees, under the path that is shown."""

    path: Segments
    leaf: Leaf
    copies: int = 1


def fold(leaves: Sequence[Leaf], mesh: MeshAxes) -> list[LeafRow]:
    """Few rows for many leaves, in the order in which they first appear."""
    by_path = {tuple(dotted(leaf.path).split(".")): leaf for leaf in leaves}
    mirrors = _mirrors(by_path)
    home: dict[Segments, tuple[Segments, bool]] = {}  # leaf → the first of its equal subtrees, whether it lies in it
    for original, copies in mirrors.items():
        for subtree in (original, *copies):
            home |= {path: (original, subtree == original) for path in by_path if _within(path, subtree)}
    rows: list[LeafRow] = []
    for place, group in groupby(by_path, key=home.get):
        paths = list(group)
        if place is None:
            rows += _folded([_Member(path, by_path[path]) for path in paths], mesh, depth=0)
            continue
        original, first = place
        if first:
            members = [_Member(path[len(original) :], by_path[path]) for path in paths]
            rows.append(_subtree_row(".".join(original), "", [m.leaf for m in members], mesh))
            rows += _folded(members, mesh, depth=1)
        elif original in mirrors:
            rows += _mirror_rows(original, mirrors.pop(original), by_path, mesh)
    return rows


def local_bytes(leaf: Leaf, mesh: MeshAxes) -> int:
    """Bytes of a leaf on one device; PRNG keys count as none."""
    if leaf.dtype.startswith("key<"):
        return 0
    local = Layout.from_spec(leaf.spec, len(leaf.shape)).local_shape(leaf.shape, mesh)
    return prod(local) * jax.numpy.dtype(leaf.dtype).itemsize


def _subtree_row(path: str, layout: str, leaves: Sequence[Leaf], mesh: MeshAxes) -> LeafRow:
    nbytes = sum(local_bytes(leaf, mesh) for leaf in leaves)
    return LeafRow(depth=0, path=path, shape="", layout=layout, count=len(leaves), local_bytes=nbytes)


def _folded(members: Iterable[_Member], mesh: MeshAxes, depth: int) -> list[LeafRow]:
    """One row per pattern of paths, shape and layout."""
    groups: dict[tuple[Segments, str, str], list[_Member]] = {}
    for member in members:
        leaf = member.leaf
        shape = f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
        layout = f"{Layout.from_spec(leaf.spec, len(leaf.shape))}{' on the host' if leaf.on_host else ''}"
        groups.setdefault((pattern_of(member.path), shape, layout), []).append(member)
    return [
        LeafRow(
            depth=depth,
            path=joined([m.path for m in same]),
            shape=shape,
            layout=layout,
            count=sum(m.copies for m in same),
            local_bytes=sum(m.copies * local_bytes(m.leaf, mesh) for m in same),
        )
        for (_, shape, layout), same in groups.items()
    ]


def _mirror_rows(
    original: Segments, copies: Sequence[Segments], by_path: Mapping[Segments, Leaf], mesh: MeshAxes
) -> list[LeafRow]:
    """One row for all copies of a subtree, then their leaves whose layout is another."""
    others: dict[tuple[Segments, str, str], list[Segments]] = {}
    for copy in copies:
        for path in (p for p in by_path if _within(p, copy)):
            tail, leaf = path[len(copy) :], by_path[path]
            if leaf.spec != by_path[original + tail].spec:
                others.setdefault((tail, leaf.dtype, str(leaf.spec)), []).append(copy)
    every = [leaf for path, leaf in by_path.items() if any(_within(path, copy) for copy in copies)]
    exceptions = [
        _Member(
            tail if len(holders) == len(copies) else (_braced(holders), *tail), by_path[holders[0] + tail], len(holders)
        )
        for (tail, _, _), holders in others.items()
    ]
    head = _subtree_row(_braced(copies), f"as {original[-1]}", every, mesh)
    return [head, *(replace(row, path=f"but {row.path}") for row in _folded(exceptions, mesh, depth=1))]


def _mirrors(by_path: Mapping[Segments, Leaf]) -> dict[Segments, list[Segments]]:
    """Subtree → later subtrees that repeat it: the same paths and shapes below, most in the same layout.

    Where such subtrees differ in layout, each kind is a key, if only of no others.
    """
    below: dict[Segments, dict[Segments, tuple[int, ...]]] = {}
    for path, leaf in by_path.items():
        for cut in range(1, len(path)):
            below.setdefault(path[:cut], {})[path[cut:]] = leaf.shape
    equal: dict[frozenset[tuple[Segments, tuple[int, ...]]], list[Segments]] = {}
    for prefix, shapes in below.items():
        if len(shapes) >= max(2.0, MIRRORED_SHARE * len(by_path)):
            equal.setdefault(frozenset(shapes.items()), []).append(prefix)
    mirrors: dict[Segments, list[Segments]] = {}
    taken: list[Segments] = []
    for shapes, prefixes in sorted(equal.items(), key=lambda item: -len(item[0])):
        patterns = Counter(map(pattern_of, prefixes))
        clusters: dict[Segments, list[Segments]] = {}
        for prefix in prefixes:
            if patterns[pattern_of(prefix)] > 1 or any(_within(prefix, t) for t in taken):
                continue  # the equal layers of a list are folded by index
            alike = (
                first
                for first in clusters
                if 2 * sum(by_path[prefix + tail].spec == by_path[first + tail].spec for tail, _ in shapes)
                > len(shapes)
            )
            clusters.setdefault(next(alike, prefix), []).append(prefix)
        for first, (_, *copies) in clusters.items():
            if copies or len(clusters) > 1:
                mirrors[first] = copies
                taken += [first, *copies]
    return mirrors


def _within(path: Segments, prefix: Segments) -> bool:
    return path[: len(prefix)] == prefix


def _braced(prefixes: Sequence[Segments]) -> str:
    """`state.opt_state.0.{mu,nu}` for two subtrees."""
    levels = zip(*prefixes, strict=False)
    shared = [level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels)]
    ends = [".".join(p[len(shared) :]) for p in prefixes]
    return ".".join(prefixes[0] if len(prefixes) == 1 else [*shared, "{" + ",".join(ends) + "}"])
