"""Stage hand-overs: values of one stage on the devices of another, whichever processes have them.

Where a process has the devices of both stages, it copies from one to the other (`jax.device_put`). Else every
process that has some of them starts a program of both stages' devices, a permute of the axis of the stages: that is
what the collectives of every platform do between processes. All processes start them in one order, that of the table.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard.api.stage_homes import Homes
from autoshard.api.stage_plans import COTANGENTS, STATE
from autoshard.pipeline_parallel.own_stages.table import Work

Leaves = list[Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class HandOvers:
    """What goes from stage to stage, as `run.HandOn`.

    Attributes:
      homes: the stages' devices, and the plans of the chunks.
    """

    homes: Homes

    def __call__(self, source: int, target: int, work: Work, values: Leaves | None) -> Leaves | None:
        """Values behind a chunk's task on the devices of another chunk's stage.

        Args:
          source: the chunk that they come from.
          target: the chunk that they go to.
          work: forward: the state; backward: cotangents.
          values: None in a process that has no devices of the source, and of a task that failed.
        """
        homes, table = self.homes, self.homes.table
        a, b = table.stage_of(source), table.stage_of(target)
        if not (homes.is_here(a) or homes.is_here(b)):
            return None
        argument = STATE if work is Work.FORWARD else COTANGENTS
        specs = homes.plans[target].specs(argument)
        if a == b or not (homes.is_elsewhere(a) or homes.is_elsewhere(b)):
            return None if values is None else self._placed(b, values, specs)
        return self._permuted(a, b, argument, target, values)

    def _permuted(self, a: int, b: int, argument: int, target: int, values: Leaves | None) -> Leaves | None:
        homes = self.homes
        made = self._hop(a, b, argument, target)
        mine: dict[int, Leaves] = {}
        if homes.is_here(a):
            mine[a] = made.zeros(a) if values is None else self._placed(a, values, made.specs)
        if homes.is_here(b):
            mine[b] = made.zeros(b)
        both = made(mine)
        return made.of_stage(b, both) if homes.is_here(b) else None

    def _placed(self, stage: int, values: Leaves, specs: Sequence[PartitionSpec]) -> Leaves:
        mesh = self.homes.stages[stage]
        return jax.device_put(values, [NamedSharding(mesh, spec) for spec in specs])

    def _hop(self, a: int, b: int, argument: int, target: int) -> "Hop":
        plan = self.homes.plans[target]
        key = a, b, argument, id(plan)
        if key not in self._hops:
            traced = plan.whole.traced
            avals = [x for x, at in zip(traced.in_avals, traced.argument_of, strict=True) if at == argument]
            self._hops[key] = Hop(homes=self.homes, ends=(a, b), avals=avals, specs=plan.specs(argument))
        return self._hops[key]

    @cached_property
    def _hops(self) -> dict[tuple[int, int, int, int], "Hop"]:
        return {}


@dataclass(frozen=True, kw_only=True, eq=False)
class Hop:
    """A program that hands values from one stage to another: of arrays over the devices of both.

    Along their leading dimension, the first half is the first stage's, and the second half the second one's.

    Attributes:
      homes: the stages' devices.
      ends: the two stages.
      avals: of the values.
      specs: their layouts on a stage.
    """

    homes: Homes
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
        mesh = self.homes.stages[stage]
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
        whole = self.homes.mesh
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

        meshes = [self.homes.stages[stage] for stage in self.ends]
        return [jax.jit(zeros, out_shardings=[NamedSharding(mesh, spec) for spec in self.specs]) for mesh in meshes]


def _raised(x: Any) -> Any:
    """A value with a dimension to split over stages."""
    return x if np.ndim(x) else x.reshape((1,))
