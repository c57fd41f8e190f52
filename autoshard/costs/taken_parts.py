"""Taken parts: products of which no more is computed than the part that is taken.

XLA:TPU (libtpu 0.0.52) slices the operands of a product in place of the product (the scores of a model's last
position), where nothing else takes it and nothing is computed of it before, not even a cast. Where a device has one
element of a dimension (one sequence), that is left out of the product and named again behind it, and all of it is
computed. XLA:GPU and XLA:CPU multiply all of it, and cut.
"""

from collections.abc import Mapping
from math import prod

from autoshard.ir.graph import Aval, Eqn, Graph
from autoshard.ir.op_traits import DOT_GENERAL, SLICE


def taken_parts(graph: Graph) -> Mapping[int, Aval]:
    """Product of a dot → the part of it that is taken."""
    found = dict[int, Aval]()
    for e, eqn in enumerate(graph.eqns):
        if eqn.primitive != SLICE or any(step != 1 for step in eqn.params["strides"] or ()):
            continue
        (product,) = graph.operands[e]
        maker = graph.producers.get(product, (-1, 0))[0]
        if maker < 0 or graph.eqns[maker].primitive != DOT_GENERAL or product in graph.outputs:
            continue
        if len(graph.consumers[product]) == 1 and graph.eqn_loop[maker] == graph.eqn_loop[e]:
            found[product] = eqn.results[0]
    return found


def shares(eqn: Eqn, taken: Aval) -> tuple[float, float]:
    """Of the operands of a dot, the shares that are read for a part of its product."""
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    of_left = eqn.operands[0].ndim - len(contracted)  # dimensions of the result: those of the batch, left, and right
    sizes = zip(taken.shape, eqn.results[0].shape, strict=True)
    taken_of = [part / max(size, 1) for part, size in sizes]
    return prod(taken_of[:of_left]), prod(taken_of[: len(batch)]) * prod(taken_of[of_left:])
