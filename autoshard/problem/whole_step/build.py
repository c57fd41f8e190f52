"""Build: a graph and the passes in it → the graph in which a plan chooses what is kept.

A pass (`ir/saved_values.py`) reads values of its forward body. Here each has two sources:

    keep      (forward value) -> (the same, which lives until the backward pass reads it)
    derive    (kept values) -> (what is not stored, but computed from these; it lies as in the forward pass)
    recall    (kept or derived value, repeated value) -> (what the backward pass reads)

In a scan a stack and its slice keep a value, in the device's memory or in the host's, where a copy each way is the
third source of its recall; in a flat body the first two do. Copies of the
forward equations, in the backward body, repeat it. All of them are *optional*: a plan has
those that something takes, and no others. Which source each recall takes is decided together
with every layout; `kept_values` reads from a choice what `ir/recompute.py` is to keep.
"""

import numpy as np
from numpy.typing import NDArray

from autoshard.ir.graph import Graph
from autoshard.ir.saved_values import SavedValues, ValueId
from autoshard.problem.whole_step.enlarged import Enlargement, WholeStep
from autoshard.problem.whole_step.flat_choices import FlatChoices
from autoshard.problem.whole_step.loop_choices import LoopChoices


def whole_step(graph: Graph, saved: SavedValues, held: NDArray[np.bool_], *, offload: bool = False) -> WholeStep:
    """The graph of a program with the choices of what its backward passes keep.

    Args:
      graph: of the program.
      saved: of the same program.
      held: of every value of the graph, whether it lies in memory where the program runs as it is written.
      offload: whether the host's memory may hold what scans stack.
    """
    stackable = saved.stackable if offload else frozenset[ValueId]()
    enlargement = Enlargement(graph, held)
    for one in saved.passes:
        if any(value.read and not value.free for value in one.values):
            choices = FlatChoices(enlargement, one) if one.source.is_flat else LoopChoices(enlargement, one, stackable)
            choices.add()
    return enlargement.finish()
