"""Fewer layers: the program that is probed in place of one with many equal layers.

What the partitioner does in one of many equal layers it does in all of them, so a program with a
few of each kind says which constraints are needed. Layers are equal if their equations are, and all
their constraints. Of those in a row the ends are probed, and one between equal neighbours stands for
those that are left out.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeVar

from autoshard import _jax
from autoshard.backends.shardy.propagation import Annotations
from autoshard.ir.bodies import opened
from autoshard.ir.constraints import Constraints, Specs
from autoshard.ir.graph import Path
from autoshard.ir.layers import Layers, Shorter, Steps, without
from autoshard.ir.rewrite import ConstraintSite
from autoshard.ir.trace import Traced

T = TypeVar("T")

KEPT = 3  # layers of a row: the ends, and one between them

_Group = Mapping[tuple[Path, int], Specs]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Probed:
    """A program with its annotations, and what its constraints say of those of the whole program.

    `origin` says where each of its constraints is in the whole program. `like` says of each constraint of the whole
    program that is missing here which other one of the whole program is needed if it is.
    """

    traced: Traced
    annotations: Annotations
    origin: Mapping[ConstraintSite, ConstraintSite]
    like: Mapping[ConstraintSite, ConstraintSite]


def probed(traced: Traced, annotations: Annotations) -> Probed:
    """The program with the fewest layers that tells which constraints are needed; itself if its layers are few.

    And itself if state lies in the host's memory: the updates of layers wait for one another then.
    """
    sites = {site: site for site in sites_of(annotations.pins)}
    found = Probed(traced=traced, annotations=annotations, origin=sites, like={})
    if any(_jax.is_on_host(x.aval) for x in _jax.open_jaxpr(traced.jaxpr).invars):
        return found
    while (shorter := _shortened(found)) is not None:
        found = shorter
    return found


def sites_of(pins: Constraints) -> Iterator[ConstraintSite]:
    """The places of all constraints that a plan may leave out."""
    for name, group in (("made", pins.made), ("taken", pins.taken), ("input", pins.inputs), ("output", pins.outputs)):
        yield from ((name, key) for key in group)


def _shortened(now: Probed) -> Probed | None:
    """The same program with fewer layers of one stack; None if no stack has more than are probed."""
    for layers in now.traced.layers:
        row = _longest_row(_kinds(layers, now.annotations))
        if len(row) <= KEPT:
            continue
        gone = range(row.start + KEPT - 1, row.stop - 1)
        shorter = without(layers, gone, gone.start - 1)
        found = None if shorter is None else _Shortening(now, layers, shorter).done()
        if found is not None and _asks_all(found):
            return found
    return None


def _asks_all(shorter: Probed) -> bool:
    """Whether results depend on all that is constrained.

    Not if the layers are links of a chain, as the sum over all gradients that `optax.clip_by_global_norm` needs may
    be: it is shorter, and what it summed is computed for nothing.
    """
    body = opened(shorter.traced.jaxpr)
    read = {atom for atom in body.outvars if not _jax.is_literal(atom)}
    live: set[int] = set()
    for k in range(len(body.steps) - 1, -1, -1):
        eqn = body.steps[k].eqn
        if eqn.effects or not read.isdisjoint(eqn.outvars):
            live.add(k)
            read.update(atom for atom in eqn.invars if not _jax.is_literal(atom))
    return all(key[0][0] in live for name, key in shorter.origin if name in ("made", "taken"))


def _longest_row(kinds: list[int]) -> range:
    """The most layers of one kind that follow each other."""
    best, first = range(0), 0
    for _, group in groupby(kinds):
        row = range(first, first + len(list(group)))
        best, first = max(best, row, key=len), row.stop
    return best


def _kinds(layers: Layers, annotations: Annotations) -> list[int]:
    """The kind of every layer: equal numbers, where all constraints and annotations are equal."""
    found: list[set[object]] = [set() for _ in range(layers.count)]
    pins, steps = annotations.pins, Steps(layers)
    for name, group in (("made", pins.made), ("taken", pins.taken), ("again", pins.again), ("kernel", pins.kernels)):
        for (path, i), specs in group.items():
            at = steps.layer_of(path)
            if at is not None:
                found[at[0]].add((name, at[1], i, specs))
    ends = (
        ("is", layers.inputs, annotations.inputs),
        ("input", layers.inputs, pins.inputs),
        ("becomes", layers.outputs, annotations.outputs),
        ("output", layers.outputs, pins.outputs),
    )
    for name, places, specs in ends:
        for i, (*where, layer) in places.items():
            if i in specs:
                found[layer].add((name, *where, specs[i]))
    numbers: dict[frozenset[object], int] = {}
    return [numbers.setdefault(frozenset(kind), len(numbers)) for kind in found]


class _Shortening:
    """The way from a program to a shorter one, for constraints."""

    def __init__(self, now: Probed, layers: Layers, shorter: Shorter) -> None:
        self._now, self._layers, self._shorter, self._steps = now, layers, shorter, Steps(layers)
        self._new_step = {k: n for n, k in enumerate(shorter.steps)}

    def done(self) -> Probed:
        """The shorter program with the constraints that are left."""
        now, shorter, pins = self._now, self._shorter, self._now.annotations.pins
        annotations = replace(
            now.annotations,
            inputs=_renumbered(now.annotations.inputs, shorter.inputs),
            outputs=_renumbered(now.annotations.outputs, shorter.outputs),
            pins=Constraints(
                made=self._group(pins.made),
                taken=self._group(pins.taken),
                again=self._group(pins.again),
                kernels=self._group(pins.kernels),
                inputs=_renumbered(pins.inputs, shorter.inputs),
                outputs=_renumbered(pins.outputs, shorter.outputs),
            ),
        )
        new_input = {i: n for n, i in enumerate(shorter.inputs)}
        new_output = {o: n for n, o in enumerate(shorter.outputs)}
        origin: dict[ConstraintSite, ConstraintSite] = {}
        like = dict(now.like)
        for site, whole in now.origin.items():
            name, key = site
            if name in ("input", "output"):
                left, stands = (new_input, shorter.input_like) if name == "input" else (new_output, shorter.output_like)
                new, other = left.get(key), stands.get(key)
            else:
                new, other = self._moved(key), self._like(key)
            if new is not None:
                origin[name, new] = whole
            elif (name, other) in now.origin:
                like[whole] = now.origin[name, other]
        traced = replace(
            now.traced,
            jaxpr=shorter.closed,
            in_avals=tuple(now.traced.in_avals[i] for i in shorter.inputs),
            out_avals=tuple(now.traced.out_avals[o] for o in shorter.outputs),
        )
        return Probed(traced=traced, annotations=annotations, origin=origin, like=like)

    def _group(self, group: _Group) -> _Group:
        return {new: specs for old, specs in group.items() if (new := self._moved(old)) is not None}

    def _moved(self, spot: tuple[Path, int]) -> tuple[Path, int] | None:
        """Where an operand or result is in the shorter program; None if it is not there."""
        k, inside = self._steps.at(spot[0])
        return ((self._new_step[k], *inside), spot[1]) if k in self._new_step else None

    def _like(self, spot: tuple[Path, int]) -> tuple[Path, int] | None:
        """The operand or result that stands for one that is gone."""
        k, inside = self._steps.at(spot[0])
        other = self._shorter.step_like.get(k)
        return None if other is None else ((*self._layers.body.steps[other].path, *inside), spot[1])


def _renumbered(specs: Mapping[int, T], left: tuple[int, ...]) -> dict[int, T]:
    """What is said of inputs or outputs, by their new positions; `left` are the old ones of those that are left."""
    return {n: specs[i] for n, i in enumerate(left) if i in specs}
