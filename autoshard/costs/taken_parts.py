"""Taken parts: products of which no more is computed than the part that is taken.

XLA:TPU (libtpu 0.0.52) slices the operands of a product in place of the product (the scores of a model's last
position), where nothing else takes it and nothing is computed of it before, not even a cast. Where a device has one
element of a dimension (one sequence), that is left out of the product and named again behind it, and all of it is
computed. XLA:GPU and XLA:CPU multiply all of it, and cut.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from autoshard.costs.strategies import Codes, split
from autoshard.ir.graph import Aval, Eqn, Graph
from autoshard.ir.mesh import MeshAxes
from autoshard.ir.op_traits import DOT_GENERAL, SLICE
from autoshard.rules.rule import ShardingRule


def taken_parts(graph: Graph) -> Mapping[int, Aval]:
    """Product of a dot → the part of it that is taken."""
    found = dict[int, Aval]()
    for e, eqn in enumerate(graph.eqns):
        if eqn.primitive != SLICE:
            continue
        (product,) = graph.operands[e]
        maker = graph.producers.get(product, (-1, 0))[0]
        if maker < 0 or graph.eqns[maker].primitive != DOT_GENERAL or product in graph.outputs:
            continue
        if len(graph.consumers[product]) == 1 and graph.eqn_loop[maker] == graph.eqn_loop[e]:
            found[product] = eqn.results[0]
    return found


def is_part_computed(product: Aval, codes: Codes, mesh: MeshAxes) -> NDArray[np.bool_]:
    """Whether no more than the part is computed in each layout (S,) of a product."""
    local = [size // split(codes, d, product.ndim, mesh) for d, size in enumerate(product.shape)]
    return np.logical_and.reduce([size != 1 for size in local])


def shares(eqn: Eqn, taken: Aval) -> tuple[float, float]:
    """Of the operands of a dot, the shares that are read for a part of its product."""
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    of_left = eqn.operands[0].ndim - len(contracted)  # dimensions of the result: those of the batch, left, and right
    sizes = zip(taken.shape, eqn.results[0].shape, strict=True)
    taken_of = [part / max(size, 1) for part, size in sizes]
    return prod(taken_of[:of_left]), prod(taken_of[: len(batch)]) * prod(taken_of[of_left:])


def rule_of_part(rule: ShardingRule, taken: Aval) -> ShardingRule:
    """The rule of a dot, with the sizes of the part of its product that is taken."""
    sizes = {dim[0]: size for dim, size in zip(rule.results[0], taken.shape, strict=True) if len(dim) == 1}
    factors = (replace(factor, size=sizes.get(f, factor.size)) for f, factor in enumerate(rule.factors))
    return replace(rule, factors=tuple(factors))
