"""The law of a collective: seconds as a function of bytes, from the links that a group crosses.

1. The placement says which levels of links the group crosses (die, domain,
   scale-out) and with how many devices.
2. At each level the group moves the remaining bytes: an all-gather of V bytes brings
   V/g over a level inside which g devices of the group lie, because those g
   receive different parts and exchange them on the faster links.
3. GPU levels work at once (NCCL's rings are pipelined through nodes; each GPU
   drives its own NIC), and so do those inside a TPU slice (two dies of a chip exchange
   what arrives over the torus); slices follow (XLA's hierarchical collectives).
4. Latency is one launch and the hops of every level.

So a law is a line, latency + bytes ÷ rate. On a network there are two, a ring of
n-1 hops and a tree of ⌈log₂ n⌉ hops that moves the bytes twice, and the cheaper
one counts. An all-reduce's tree moves them once up and once down, as its ring does.
Within one switched domain a measured table takes their place. A group over several
nodes takes at least as long as its part in one node does with the same bytes: no
network of the catalogue is faster than the links of its nodes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, log, log2, prod
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from cost_models.machines import alpha_beta
from cost_models.machines.alpha_beta import Floats, Kind
from cost_models.machines.hardware_file import CollectiveTable, Interconnect
from cost_models.machines.placement import Crossing

Links: TypeAlias = Mapping[str, Interconnect]


@dataclass(frozen=True, slots=True)
class Line:
    """`latency_s + nbytes × s_per_byte`."""

    latency_s: float
    s_per_byte: float

    def seconds(self, nbytes: Floats) -> Floats:
        return self.latency_s + nbytes * self.s_per_byte


@dataclass(frozen=True, slots=True)
class Cheapest:
    """The cheapest of several laws at each size."""

    laws: tuple["Law", ...]

    def seconds(self, nbytes: Floats) -> Floats:
        return np.minimum.reduce([law.seconds(nbytes) for law in self.laws])


@dataclass(frozen=True, slots=True)
class AtLeast:
    """A law that takes no less than another one, which is a part of it."""

    law: "Law"
    part: "Law"

    def seconds(self, nbytes: Floats) -> Floats:
        return np.maximum(self.law.seconds(nbytes), self.part.seconds(nbytes))


@dataclass(frozen=True, slots=True)
class Measured:
    """A measured table, read at equal bytes on the wire and rescaled to the stated links.

    Attributes:
        table: The measurements.
        wire_ratio: Bytes on the wire per logical byte, against the table's group.
        slower: The link rate of the measurements ÷ that of the hardware file. It scales
            the time above the table's smallest one, which is bandwidth.
        more_s: Latency beyond the table's for a larger group; negative for a smaller one.
    """

    table: CollectiveTable
    wire_ratio: float
    slower: float
    more_s: float

    def seconds(self, nbytes: Floats) -> Floats:
        floor_s = float(np.min(self.table.seconds))
        sizes = np.maximum(nbytes * self.wire_ratio, 1.0)
        above_s = alpha_beta.interpolate_s(sizes, self.table.nbytes, self.table.seconds) - floor_s
        return max(floor_s + self.more_s, floor_s / 2) + above_s * self.slower


@dataclass(frozen=True, slots=True)
class InTurn:
    """One collective made of two, which takes less than both by `saved_s`: a launch, and latency."""

    first: "Law"
    second: "Law"
    saved_s: float

    def seconds(self, nbytes: Floats) -> Floats:
        return self.first.seconds(nbytes) + self.second.seconds(nbytes) - self.saved_s


@dataclass(frozen=True, slots=True)
class Between:
    """A law between two others, linear in the logarithms; `share` is how near it is to the second."""

    first: "Law"
    second: "Law"
    share: float

    def seconds(self, nbytes: Floats) -> Floats:
        return self.first.seconds(nbytes) ** (1 - self.share) * self.second.seconds(nbytes) ** self.share


Law: TypeAlias = Line | Cheapest | AtLeast | Between | Measured | InTurn


def law_of(kind: Kind, crossings: Sequence[Crossing], links: Links) -> Law:
    """The law of a collective for a group that crosses these levels, inner to outer.

    Args:
        kind: The collective. An all-reduce is a reduce-scatter, then an all-gather, or what was
            published, if that takes less: switches that reduce (NVLink SHARP); no more than that of a
            larger group that was measured. Timed on the very links, it is what was timed.
        crossings: At least one.
        links: The interconnect of each level.
    """
    measured = _as_measured(kind, crossings[0], links) if len(crossings) == 1 else None
    if kind != "all-reduce" or (measured and links[crossings[0].level].timed_whole):
        return measured or _phase(kind, crossings, links)
    halves = _all_reduce(crossings, links)
    if measured is None:
        return _no_less_than_inside(kind, halves, crossings, links)
    larger = sorted(t.devices for t in links[crossings[0].level].tables if t.devices > crossings[0].n)
    next_larger = (law_of(kind, [replace(crossings[0], n=n)], links) for n in larger[:1])
    return Cheapest((measured, halves, *next_larger))


def _all_reduce(crossings: Sequence[Crossing], links: Links) -> InTurn:
    """A reduce-scatter, then an all-gather."""
    phases: tuple[Kind, ...] = ("reduce-scatter", "all-gather")
    alone = len(crossings) == 1 and crossings[0].medium != "network"
    first, second = (
        law_of(phase, crossings, links) if alone else _phase(phase, crossings, links, once=True) for phase in phases
    )
    smallest_s = _smallest_all_reduce_s(crossings, links)
    if smallest_s is None:
        return InTurn(first, second, _launch_s(crossings, links))
    both_s = sum(float(half.seconds(np.ones(()))) for half in (first, second))
    return InTurn(first, second, both_s - smallest_s)


def _phase(kind: Kind, crossings: Sequence[Crossing], links: Links, *, once: bool = False) -> Law:
    """The law of a collective that was not measured; `once`: its tree moves the bytes once, as half an all-reduce."""
    law: Law = _line(kind, crossings, links)
    if kind != "collective-permute" and any(c.medium == "network" for c in crossings):
        law = Cheapest((law, _line(kind, crossings, links, climbing=1.0 if once else 2.0)))
    return _no_less_than_inside(kind, law, crossings, links)


def _no_less_than_inside(kind: Kind, law: Law, crossings: Sequence[Crossing], links: Links) -> Law:
    """A law that takes no less than the collective of the same bytes inside one node.

    An all-to-all moves fewer bytes inside of a node than it would if the node were alone; the others cross the network.
    """
    inside = crossings[:-1]
    if not inside or any(c.medium == "torus" for c in crossings):
        return law
    return AtLeast(law, law_of(kind, inside, links))


def link_bytes(kind: Kind, crossings: Sequence[Crossing], links: Links, nbytes: ArrayLike) -> dict[str, Floats]:
    """Bytes on the busiest link and direction of each level."""
    twice = 2.0 if kind == "all-reduce" else 1.0
    phase: Kind = "all-gather" if kind == "all-reduce" else kind
    sizes = np.asarray(nbytes, float)
    shares = (_share(phase, c, crossings) * _link_bytes_per_byte(phase, c, links) for c in crossings)
    return {c.level: twice * sizes * share for c, share in zip(crossings, shares, strict=True)}


def _line(kind: Kind, crossings: Sequence[Crossing], links: Links, *, climbing: float = 0.0) -> Line:
    """One launch, the hops of every level, and bytes at the slowest level, or inside a slice and then between.

    `climbing`: how often a tree moves the bytes over a network; 0 for a ring.
    """
    latency_s = _launch_s(crossings, links)
    s_per_byte: dict[str, float] = {}
    for crossing in crossings:
        climbs = climbing and crossing.medium == "network"
        carried = _share(kind, crossing, crossings) * _link_bytes_per_byte(kind, crossing, links)
        s_per_byte[crossing.level] = (climbing if climbs else 1.0) * carried / _rate(crossing, links)
        hops = ceil(log2(crossing.n)) if climbs else _hops(kind, crossing)
        latency_s += hops * _number(crossing, links, "hop_s")
    if all(c.medium != "torus" for c in crossings):
        return Line(latency_s, max(s_per_byte.values()))
    between = s_per_byte.pop("scale_out", 0.0)
    return Line(latency_s, max(s_per_byte.values()) + between)


def _share(kind: Kind, crossing: Crossing, crossings: Sequence[Crossing]) -> float:
    """Which part of a collective's bytes a device moves at one level."""
    if kind in ("all-gather", "reduce-scatter", "broadcast"):
        return 1 / crossing.inner
    if kind == "all-to-all":
        return crossing.inner * crossing.n / prod(c.n for c in crossings)
    return 1.0


def _link_bytes_per_byte(kind: Kind, crossing: Crossing, links: Links) -> float:
    """Bytes on the busiest link of one level per byte of a collective on that level alone."""
    n, rings = crossing.n, crossing.rings
    if crossing.medium == "torus":
        return float(_TORUS[kind](1.0, rings, 1.0))
    peers = int(_number(crossing, links, "max_devices_count")) - 1 if crossing.medium == "direct" else 1
    if kind in ("collective-permute", "broadcast"):
        return peers * float(alpha_beta.switch_permute_s(1.0, 1.0))
    if crossing.medium == "direct":
        return peers * float(alpha_beta.direct_gather_s(1.0, n, 1.0))
    return float(alpha_beta.switch_gather_s(1.0, n, 1.0))


_TORUS = {
    "all-gather": alpha_beta.torus_gather_s,
    "reduce-scatter": alpha_beta.torus_gather_s,
    "all-to-all": alpha_beta.torus_all_to_all_s,
    "collective-permute": alpha_beta.torus_permute_s,
    "broadcast": alpha_beta.torus_broadcast_s,
}


def _hops(kind: Kind, crossing: Crossing) -> int:
    """Latency steps of one level: a ring's, a torus's to the farthest device, or one through a switch."""
    if crossing.medium == "torus":
        if kind == "collective-permute":
            return max(r.sharers if r.wraps else (r.n - 1) * r.sharers for r in crossing.rings)
        return sum(r.hops for r in crossing.rings)
    if crossing.medium == "direct" or kind == "collective-permute":
        return 1
    return crossing.n - 1


def _tables(kind: Kind, crossing: Crossing, links: Links) -> list[CollectiveTable]:
    """The measured tables of a collective; a reduce-scatter may use an all-gather's.

    None on a torus, where groups of one size have different links.
    """
    if crossing.medium == "torus":
        return []
    for wanted in (kind, "all-gather") if kind == "reduce-scatter" else (kind,):
        tables = [table for table in links[crossing.level].tables if table.kind == wanted]
        if tables:
            return tables
    return []


def _as_measured(kind: Kind, crossing: Crossing, links: Links) -> Law | None:
    """The law of the measured tables, if there are any; a group never takes more than a larger one took.

    Between two measured groups it is interpolated; beyond, the nearest is rescaled.
    """
    tables = sorted(_tables(kind, crossing, links), key=lambda table: table.devices)
    if not tables:
        return None
    own = [_measured(kind, table, replace(crossing, n=table.devices), links) for table in tables]
    smaller = [i for i, table in enumerate(tables) if table.devices <= crossing.n]
    if not smaller:
        return Cheapest((_measured(kind, tables[0], crossing, links), *own))
    last = smaller[-1]
    if tables[last].devices == crossing.n:
        return own[last] if last == len(own) - 1 else Cheapest(tuple(own[last:]))
    if last == len(own) - 1:
        return _measured(kind, tables[last], crossing, links)
    below, above = (log(tables[i].devices) for i in (last, last + 1))
    share = (log(crossing.n) - below) / (above - below)
    return Between(Cheapest(tuple(own[last:])), Cheapest(tuple(own[last + 1 :])), share)


def _measured(kind: Kind, table: CollectiveTable, crossing: Crossing, links: Links) -> Measured:
    on_wire = [float(alpha_beta.wire_bytes(kind, n, 1.0)) for n in (crossing.n, table.devices)]
    hops = _hops(kind, crossing) - _hops(kind, replace(crossing, n=table.devices))
    return Measured(
        table,
        wire_ratio=on_wire[0] / on_wire[1],
        slower=table.link_bytes_per_s / _number(crossing, links, "one_way_bytes_per_s"),
        more_s=(2 if kind == "all-reduce" else 1) * hops * _number(crossing, links, "hop_s"),
    )


def _smallest_all_reduce_s(crossings: Sequence[Crossing], links: Links) -> float | None:
    """Latency of a whole all-reduce inside one domain, where its link states it; None: that of its halves."""
    numbers = links[crossings[0].level].numbers
    if len(crossings) > 1 or "all_reduce_launch_s" not in numbers or "all_reduce_hop_s" not in numbers:
        return None
    return numbers["all_reduce_launch_s"].value + (crossings[0].n - 1) * numbers["all_reduce_hop_s"].value


def _number(crossing: Crossing, links: Links, key: str) -> float:
    return links[crossing.level].numbers[key].value


def _rate(crossing: Crossing, links: Links) -> float:
    return _number(crossing, links, "one_way_bytes_per_s") * _number(crossing, links, "achieved_fraction")


def _launch_s(crossings: Sequence[Crossing], links: Links) -> float:
    return max(_number(c, links, "launch_s") for c in crossings)
