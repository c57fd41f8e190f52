"""How a transformer's training step is spread over devices: the names of the parallelisms, with their ways."""

from dataclasses import dataclass, fields
from typing import Literal, TypeAlias, get_args

from cost_models.errors import CostModelError
from cost_models.machines.amounts import count

Remat: TypeAlias = Literal["none", "minimal", "mlp", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLayout:
    """The product of the ways is the number of devices.

    Attributes:
        data: Replicas: DP (on TPUs the slices, over DCN).
        fsdp: Ways that parameters, gradients and optimizer are sharded over data.
        expert: Ways that experts are spread; for the rest of the model more data.
        context: Ways that a sequence is split.
        tensor: Megatron tensor parallelism.
        pipeline: Pipeline stages.
        virtual_stages: Chunks of layers per stage of an interleaved schedule.
        microbatch: Sequences per microbatch of one data shard.
        remat: What backward recomputes: nothing; the flash kernel, every matmul's result
            being kept ("minimal"); the MLP, attention's operands and result being kept
            ("mlp"); or the block ("full"). The last matmul of an MLP is never
            recomputed, since backward does not need its result.
        keep_gathered: With fsdp: whether weights stay gathered from forward to
            backward (ZeRO-2, PyTorch's SHARD_GRAD_OP).
        shard_optimizer: Whether replicas split the optimizer's state (ZeRO-1).
        sequence_parallel: With tensor: whether the residual stream is split by tokens between
            blocks (Korthikanti et al. 2022), or summed to be whole everywhere.
        collective_matmul: Whether tensor-parallel exchanges are cut up to run beside their matmuls.

    Raises:
        CostModelError: Ways are no whole number from 1 on, or there is no such remat.
    """

    data: int = 1
    fsdp: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1
    pipeline: int = 1
    virtual_stages: int = 1
    microbatch: int = 1
    remat: Remat = "none"
    keep_gathered: bool = False
    shard_optimizer: bool = True
    sequence_parallel: bool = True
    collective_matmul: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type is int:
                count(getattr(self, field.name), f"a layout's {field.name}")
        if self.remat not in get_args(Remat):
            raise CostModelError(f"there is no remat={self.remat!r}; there are {', '.join(get_args(Remat))}")

    @property
    def stream_ways(self) -> int:
        """Ways that the residual stream of a microbatch is split between blocks."""
        return self.tensor if self.sequence_parallel else 1

    @property
    def devices(self) -> int:
        return self.data_shards * self.context * self.tensor * self.pipeline

    @property
    def data_shards(self) -> int:
        """Groups of devices that hold different sequences."""
        return self.data * self.fsdp * self.expert

    def microbatches(self, sequences: int) -> float:
        """Microbatches of one data shard in a global batch."""
        return sequences / (self.data_shards * self.microbatch)

    def mesh(self, *, slices_outermost: bool) -> dict[str, int]:
        """Mesh axes, outermost first: replicas over slices, or stages over nodes."""
        inner = {"fsdp": self.fsdp, "expert": self.expert, "context": self.context, "tensor": self.tensor}
        if slices_outermost:
            return {"data": self.data, "pipeline": self.pipeline, **inner}
        return {"pipeline": self.pipeline, "data": self.data, **inner}
