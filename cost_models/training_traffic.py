"""The collectives of one training step: what, over which mesh axes, how large, how often, how long.

Sizes are logical bytes per device, as `Machine.collective_s` takes them. Whether
any of it hides behind compute is `training_step`'s business.
"""

from dataclasses import dataclass

from cost_models.alpha_beta import Kind
from cost_models.block import ACTIVATIONS, Block
from cost_models.closed_forms import array_bytes
from cost_models.dtypes import itemsize
from cost_models.machine import Machine
from cost_models.training_layout import TrainingLayout
from cost_models.transformer import Transformer

GRADIENT_BYTES = 2.0  # per parameter on the wire between FSDP shards, as the bf16 matmul leaves them
REPLICA_GRADIENT_BYTES = 4.0  # between replicas, summed in float32 (Megatron-LM's default)

# How many of a block's two halves, attention and MLP, rematerialization runs again.
REPEATED_HALVES = {"none": 0, "minimal": 0, "mlp": 1, "full": 2}


@dataclass(frozen=True, slots=True)
class Traffic:
    """One kind of collective of a step.

    Attributes:
        kind: The collective.
        axes: Mesh axes of its groups.
        nbytes: Logical bytes per device of one.
        times: How many a step has.
        seconds: Of all of them.
    """

    kind: Kind
    axes: tuple[str, ...]
    nbytes: float
    times: float
    seconds: float


@dataclass(frozen=True, slots=True)
class TrainingTraffic:
    """What each kind of parallelism exchanges in one step.

    Attributes:
        block: The average block.
        microbatches: Of one data shard.
    """

    block: Block
    microbatches: float

    @property
    def machine(self) -> Machine:
        return self.block.machine

    @property
    def layout(self) -> TrainingLayout:
        return self.block.layout

    @property
    def model(self) -> Transformer:
        return self.block.model

    @property
    def stage_blocks(self) -> float:
        """Blocks of one stage."""
        return self.model.layers / self.layout.pipeline

    @property
    def blocks(self) -> float:
        """How often a block runs forward on a device: blocks of a stage × microbatches."""
        return self.stage_blocks * self.microbatches

    def _priced(self, kind: Kind, axes: tuple[str, ...], nbytes: float, times: float) -> Traffic:
        each_s = float(self.machine.collective_s(kind, axes, nbytes))
        return Traffic(kind, axes, nbytes, times if self.machine.group_size(axes) > 1 else 0.0, each_s * times)

    def tensor(self) -> list[Traffic]:
        """Per block and microbatch: two gathers and two scatters forward, as many backward.

        Recomputation repeats the forward ones, but for the last scatter.
        """
        stream = array_bytes((self.block.tokens, self.model.d_model), itemsize(ACTIVATIONS))
        again = REPEATED_HALVES[self.layout.remat] / 2
        return [
            self._priced("all-gather", ("tensor",), stream, (4 + 2 * again) * self.blocks),
            self._priced("reduce-scatter", ("tensor",), stream, (4 + again) * self.blocks),
        ]

    def context(self) -> list[Traffic]:
        """Keys and values of the whole sequence: gathered forward and again backward, their gradients scattered."""
        heads = 2 * max(1.0, self.model.kv_heads / self.layout.tensor) * self.model.head_dim
        kv = self.layout.microbatch * self.block.sequence * heads * itemsize(ACTIVATIONS)
        return [
            self._priced("all-gather", ("context",), kv, 2 * self.blocks),
            self._priced("reduce-scatter", ("context",), kv, self.blocks),
        ]

    def expert(self) -> list[Traffic]:
        """Dispatch and combine, forward and backward, in blocks with experts.

        A token crosses the slowest links once per place that holds one of its k experts,
        not once per expert: M·(1 - (1 - 1/M)^k) places of M. Source: scaling book gpus.md:451.
        """
        crossings = self.machine.crossings(("expert",))
        if not crossings:
            return []
        places = crossings[-1].n
        copies = places * (1 - (1 - 1 / places) ** self.model.active_experts)
        moe = self.model.moe_layers / self.model.layers
        shape = (self.block.tokens, copies, self.model.d_model)
        routed = array_bytes(shape, itemsize(ACTIVATIONS), ways=self.layout.tensor)
        again = 1 if REPEATED_HALVES[self.layout.remat] else 0
        times = (4 + 2 * again) * moe * self.blocks
        return [self._priced("all-to-all", ("expert",), routed, times)]

    def local_parameters(self) -> tuple[float, float]:
        """Of one block, after tensor and expert parallelism: dense, routed experts."""
        block, layout = self.block, self.layout
        return block.dense_parameters / layout.tensor, block.expert_parameters / layout.tensor / layout.expert

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """Axes over which FSDP shards the dense part; experts stay off their own axis."""
        return ("fsdp", "expert") if self.layout.fsdp > 1 else ()

    def fsdp(self) -> tuple[list[Traffic], list[Traffic]]:
        """Weights of a block gathered in each pass, gradients scattered; once per microbatch."""
        dense, experts = self.local_parameters()
        width = itemsize(self.block.dtype)
        passes = 1 if self.layout.keep_gathered else 2
        axes_of = ((dense, self.shard_axes), (experts, ("fsdp",)))
        gathers = [self._priced("all-gather", axes, p * width, passes * self.blocks) for p, axes in axes_of if p]
        scatters = [self._priced("reduce-scatter", axes, p * GRADIENT_BYTES, self.blocks) for p, axes in axes_of if p]
        return gathers, scatters

    def replica(self) -> tuple[list[Traffic], list[Traffic]]:
        """Once per step: gradients of a stage summed between replicas, and what is gathered back.

        With a split optimizer every replica gets its part of the sums, updates it and
        gathers the new weights, in the matmuls' type; otherwise it gets all of the sums.
        """
        layers = self.stage_blocks
        dense, experts = (p * layers for p in self.local_parameters())
        shards = self.machine.group_size(self.shard_axes)
        copies = ("data",) if self.shard_axes else ("data", "expert")
        held = ((dense / shards, copies), (experts / self.layout.fsdp, ("data",)))
        if not self.layout.shard_optimizer:
            return [self._priced("all-reduce", axes, p * REPLICA_GRADIENT_BYTES, 1.0) for p, axes in held], []
        weight_bytes = itemsize(ACTIVATIONS)
        return (
            [self._priced("reduce-scatter", axes, p * REPLICA_GRADIENT_BYTES, 1.0) for p, axes in held],
            [self._priced("all-gather", axes, p * weight_bytes, 1.0) for p, axes in held],
        )

    def stage(self) -> list[Traffic]:
        """Activations to the next stage and their gradients back, per microbatch and chunk."""
        shape = (self.block.tokens, self.model.d_model)
        stream = array_bytes(shape, itemsize(ACTIVATIONS), ways=self.layout.tensor)
        times = 2 * self.microbatches * self.layout.virtual_stages
        return [self._priced("collective-permute", ("pipeline",), stream, times)]

    def held_parameters(self) -> tuple[float, float]:
        """Parameters that a device of the last stage holds: dense with the embedding, routed experts."""
        dense, experts = self.local_parameters()
        layers = self.stage_blocks
        embedding = self.model.embedding_parameters / self.layout.tensor / min(self.layout.pipeline, 2)
        shards = self.machine.group_size(self.shard_axes)
        return (dense * layers + embedding) / shards, experts * layers / self.layout.fsdp

    def updated_parameters(self) -> float:
        """Those of them whose optimizer state it keeps."""
        dense, experts = self.held_parameters()
        if not self.layout.shard_optimizer:
            return dense + experts
        copies = self.layout.data * (1 if self.shard_axes else self.layout.expert)
        return dense / copies + experts / self.layout.data
