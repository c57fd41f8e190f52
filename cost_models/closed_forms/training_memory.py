"""The memory of one training step whose buffers a framework lays out, per device, at its fullest moment.

Parameters, the optimizer's state and a buffer of every gradient are always there. For the
rest, two moments are compared, and the fuller counts:

- the logits: every block's saved activations, and the logits in float32, over which the
  loss writes their gradient;
- the backward of the last block, when every block's activations are still saved.

For a program whose buffers a compiler lays out, see `program_memory`.
"""

from dataclasses import dataclass

from cost_models.closed_forms import formulas
from cost_models.closed_forms.block import ACTIVATIONS, Block
from cost_models.closed_forms.training_traffic import TrainingTraffic
from cost_models.machines.dtypes import itemsize

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
        """Bytes at the fullest moment, by what holds them."""
        block, blocks = self.block, self.traffic.stage_blocks
        saved = block.saved_bytes() * min(self.traffic.microbatches, block.layout.pipeline) * blocks
        moments = (
            self._moment(saved, logits=self._logits(), gathered=self._gathered(block.layout.keep_gathered * blocks)),
            self._moment(saved, working=block.working_bytes(), gathered=self._gathered(2.0)),
        )
        return max(moments, key=lambda held: sum(held.values()))

    def _moment(self, saved: float, *, working: float = 0.0, logits: float = 0.0, gathered: float) -> Held:
        framework, traffic = self.block.framework, self.traffic
        held = sum(traffic.held_parameters())
        return {
            "parameters": held * framework.parameter_bytes,
            "gradients": held * framework.gradient_bytes,
            "optimizer": formulas.state_bytes(
                traffic.updated_parameters(), bytes_per_parameter=framework.optimizer_bytes
            ),
            "activations": saved,
            "working set": working,
            "gathered weights": gathered,
            "logits": logits,
        }

    def _logits(self) -> float:
        """In float32, of one microbatch."""
        block = self.block
        shape = (block.tokens, block.model.vocab)
        return formulas.array_bytes(shape, itemsize("float32"), ways=block.layout.tensor)

    def _gathered(self, blocks: float) -> float:
        """Weights that FSDP has gathered: of the block in use and the one arriving, or of all."""
        layout, traffic = self.block.layout, self.traffic
        if layout.fsdp == 1 or not blocks:
            return 0.0
        count = traffic.stage_blocks if layout.keep_gathered else blocks
        return sum(traffic.local_parameters()) * count * itemsize(ACTIVATIONS)
