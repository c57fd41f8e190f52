"""The collectives of one training step: kind, mesh axes, bytes, count and seconds.

Sizes are logical bytes per device, as `Machine.collective_s` takes them. Whether
any of it hides behind compute is `training_step`'s business.
"""

from dataclasses import dataclass

from cost_models.closed_forms.block import ACTIVATIONS, Block
from cost_models.closed_forms.formulas import array_bytes
from cost_models.closed_forms.training_layout import TrainingLayout
from cost_models.closed_forms.transformer import Transformer
from cost_models.machines.alpha_beta import Kind
from cost_models.machines.dtypes import itemsize
from cost_models.machines.machine import Machine

# How many of a block's two halves, attention and MLP, rematerialization runs again.
REPEATED_HALVES = {"none": 0, "minimal": 0, "mlp": 1, "full": 2}


@dataclass(frozen=True, slots=True)
class Traffic:
    """One kind of collective of a step.

    Attributes:
        kind: The collective.
        axes: Mesh axes of its groups.
        nbytes: Logical bytes per device of one collective.
        times: Collectives per step.
        seconds: Seconds of all of them.
    """

    kind: Kind
    axes: tuple[str, ...]
    nbytes: float
    times: float
    seconds: float


@dataclass(frozen=True, slots=True)
class TrainingTraffic:
    """The collectives of each kind of parallelism in one step.

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

        Recomputation repeats the forward ones, but for the last scatter. Where the
        residual stream is whole everywhere, every scatter is an all-reduce instead, and
        experts that are reached by one-hot products sum all of their rows, recomputed too.
        """
        stream, halves = self.stream_bytes, REPEATED_HALVES[self.layout.remat]
        scatters = (4 + max(0, halves - 1)) * self.blocks
        if not self.layout.sequence_parallel:
            if self.block.framework.one_hot_dispatch:
                rows = self.block.expert_rows - 1
                moe = self.model.moe_layers / self.model.layers
                scatters += moe * self.blocks * (2 * rows + halves / 2 * (rows + 1))
            return [self._priced("all-reduce", ("tensor",), stream, scatters)]
        return [
            self._priced("all-gather", ("tensor",), stream, (4 + halves) * self.blocks),
            self._priced("reduce-scatter", ("tensor",), stream, scatters),
        ]

    @property
    def stream_bytes(self) -> float:
        """The residual stream of a microbatch, whole."""
        return array_bytes((self.block.tokens, self.model.d_model), itemsize(ACTIVATIONS))

    def vocabulary(self) -> list[Traffic]:
        """Collectives of the embedding and the logits per microbatch; in a pipeline, of the last stage alone.

        Tensor parallelism splits both matrices by vocabulary: the logits' matmul needs
        the stream whole, and looked-up vectors are partial sums. A table that FSDP
        splits by width may be looked up where it lies.
        """
        times, layout = self.microbatches, self.layout
        streams = [self.stream_bytes] if layout.pipeline > 1 else [self.stream_bytes, self.vector_bytes]
        kinds: tuple[Kind, ...] = ("all-gather", "reduce-scatter") if layout.sequence_parallel else ("all-reduce",)
        found = [self._priced(kind, ("tensor",), nbytes, times) for nbytes in streams for kind in kinds]
        if self.block.framework.looks_up_in_place and layout.pipeline == 1:
            part = self.vector_bytes / layout.stream_ways
            found.append(self._priced("all-to-all", self.shard_axes, part, 2 * times))
            if self._split_update:
                found.append(self._priced("all-to-all", ("data",), part, times))
        return found

    @property
    def vector_bytes(self) -> float:
        """Bytes of an embedding's look-up for a microbatch, in the table's type."""
        return array_bytes((self.block.tokens, self.model.d_model), self.block.framework.parameter_bytes)

    @property
    def matrix(self) -> float:
        """Parameters of one embedding or output matrix, after tensor parallelism."""
        return self.model.vocab * self.model.d_model / self.layout.tensor

    @property
    def _split_update(self) -> bool:
        """Whether replicas alone split the optimizer."""
        return self.layout.shard_optimizer and not self.shard_axes

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
        One-hot products send every expert's rows, filled or not.
        """
        crossings = self.machine.crossings(("expert",))
        if not crossings:
            return []
        places = crossings[-1].n
        copies = places * (1 - (1 - 1 / places) ** self.model.active_experts)
        if self.block.framework.one_hot_dispatch:
            copies = self.block.expert_rows
        moe = self.model.moe_layers / self.model.layers
        shape = (self.block.tokens, copies, self.model.d_model)
        routed = array_bytes(shape, itemsize(ACTIVATIONS), ways=self.layout.tensor)
        again = 1 if REPEATED_HALVES[self.layout.remat] else 0
        times = (4 + 2 * again) * moe * self.blocks
        return [self._priced("all-to-all", ("expert",), routed, times)]

    def local_parameters(self) -> tuple[float, float]:
        """Parameters of one block after tensor and expert parallelism: (dense, routed experts)."""
        block, layout = self.block, self.layout
        return block.dense_parameters / layout.tensor, block.expert_parameters / layout.tensor / layout.expert

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """Axes over which FSDP shards the dense part; experts stay off their own axis."""
        return ("fsdp", "expert") if self.layout.fsdp > 1 else ()

    def fsdp(self) -> tuple[list[Traffic], list[Traffic]]:
        """Weights of a block gathered in each pass, gradients scattered; once per microbatch.

        So are the embedding, unless it is looked up where it lies, and the output
        matrix, whose forward and backward follow each other, once for both.
        """
        dense, experts = self.local_parameters()
        framework = self.block.framework
        width = framework.gathered_bytes or itemsize(self.block.dtype)
        passes = 1 if self.layout.keep_gathered else 2
        axes_of = ((dense, self.shard_axes), (experts, ("fsdp",)))
        gathers = [self._priced("all-gather", axes, p * width, passes * self.blocks) for p, axes in axes_of if p]
        scatters = [
            self._priced("reduce-scatter", axes, p * framework.scattered_bytes, self.blocks) for p, axes in axes_of if p
        ]
        one = framework.looks_up_in_place or self.model.tied or self.layout.pipeline > 1
        ends = self.matrix * (1 if one else 2)
        wide = itemsize(ACTIVATIONS)
        gathers.append(self._priced("all-gather", self.shard_axes, ends * wide, self.microbatches))
        scatters.append(self._priced("reduce-scatter", self.shard_axes, ends * wide, self.microbatches))
        return gathers, scatters

    def replica(self) -> tuple[list[Traffic], list[Traffic]]:
        """Once per step: gradients of a stage summed between replicas, and updated weights gathered.

        With a split optimizer every replica gets its part of the sums, updates it and
        gathers the new weights; otherwise it gets all of the sums.
        """
        framework, shards = self.block.framework, self.machine.group_size(self.shard_axes)
        dense, experts = (p * self.stage_blocks for p in self.local_parameters())
        copies = ("data",) if self.shard_axes else ("data", "expert")
        summed = framework.summed_bytes
        held = [(dense / shards, summed, copies), (experts / self.layout.fsdp, summed, ("data",))]
        held.append((self.matrix / shards, summed, copies))
        if framework.looks_up_in_place and self.layout.pipeline == 1:
            # XLA sums the gradient of a look-up by itself, and in the table's type.
            held.append((self.matrix / shards, max(summed, framework.parameter_bytes), copies))
        elif not self.model.tied and self.layout.pipeline == 1:
            held.append((self.matrix / shards, summed, copies))
        if not self.layout.shard_optimizer:
            return [self._priced("all-reduce", axes, p * width, 1.0) for p, width, axes in held], []
        kept = held[:-1] if framework.looks_up_in_place and self.model.tied else held
        returns = [self._priced("all-gather", axes, p * framework.returned_bytes, 1.0) for p, _, axes in kept]
        if framework.looks_up_in_place and self._split_update:
            held.pop()  # the look-up's gradient arrives by token: see `vocabulary`
        return [self._priced("reduce-scatter", axes, p * width, 1.0) for p, width, axes in held], returns

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
