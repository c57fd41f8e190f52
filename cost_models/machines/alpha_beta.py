"""The α-β model: the seconds of each collective on one kind of link.

A collective costs `latency_s + bytes over the busiest link ÷ rate of that link`.
The functions return the second term, in seconds, except `latency_s`. Sizes are
*logical* bytes per device: an all-gather's result, the operand of any other
collective. A reduce-scatter is an all-gather run backwards and is priced by the
same `*_gather_s`; an all-reduce is one after the other.

Sources: ring volumes from Thakur, Rabenseifner & Gropp 2005; tori from Austin
et al., How to Scale Your Model (2026-06-24), sharding.md; switched nodes from
its gpus.md. Numbers of links are exact, so results carry the (n-1)/n that the
book drops.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats: TypeAlias = NDArray[np.float64]
Kind: TypeAlias = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute", "broadcast"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Ring:
    """The part of a torus axis that a group of devices spans: a ring, or a line if it does not wrap.

    Attributes:
        n: Devices of the group along the axis.
        wraps: Whether the two ends are linked.
        sharers: Interleaved groups that use the same links at once (the stride of
            the group along the axis): each gets 1/sharers of a link, and a step
            is `sharers` physical hops.
    """

    n: int
    wraps: bool
    sharers: int = 1

    @property
    def links(self) -> float:
        """One-way links that deliver to a device: both neighbours send if the ring closes."""
        return (2 if self.wraps else 1) / self.sharers if self.n > 1 else 0.0

    @property
    def hops(self) -> int:
        """Physical hops to the farthest device."""
        return (self.n // 2 if self.wraps else self.n - 1) * self.sharers


def torus_gather_s(nbytes: ArrayLike, rings: Sequence[Ring], one_way_bytes_per_s: float) -> Floats:
    """All-gather over several torus axes at once, each carrying its share of the data.

    Source: scaling book sharding.md:320-361: V/(2·W·axes) on closed rings; on a
    line the end device receives everything through one link, twice that.
    """
    n, links = prod(r.n for r in rings), sum(r.links for r in rings)
    return np.asarray(nbytes, float) * ((n - 1) / n / (one_way_bytes_per_s * links))


def torus_all_to_all_s(nbytes: ArrayLike, rings: Sequence[Ring], one_way_bytes_per_s: float) -> Floats:
    """All-to-all over a torus of an operand of `nbytes` per device: the longest axis decides.

    On an axis of n the average block travels ⌊n²/4⌋/n steps, over two directions
    if the ring closes. Source: scaling book sharding.md:458-480 (bisection).
    """
    worst = max(r.n**2 // 4 / r.n / r.links for r in rings)
    return np.asarray(nbytes, float) * (worst / one_way_bytes_per_s)


def torus_permute_s(nbytes: ArrayLike, rings: Sequence[Ring], one_way_bytes_per_s: float) -> Floats:
    """A shift by one along the group: one link per device, shared with interleaved groups."""
    return np.asarray(nbytes, float) * (max(r.sharers for r in rings) / one_way_bytes_per_s)


def torus_broadcast_s(nbytes: ArrayLike, rings: Sequence[Ring], one_way_bytes_per_s: float) -> Floats:
    """Broadcast through every link of the root. Source: scaling book tpus.md:271 Q5."""
    return np.asarray(nbytes, float) / (one_way_bytes_per_s * sum(r.links for r in rings))


def switch_gather_s(nbytes: ArrayLike, n: int, one_way_bytes_per_s: float) -> Floats:
    """All-gather or all-to-all among n devices at full rate: all but one block moves. Source: gpus.md:388-451."""
    return np.asarray(nbytes, float) * ((n - 1) / n / one_way_bytes_per_s)


def switch_permute_s(nbytes: ArrayLike, one_way_bytes_per_s: float) -> Floats:
    """Point to point behind a switch."""
    return np.asarray(nbytes, float) / one_way_bytes_per_s


def direct_gather_s(nbytes: ArrayLike, n: int, peer_bytes_per_s: float) -> Floats:
    """All-gather, or all-to-all, where every pair has a link of its own: each carries one shard."""
    return np.asarray(nbytes, float) / (n * peer_bytes_per_s)


def wire_bytes(kind: Kind, n: int, nbytes: ArrayLike) -> Floats:
    """Bytes that each device of a group of n sends. Source: nccl-tests doc/PERFORMANCE.md (a0b82b2)."""
    factor = {
        "all-gather": (n - 1) / n,
        "reduce-scatter": (n - 1) / n,
        "all-to-all": (n - 1) / n,
        "all-reduce": 2 * (n - 1) / n,
        "collective-permute": 1.0,
        "broadcast": 1.0,
    }[kind]
    return np.asarray(nbytes, float) * (factor if n > 1 else 0.0)


def interpolate_s(nbytes: ArrayLike, sizes: Floats, seconds: Floats) -> Floats:
    """Time of a transfer from a measured table, never falling as the size grows.

    Linear in the logarithms between points; flat below the first; at the rate
    of the last point above it. A measured time that exceeds that of a larger
    transfer is replaced by the latter: padding would have been faster.

    Args:
        nbytes: Sizes to price, positive.
        sizes: Measured sizes in bytes, ascending.
        seconds: Measured times.
    """
    v = np.asarray(nbytes, float)
    rising = np.minimum.accumulate(seconds[::-1])[::-1]
    inside = np.exp(np.interp(np.log(np.maximum(v, 1.0)), np.log(sizes), np.log(rising)))
    return np.where(v > sizes[-1], rising[-1] * v / sizes[-1], inside)
