"""The seconds and bytes of one transformer block on one device, for one microbatch, without communication."""

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal, get_args

from cost_models.closed_forms import formulas
from cost_models.closed_forms.framework import MEGATRON, Framework
from cost_models.closed_forms.operations import attention_s, elementwise_s, lookup_s
from cost_models.closed_forms.training_layout import Remat, TrainingLayout
from cost_models.closed_forms.transformer import Transformer
from cost_models.machines.dtypes import itemsize
from cost_models.machines.machine import Machine

ACTIVATIONS = "bfloat16"  # the residual stream and the scores, also where matmuls are quantized

# Share of the forward FLOPs of a flash kernel that its backward takes: five matmuls
# against two, the scores being recomputed. Dao et al. 2022, FlashAttention, section 3.
FLASH_BACKWARD = 2.5

# (name, batch, m, n, k, how many such matmuls an average block has)
Matmul = tuple[str, float, float, float, float, float]
Pass = Literal["forward", "recomputed", "backward"]
PASSES: tuple[Pass, ...] = get_args(Pass)


@dataclass(frozen=True, kw_only=True)  # without slots, for what is worked out once
class Block:
    """The average block of a model under a layout.

    Attributes:
        model: Its shape; mixture and dense blocks are averaged by their number.
        layout: How parameters and data are split.
        machine: The machine that prices it.
        sequence: Tokens of one sequence.
        dtype: Type of the matmuls' operands.
        framework: How the program is written.
    """

    model: Transformer
    layout: TrainingLayout
    machine: Machine
    sequence: int
    dtype: str
    framework: Framework = MEGATRON

    @property
    def tokens(self) -> float:
        """Tokens of one microbatch that a tensor-parallel group works on."""
        return self.layout.microbatch * self.sequence / self.layout.context

    @property
    def parameters(self) -> float:
        """Matrices of the average block, all experts."""
        return (self.model.parameters - self.model.embedding_parameters) / self.model.layers

    @property
    def dense_parameters(self) -> float:
        """Those that expert parallelism does not spread."""
        return self.parameters - self.expert_parameters

    @property
    def expert_parameters(self) -> float:
        """Routed experts of the average block."""
        model = self.model
        return model.moe_layers / model.layers * model.experts * model.expert_parameters

    @property
    def expert_rows(self) -> float:
        """Rows that experts compute per token."""
        return self.model.active_experts * self.framework.expert_capacity

    def matmuls(self) -> tuple[Matmul, ...]:
        """Local matmuls of the forward pass, in order; the last of an MLP is named "out"."""
        model, ways, tokens = self.model, self.layout.tensor, self.tokens
        d, inputs = model.d_model, model.mlp_matrices - 1
        moe = model.moe_layers / model.layers
        # Half of the attention's matrices read the stream, half write it.
        projected = model.attention_layer_parameters / 2 / d
        found: list[Matmul] = [
            ("attention in", 1, tokens, projected / ways, d, 1),
            ("attention out", 1, tokens, d, projected / ways, 1),
        ]
        if moe < 1:
            found.append(("mlp in", 1, tokens, inputs * model.d_ff / ways, d, 1 - moe))
            found.append(("mlp out", 1, tokens, d, model.d_ff / ways, 1 - moe))
        if moe > 0:
            local = model.experts / self.layout.expert
            routed = tokens * self.expert_rows / local
            width = model.expert_width / ways
            found.append(("expert in", local, routed, inputs * width, d, moe))
            found.append(("expert out", local, routed, d, width, moe))
            if self.framework.one_hot_dispatch:
                found += self._one_hot(moe)
            if model.shared_experts:
                shared = model.shared_experts * width
                found.append(("shared in", 1, tokens, inputs * shared, d, moe))
                found.append(("shared out", 1, tokens, d, shared, moe))
        return tuple(found)

    def _one_hot(self, moe: float) -> list[Matmul]:
        """Products with one-hot tensors, to the rows of all experts and back: [E·C, S] by [S, D] per sequence."""
        rows, sequences, width = self.expert_rows * self.sequence, self.tokens / self.sequence, self.model.d_model
        return [
            ("dispatch", sequences, rows, width, self.sequence, moe),
            ("combine", sequences, self.sequence, width, rows, moe),
        ]

    def matmul_s(self, part: Pass = "forward") -> float:
        """The matmuls of one pass, of what rematerialization repeats of it, or of backward."""
        fraction = self.machine.chip.numbers["step_compute_fraction"].value
        return sum(often * seconds * self._runs(name, part) for name, often, seconds in self._priced) / fraction

    @cached_property
    def _priced(self) -> tuple[tuple[str, float, float], ...]:
        """(name, how many an average block has, seconds of one) of every matmul."""
        found = self.matmuls()
        batch, m, n, k = zip(*(sizes for _, *sizes, _ in found), strict=True)
        seconds = self.machine.matmul_s(batch, m, n, k, self.dtype).tolist()
        return tuple((name, often, one) for (name, *_, often), one in zip(found, seconds, strict=True))

    def matmul_flops(self, part: Pass = "forward") -> float:
        """FLOPs of `matmul_s`."""
        return sum(2.0 * prod(shape) * often * self._runs(name, part) for name, *shape, often in self.matmuls())

    def _runs(self, name: str, part: Pass) -> int:
        """How often a part runs a matmul; backward once per operand that has a gradient: a one-hot has none."""
        if part == "backward":
            return 1 if name == "dispatch" else 2
        return 1 if part == "forward" or self._is_repeated(name) else 0

    def _is_repeated(self, name: str) -> bool:
        """Whether backward computes this matmul's result again; it needs none of an MLP's last.

        One-hot products end in another, whose weights have a gradient.
        """
        if self.layout.remat == "full":
            last = ("combine",) if self.framework.one_hot_dispatch else ("expert out",)
            return name not in ("mlp out", "shared out", *last)
        return self.layout.remat == "mlp" and name in ("mlp in", "expert in", "shared in")

    def score_flops(self) -> float:
        """Forward FLOPs of attention's scores and weighted values, of a flash kernel the causal half."""
        whole = self.model.score_flops(self.sequence, causal=self.framework.flash)
        return self.tokens * whole / self.model.layers / self.layout.tensor

    @property
    def score_backward(self) -> float:
        """Attention's backward as a multiple of its forward: a flash kernel computes its scores again."""
        return FLASH_BACKWARD if self.framework.flash else 2.0

    def score_s(self) -> float:
        """The flash kernel, forward; local layers compute every block that their window touches."""
        return self._score_s

    @cached_property
    def _score_s(self) -> float:
        model, ways = self.model, self.layout.tensor
        whole = attention_s(
            self.machine,
            self.layout.microbatch,
            max(1, model.heads // ways),
            max(1, model.kv_heads // ways),
            self.sequence / self.layout.context,
            self.sequence,
            model.head_dim,
            ACTIVATIONS,
            flash=self.framework.flash,
        )
        numbers = self.machine.chip.numbers
        touched = min(model.window + numbers["attention_block_count"].value, self.sequence / 2)
        local = (model.layers - model.global_layers) / model.layers if model.window else 0.0
        share = 1 - local + local * touched / (self.sequence / 2)
        return share * float(whole) / numbers["step_compute_fraction"].value

    def forward_s(self) -> float:
        """One forward pass."""
        return self.matmul_s() + self.score_s() + self.stream_s()

    def backward_s(self) -> float:
        """One backward pass, rematerialization included."""
        return (
            self.recompute_s() + self.matmul_s("backward") + self.score_backward * self.score_s() + 2 * self.stream_s()
        )

    def recompute_s(self) -> float:
        """Seconds of the operations that rematerialization repeats in backward."""
        return {
            "none": lambda: 0.0,
            "minimal": self.score_s,
            "mlp": lambda: self.matmul_s("recomputed") + self.stream_s(),
            "full": lambda: self.matmul_s("recomputed") + self.stream_s() + self.score_s(),
        }[self.layout.remat]()

    def recompute_flops(self) -> float:
        """FLOPs of `recompute_s`."""
        scores = self.score_flops() if self.layout.remat in ("minimal", "full") else 0.0
        return self.matmul_flops("recomputed") + scores

    def stream_s(self) -> float:
        """Norms, residuals, rotations, activations and dispatch, forward, each a fused chain."""
        model, ways, machine = self.model, self.layout.tensor, self.machine
        moe = model.moe_layers / model.layers
        visited = (model.active_experts + model.shared_experts) * model.expert_width
        hidden = moe * visited + (1 - moe) * model.d_ff
        rotated = (model.heads + 2 * model.kv_heads) * model.head_dim
        tokens = self.tokens / ways
        seconds = float(
            elementwise_s(machine, tokens * model.d_model, 6, 4, ACTIVATIONS)  # two norms, two residual sums
            + elementwise_s(machine, tokens * rotated, 1, 1, ACTIVATIONS)
            + elementwise_s(machine, tokens * hidden, model.mlp_matrices - 1, 1, ACTIVATIONS)
            + lookup_s(machine, moe * 2 * self.tokens * model.active_experts, model.d_model, ACTIVATIONS)
        )
        return seconds / machine.chip.numbers["step_stream_fraction"].value

    def saved_bytes(self) -> float:
        """Bytes that the average block keeps for backward, per microbatch and device."""
        return self._saved_bytes(self.layout.remat)

    def working_bytes(self) -> float:
        """Bytes that one block's backward adds: recomputed values, and gradients of hidden values or scores."""
        again = self._saved_bytes("none") - self._saved_bytes(self.layout.remat)
        hidden = (self.model.mlp_matrices - 1) * self.hidden / self.layout.tensor
        mlp = formulas.activation_bytes(self.tokens, 1, hidden, itemsize=itemsize(ACTIVATIONS))
        return again + max(mlp, self.score_bytes())

    def score_bytes(self) -> float:
        """Attention's weights where they lie in memory: the scores and their softmax."""
        if self.framework.flash:
            return 0.0
        pairs = self.tokens * self.sequence * self.model.heads / self.layout.tensor
        return formulas.array_bytes((2, pairs), itemsize(ACTIVATIONS))

    @property
    def hidden(self) -> float:
        """Hidden values per token of the average MLP."""
        model = self.model
        moe = model.moe_layers / model.layers
        return moe * (self.expert_rows + model.shared_experts) * model.expert_width + (1 - moe) * model.d_ff

    def _saved_bytes(self, remat: Remat) -> float:
        model, layout = self.model, self.layout
        stream = model.d_model / layout.stream_ways
        heads = (2 * model.heads + 2 * model.kv_heads) * model.head_dim / layout.tensor  # q, k, v, attention's output
        hidden = self.hidden / layout.tensor
        matmul_results = heads + stream + (model.mlp_matrices - 1) * hidden
        kept = {
            "full": stream,
            "mlp": stream + heads,
            "minimal": stream + matmul_results,
            "none": 4 * stream + matmul_results + hidden + rotated_copies(model) / layout.tensor,
        }[remat]
        scores = self.score_bytes() if remat == "none" else 0.0
        return formulas.activation_bytes(self.tokens, 1, kept, itemsize=itemsize(ACTIVATIONS)) + scores


def rotated_copies(model: Transformer) -> int:
    """Rotated queries and keys per token, which no-remat keeps beside the plain ones."""
    return (model.heads + model.kv_heads) * model.head_dim
