"""A machine: a mesh laid on hardware, which prices what its devices do, in seconds.

How a collective over a set of mesh axes is priced:

1. the placement says which levels of links the group crosses (die, domain,
   scale-out) and with how many devices;
2. at each level the group moves what is left: an all-gather of V bytes brings
   V/g over a level inside which g devices of the group lie, because those g
   receive different parts and exchange them on the faster links;
3. GPU levels work at once (NCCL's rings are pipelined through nodes; each GPU
   drives its own NIC), TPU slices after each other (XLA's hierarchical
   collectives);
4. latency is a fixed launch, and the hops of every level; on a network the
   cheaper of a ring (n-1 hops) and a tree (⌈log₂ n⌉ hops, twice the bytes).

Within one switched domain a measured table is interpolated where there is one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, log, log2, prod

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cost_models import alpha_beta
from cost_models.alpha_beta import KINDS, Floats, Kind
from cost_models.dtypes import itemsize, matmul_rates
from cost_models.errors import CostModelError
from cost_models.hardware_file import Chip, CollectiveTable
from cost_models.placement import Crossing, Placement
from cost_models.roofline import MatmulUnit, matmul_bytes


@dataclass(frozen=True, slots=True)
class Machine:
    """Prices collectives over mesh axes, matmuls and memory traffic of one device.

    Attributes:
        chip: The numbers.
        placement: Where the mesh axes lie.
    """

    chip: Chip
    placement: Placement
    _crossings: dict[tuple[str, ...], tuple[Crossing, ...]] = field(
        default_factory=dict[tuple[str, ...], tuple[Crossing, ...]], compare=False, repr=False
    )

    @property
    def mesh(self) -> dict[str, int]:
        """Axis name → size, major to minor."""
        return dict(zip(self.placement.axes, self.placement.sizes, strict=True))

    @property
    def device_order(self) -> NDArray[np.intp]:
        """Physical device id (row-major in the topology) at each mesh coordinate, `[*mesh sizes]`."""
        return self.placement.device_order()

    @property
    def overlap(self) -> float:
        """Share of a window's compute behind which communication that may hide does hide."""
        return self.chip.numbers["overlap_fraction"].value

    def exposed_s(self, communication_s: ArrayLike, compute_s: ArrayLike) -> Floats:
        """What is left of communication that may run beside compute: h - overlap·min(h, c).

        Two linear bounds say the same: exposed ≥ h - overlap·c and exposed ≥ (1 - overlap)·h.
        The second is the price of sharing memory, multiprocessors and the scheduler's
        attention: even a short transfer does not vanish.
        """
        h, c = np.asarray(communication_s, float), np.asarray(compute_s, float)
        return h - self.overlap * np.minimum(h, c)

    def group_size(self, axes: Sequence[str]) -> int:
        """Devices that take part in one collective over these mesh axes."""
        return prod(c.n for c in self.crossings(axes))

    def crossings(self, axes: Sequence[str]) -> tuple[Crossing, ...]:
        """Which links a group over these mesh axes uses, inner to outer.

        Raises:
            MeshFitError: The mesh has no such axis.
        """
        key = (axes,) if isinstance(axes, str) else tuple(axes)
        if key not in self._crossings:
            self._crossings[key] = self.placement.crossings(key)
        return self._crossings[key]

    def collective_s(self, kind: Kind, axes: Sequence[str], nbytes: ArrayLike) -> Floats:
        """Seconds of one collective over a set of mesh axes, latency included.

        Args:
            kind: `"all-gather"`, `"reduce-scatter"`, `"all-reduce"`, `"all-to-all"`,
                `"collective-permute"` or `"broadcast"`.
            axes: Mesh axis names.
            nbytes: Logical bytes per device: the result of an all-gather, the
                operand of the others. Any shape; 0 costs nothing.

        Returns:
            Seconds, the shape of `nbytes`.
        """
        _check(kind)
        sizes = np.asarray(nbytes, float)
        crossings = self.crossings(axes)
        if not crossings:
            return np.zeros(sizes.shape)
        if kind == "all-reduce":
            both = self._priced("reduce-scatter", crossings, sizes) + self._priced("all-gather", crossings, sizes)
            seconds = both - self._launch_s(crossings)
        else:
            seconds = self._priced(kind, crossings, sizes)
        return np.where(sizes > 0, seconds, 0.0)

    def latency_s(self, kind: Kind, axes: Sequence[str]) -> float:
        """What the smallest such collective takes."""
        return float(self.collective_s(kind, axes, 1.0))

    def wire_bytes(self, kind: Kind, axes: Sequence[str], nbytes: ArrayLike) -> Floats:
        """Bytes that a device puts on the wire; `nbytes` as in `collective_s`."""
        _check(kind)
        return alpha_beta.wire_bytes(kind, self.group_size(axes), nbytes)

    def link_bytes(self, kind: Kind, axes: Sequence[str], nbytes: ArrayLike) -> dict[str, Floats]:
        """Bytes on the busiest link and direction of each level that the collective crosses."""
        _check(kind)
        crossings = self.crossings(axes)
        outer = _outer_products(crossings)
        twice = 2.0 if kind == "all-reduce" else 1.0
        single: Kind = "all-gather" if kind == "all-reduce" else kind
        return {
            c.level: twice * _level_s(single, c, self._peers(c), _level_bytes(single, c, o, nbytes), 1.0)
            for c, o in zip(crossings, outer, strict=True)
        }

    def matmul_unit(self, dtype: str) -> MatmulUnit:
        """How this device multiplies matrices of `dtype` under JAX's default precision.

        float32 runs as TF32 on GPUs and as one bfloat16 pass on TPUs.
        """
        numbers = self.chip.numbers
        rate = next(rate for rate in matmul_rates(dtype) if rate in numbers)
        short = rate.removeprefix("peak_").removesuffix("_flops_per_s")
        achieved = numbers.get(f"matmul_achieved_{short}_fraction", numbers["matmul_achieved_fraction"])
        return MatmulUnit(
            peak_flops_per_s=numbers[rate].value,
            achieved_fraction=achieved.value,
            tile_rows=int(numbers["matmul_tile_rows_count"].value),
            tile_columns=int(numbers["matmul_tile_columns_count"].value),
            tile_depth=int(numbers["matmul_tile_depth_count"].value),
            units=int(numbers["matmul_units_count"].value),
            launch_s=numbers["matmul_launch_s"].value,
        )

    def peak_flops_per_s(self, dtype: str) -> float:
        """Data-sheet matmul rate of one device for `dtype`."""
        return self.matmul_unit(dtype).peak_flops_per_s

    def matmul_s(
        self, batch: ArrayLike, m: ArrayLike, n: ArrayLike, k: ArrayLike, dtype: str, result_dtype: str | None = None
    ) -> Floats:
        """Seconds of a local `[batch, m, k] @ [batch, k, n]` on one device.

        Launch, then the longer of the arithmetic (padded to tiles and waves, at
        the fraction of peak that large matmuls achieve) and the HBM traffic of
        operands and result.

        Args:
            batch: Matmuls of this shape. All four sizes broadcast; a size of 0 costs nothing.
            m: Rows of the result.
            n: Columns of the result.
            k: Contracted size.
            dtype: Of the operands.
            result_dtype: Of the result; that of the operands if None.
        """
        unit = self.matmul_unit(dtype)
        traffic = matmul_bytes(batch, m, n, k, itemsize(dtype), itemsize(result_dtype or dtype))
        seconds = unit.launch_s + np.maximum(unit.compute_s(batch, m, n, k), self.hbm_s(traffic))
        empty = np.asarray(batch, float) * np.asarray(m, float) * np.asarray(n, float) * np.asarray(k, float) == 0
        return np.where(empty, 0.0, seconds)

    def matmul_flops_per_s(self, batch: ArrayLike, m: ArrayLike, n: ArrayLike, k: ArrayLike, dtype: str) -> Floats:
        """Rate that a local matmul reaches, its own FLOPs over `matmul_s`."""
        flops = 2.0 * np.asarray(batch, float) * np.asarray(m, float) * np.asarray(n, float) * np.asarray(k, float)
        return flops / self.matmul_s(batch, m, n, k, dtype)

    def hbm_s(self, nbytes: ArrayLike) -> Floats:
        """Seconds to stream bytes through the device's memory, at the achieved fraction."""
        numbers = self.chip.numbers
        rate = numbers["hbm_bytes_per_s"].value * numbers["hbm_achieved_fraction"].value
        return np.asarray(nbytes, float) / rate

    def _number(self, level: str, key: str) -> float:
        return self.chip.links[level].numbers[key].value

    def _rate(self, level: str) -> float:
        return self._number(level, "one_way_bytes_per_s") * self._number(level, "achieved_fraction")

    def _peers(self, crossing: Crossing) -> int:
        if crossing.medium != "direct":
            return 1
        return int(self._number(crossing.level, "max_devices_count")) - 1

    def _launch_s(self, crossings: Sequence[Crossing]) -> float:
        return max(self._number(c.level, "launch_s") for c in crossings)

    def _priced(self, kind: Kind, crossings: Sequence[Crossing], sizes: Floats) -> Floats:
        """One phase (any kind but all-reduce) over one or more levels."""
        if len(crossings) == 1:
            table = self._table(kind, crossings[0])
            if table is not None:
                return self._measured_s(table, crossings[0], sizes)
        outer = _outer_products(crossings)
        pipelined = all(c.medium != "torus" for c in crossings)
        ring_s, tree_s = [np.zeros(sizes.shape)], [np.zeros(sizes.shape)]
        ring_latency_s = tree_latency_s = self._launch_s(crossings)
        for crossing, out in zip(crossings, outer, strict=True):
            moved = _level_bytes(kind, crossing, out, sizes)
            bandwidth_s = _level_s(kind, crossing, self._peers(crossing), moved, self._rate(crossing.level))
            hop_s = self._number(crossing.level, "hop_s")
            ring_s.append(bandwidth_s)
            ring_latency_s += hop_s * _hops(kind, crossing)
            network = crossing.medium == "network" and kind != "collective-permute"
            tree_s.append(2 * bandwidth_s if network else bandwidth_s)
            tree_latency_s += hop_s * (ceil(log2(crossing.n)) if network else _hops(kind, crossing))
        combine = np.max if pipelined else np.sum
        return np.minimum(ring_latency_s + combine(ring_s, axis=0), tree_latency_s + combine(tree_s, axis=0))

    def _table(self, kind: Kind, crossing: Crossing) -> CollectiveTable | None:
        """The measured table nearest in group size; a reduce-scatter may use an all-gather's."""
        tables = self.chip.links[crossing.level].tables
        for wanted in (kind, "all-gather") if kind == "reduce-scatter" else (kind,):
            near = [t for t in tables if t.kind == wanted]
            if near:
                return min(near, key=lambda t: abs(log(t.devices / crossing.n)))
        return None

    def _measured_s(self, table: CollectiveTable, crossing: Crossing, sizes: Floats) -> Floats:
        """A table's time at equal bytes on the wire, rescaled to this file's own link numbers.

        The part above the table's smallest time is bandwidth and follows the link
        rate that the file states against the rate at which it was measured.
        """
        n, measured = crossing.n, table.devices
        equal_wire = sizes * ((n - 1) / n) / ((measured - 1) / measured)
        seconds = alpha_beta.interpolate_s(np.maximum(equal_wire, 1.0), table.nbytes, table.seconds)
        floor = float(np.min(table.seconds))
        slower = table.link_bytes_per_s / self._number(crossing.level, "one_way_bytes_per_s")
        hops_s = self._number(crossing.level, "hop_s") * (n - measured)
        return max(floor + hops_s, floor / 2) + (seconds - floor) * slower


def _check(kind: str) -> None:
    if kind not in KINDS:
        raise CostModelError(f"no collective `{kind}`; there are {', '.join(KINDS)}")


def _outer_products(crossings: Sequence[Crossing]) -> list[int]:
    """For each level, the devices of the group along the levels outside it."""
    total = prod(c.n for c in crossings)
    return [total // (c.inner * c.n) for c in crossings]


def _level_bytes(kind: Kind, crossing: Crossing, outer: int, nbytes: ArrayLike) -> Floats:
    """What a device moves at one level, stated as a collective of that level alone."""
    sizes = np.asarray(nbytes, float)
    if kind in ("all-gather", "reduce-scatter", "broadcast"):
        return sizes / crossing.inner
    if kind == "all-to-all":
        return sizes / outer
    return sizes


def _level_s(kind: Kind, crossing: Crossing, peers: int, nbytes: Floats, rate: float) -> Floats:
    """Bandwidth term of one level, bytes ÷ rate of the busiest link."""
    n, rings = crossing.n, crossing.rings
    gathers = kind in ("all-gather", "reduce-scatter")
    if crossing.medium == "torus":
        if gathers:
            return alpha_beta.torus_gather_s(nbytes, rings, rate)
        if kind == "all-to-all":
            return alpha_beta.torus_all_to_all_s(nbytes, rings, rate)
        if kind == "broadcast":
            return alpha_beta.torus_broadcast_s(nbytes, rings, rate)
        return alpha_beta.torus_permute_s(nbytes, rings, rate)
    if crossing.medium == "direct" and (gathers or kind == "all-to-all"):
        return alpha_beta.direct_gather_s(nbytes, n, rate / peers)
    if gathers:
        return alpha_beta.switch_gather_s(nbytes, n, rate)
    if kind == "all-to-all":
        return alpha_beta.switch_all_to_all_s(nbytes, n, rate)
    return alpha_beta.switch_permute_s(nbytes, rate / peers)


def _hops(kind: Kind, crossing: Crossing) -> int:
    """Latency steps of one level: a ring's, a torus's farthest device, or one through a switch."""
    if crossing.medium == "torus":
        if kind == "collective-permute":
            return max(r.sharers if r.wraps else (r.n - 1) * r.sharers for r in crossing.rings)
        return sum(r.hops for r in crossing.rings)
    if crossing.medium == "direct" or kind == "collective-permute":
        return 1
    return crossing.n - 1
