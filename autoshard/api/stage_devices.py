"""Stage devices: which devices the stages have, and which processes they are of."""

from dataclasses import dataclass
from functools import cached_property

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard.pipeline_parallel.own_stages.table import Table


@dataclass(frozen=True, kw_only=True, eq=False)
class StageDevices:
    """The devices of all stages.

    Attributes:
      mesh: all devices, the stages first.
      table: what runs where.
    """

    mesh: Mesh
    table: Table

    @cached_property
    def stages(self) -> list[Mesh]:
        """The devices of every stage."""
        names, devices = self.mesh.axis_names[1:], self.mesh.devices
        return [Mesh(devices[s], names, axis_types=self.mesh.axis_types[1:]) for s in range(self.table.stages)]

    @cached_property
    def here(self) -> list[int]:
        """The stages of which this process has devices."""
        return [stage for stage in range(self.table.stages) if self.is_here(stage)]

    def is_here(self, stage: int) -> bool:
        """Whether this process has devices of a stage."""
        return jax.process_index() in self._processes[stage]

    def is_elsewhere(self, stage: int) -> bool:
        """Whether other processes have devices of a stage."""
        return self._processes[stage] != {jax.process_index()}

    def on_stage(self, chunk: int, spec: PartitionSpec) -> NamedSharding:
        """A layout on the devices of a chunk's stage."""
        return NamedSharding(self.stages[self.table.stage_of(chunk)], spec)

    def at_home(self, spec: PartitionSpec) -> NamedSharding:
        """A layout on all devices."""
        return NamedSharding(self.mesh, spec)

    @cached_property
    def _processes(self) -> list[set[int]]:
        return [{device.process_index for device in mesh.devices.flat} for mesh in self.stages]
