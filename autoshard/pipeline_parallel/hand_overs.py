"""Hand-overs: the pipelines in a traced program, by the equations that move micro-batches on by one stage."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from autoshard import _jax
from autoshard.ir.op_traits import PAD, SCAN

HANDS_OVER = "hands_over"  # the name scope of the equations that move micro-batches on


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class Pipeline:
    """The loop of a pipeline in one program, forward or backward.

    Attributes:
      where: the source line of its layers.
      stages: what runs at one trip.
      trips: how often all stages run.
    """

    where: str
    stages: int
    trips: int

    @property
    def bubble(self) -> float:
        """The share of the trips in which a stage has nothing to do."""
        return (self.stages - 1) / self.trips


def pipelines(jaxpr: Any) -> tuple[Pipeline, ...]:
    """The pipelines in a program; one whose backward loop has as many trips is one. Of one stage there are none."""
    lines = _jax.SourceLines()
    found = {
        Pipeline(where=lines(eqn), stages=stages, trips=loop.params["length"])
        for loop in _jax.equations(jaxpr)
        if loop.primitive.name == SCAN
        for body in _jax.sub_jaxprs(loop.params)
        for eqn in _jax.open_jaxpr(body).eqns
        if HANDS_OVER in _jax.scopes(eqn)
        for stages in _moved(eqn)
    }
    return tuple(sorted(found))


def _moved(eqn: Any) -> Iterator[int]:
    """The sizes of the dimensions that an equation shifts."""
    if eqn.primitive.name == PAD:
        pairs = zip(eqn.invars[0].aval.shape, eqn.params["padding_config"], strict=True)
        yield from (size for size, (low, high, _) in pairs if low and low == -high)
