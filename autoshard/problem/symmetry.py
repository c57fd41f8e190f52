"""Symmetry: decisions in equal places share one variable.

Colour refinement (Weisfeiler & Leman 1968): nodes start with a hash of their own
costs, then repeatedly take up the multiset of (edge, neighbour's colour), until the
number of colours stays. Equal layers of an unrolled network end up with equal
colours; names and the order of equations play no part, so the classes, and their
order, are the same for every way of writing the same program.

After a few rounds, nodes have one colour whose surroundings are alike within as many
steps: all layers of a stack but the first and the last few, where the stable colouring
tells every one from the next by its distance from the ends. Nodes of one colour cost the
same, so the choices that give them one layout are choices of the program, but not all.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.problem.decisions import Decisions, digest


@dataclass(frozen=True, slots=True, eq=False)
class Folding:
    """`class_of[node]`; `members[c]` in node order; classes in canonical (colour) order.

    `within`: the steps up to which the surroundings of a class are alike; None where all of them are.
    """

    class_of: NDArray[np.int64]
    members: tuple[tuple[int, ...], ...]
    within: int | None = None

    @property
    def classes(self) -> int:
        return len(self.members)


def fold(decisions: Decisions) -> Folding:
    """The coarsest stable colouring of the decisions."""
    *_, stable = foldings(decisions, ())
    return stable


def foldings(decisions: Decisions, within: Sequence[int]) -> Iterator[Folding]:
    """The colourings after so many rounds each, in rising order, and the coarsest stable one at last."""
    known: dict[int, bytes] = {}

    def content(array: NDArray[Any]) -> bytes:
        """A hash of an array, remembered by identity while the decisions live."""
        if id(array) not in known:
            known[id(array)] = digest(array)
        return known[id(array)]

    usages: list[list[bytes]] = [[] for _ in decisions.nodes]
    for use in decisions.usages:
        usages[use.node].append(digest(use.kind, use.nbytes))
    on_links = _on_links(decisions)
    colors = [
        digest(n.kind, n.window, n.cost_ps, n.cover_ps, sorted(usages[i]), *on_links[i])
        for i, n in enumerate(decisions.nodes)
    ]
    labels = _Labels(decisions, content)
    count, done = len(set(colors)), 0
    while True:
        if done in within:
            yield _folding(colors, done)
        refined = labels.refined(colors)
        if len(set(refined)) == count:
            break
        colors, count, done = refined, len(set(refined)), done + 1
    yield _folding(refined, None)


def _folding(colors: Sequence[bytes], within: int | None) -> Folding:
    order = {color: c for c, color in enumerate(sorted(set(colors)))}
    class_of = np.array([order[color] for color in colors], np.int64)
    members: list[list[int]] = [[] for _ in order]
    for node, c in enumerate(class_of):
        members[c].append(node)
    return Folding(class_of, tuple(tuple(m) for m in members), within)


def _on_links(decisions: Decisions) -> list[list[bytes]]:
    """What every decision copies over each link to the host's memory, or hides of it."""
    found: list[list[bytes]] = [[] for _ in decisions.nodes]
    for number, link in enumerate(decisions.links):
        beside = frozenset(link.beside)
        for n in sorted(beside.union(link.hidden_ps)):
            found[n].append(digest(number, n in beside, link.hidden_ps.get(n)))
    return found


class _Labels:
    """Labels of the edges between decisions, and the colours that decisions get from their neighbours."""

    def __init__(self, decisions: Decisions, content: Callable[[NDArray[Any]], bytes]) -> None:
        numbers: dict[bytes, int] = {}
        known: dict[tuple[object, ...], bytes] = {}
        self._neighbours: list[list[tuple[int, int]]] = [[] for _ in decisions.nodes]
        for edge in decisions.edges:
            mask = b"" if edge.forbidden is None else content(edge.forbidden)
            parts = (
                edge.moved.shape,
                edge.moved.itemsize,
                content(edge.source),
                content(edge.target),
                edge.window,
                edge.hides,
                edge.bucket,
                edge.strides.key,
                edge.trips * edge.times,
                edge.total and (edge.total[0].itemsize, edge.total[1]),
                mask,
                *(() if edge.waived is None else (content(edge.waived),)),
                *(() if edge.pending is None else (edge.pending.itemsize,)),
                *(() if edge.unfused is None else (edge.unfused.nbytes, edge.unfused.before)),
                *(() if edge.cut_bytes is None else (content(edge.cut_bytes),)),
                *(() if edge.carried is None else astuple(edge.carried)),
            )
            if parts not in known:
                known[parts] = digest(*parts)
            for end, here, there in ((b">", edge.u, edge.v), (b"<", edge.v, edge.u)):
                number = numbers.setdefault(known[parts] + end, len(numbers))
                self._neighbours[here].append((number, there))
        self._names = list(numbers)

    def refined(self, colors: Sequence[bytes]) -> list[bytes]:
        """Hashes of each colour with those around it; equal surroundings, by number, are hashed once."""
        numbers = {color: c for c, color in enumerate(dict.fromkeys(colors))}
        own = [numbers[color] for color in colors]
        known: dict[tuple[int, ...], bytes] = {}
        found: list[bytes] = []
        for color, number, around in zip(colors, own, self._neighbours, strict=True):
            key = (number, *sorted([label * len(numbers) + own[other] for label, other in around]))
            if key not in known:
                known[key] = digest(color, *sorted(self._names[label] + colors[other] for label, other in around))
            found.append(known[key])
        return found


def unfolded(decisions: Decisions) -> Folding:
    """One class per decision."""
    nodes = range(len(decisions.nodes))
    return Folding(np.arange(len(decisions.nodes)), tuple((n,) for n in nodes))
