"""The memory of one training step per device: what is held, and what the fullest moment adds.

Parameters and the optimizer's state are always there. Of the rest there are four
moments to look at, and the fullest counts:

- the logits: every block's saved activations, the logits and their gradient, the
  output matrix gathered and its gradient not yet scattered;
- the backward of the last block, when every block's activations are still saved, and of
  the first, when every other gradient is there: what one block's backward works on;
- the update: every gradient.
"""

from dataclasses import dataclass

from cost_models import closed_forms
from cost_models.block import ACTIVATIONS, Block
from cost_models.dtypes import itemsize
from cost_models.training_traffic import TrainingTraffic

Held = dict[str, float]


@dataclass(frozen=True, slots=True)
class TrainingMemory:
    """Bytes of one device.

    Attributes:
        traffic: The step.
    """

    traffic: TrainingTraffic

    @property
    def block(self) -> Block:
        return self.traffic.block

    def peak(self) -> Held:
        """By what holds it, at the fullest moment."""
        block, blocks = self.block, self.traffic.stage_blocks
        saved = block.saved_bytes() * min(self.traffic.microbatches, block.layout.pipeline)
        head, inner, table = self._gradients()
        moments = (
            self._moment(
                saved * blocks,
                head,
                logits=self._logits(),
                gathered=self._gathered(block.layout.keep_gathered * blocks),
            ),
            self._moment(saved * blocks, head, working=block.working_bytes(), gathered=self._gathered(2.0)),
            self._moment(saved, head + inner, working=block.working_bytes(), gathered=self._gathered(2.0)),
            self._moment(0.0, head + inner + table),
        )
        return max(moments, key=lambda held: sum(held.values()))

    def _moment(
        self, saved: float, gradients: float, *, working: float = 0.0, logits: float = 0.0, gathered: float = 0.0
    ) -> Held:
        framework, traffic = self.block.framework, self.traffic
        if framework.gradient_buffer:
            gradients = sum(self._gradients())
        return {
            "parameters": sum(traffic.held_parameters()) * framework.parameter_bytes,
            "gradients": gradients,
            "optimizer": closed_forms.state_bytes(
                traffic.updated_parameters(), bytes_per_parameter=framework.optimizer_bytes
            ),
            "activations": saved,
            "working set": working,
            "gathered weights": gathered,
            "logits": logits,
        }

    def _gradients(self) -> tuple[float, float, float]:
        """Bytes of finished gradients: the output matrix's, the blocks', the embedding's."""
        framework, traffic, model = self.block.framework, self.traffic, self.block.model
        if framework.gradient_buffer or not traffic.layout.shard_optimizer:
            count = sum(traffic.held_parameters())
        else:
            count = traffic.updated_parameters()
        width = framework.gradient_bytes
        share = traffic.matrix * count / (sum(traffic.local_parameters()) * traffic.stage_blocks + self._embeddings())
        if not framework.looks_up_in_place:
            return share * width, (count - share) * width, 0.0
        inner = count - share * (1 if model.tied else 2)
        return share * width, inner * width, share * framework.parameter_bytes  # a look-up's has the table's type

    def _embeddings(self) -> float:
        return self.traffic.matrix * (1 if self.block.model.tied or self.block.layout.pipeline > 1 else 2)

    def _logits(self) -> float:
        """The logits and their gradient, and the output matrix cast beside its own whole gradient.

        Where gradients have a buffer, float32 logits alone: the loss writes its gradient over them.
        """
        block, traffic = self.block, self.traffic
        logits = closed_forms.array_bytes(
            (block.tokens, block.model.vocab), itemsize("float32"), ways=block.layout.tensor
        )
        if block.framework.gradient_buffer:
            return logits
        return logits + 2 * traffic.matrix * itemsize(ACTIVATIONS)

    def _gathered(self, blocks: float) -> float:
        """Weights that FSDP has gathered: of the block in use and the one arriving, or of all.

        A plain program has one block's, and the gradient of its largest matrix before it is scattered.
        """
        block, layout, traffic = self.block, self.block.layout, self.traffic
        if layout.fsdp == 1 or not blocks:
            return 0.0
        one = sum(traffic.local_parameters())
        if layout.keep_gathered:
            count = one * traffic.stage_blocks
        elif block.framework.gradient_buffer:
            count = one * blocks
        else:
            dense, experts = block.model.d_ff * block.model.d_model, block.expert_parameters / block.model.mlp_matrices
            count = one + max(dense, experts / layout.expert) / layout.tensor
        return count * itemsize(ACTIVATIONS)
