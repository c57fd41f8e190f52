"""The time of one training step of a transformer under a layout, with a reason for every second.

The offline reports quote it for scales that nobody compiles. Collectives and
matmuls are priced by the same `Machine` that the planner asks::

    step = microbatches × blocks of a stage × (forward + recompute + backward
           + exchanges that compute waits for + gathers that did not hide)
         + pipeline bubble + gradient sums that did not hide + optimizer
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cost_models.closed_forms import formulas
from cost_models.closed_forms.block import ACTIVATIONS, PASSES, Block
from cost_models.closed_forms.framework import MEGATRON, Framework
from cost_models.closed_forms.operations import elementwise_s, lookup_s, optimizer_s
from cost_models.closed_forms.program_memory import ProgramMemory
from cost_models.closed_forms.training_layout import TrainingLayout
from cost_models.closed_forms.training_memory import TrainingMemory
from cost_models.closed_forms.training_traffic import Traffic, TrainingTraffic
from cost_models.closed_forms.transformer import Transformer
from cost_models.errors import CostModelError, MeshFitError
from cost_models.machines.amounts import count
from cost_models.machines.machine import Machine
from cost_models.machines.model import Hardware


@dataclass(frozen=True, slots=True)
class Part:
    """Seconds of a step, and why they are spent.

    Attributes:
        name: Name of the part.
        seconds: Seconds on the critical path.
        reason: Why they are spent.
        traffic: The collectives behind it, hidden or not.
    """

    name: str
    seconds: float
    reason: str
    traffic: tuple[Traffic, ...] = ()

    @property
    def hidden_s(self) -> float:
        """Communication of this part that runs beside compute."""
        return max(0.0, sum(t.seconds for t in self.traffic) - self.seconds) if self.traffic else 0.0


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
        return formulas.model_flops_utilization(rate, self.peak_flops_per_s)

    @property
    def peak_bytes(self) -> float:
        """Memory that a device needs."""
        return sum(self.memory_bytes.values())

    def why(self, name: str) -> str:
        """The reason for a part's seconds: its share, its collectives, and how much of them hides.

        Raises:
            CostModelError: The step has no part of that name.
        """
        part = next((part for part in self.parts if part.name == name), None)
        if part is None:
            raise CostModelError(f"no part `{name}` of a step; there are {', '.join(p.name for p in self.parts)}")
        share = part.seconds / self.seconds
        lines = [f"{part.name}: {part.seconds:.6f} s, {share:.1%} of the step: {part.reason}"]
        for t in part.traffic:
            axes, each_s = "·".join(t.axes), t.seconds / t.times
            lines.append(
                f"  {t.times:g} × {t.kind} over {axes} of {t.nbytes / 1e6:.3f} MB, {each_s * 1e6:.1f} µs each: "
                f"{t.seconds:.6f} s"
            )
        if part.hidden_s > 0:
            lines.append(f"  of them hidden behind compute: {part.hidden_s:.6f} s")
        return "\n".join(lines)

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
    framework: Framework = MEGATRON,
    machine: Machine | None = None,
) -> StepTime:
    """Predict one training step.

    Args:
        model: The transformer.
        layout: How it is spread; its devices must be those of `hardware`.
        hardware: The devices and links.
        sequences: Global batch.
        sequence: Tokens per sequence.
        dtype: Of the matmuls' operands: `"bfloat16"`, `"float8_e4m3fn"`, `"int8"`.
        framework: How the program is written: `MEGATRON`, or `JAX`.
        machine: `placed` for another layout before, whose prices are taken if it has this layout's mesh.

    Raises:
        MeshFitError: The layout has another number of devices than the hardware, or
            the batch is smaller than one microbatch for every data shard.
        CostModelError: A size is no whole number from 1 on, or there is no such dtype.
    """
    sequences, sequence = count(sequences, "a number of sequences"), count(sequence, "a sequence's length")
    machine = placed(layout, hardware, machine)
    microbatches = layout.microbatches(sequences)
    if microbatches < 1:
        raise MeshFitError(
            f"{sequences} sequences are less than one microbatch of {layout.microbatch} for each of "
            f"{layout.data_shards} data shards"
        )
    block = Block(model=model, layout=layout, machine=machine, sequence=sequence, dtype=dtype, framework=framework)
    traffic = TrainingTraffic(block, microbatches)
    parts = _parts(block, traffic)
    memory = (TrainingMemory if framework.gradient_buffer else ProgramMemory)(traffic)
    return StepTime(
        parts=parts,
        traffic=tuple(t for part in parts for t in part.traffic),
        memory_bytes=memory.peak(),
        flops=_flops(block, traffic),
        model_flops=sequences * sequence * model.train_flops(sequence),
        devices=layout.devices,
        peak_flops_per_s=machine.peak_flops_per_s(dtype),
    )


def placed(layout: TrainingLayout, hardware: Hardware, before: Machine | None = None) -> Machine:
    """The hardware under a layout's mesh; the machine of before, which knows its prices, if it has that mesh.

    Raises:
        MeshFitError: The layout has another number of devices than the hardware.
    """
    tori = any(d.medium == "torus" for d in hardware.topology.dimensions)
    mesh = layout.mesh(slices_outermost=tori)
    return before if before is not None and before.mesh == mesh else hardware.place(mesh)


def _parts(block: Block, traffic: TrainingTraffic) -> tuple[Part, ...]:
    """Everything that a device of the busiest stage spends its step on."""
    layout, n = block.layout, traffic.blocks
    work = (
        Part(
            "matmuls",
            (block.matmul_s() + block.matmul_s("backward")) * n,
            "forward and backward, padded to tiles, at the achieved rate",
        ),
        Part("attention", (1 + block.score_backward) * block.score_s() * n, _attention(block)),
        Part("element-wise", 3 * block.stream_s() * n, "norms, residuals and activations, memory-bound"),
        Part("recompute", block.recompute_s() * n, f"rematerialization: {layout.remat}"),
        Part("logits", _logits_s(block) * traffic.microbatches, "vocabulary matmul and softmax, on the last stage"),
        Part("embedding", _embedding_s(block) * traffic.microbatches, "look-up and its scatter"),
    )
    tensor, context, expert = traffic.tensor(), traffic.context(), traffic.expert()
    vocabulary, stage = traffic.vocabulary(), traffic.stage()
    sharded, replicas = ([*one, *other] for one, other in (traffic.fsdp(), traffic.replica()))
    stream = "all-gathers and reduce-scatters" if layout.sequence_parallel else "all-reduces"
    waits = (
        _communicated("tensor-parallel", _tensor_s(block, traffic), f"{stream} of the residual stream", tensor),
        _communicated("context-parallel", _total_s(context), "keys and values of the whole sequence", context),
        _communicated("expert-parallel", _total_s(expert), "tokens to their experts and back", expert),
        _communicated(
            "vocabulary", _total_s(vocabulary), "tokens to and from the split embedding and logits", vocabulary
        ),
        _communicated(
            "fsdp", _fsdp_s(block, traffic), "weight gathers and gradient scatters that compute did not hide", sharded
        ),
        _communicated("stage hand-over", _stage_s(block, traffic), "activations between pipeline stages", stage),
    )
    busy_s = sum(part.seconds for part in (*work, *waits))
    bubble = formulas.pipeline_bubble(layout.pipeline, traffic.microbatches, repeats=layout.virtual_stages)
    return (
        *work,
        *waits,
        Part("pipeline bubble", busy_s * bubble / (1 - bubble), _bubble(layout, traffic.microbatches, bubble)),
        _communicated(
            "gradient sums", _replica_s(block, traffic), "between replicas, what one microbatch did not hide", replicas
        ),
        Part("optimizer", _optimizer_s(block, traffic), "memory-bound update of the local parameters"),
    )


def _bubble(layout: TrainingLayout, microbatches: float, exact: float) -> str:
    """The seconds that stages wait, exactly and by the rule of thumb."""
    waits = "stages that wait to fill and to drain"
    if layout.pipeline == 1:
        return waits
    rough = formulas.pipeline_bubble_rough(layout.pipeline, layout.virtual_stages * microbatches)
    return f"{waits}: {exact:.1%} of the time, (p-1)/(p+k-1); roughly p/(p+k), {rough:.1%}"


def _communicated(name: str, seconds: float, reason: str, exchanged: Sequence[Traffic]) -> Part:
    """A part that collectives take, those of groups of one left out."""
    return Part(name, seconds, reason, tuple(t for t in exchanged if t.times))


def _attention(block: Block) -> str:
    if block.framework.flash:
        return "flash kernels, causal half"
    return "scores in memory, the masked half computed"


def _total_s(traffic: Sequence[Traffic]) -> float:
    return sum(t.seconds for t in traffic)


def _tensor_s(block: Block, traffic: TrainingTraffic) -> float:
    """On the critical path, unless the exchanges are cut up to run beside their matmuls."""
    exchange_s = _total_s(traffic.tensor())
    if not block.layout.collective_matmul:
        return exchange_s
    beside_s = sum(block.matmul_s(part) for part in PASSES) * traffic.blocks
    return float(block.machine.exposed_s(exchange_s, beside_s))


def _fsdp_s(block: Block, traffic: TrainingTraffic) -> float:
    """Gathers hide behind the pass that runs while they arrive, scatters behind backward."""
    gathers, scatters = traffic.fsdp()
    forward_s, backward_s = block.forward_s() * traffic.blocks, block.backward_s() * traffic.blocks
    passes = 1 if block.layout.keep_gathered else 2
    before_s = _total_s(gathers) / passes
    after_s = _total_s(gathers) - before_s + _total_s(scatters)
    return float(block.machine.exposed_s(before_s, forward_s) + block.machine.exposed_s(after_s, backward_s))


def _replica_s(block: Block, traffic: TrainingTraffic) -> float:
    """Sums hide behind the last microbatch's backward, returning weights behind the first one's forward."""
    sums, returns = traffic.replica()
    exposed_s = block.machine.exposed_s
    after_s = exposed_s(_total_s(sums), block.backward_s() * traffic.stage_blocks)
    return float(after_s + exposed_s(_total_s(returns), block.forward_s() * traffic.stage_blocks))


def _stage_s(block: Block, traffic: TrainingTraffic) -> float:
    """Hand-overs hide behind the next microbatch."""
    beside_s = (block.forward_s() + block.backward_s()) * traffic.blocks
    return float(block.machine.exposed_s(_total_s(traffic.stage()), beside_s))


def _logits_s(block: Block) -> float:
    """Vocabulary matmul, forward and backward, and a float32 softmax, of one microbatch."""
    model, width = block.model, block.model.vocab / block.layout.tensor
    once_s = block.machine.matmul_s(1, block.tokens, width, model.d_model, ACTIVATIONS)
    softmax_s = elementwise_s(block.machine, block.tokens * width, 2, 2, "float32")
    return float(3 * once_s / block.machine.chip.numbers["step_compute_fraction"].value + softmax_s)


def _embedding_s(block: Block) -> float:
    return float(lookup_s(block.machine, 2 * block.tokens, block.model.d_model, ACTIVATIONS))


def _optimizer_s(block: Block, traffic: TrainingTraffic) -> float:
    return float(optimizer_s(block.machine, traffic.updated_parameters()))


def _flops(block: Block, traffic: TrainingTraffic) -> float:
    """Executed by one device of the last stage; attention's backward counted as twice its forward."""
    logits = 6.0 * block.tokens * block.model.d_model * block.model.vocab / block.layout.tensor
    per_block = (
        block.matmul_flops() + block.matmul_flops("backward") + 3 * block.score_flops() + block.recompute_flops()
    )
    return traffic.blocks * per_block + traffic.microbatches * logits
