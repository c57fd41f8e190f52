"""A machine: a mesh laid on hardware, which prices the work of its devices in seconds.

The price of a collective over a set of mesh axes follows from the links that its
groups cross: see `collective_law`. Local operations are rooflines: see `roofline`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cost_models.errors import CostModelError, UnknownNumberError
from cost_models.machines import alpha_beta
from cost_models.machines.alpha_beta import KINDS, Floats, Kind
from cost_models.machines.amounts import amounts
from cost_models.machines.collective_law import Law, law_of, link_bytes
from cost_models.machines.contraction_sums import Product, contraction_sums
from cost_models.machines.dtypes import itemsize, matmul_rates
from cost_models.machines.hardware_file import Chip
from cost_models.machines.placement import Crossing, Placement
from cost_models.machines.roofline import LOOP_FRACTION, SPLITS, MatmulUnit, matmul_bytes, partial_sums_bytes


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
    _laws: dict[tuple[str, tuple[Crossing, ...]], Law] = field(
        default_factory=dict[tuple[str, tuple[Crossing, ...]], Law], compare=False, repr=False
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
        """κ: how much of hideable communication hides, at most κ times the compute beside it: see `exposed_s`."""
        return self.chip.numbers["overlap_fraction"].value

    @property
    def unscattered_axes(self) -> frozenset[str]:
        """The mesh axes over all of which a sum that ends up split is all-reduced and cut; none if it is scattered.

        XLA:TPU scatters inside any part of a slice, but over all of it only on a line, on 2x2
        and on two unequal sides; on squares and in three dimensions it all-reduces, then slices
        (libtpu 0.0.51 and 0.0.52, compiled for v4, v5e, v5p and v6e, among them 2x2x2, 2x2x4, 2x4x4, 4x4x4 and 4x4x8,
        whatever mesh lies on them; no `xla_tpu_*reduce_scatter*` flag changes it). So it is without windowed einsum,
        which makes rings of what most larger matmuls leave, over the whole torus, too (docs/verification.md).
        Of several slices it is so inside each (libtpu 0.0.52, two and four slices of v5e:4x4).
        """
        sides = [d.size for d in self.placement.topology.dimensions if d.medium == "torus" and d.size > 1]
        if len(sides) < 2 or sides == [2, 2] or (len(sides) == 2 and sides[0] != sides[1]):
            return frozenset()
        return frozenset(axis for axis in self.mesh if any(c.medium == "torus" for c in self.crossings((axis,))))

    @property
    def slices(self) -> int:
        """Slices of a torus that the devices are; 1 of all else."""
        return prod(d.size for d in self.placement.topology.dimensions if self.tiled and d.medium == "network")

    @property
    def slice_axes(self) -> frozenset[str]:
        """The mesh axes that lie between the slices of a torus, and not in them."""
        return frozenset(axis for axis in self.mesh if self.tiled and self._media(axis) == {"network"})

    @property
    def partly_sliced_axes(self) -> frozenset[str]:
        """The mesh axes that lie between the slices of a torus and in them."""
        return frozenset(axis for axis in self.mesh if self.tiled and self._media(axis) >= {"network", "torus"})

    def _media(self, axis: str) -> set[str]:
        """How the links of an axis' groups join devices."""
        return {c.medium for c in self.crossings((axis,))}

    @property
    def stores_quotients(self) -> bool:
        """Whether a softmax's quotient lies in memory before several products read it; of the chip's file."""
        return self.chip.fact("stores_quotients").value

    @property
    def stores_score_gradients(self) -> bool:
        """Whether gradients of a softmax's scores lie in memory before products read them; of the chip's file."""
        return self.chip.fact("stores_score_gradients").value

    @property
    def host_bytes_per_s(self) -> float:
        """Bytes per second of one device to or from its host's memory, each way."""
        return self.chip.numbers["host_bytes_per_s"].value

    @property
    def gathers_ahead(self) -> bool:
        """Whether gathers begin long before their use, beside compute; of the chip's file."""
        return self.chip.fact("gathers_ahead").value

    @property
    def tiled(self) -> bool:
        """Whether arrays lie in memory in tiles of their last two dimensions: on TPUs."""
        return any(d.medium == "torus" for d in self.placement.topology.dimensions)

    def exposed_s(self, communication_s: ArrayLike, compute_s: ArrayLike) -> Floats:
        """The exposed part of communication that may run beside compute: h - overlap·min(h, c).

        Two linear bounds say the same: exposed ≥ h - overlap·c and exposed ≥ (1 - overlap)·h.
        The second is the price of sharing memory, multiprocessors and the scheduler's
        attention: even a short transfer does not vanish.
        """
        h, c = amounts(communication_s, "seconds of communication"), amounts(compute_s, "seconds of compute")
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
                operand of the others; of the largest device, where they are
                uneven. Any shape; 0 costs nothing.

        Returns:
            Seconds, the shape of `nbytes`.
        """
        sizes = amounts(nbytes, "bytes")
        crossings = self.crossings(axes)
        if not crossings:
            _check(kind)
            return np.zeros(sizes.shape)
        key = (kind, crossings)
        if key not in self._laws:
            _check(kind)
            self._laws[key] = law_of(kind, crossings, self.chip.links)
        return np.where(sizes > 0, self._laws[key].seconds(sizes), 0.0)

    def latency_s(self, kind: Kind, axes: Sequence[str]) -> float:
        """Seconds of the smallest such collective."""
        return float(self.collective_s(kind, axes, 1.0))

    def wire_bytes(self, kind: Kind, axes: Sequence[str], nbytes: ArrayLike) -> Floats:
        """Bytes that a device puts on the wire; `nbytes` as in `collective_s`."""
        _check(kind)
        return alpha_beta.wire_bytes(kind, self.group_size(axes), amounts(nbytes, "bytes"))

    def link_bytes(self, kind: Kind, axes: Sequence[str], nbytes: ArrayLike) -> dict[str, Floats]:
        """Bytes on the busiest link and direction of each level that the collective crosses."""
        _check(kind)
        return link_bytes(kind, self.crossings(axes), self.chip.links, amounts(nbytes, "bytes"))

    def matmul_unit(self, dtype: str) -> MatmulUnit:
        """How this device multiplies matrices of `dtype` under JAX's default precision.

        float32 runs as TF32 on GPUs and as one bfloat16 pass on TPUs.

        Raises:
            CostModelError: There is no such dtype, or the chip states no rate that serves it.
        """
        numbers = self.chip.numbers
        rates = matmul_rates(dtype)
        rate = next((rate for rate in rates if rate in numbers), None)
        if rate is None:
            raise UnknownNumberError(rates[0], self.chip.name, tuple(numbers))
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
        self,
        batch: ArrayLike,
        m: ArrayLike,
        n: ArrayLike,
        k: ArrayLike,
        dtype: str,
        result_dtype: str | None = None,
        *,
        beside_bytes: ArrayLike = 0.0,
    ) -> Floats:
        """Seconds of a local `[batch, m, k] @ [batch, k, n]` on one device.

        Launch, then the longer of the arithmetic (padded to tiles and waves, at
        the fraction of peak that large matmuls achieve) and the HBM traffic of
        operands and result. Where tiles are few, the contraction is cut into sums
        that run at once and are added afterwards, if that takes less (split-K). What fills
        no tile runs on the vector units, if they take less.

        Args:
            batch: Matmuls of this shape. All four sizes broadcast; a size of 0 costs nothing.
            m: Rows of the result.
            n: Columns of the result.
            k: Contracted size.
            dtype: Of the operands.
            result_dtype: Of the result; that of the operands if None.
            beside_bytes: HBM traffic of the same kernel besides, below 0 for what it does not read or write.
        """
        batch, m, n, k = (amounts(size, "elements") for size in (batch, m, n, k))
        unit = self.matmul_unit(dtype)
        traffic = matmul_bytes(batch, m, n, k, itemsize(dtype), itemsize(result_dtype or dtype))
        beside = np.asarray(beside_bytes, float)
        more, less = amounts(np.maximum(beside, 0.0), "bytes"), amounts(np.maximum(-beside, 0.0), "bytes")
        traffic = np.maximum(traffic + more - less, 0.0)
        traffic_s, arithmetic_s = self.hbm_s(traffic), unit.compute_s(batch, m, n, k)
        loop_flops_per_s = LOOP_FRACTION * self.chip.numbers["vector_flops_per_s"].value
        arithmetic_s = np.minimum(arithmetic_s, 2.0 * batch * m * n * k / loop_flops_per_s)
        seconds = np.maximum(arithmetic_s, traffic_s)
        for splits in SPLITS[1:]:
            split_s = np.maximum(unit.compute_s(batch, m, n, k, splits), traffic_s)
            adding_s = unit.launch_s + self.hbm_s(partial_sums_bytes(batch, m, n, splits))
            seconds = np.minimum(seconds, split_s + adding_s)
        return np.where(batch * m * n * k == 0, 0.0, unit.launch_s + seconds)

    def contraction_sums(
        self, batch: ArrayLike, m: ArrayLike, n: ArrayLike, k: ArrayLike, dtype: str, result_dtype: str
    ) -> NDArray[np.int64]:
        """How many sums XLA:GPU cuts a local matmul into; 1 where it is left whole, as on all but NVIDIA's GPUs."""
        numbers = self.chip.numbers
        product = Product(batch, m, n, k, itemsize(dtype), itemsize(result_dtype))
        capability = numbers.get("cuda_capability_count")
        if capability is None:
            return np.ones(np.broadcast_shapes(*map(np.shape, (batch, m, n, k))), np.int64)
        return contraction_sums(product, int(numbers["matmul_units_count"].value), int(capability.value))

    def matmul_flops_per_s(self, batch: ArrayLike, m: ArrayLike, n: ArrayLike, k: ArrayLike, dtype: str) -> Floats:
        """Rate that a local matmul reaches, its own FLOPs over `matmul_s`; 0 of an empty one."""
        batch, m, n, k = (amounts(size, "elements") for size in (batch, m, n, k))
        flops, seconds = np.broadcast_arrays(2.0 * batch * m * n * k, self.matmul_s(batch, m, n, k, dtype))
        return np.divide(flops, seconds, out=np.zeros_like(flops), where=seconds > 0)

    def vector_s(self, operations: ArrayLike) -> Floats:
        """Seconds of element-wise operations that read nothing from memory, at the peak rate outside matrix units."""
        return amounts(operations, "operations") / self.chip.numbers["vector_flops_per_s"].value

    def hbm_s(self, nbytes: ArrayLike) -> Floats:
        """Seconds to stream bytes through the device's memory, at the achieved fraction."""
        numbers = self.chip.numbers
        rate = numbers["hbm_bytes_per_s"].value * numbers["hbm_achieved_fraction"].value
        return amounts(nbytes, "bytes") / rate


def _check(kind: str) -> None:
    if kind not in KINDS:
        raise CostModelError(f"no collective `{kind}`; there are {', '.join(KINDS)}")
