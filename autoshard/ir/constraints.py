"""Constraints: the places in a program, and the PartitionSpecs emitted there."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from jax.sharding import PartitionSpec

from autoshard.errors import SpecError
from autoshard.ir.graph import Eqn, Graph, Path
from autoshard.ir.op_traits import CONSTRAINT

Specs = tuple[PartitionSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """PartitionSpecs to constrain to, in order.

    `made[path, i]` right after result i of the equation at a path, `taken[path, i]` right
    before its operand i, `inputs[i]` and `outputs[i]` at the program's ends. `again` is as
    `taken`, for an operand that is to be gathered once more rather than kept gathered since
    an earlier use: all of the equation's operands pass an `optimization_barrier` first, so
    that the compiler neither merges the two gathers nor starts the second before the other
    operands exist. `regathered[path, i]` numbers, from 1, the later groups of uses of a value for each of which it
    is gathered once more, by its constraints in `taken`: what a group takes passes an `optimization_barrier` of its
    own, so that equal constraints of two groups are not one. `kernels[path, i]` is the one layout in which the opaque
    kernel at a path runs: of its operand i or, counted on from its operands, of its result.
    """

    made: Mapping[tuple[Path, int], Specs]
    taken: Mapping[tuple[Path, int], Specs]
    inputs: Mapping[int, Specs]
    outputs: Mapping[int, Specs]
    again: Mapping[tuple[Path, int], Specs] = field(default_factory=dict)
    kernels: Mapping[tuple[Path, int], Specs] = field(default_factory=dict)
    regathered: Mapping[tuple[Path, int], int] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How many constraints are emitted."""
        groups = (self.made, self.taken, self.again, self.inputs, self.outputs)
        return sum(len(specs) for group in groups for specs in group.values())


def own(graph: Graph) -> Constraints:
    """A program's own `with_sharding_constraint`s; `P.UNCONSTRAINED` where they leave a dimension open."""
    constraints = [(e, eqn) for e, eqn in enumerate(graph.eqns) if eqn.primitive == CONSTRAINT]
    return Constraints(
        made={graph.makes[e][0]: (spec_of(eqn),) for e, eqn in constraints}, taken={}, inputs={}, outputs={}
    )


def spec_of(eqn: Eqn) -> PartitionSpec:
    """The PartitionSpec of a `with_sharding_constraint`.

    Raises:
      SpecError: its sharding has no PartitionSpec.
    """
    spec = getattr(eqn.params["sharding"], "spec", None)
    if spec is None:
        raise SpecError(f"with_sharding_constraint at {eqn.where}: only PartitionSpec and NamedSharding are understood")
    free = eqn.params.get("unconstrained_dims") or ()
    entries = list(spec) + [None] * (eqn.results[0].ndim - len(spec))
    return PartitionSpec(*(PartitionSpec.UNCONSTRAINED if d in free else s for d, s in enumerate(entries)))
