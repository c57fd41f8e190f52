"""Partitioner faults: programs that XLA computes wrongly when they are split, and autoshard's remedies.

One table, `FAULTS`. A row gives the primitives with the fault, the wrong behaviour, the
backends whose compiled programs show it, and the JAX versions in which it was seen. Its
remedy: the split is *not offered* (the primitive's rule keeps the dimension whole), or the
equation is *emitted otherwise* (`fault_remedies` binds it so that the fault cannot show). Rules and
`fault_remedies` ask the row itself whether a primitive has the fault, so that no remedy exists without its row.

Every row is reproduced in plain JAX, without autoshard, by the function of its name in
`tests/faults_reproduced.py`; `tests/rules/test_rules_faults.py` fails as soon as a JAX version
that `seen` names computes it rightly, or one that it does not name computes it wrongly.
"""

from dataclasses import dataclass
from enum import StrEnum

INDEXED = ("gather", "scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub")


class Remedy(StrEnum):
    """How autoshard avoids a fault."""

    NOT_OFFERED = "not offered"  # a rule keeps the dimension whole
    EMITTED_OTHERWISE = "emitted otherwise"  # `fault_remedies` binds the equation in another way, or `opaque` on parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One row: XLA is wrong about these primitives in the way that `what` says."""

    name: str
    primitives: frozenset[str]
    what: str
    backends: tuple[str, ...]  # whose compiled programs show it: "cpu", "gpu", "tpu"
    seen: tuple[str, ...]  # JAX versions
    remedy: Remedy

    def of(self, primitive: str) -> bool:
        """Whether the fault is of a primitive."""
        return primitive in self.primitives


DROPPED_UPDATE = Fault(
    name="dropped update",
    primitives=frozenset({"dynamic_update_slice"}),
    what="a row written at a start that is out of range along a split dimension is dropped: the shards compare "
    "the start with their offsets before it is clamped",
    backends=("cpu", "gpu", "tpu"),
    seen=("0.10.2", "0.12.0.1"),
    remedy=Remedy.EMITTED_OTHERWISE,
)
MERGED_SLICES = Fault(
    name="merged slices",
    primitives=frozenset({"dynamic_slice", "gather"}),
    what="a slice of a slice is read as one whose start is the sum of both, though each start was to be clamped on "
    "its own: a window with a start out of range is wrong as soon as its result is split",
    backends=("cpu",),
    seen=("0.10.2",),
    remedy=Remedy.EMITTED_OTHERWISE,
)
MERGED_SCATTER = Fault(
    name="merged scatter",
    primitives=frozenset(INDEXED) - {"gather"},
    what="a scatter of one row reads, on shards that do not hold the row, a slice of the slice that makes their "
    "shard, merges both (see `merged slices`) and writes the wrong row back",
    backends=("cpu",),
    seen=("0.10.2",),
    remedy=Remedy.EMITTED_OTHERWISE,
)
NARROW_INDICES = Fault(
    name="narrow indices",
    primitives=frozenset({*INDEXED, "dynamic_slice", "dynamic_update_slice"}),
    what="offsets of shards are counted in the indices' type: in int8 they overflow and rows get lost; a gather with "
    "indices of less than 32 bits along a split dimension ends the process (`Unsupported indices type`)",
    backends=("cpu",),
    seen=("0.10.2", "0.12.0.1"),
    remedy=Remedy.EMITTED_OTHERWISE,
)
REPEATED_INITIAL = Fault(
    name="repeated initial value",
    primitives=frozenset({"reduce"}),
    what="every part of a split dimension, and every part that an all-to-all brings together, is reduced from the "
    "initial value of the reduction, which counts once per part (`lax.reduce` from three instead of nought): the "
    "reduced dimensions are whole, and what is reduced stands behind a barrier",
    backends=("cpu",),
    seen=("0.10.2", "0.12.0.1"),
    remedy=Remedy.EMITTED_OTHERWISE,
)
LOST_NAN = Fault(
    name="lost nan",
    primitives=frozenset({"reduce_max", "reduce_min", "scatter-max", "scatter-min"}),
    what="the all-reduce of partial maxima (or minima) takes the larger number where one of them is NaN, and so do the "
    "loops of large maxima on one device: they are taken of integers in the same order",
    backends=("cpu",),
    seen=("0.10.2", "0.12.0.1"),
    remedy=Remedy.EMITTED_OTHERWISE,
)

CONVOLUTION_IN_GROUPS = Fault(
    name="convolution in groups",
    primitives=frozenset({"conv_general_dilated"}),
    what="splits of feature groups and batch groups are misread, by the order of the dimensions and where as many "
    "parts are made as there are groups: depthwise from NCHW to NHWC, gradients of depthwise kernels by a split batch",
    backends=("cpu",),
    seen=("0.10.2", "0.12.0.1"),
    remedy=Remedy.EMITTED_OTHERWISE,
)
DILATED_TAP = Fault(
    name="dilated tap",
    primitives=frozenset({"conv_general_dilated"}),
    what="a spatial dimension that one tap is moved over is split rightly together with the output features, unless "
    "the tap is dilated, which means nothing; as gradient of a stride to one place, it ends the process "
    "(convolution_handler.cc, `Compatible(shard_shape, sharded_conv->shape())`): strides and dilations of one place "
    "are emitted as 1",
    backends=("cpu",),
    seen=("0.10.2", "0.12.0.1"),
    remedy=Remedy.NOT_OFFERED,
)
SPLIT_TRANSFORM = Fault(
    name="split transform",
    primitives=frozenset({"fft"}),
    what="the batch is gathered; a transformed dimension that is split into parts of few elements ends the process "
    "(fft_handler.cc, `size_per_partition % num_partitions == 0`), and what is moved before may lie in an order of "
    "memory that XLA:CPU refuses (fft_thunk.cc, `IsMonotonicWithDim0Major`)",
    backends=("cpu",),
    seen=("0.10.2",),
    remedy=Remedy.EMITTED_OTHERWISE,
)
HIGH_PRODUCT = Fault(
    name="high product",
    primitives=frozenset({"mulhi"}),
    what="a program for several devices is refused wherever it is (`Unable to convert MHLO to StableHLO`)",
    backends=("cpu",),
    seen=("0.10.2", "0.12.0.1"),
    remedy=Remedy.EMITTED_OTHERWISE,
)

BITS = Fault(
    name="reduced bits",
    primitives=frozenset({"reduce_xor", "reduce_or", "reduce_and"}),
    what="there is no all-reduce by exclusive or, nor one of integers by and, or by or "
    "(`Unsupported reduction computation`)",
    backends=("cpu",),
    seen=("0.10.2", "0.12.0.1"),
    remedy=Remedy.NOT_OFFERED,
)
COMPLEX_ORDER = Fault(
    name="complex order",
    primitives=frozenset({"reduce_max", "reduce_min"}),
    what="there is no all-reduce of complex maxima or minima (`Unsupported reduction computation`)",
    backends=("cpu",),
    seen=("0.10.2", "0.12.0.1"),
    remedy=Remedy.NOT_OFFERED,
)

FAULTS: tuple[Fault, ...] = (
    *(DROPPED_UPDATE, MERGED_SLICES, MERGED_SCATTER, NARROW_INDICES, REPEATED_INITIAL, LOST_NAN),
    *(CONVOLUTION_IN_GROUPS, DILATED_TAP, SPLIT_TRANSFORM, HIGH_PRODUCT, BITS, COMPLEX_ORDER),
)
