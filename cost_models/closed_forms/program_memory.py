"""The memory of one training step of a plain program, as XLA's GPU compiler keeps it.

No buffers are laid out by hand, so a value lies in memory from its making to its last use:

- A weight lies in the matmuls' type, gathered from its shards, from the pass that casts
  it to the matmul that reads it last: through one block's backward where the block is
  computed again, from forward to backward otherwise.
- Every reader adds up the sums of the residual stream itself. The term that each half of a
  block adds lies in memory, and so does the look-up, in the table's type.
- Attention keeps its scores and their softmax in memory, in the stream's type; the float32
  values in between are never stored.
- Weights' gradients are made after the backward pass, or in the next recomputed block: their
  operands live until then, the logits' gradient until the end. Each gradient is reduced at
  once, and stays scattered until the update if the update is split.
- If gathers take longer than the forward pass, all its weights are gathered at its beginning.
- Replicas that update parts of a weight gather the new parts into the old weight's place if
  they are parts of its first dimension; otherwise beside both, and transpose them.

Six moments of the step are compared, and the fullest counts: the beginning, if all weights are
gathered there; the softmax's backward, with the logits and their gradient in float32; the
backward of the last block, with everything that was saved, and of the first, with every other
gradient; the update, with the look-up's gradient in the table's type; and the gathers of updated
weights between replicas.
"""

from dataclasses import dataclass

from cost_models.closed_forms import formulas
from cost_models.closed_forms.block import ACTIVATIONS, Block
from cost_models.closed_forms.training_memory import Held
from cost_models.closed_forms.training_traffic import TrainingTraffic
from cost_models.machines.dtypes import itemsize

WIDE = itemsize(ACTIVATIONS)

# Of the logits at the softmax's backward: as they were made, where their gradient is cast to, beside it in float32.
LOGITS_BYTES = WIDE + itemsize("float32")


@dataclass(frozen=True, slots=True)
class ProgramMemory:
    """Bytes of one device.

    Attributes:
        traffic: The step.
    """

    traffic: TrainingTraffic

    @property
    def block(self) -> Block:
        return self.traffic.block

    def peak(self) -> Held:
        """Bytes at the fullest moment, by what holds them."""
        blocks, in_flight = self.traffic.stage_blocks, min(self.traffic.microbatches, self.block.layout.pipeline)
        block, head, table = self._gradients()
        before, after = (self._saved(n) * in_flight for n in (blocks, blocks - 1))
        moments = (
            self._beginning(blocks),
            self._moment(saved=before, casts=self._casts(blocks), gradients=0.0, logits=LOGITS_BYTES, head=True),
            self._backward(after, blocks, 0.0),
            self._backward(self._saved(0), 1, (blocks - 1) * block),
            *([self._backward(self._saved(blocks - 2) * in_flight, blocks - 1, block)] if blocks >= 2 else []),
            self._moment(saved=0.0, casts=0.0, gradients=head + blocks * block + table),
            self._moment(saved=0.0, casts=self._returned(blocks), gradients=0.0),
        )
        return max(moments, key=lambda held: sum(held.values()))

    def _beginning(self, blocks: float) -> Held:
        """At the beginning of the forward pass: all weights, if their gathers take longer than the pass."""
        passes = 1 if self.block.layout.keep_gathered else 2
        gathers_s = sum(t.seconds for t in self.traffic.fsdp()[0]) / passes
        waits = bool(self.traffic.shard_axes) and gathers_s > self.block.forward_s() * self.traffic.blocks
        casts = self._block_parameters() * WIDE * blocks if waits else 0.0
        return self._moment(saved=self._stream(WIDE), casts=casts, gradients=0.0, logits=0.0, head=True)

    def _moment(
        self,
        *,
        saved: float,
        casts: float,
        gradients: float,
        logits: float = 0.0,
        working: float = 0.0,
        head: bool = False,
    ) -> Held:
        """`logits`: bytes of each; with any, the output matrix's operand is whole. `head`: that matrix is cast."""
        traffic, framework = self.traffic, self.block.framework
        count = self.block.tokens * self.block.model.vocab / self.block.layout.tensor
        ends = (traffic.matrix * WIDE if head else 0.0, traffic.stream_bytes if logits else 0.0)
        return {
            "parameters": sum(traffic.held_parameters()) * framework.parameter_bytes,
            "gradients": gradients,
            "optimizer": formulas.state_bytes(
                traffic.updated_parameters(), bytes_per_parameter=framework.optimizer_bytes
            ),
            "activations": saved,
            "working set": working + ends[1],
            "gathered weights": casts + ends[0],
            "logits": count * logits,
        }

    def _backward(self, saved: float, blocks: float, gradients: float) -> Held:
        """A block's backward, `blocks` being left to go through, this one included."""
        matrix = self._mlp_parameters() / self.block.model.mlp_matrices * WIDE
        casts = self._casts(blocks) if self.block.layout.remat == "none" else self._block_parameters() * WIDE
        working = max(self._mlp_working(), self._attention_working())
        working += self._operands() if blocks < self.traffic.stage_blocks else 0.0
        return self._moment(saved=saved, casts=casts, gradients=gradients + matrix, logits=WIDE, working=working)

    def _gradients(self) -> tuple[float, float, float]:
        """Bytes of gradients behind their reduction: a block's, the output matrix's; and the look-up's, by token."""
        traffic, framework = self.traffic, self.block.framework
        splits = traffic.shard_axes or (("data",) if traffic.layout.shard_optimizer else ())
        shards = self.block.machine.group_size(splits)
        table = traffic.matrix / shards * framework.parameter_bytes
        head = traffic.matrix / shards * framework.gradient_bytes
        arriving = self._stream(framework.parameter_bytes)
        return self._block_parameters() / shards * framework.gradient_bytes, head, table + arriving

    def _returned(self, blocks: float) -> float:
        """New weights beside the old ones, and the parts: of all whose first dimension is not the stream's width.

        Those are the look-up, and of a block the output projections of attention and of
        dense MLPs, and the experts, whose first dimension is their number.
        """
        traffic, model, layout = self.traffic, self.block.model, self.block.layout
        if not layout.shard_optimizer or traffic.shard_axes or layout.data == 1:
            return 0.0
        dense = (1 - model.moe_layers / model.layers) * model.d_ff
        outputs = (model.heads * model.head_dim + dense) * model.d_model / layout.tensor
        _, experts = traffic.local_parameters()
        whole = (traffic.matrix + blocks * (outputs + experts)) * self.block.framework.parameter_bytes
        return whole + whole / layout.data

    def _block_parameters(self) -> float:
        """Parameters of a block, after tensor and expert parallelism."""
        return sum(self.traffic.local_parameters())

    def _mlp_parameters(self) -> float:
        """Parameters of a block's MLP."""
        return self._block_parameters() - self.block.model.attention_layer_parameters / self.block.layout.tensor

    def _casts(self, blocks: float) -> float:
        """Weights in the matmuls' type: kept from forward to backward where nothing is computed again."""
        kept = self.block.layout.remat == "none" or self.block.layout.keep_gathered
        return self._block_parameters() * WIDE * blocks if kept else 0.0

    def _stream(self, width: float) -> float:
        """The residual stream where it is split, in elements of `width` bytes."""
        return self.traffic.stream_bytes / WIDE * width / self.block.layout.stream_ways

    def _saved(self, blocks: float) -> float:
        """Bytes that a number of blocks keep for backward, and the look-up that begins the residual stream."""
        return self._stream(self.block.framework.parameter_bytes) + blocks * self._saved_of_one()

    def _saved_of_one(self) -> float:
        """Bytes that the average block keeps for backward: its halves' terms, and values that are not recomputed.

        Without recomputation, the float32 input of each norm replaces the terms.
        """
        remat, added = self.block.layout.remat, 2 * self._stream(WIDE)
        model = self.block.model
        if remat == "none":
            return 2 * self._stream(itemsize("float32")) + self._attention() + self._mlp(model.mlp_matrices)
        if remat == "full":
            return added
        inputs = model.mlp_matrices - 1 if remat == "minimal" else 0
        return added + self._heads(model.heads + 2 * model.kv_heads) + inputs * self._hidden()

    def _mlp_working(self) -> float:
        """Bytes at an MLP's backward, beside the saved ones: recomputed values, two hidden values' gradients.

        The stream has two whole gradients there: the incoming one, and that of the MLP's
        operand; a recomputed block also has attention's term.
        """
        beside = self._stream(WIDE) + self.traffic.stream_bytes
        if self.block.layout.remat == "none":
            return beside + 2 * self._hidden()
        return beside + self._stream(WIDE) + self._attention() + self._mlp(2)

    def _attention_working(self) -> float:
        """Bytes at attention's backward: gradients of scores and softmax, and operands of the MLP gradients."""
        mlp = self._mlp(self.block.model.mlp_matrices)
        return 2 * self.traffic.stream_bytes + self._attention() + self.block.score_bytes() + mlp

    def _operands(self) -> float:
        """Operands of a block's weight gradients: normalized streams, heads, hidden values, and gradients."""
        model = self.block.model
        heads = self._heads(2 * model.heads + 2 * model.kv_heads)
        return 4 * self.traffic.stream_bytes + heads + model.mlp_matrices * self._hidden()

    def _attention(self) -> float:
        """Operands of its matmuls: the normalized stream, queries, keys, values, scores' softmax, what heads read."""
        model = self.block.model
        heads = self._heads(2 * model.heads + 2 * model.kv_heads)
        return self.traffic.stream_bytes + heads + self.block.score_bytes()

    def _mlp(self, hidden: float) -> float:
        """The normalized stream and so many hidden values; tokens at their experts, and the one-hot tensors."""
        block = self.block
        moe = block.model.moe_layers / block.model.layers
        routed = 2 * block.expert_rows * self.traffic.stream_bytes
        if block.framework.one_hot_dispatch:
            routed += 2 * block.tokens * block.expert_rows * block.sequence * WIDE
        return self.traffic.stream_bytes + hidden * self._hidden() + moe * routed

    def _heads(self, count: float) -> float:
        """So many heads of every token."""
        return count * self.block.model.head_dim / self.block.layout.tensor * self.block.tokens * WIDE

    def _hidden(self) -> float:
        """One hidden value of the MLP, every token."""
        return self.block.hidden / self.block.layout.tensor * self.block.tokens * WIDE
