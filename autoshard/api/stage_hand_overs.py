"""Stage hand-overs: values of one stage on the devices of another, whichever processes have them.

Where a process has the devices of both stages, it copies from one to the other (`jax.device_put`). Else every
process that has some of them starts a program of both stages' devices, a permute of the axis of the stages: that is
what the collectives of every platform do between processes. All processes start them in one order, that of the table.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard.api.stage_devices import StageDevices
from autoshard.pipeline_parallel.own_stages.table import Work

Leaves = list[Any]
Arriving = Callable[[int, Work], tuple[Sequence[Any], Sequence[PartitionSpec]]]


@dataclass(frozen=True, kw_only=True, eq=False)
class HandOvers:
    """What goes from stage to stage, as `run.HandOn`.

    Attributes:
      devices: of the stages.
      arriving: what comes to a chunk for its forward or its backward pass: abstract values, and their layouts.
    """

    devices: StageDevices
    arriving: Arriving

    def __call__(self, source: int, target: int, work: Work, values: Leaves | None) -> Leaves | None:
        """Values behind a chunk's task on the devices of another chunk's stage.

        Args:
          source: the chunk that they come from.
          target: the chunk that they go to.
          work: forward: the state; backward: cotangents.
          values: None in a process that has no devices of the source, and of a task that failed.
        """
        devices, table = self.devices, self.devices.table
        a, b = table.stage_of(source), table.stage_of(target)
        if not (devices.is_here(a) or devices.is_here(b)):
            return None
        if a == b or not (devices.is_elsewhere(a) or devices.is_elsewhere(b)):
            return None if values is None else self._placed(b, values, self.arriving(target, work)[1])
        return self._permuted(a, b, self._hop(a, b, target, work), values)

    def _permuted(self, a: int, b: int, hop: "Hop", values: Leaves | None) -> Leaves | None:
        mine: dict[int, Leaves] = {}
        if self.devices.is_here(a):
            mine[a] = hop.zeros(a) if values is None else self._placed(a, values, hop.specs)
        if self.devices.is_here(b):
            mine[b] = hop.zeros(b)
        both = hop(mine)
        return hop.of_stage(b, both) if self.devices.is_here(b) else None

    def _placed(self, stage: int, values: Leaves, specs: Sequence[PartitionSpec]) -> Leaves:
        mesh = self.devices.stages[stage]
        return jax.device_put(values, [NamedSharding(mesh, spec) for spec in specs])

    def _hop(self, a: int, b: int, target: int, work: Work) -> "Hop":
        """The program between two stages; hand-overs of equal values have one."""
        avals, specs = self.arriving(target, work)
        key = a, b, tuple((x.shape, x.dtype) for x in avals), tuple(specs)
        if key not in self._hops:
            self._hops[key] = Hop(devices=self.devices, ends=(a, b), avals=avals, specs=specs)
        return self._hops[key]

    @cached_property
    def _hops(self) -> dict[Hashable, "Hop"]:
        return {}


@dataclass(frozen=True, kw_only=True, eq=False)
class Hop:
    """A program that hands values from one stage to another: of arrays over the devices of both.

    Along their leading dimension, the first half is the first stage's, and the second half the second one's.

    Attributes:
      devices: of the stages.
      ends: the two stages.
      avals: of the values.
      specs: their layouts on a stage.
    """

    devices: StageDevices
    ends: tuple[int, int]
    avals: Sequence[Any]
    specs: Sequence[PartitionSpec]

    def __call__(self, values: dict[int, Leaves]) -> Leaves:
        """The values of both ends behind the hop, from those that this process has."""
        whole: Leaves = []
        for i, (aval, place) in enumerate(zip(self.avals, self._places, strict=True)):
            parts = [_raised(own[i]) for own in values.values()]
            arrays = [shard.data for part in parts for shard in part.addressable_shards]
            first, *others = aval.shape or (1,)
            shape = (2 * first, *others)
            whole.append(jax.make_array_from_single_device_arrays(shape, place, arrays, dtype=aval.dtype))
        return self._program(whole)

    def of_stage(self, stage: int, both: Leaves) -> Leaves:
        """One end's part of arrays of both."""
        mesh = self.devices.stages[stage]
        own = set(mesh.devices.flat)
        found: Leaves = []
        for x, aval, spec in zip(both, self.avals, self.specs, strict=True):
            arrays = [shard.data for shard in x.addressable_shards if shard.device in own]
            place = NamedSharding(mesh, spec)
            shape = aval.shape or (1,)
            part = jax.make_array_from_single_device_arrays(shape, place, arrays, dtype=aval.dtype)
            found.append(part if aval.shape else part.reshape(()))
        return found

    def zeros(self, stage: int) -> Leaves:
        """Zeros on one end."""
        return self._zeros[self.ends.index(stage)]()

    @cached_property
    def _mesh(self) -> Mesh:
        whole = self.devices.mesh
        return Mesh(whole.devices[list(self.ends)], whole.axis_names, axis_types=whole.axis_types)

    @cached_property
    def _places(self) -> list[NamedSharding]:
        return [NamedSharding(self._mesh, spec) for spec in self._both]

    @cached_property
    def _both(self) -> list[PartitionSpec]:
        """The layouts over both ends."""
        axis = self._mesh.axis_names[0]
        found: list[PartitionSpec] = []
        for spec in self.specs:
            first, *others = tuple(spec) or (None,)
            inner = (first,) if isinstance(first, str) else tuple(first or ())
            found.append(PartitionSpec((axis, *inner), *others))
        return found

    @cached_property
    def _program(self) -> Any:
        axis = self._mesh.axis_names[0]

        def hop(values: Leaves) -> Leaves:
            return [jax.lax.ppermute(x, axis, [(0, 1)]) for x in values]

        specs = (self._both,)
        return jax.jit(jax.shard_map(hop, mesh=self._mesh, in_specs=specs, out_specs=self._both))

    @cached_property
    def _zeros(self) -> list[Any]:
        def zeros() -> Leaves:
            return [jnp.zeros(aval.shape, aval.dtype) for aval in self.avals]

        meshes = [self.devices.stages[stage] for stage in self.ends]
        return [jax.jit(zeros, out_shardings=[NamedSharding(mesh, spec) for spec in self.specs]) for mesh in meshes]


def _raised(x: Any) -> Any:
    """A value with a dimension to split over stages."""
    return x if np.ndim(x) else x.reshape((1,))
