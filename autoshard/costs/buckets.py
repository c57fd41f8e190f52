"""Buckets: what compilers merge, so that many small collectives pay one latency.

Collectives that are off the critical path (weights' gathers, gradients' reductions) are combined, if they are of one
kind and over the same axes, up to so many bytes: below a bucket they are priced at the bucket's rate, plus what each
costs by itself. Buckets are taken for full: how much a plan puts into one is known only once there is a plan
(`problem.filled_buckets`). All-to-alls and permutes are never combined.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autoshard.costs.prices import CollectiveMachine

# XLA:GPU's default combine threshold
# (`xla_gpu_*_combine_threshold_bytes`, openxla/xla debug_options_flags.cc).
BUCKET_BYTES = 30 * 2**20
# In a trip of a loop fewer bytes are merged. With this size, the prices of a trip's collectives are within 5 % (root
# mean square) of those that XLA:GPU emits, and 2 % too low on average, in 54 trips of four models on 8 and 16 H100
# (those of docs/comparing.md); with 30 MB they are 7 % too low.
TRIP_BYTES = 16 * 2**20
COMBINED = frozenset({"all-gather", "all-reduce", "reduce-scatter"})
# What one member of a bucket adds: the kernel that copies it in and out (kernel launch
# overhead of 1 µs in XLA's own model, openxla/xla sol_gpu_cost_model.cc). To an all-reduce it
# adds as much as to the reduce-scatter and the all-gather that do the same: else small
# parameters would be kept whole for that alone.
MEMBER_S = 1e-6

Like = tuple[str, tuple[str, ...]]  # what is merged with its like: a collective's kind and axes


@dataclass(frozen=True, slots=True)
class Filled:
    """A bucket that is not always full.

    of: some kinds and axes, in order, and the bytes that there are of them to merge.
    rest: the bytes up to which others are merged.
    """

    of: tuple[tuple[Like, int], ...]
    rest: int

    def nbytes(self, kind: str, axes: tuple[str, ...]) -> int:
        """The bytes up to which collectives of a kind over some axes are merged."""
        return dict(self.of).get((kind, axes), self.rest)


Bucket = int | Filled  # bytes, the same for all kinds and axes, or not; 0: nothing is merged


def collective_s(
    machine: CollectiveMachine, kind: str, axes: tuple[str, ...], nbytes: ArrayLike, *, bucket: Bucket
) -> NDArray[np.float64]:
    """Seconds of collectives, alone (`bucket` 0) or as their share of a bucket of so many bytes."""
    sizes = np.asarray(nbytes, np.float64)
    if isinstance(bucket, Filled):
        bucket = bucket.nbytes(kind, axes)
    if not bucket or kind not in COMBINED:
        return np.asarray(machine.collective_s(kind, axes, sizes))
    whole = np.maximum(sizes, bucket)
    share = np.asarray(machine.collective_s(kind, axes, whole)) * (sizes / whole)
    member_s = MEMBER_S * (2 if kind == "all-reduce" else 1)
    return share + np.where((sizes > 0) & (share > 0), member_s, 0.0)
