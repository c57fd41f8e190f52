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
one counts. Within one switched domain a measured table takes their place.
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
    """The cheapest of several lines at each size."""

    lines: tuple[Line, ...]

    def seconds(self, nbytes: Floats) -> Floats:
        return np.minimum.reduce([line.seconds(nbytes) for line in self.lines])


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


Law: TypeAlias = Line | Cheapest | Measured | InTurn


def law_of(kind: Kind, crossings: Sequence[Crossing], links: Links) -> Law:
    """The law of a collective for a group that crosses these levels, inner to outer.

    Args:
        kind: The collective. An all-reduce that was not measured is a reduce-scatter,
            then an all-gather.
        crossings: At least one.
        links: The interconnect of each level.
    """
    if len(crossings) == 1 and (table := _nearest_table(kind, crossings[0], links)) is not None:
        return _measured(kind, table, crossings[0], links)
    if kind == "all-reduce":
        halves = [law_of(half, crossings, links) for half in ("reduce-scatter", "all-gather")]
        smallest_s = _smallest_all_reduce_s(crossings, links)
        if smallest_s is None:
            return InTurn(halves[0], halves[1], _launch_s(crossings, links))
        both_s = sum(float(half.seconds(np.ones(()))) for half in halves)
        return InTurn(halves[0], halves[1], both_s - smallest_s)
    ring = _line(kind, crossings, links, tree=False)
    if kind == "collective-permute" or all(c.medium != "network" for c in crossings):
        return ring
    return Cheapest((ring, _line(kind, crossings, links, tree=True)))


def link_bytes(kind: Kind, crossings: Sequence[Crossing], links: Links, nbytes: ArrayLike) -> dict[str, Floats]:
    """Bytes on the busiest link and direction of each level."""
    twice = 2.0 if kind == "all-reduce" else 1.0
    phase: Kind = "all-gather" if kind == "all-reduce" else kind
    sizes = np.asarray(nbytes, float)
    shares = (_share(phase, c, crossings) * _link_bytes_per_byte(phase, c, links) for c in crossings)
    return {c.level: twice * sizes * share for c, share in zip(crossings, shares, strict=True)}


def _line(kind: Kind, crossings: Sequence[Crossing], links: Links, *, tree: bool) -> Line:
    """One launch, the hops of every level, and bytes at the slowest level, or inside a slice and then between."""
    latency_s = _launch_s(crossings, links)
    s_per_byte: dict[str, float] = {}
    for crossing in crossings:
        climbs = tree and crossing.medium == "network"
        carried = _share(kind, crossing, crossings) * _link_bytes_per_byte(kind, crossing, links)
        s_per_byte[crossing.level] = (2.0 if climbs else 1.0) * carried / _rate(crossing, links)
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


def _nearest_table(kind: Kind, crossing: Crossing, links: Links) -> CollectiveTable | None:
    """The measured table nearest in group size; a reduce-scatter may use an all-gather's.

    None on a torus, where groups of one size have different links.
    """
    if crossing.medium == "torus":
        return None
    for wanted in (kind, "all-gather") if kind == "reduce-scatter" else (kind,):
        tables = [table for table in links[crossing.level].tables if table.kind == wanted]
        if tables:
            return min(tables, key=lambda table: abs(log(table.devices / crossing.n)))
    return None


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
