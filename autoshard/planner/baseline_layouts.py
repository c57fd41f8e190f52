"""Standard: the layouts that people start with, for any program, from its shapes alone.

    data parallel   the batch split over all devices, everything else whole
    fully sharded   besides, every donated leaf split over all devices along its longest
                    dimension that divides (FSDP, ZeRO-3)

Both leave the layouts of all other values to the best plan that keeps these.
"""

from collections.abc import Callable, Iterator

from jax.sharding import PartitionSpec

from autoshard.ir.mesh import MeshAxes
from autoshard.planner.planning_result import PlanningResult
from autoshard.planner.record import Leaf

Specs = tuple[PartitionSpec, ...]


def layouts(planned: PlanningResult) -> Iterator[tuple[str, Specs]]:
    """Each standard layout's name and a spec per input leaf."""
    record = planned.record
    batch = _split(0, record.mesh)

    def specs(state: Callable[[Leaf], PartitionSpec]) -> Specs:
        return tuple(
            state(leaf)
            if i in record.donated
            else batch
            if leaf.shape and leaf.shape[0] % record.mesh.size == 0
            else PartitionSpec()
            for i, leaf in enumerate(record.inputs)
        )

    yield "data parallel", specs(lambda leaf: PartitionSpec())
    yield "fully sharded", specs(lambda leaf: _longest(leaf, record.mesh))


def _longest(leaf: Leaf, mesh: MeshAxes) -> PartitionSpec:
    divide = [d for d, size in enumerate(leaf.shape) if size % mesh.size == 0]
    return _split(max(divide, key=lambda d: leaf.shape[d]), mesh) if divide else PartitionSpec()


def _split(dim: int, mesh: MeshAxes) -> PartitionSpec:
    return PartitionSpec(*(None,) * dim, mesh.names)
