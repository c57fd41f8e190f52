"""Pins: where in a program which constraints are emitted."""

from collections.abc import Mapping
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from autoshard.graph import Path

Specs = tuple[PartitionSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """PartitionSpecs to constrain to, in order.

    `made[path, i]` right after result i of the equation at a path, `taken[path, i]` right
    before its operand i, `inputs[i]` and `outputs[i]` at the program's ends.
    """

    made: Mapping[tuple[Path, int], Specs]
    taken: Mapping[tuple[Path, int], Specs]
    inputs: Mapping[int, Specs]
    outputs: Mapping[int, Specs]

    @property
    def count(self) -> int:
        """How many constraints are emitted."""
        groups = (self.made, self.taken, self.inputs, self.outputs)
        return sum(len(specs) for group in groups for specs in group.values())
