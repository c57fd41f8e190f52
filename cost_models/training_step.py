"""The time of one training step of a transformer under a layout, with a reason for every second.

What the offline reports quote for scales that nobody compiles. Collectives and
matmuls are priced by the same `Machine` that the planner asks::

    step = microbatches × blocks of a stage × (forward + recompute + backward
           + exchanges that compute waits for + gathers that did not hide)
         + pipeline bubble + gradient sums that did not hide + optimizer
"""

from dataclasses import dataclass

from cost_models import closed_forms
from cost_models.alpha_beta import Kind
from cost_models.block import ACTIVATIONS, FLASH_BACKWARD, Block
from cost_models.dtypes import itemsize
from cost_models.errors import MeshFitError
from cost_models.machine import Machine
from cost_models.model import Hardware
from cost_models.operations import elementwise_s, lookup_s, optimizer_s
from cost_models.training_layout import TrainingLayout
from cost_models.transformer import Transformer

GRADIENT_BYTES = 2.0  # per parameter on the wire between FSDP shards, as the bf16 matmul leaves them
REPLICA_GRADIENT_BYTES = 4.0  # between replicas, summed in float32 (Megatron-LM's default)


@dataclass(frozen=True, slots=True)
class Part:
    """Seconds of a step, and why they are spent."""

    name: str
    seconds: float
    reason: str


@dataclass(frozen=True, slots=True)
class Traffic:
    """One kind of collective of a step: logical bytes per device, how often, and seconds of all."""

    kind: Kind
    axes: tuple[str, ...]
    nbytes: float
    times: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """A predicted step.

    Attributes:
        parts: Where the time goes; they add up to `seconds`.
        traffic: Every collective, hidden or not.
        memory_bytes: Peak per device, by what holds it.
        flops: Executed by one device, recomputation included.
        model_flops: Of the whole step, without recomputation, causal half of attention.
        devices: Number of them.
        peak_flops_per_s: Of one device.
    """

    parts: tuple[Part, ...]
    traffic: tuple[Traffic, ...]
    memory_bytes: dict[str, float]
    flops: float
    model_flops: float
    devices: int
    peak_flops_per_s: float

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.parts)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization."""
        rate = self.model_flops / self.seconds / self.devices
        return closed_forms.model_flops_utilization(rate, self.peak_flops_per_s)

    @property
    def peak_bytes(self) -> float:
        """Memory that a device needs."""
        return sum(self.memory_bytes.values())

    def __str__(self) -> str:
        rows = [f"{p.seconds:12.6f} s  {p.name:<24} {p.reason}" for p in self.parts if p.seconds > 0]
        return "\n".join([*rows, f"{self.seconds:12.6f} s  step, {100 * self.mfu:.1f}% MFU"])


def step_time(
    model: Transformer,
    layout: TrainingLayout,
    hardware: Hardware,
    *,
    sequences: int,
    sequence: int,
    dtype: str = "bfloat16",
) -> StepTime:
    """Predict one training step.

    Args:
        model: The transformer.
        layout: How it is spread; its devices must be those of `hardware`.
        hardware: The devices and links.
        sequences: Global batch.
        sequence: Tokens per sequence.
        dtype: Of the matmuls' operands: `"bfloat16"`, `"float8_e4m3fn"`, `"int8"`.

    Raises:
        MeshFitError: The layout has another number of devices than the hardware, or
            the batch is smaller than one microbatch for every data shard.
    """
    tori = any(d.medium == "torus" for d in hardware.topology.dimensions)
    mesh = layout.mesh(slices_outermost=tori)
    machine = hardware.place(mesh)
    microbatches = layout.microbatches(sequences)
    if microbatches < 1:
        raise MeshFitError(
            f"{sequences} sequences are less than one microbatch of {layout.microbatch} for each of "
            f"{layout.data_shards} data shards"
        )
    block = Block(model=model, layout=layout, machine=machine, sequence=sequence, dtype=dtype)
    return _Step(block, hardware, microbatches, sequences).total()


@dataclass(slots=True)
class _Step:
    """Assembles the parts of one step."""

    block: Block
    hardware: Hardware
    microbatches: float
    sequences: int

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
    def blocks(self) -> float:
        """Blocks of a stage × microbatches: how often a block runs forward on a device."""
        return self.model.layers / self.layout.pipeline * self.microbatches

    def total(self) -> StepTime:
        layout, block = self.layout, self.block
        forward_s, recompute_s, backward_s = self.compute()
        tensor = self.tensor_traffic()
        sequence, experts = self.context_traffic(), self.expert_traffic()
        gathers, scatters = self.fsdp_traffic()
        exchange_s = _per_block(tensor, self.blocks)
        beside_s = block.matmul_s() * (3 if layout.remat != "full" else 4)
        if layout.collective_matmul:
            exchange_s = float(self.machine.exposed_s(exchange_s, beside_s))
        # Gathers hide behind the pass that runs while they arrive; half of them belong to each.
        gather_s, scatter_s = _per_block(gathers, self.blocks), _per_block(scatters, self.blocks)
        passes = 1 if layout.keep_gathered else 2
        fsdp_s = float(
            self.machine.exposed_s(gather_s / passes, forward_s)
            + self.machine.exposed_s(gather_s * (1 - 1 / passes) + scatter_s, backward_s + recompute_s)
        )
        sums, returns = self.replica_traffic()
        stage_blocks = self.model.layers / layout.pipeline
        replica_s = float(
            self.machine.exposed_s(sum(t.seconds for t in sums), (backward_s + recompute_s) * stage_blocks)
            + self.machine.exposed_s(sum(t.seconds for t in returns), forward_s * stage_blocks)
        )
        stages = self.stage_traffic()
        logits_s, embedding_s = self.logits_s(), self.embedding_s()
        n = self.blocks
        waits = {
            "tensor-parallel": (exchange_s * n, "all-gathers and reduce-scatters of the residual stream"),
            "context-parallel": (sum(t.seconds for t in sequence), "keys and values of the whole sequence"),
            "expert-parallel": (sum(t.seconds for t in experts), "tokens to their experts and back"),
            "fsdp": (fsdp_s * n, "weight gathers and gradient scatters that compute did not hide"),
            "stage hand-over": (
                float(self.machine.exposed_s(sum(t.seconds for t in stages), (forward_s + backward_s) * n)),
                "activations between pipeline stages",
            ),
        }
        work = {
            "matmuls": (block.matmul_s() * 3 * n, "forward and backward, padded to tiles, at the achieved rate"),
            "attention": (block.score_s() * (1 + FLASH_BACKWARD) * n, "flash kernels, causal half"),
            "element-wise": (block.stream_s() * 3 * n, "norms, residuals and activations, memory-bound"),
            "recompute": (recompute_s * n, f"rematerialization: {layout.remat}"),
            "logits": (logits_s * self.microbatches, "vocabulary matmul and softmax, on the last stage"),
            "embedding": (embedding_s * self.microbatches, "look-up and its scatter"),
        }
        busy_s = sum(seconds for seconds, _ in (*work.values(), *waits.values()))
        bubble = closed_forms.pipeline_bubble(layout.pipeline, self.microbatches, repeats=layout.virtual_stages)
        parts = [
            *(Part(name, seconds, reason) for name, (seconds, reason) in (work | waits).items()),
            Part("pipeline bubble", busy_s * bubble / (1 - bubble), "stages that wait to fill and to drain"),
            Part("gradient sums", replica_s, "between replicas, what one microbatch did not hide"),
            Part("optimizer", self.optimizer_s(), "memory-bound update of the local parameters"),
        ]
        traffic = (*tensor, *sequence, *experts, *gathers, *scatters, *stages, *sums, *returns)
        return StepTime(
            parts=tuple(parts),
            traffic=tuple(t for t in traffic if t.seconds > 0),
            memory_bytes=self.memory(),
            flops=self.flops(),
            model_flops=self.sequences * block.sequence * self.model.train_flops(block.sequence),
            devices=layout.devices,
            peak_flops_per_s=self.machine.peak_flops_per_s(block.dtype),
        )

    def compute(self) -> tuple[float, float, float]:
        """Seconds of one block: forward, recomputation, backward."""
        block = self.block
        matmul_s, score_s, stream_s = block.matmul_s(), block.score_s(), block.stream_s()
        recompute_s = {
            "none": 0.0,
            "minimal": score_s,
            "mlp": block.matmul_s(recomputed=True) + stream_s,
            "full": block.matmul_s(recomputed=True) + score_s + stream_s,
        }[self.layout.remat]
        return (
            matmul_s + score_s + stream_s,
            recompute_s,
            2 * matmul_s + FLASH_BACKWARD * score_s + 2 * stream_s,
        )

    def flops(self) -> float:
        """Executed by one device of the last stage."""
        block = self.block
        matmul, score = block.matmul_flops(), block.score_flops()
        again = {
            "none": 0.0,
            "minimal": score,
            "mlp": block.matmul_flops(recomputed=True),
            "full": block.matmul_flops(recomputed=True) + score,
        }[self.layout.remat]
        logits = 6.0 * block.tokens * self.model.d_model * self.model.vocab / self.layout.tensor
        return self.blocks * (3 * matmul + 3.0 * score + again) + self.microbatches * logits

    def priced(self, kind: Kind, axes: tuple[str, ...], nbytes: float, times: float) -> Traffic:
        each_s = float(self.machine.collective_s(kind, axes, nbytes))
        return Traffic(kind, axes, nbytes, times if self.machine.group_size(axes) > 1 else 0.0, each_s * times)

    def tensor_traffic(self) -> list[Traffic]:
        """Per block and microbatch: two gathers and two scatters forward, as many backward.

        Recomputation repeats the forward ones, but for the last scatter.
        """
        stream = closed_forms.array_bytes((self.block.tokens, self.model.d_model), itemsize(ACTIVATIONS))
        again = {"none": 0.0, "minimal": 0.0, "mlp": 0.5, "full": 1.0}[self.layout.remat]
        return [
            self.priced("all-gather", ("tensor",), stream, (4 + 2 * again) * self.blocks),
            self.priced("reduce-scatter", ("tensor",), stream, (4 + again) * self.blocks),
        ]

    def context_traffic(self) -> list[Traffic]:
        """Keys and values of the whole sequence: gathered forward and again backward, their gradients scattered."""
        heads = 2 * max(1.0, self.model.kv_heads / self.layout.tensor) * self.model.head_dim
        kv = self.layout.microbatch * self.block.sequence * heads * itemsize(ACTIVATIONS)
        return [
            self.priced("all-gather", ("context",), kv, 2 * self.blocks),
            self.priced("reduce-scatter", ("context",), kv, self.blocks),
        ]

    def expert_traffic(self) -> list[Traffic]:
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
        routed = closed_forms.array_bytes(shape, itemsize(ACTIVATIONS), ways=self.layout.tensor)
        again = 1 if self.layout.remat in ("mlp", "full") else 0
        times = (4 + 2 * again) * moe * self.blocks
        return [self.priced("all-to-all", ("expert",), routed, times)]

    def local_parameters(self) -> tuple[float, float]:
        """Of one block, after tensor and expert parallelism: dense, routed experts."""
        block, layout = self.block, self.layout
        return block.dense_parameters / layout.tensor, block.expert_parameters / layout.tensor / layout.expert

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """Axes over which FSDP shards the dense part; experts stay off their own axis."""
        return ("fsdp", "expert") if self.layout.fsdp > 1 else ()

    def fsdp_traffic(self) -> tuple[list[Traffic], list[Traffic]]:
        """Weights of a block gathered in each pass, gradients scattered; once per microbatch."""
        dense, experts = self.local_parameters()
        width = itemsize(self.block.dtype)
        passes = 1 if self.layout.keep_gathered else 2
        axes_of = ((dense, self.shard_axes), (experts, ("fsdp",)))
        gathers = [self.priced("all-gather", axes, p * width, passes * self.blocks) for p, axes in axes_of if p]
        scatters = [self.priced("reduce-scatter", axes, p * GRADIENT_BYTES, self.blocks) for p, axes in axes_of if p]
        return gathers, scatters

    def replica_traffic(self) -> tuple[list[Traffic], list[Traffic]]:
        """Once per step: gradients of a stage summed between replicas, and what is gathered back.

        With a split optimizer every replica gets its part of the sums, updates it and
        gathers the new weights, in the matmuls' type; otherwise it gets all of the sums.
        """
        layers = self.model.layers / self.layout.pipeline
        dense, experts = (p * layers for p in self.local_parameters())
        shards = self.machine.group_size(self.shard_axes)
        copies = ("data",) if self.shard_axes else ("data", "expert")
        held = ((dense / shards, copies), (experts / self.layout.fsdp, ("data",)))
        if not self.layout.shard_optimizer:
            return [self.priced("all-reduce", axes, p * REPLICA_GRADIENT_BYTES, 1.0) for p, axes in held], []
        weight_bytes = itemsize(ACTIVATIONS)
        return (
            [self.priced("reduce-scatter", axes, p * REPLICA_GRADIENT_BYTES, 1.0) for p, axes in held],
            [self.priced("all-gather", axes, p * weight_bytes, 1.0) for p, axes in held],
        )

    def stage_traffic(self) -> list[Traffic]:
        """Activations to the next stage and their gradients back, per microbatch and chunk."""
        shape = (self.block.tokens, self.model.d_model)
        stream = closed_forms.array_bytes(shape, itemsize(ACTIVATIONS), ways=self.layout.tensor)
        times = 2 * self.microbatches * self.layout.virtual_stages
        return [self.priced("collective-permute", ("pipeline",), stream, times)]

    def logits_s(self) -> float:
        """Vocabulary matmul, forward and backward, and a float32 softmax; spread over no stage but the last."""
        ways, tokens = self.layout.tensor, self.block.tokens
        fraction = self.machine.chip.numbers["step_compute_fraction"].value
        once = self.machine.matmul_s(1, tokens, self.model.vocab / ways, self.model.d_model, ACTIVATIONS)
        softmax = elementwise_s(self.machine, tokens * self.model.vocab / ways, 2, 2, "float32")
        return float(3 * once / fraction + softmax)

    def embedding_s(self) -> float:
        return float(lookup_s(self.machine, 2 * self.block.tokens, self.model.d_model, ACTIVATIONS))

    def held_parameters(self) -> tuple[float, float]:
        """Parameters that a device of the last stage holds: dense with the embedding, routed experts."""
        dense, experts = self.local_parameters()
        layers = self.model.layers / self.layout.pipeline
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

    def optimizer_s(self) -> float:
        return float(optimizer_s(self.machine, self.updated_parameters()))

    def memory(self) -> dict[str, float]:
        """Bytes per device at the peak, which is at the end of forward."""
        dense, experts = self.local_parameters()
        layers = self.model.layers / self.layout.pipeline
        held = sum(self.held_parameters())
        in_flight = min(self.microbatches, self.layout.pipeline)
        saved = self.block.saved_bytes() * layers * in_flight
        gathered = (dense + experts) * itemsize(ACTIVATIONS) if self.layout.fsdp > 1 else 0.0
        logits = self.block.tokens * self.model.vocab / self.layout.tensor * itemsize("float32")
        return {
            "parameters": held * itemsize(ACTIVATIONS),
            "gradients": held * itemsize(ACTIVATIONS),
            "optimizer": closed_forms.state_bytes(self.updated_parameters(), bytes_per_parameter=12.0),
            "activations": saved,
            "gathered weights": gathered * (layers if self.layout.keep_gathered else 2),
            "logits": logits,
        }


def _per_block(traffic: list[Traffic], blocks: float) -> float:
    """Seconds of one block's share."""
    return sum(t.seconds for t in traffic) / blocks
