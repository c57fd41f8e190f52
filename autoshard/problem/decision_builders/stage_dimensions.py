"""Stage dimensions: which dimension of a pipeline's values holds its stages, where an axis is pinned to them.

A loop that hands a value on from stage to stage shifts it along one dimension, of one element per stage. Where the
program pins a mesh axis to that dimension and leaves the others open, every value of the layers that has the dimension
is searched in layouts with one stage per shard only: in others each device would work for all stages. What moves values
on (it may be cheaper with whole values), and all outside of the stages' loops (embedding, head, optimizer), keep all
their layouts. Found by the rules' factors, from the pinned values on to all that share their factor.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from jax.sharding import PartitionSpec
from numpy.typing import NDArray

from autoshard.costs.strategies import Codes, decode
from autoshard.ir.constraints import spec_of
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import MeshAxes
from autoshard.ir.op_traits import CONSTRAINT, LOOP_CARRY, LOOP_RESULT, LOOP_SLICE
from autoshard.rules.rule import ShardingRule

Stage = tuple[int, int]  # the dimension of a value, and the number of the mesh axis that splits it


def stage_dimensions(
    graph: Graph, rules: Sequence[ShardingRule], pointwise: Sequence[bool], mesh: MeshAxes
) -> Mapping[int, Stage]:
    """Value → the dimension of its stages and the mesh axis that is pinned to it; of a value without them, nothing.

    Args:
      graph: the program.
      rules: of its equations.
      pointwise: which of them are element-wise, and not pinned.
      mesh: the logical mesh.
    """
    found = dict(_pinned(graph, rules, mesh))
    moved = _moved(graph, rules, pointwise) if found else frozenset[int]()
    waiting = list(found)
    while waiting:
        v = waiting.pop()
        for e in _around(graph, v):
            for other, stage in _shared(graph, rules, e, v, found[v]):
                if other not in found and other not in moved and graph.value_loop[other]:
                    found[other] = stage
                    waiting.append(other)
    return found


def are_staged(codes: Codes, ndim: int, mesh: MeshAxes, stage: Stage | None) -> NDArray[np.bool_]:
    """Whether each code has one stage per shard; all have where a value has no stages."""
    if stage is None:
        return np.ones(len(codes), bool)
    dimension, axis = stage
    return decode(codes, ndim, mesh.ndim)[:, axis] == dimension


def _hopping(graph: Graph, rules: Sequence[ShardingRule]) -> Iterator[tuple[int, int]]:
    """The equations of loops that shift their values, and by the dimension of how many elements."""
    for e, rule in enumerate(rules):
        if graph.eqn_loop[e]:
            yield from ((e, factor.size) for factor in rule.factors if factor.hops)


def _moved(graph: Graph, rules: Sequence[ShardingRule], pointwise: Sequence[bool]) -> frozenset[int]:
    """The values of shifting loops that come from, or go to, other stages and trips, element by element."""
    hopping = {e for e, _ in _hopping(graph, rules)}
    loops = {graph.eqn_loop[e] for e in hopping}
    waiting: list[int] = []
    for e, eqn in enumerate(graph.eqns):
        if e in hopping:
            waiting.extend((*graph.operands[e], *graph.results[e]))
        elif eqn.primitive in (LOOP_CARRY, LOOP_SLICE) and graph.eqn_loop[e] in loops:
            waiting.extend(graph.results[e])
        elif eqn.primitive == LOOP_RESULT and graph.value_loop[graph.operands[e][0]] in loops:
            waiting.extend(graph.operands[e])
    moved = set(waiting)
    while waiting:
        for e in _around(graph, waiting.pop()):
            if pointwise[e] and graph.eqn_loop[e] in loops:
                near = {*graph.operands[e], *graph.results[e]} - moved
                moved |= near
                waiting.extend(near)
    return frozenset(moved)


def _around(graph: Graph, v: int) -> set[int]:
    """The equations that make and take a value."""
    made = graph.producers.get(v)
    return {*(e for e, _ in graph.consumers.get(v, ())), *(made[:1] if made else ())}


def _pinned(graph: Graph, rules: Sequence[ShardingRule], mesh: MeshAxes) -> Iterator[tuple[int, Stage]]:
    """The values of loops that are pinned in the dimension along which their loop shifts, and in no other."""
    shifted = {(graph.eqn_loop[e], size) for e, size in _hopping(graph, rules)}
    for e, eqn in enumerate(graph.eqns):
        if eqn.primitive != CONSTRAINT or not graph.eqn_loop[e]:
            continue
        entries = list(enumerate(spec_of(eqn)))
        fixed = [(d, entry) for d, entry in entries if entry is not PartitionSpec.UNCONSTRAINED]
        if len(fixed) != 1 or fixed[0][1] not in mesh.names:
            continue
        ((d, name),) = fixed
        axis = mesh.names.index(name)
        if eqn.results[0].shape[d] == mesh.sizes[axis] and (graph.eqn_loop[e], mesh.sizes[axis]) in shifted:
            yield graph.results[e][0], (d, axis)


def _shared(graph: Graph, rules: Sequence[ShardingRule], e: int, v: int, stage: Stage) -> Iterator[tuple[int, Stage]]:
    """The other values of an equation with a dimension that is the stages' alone."""
    dimension, axis = stage
    values = [*graph.operands[e], *graph.results[e]]
    dims_of = [*rules[e].operands, *rules[e].results]
    factors = {dims[dimension] for u, dims in zip(values, dims_of, strict=True) if u == v}
    if len(factors) != 1:
        return
    (factor,) = factors
    if len(factor) != 1:
        return
    for u, dims in zip(values, dims_of, strict=True):
        if u != v and dims.count(factor) == 1:
            yield u, (dims.index(factor), axis)
