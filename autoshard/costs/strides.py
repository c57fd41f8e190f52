"""Strides: the dimensions of a value that contractions read, or write, by a stride of their own.

A matmul has three groups of dimensions per operand: batch, contracted and free. It reads each group as
one dimension with any stride, if the group's dimensions lie in memory in their order. An array may
therefore have any dimension outermost that forms a group by itself, and XLA:GPU does not transpose it for
a collective along that dimension, however many dimensions it has: experts' weights [expert, in, out]
along each, heads' weights [head, width, out] along the last, but not along the second.

The kernels that make gathered pieces of weights (casts, slices of a stack) also transpose them. Pieces that
come from a scatter are different: if they meet values in another order, all of those may be transposed
(the moments of gemma-7b's embedding, on 16 H100).
"""

from collections.abc import Mapping, Sequence

from autoshard.costs.resharding import Strides
from autoshard.ir.graph import Eqn, Graph
from autoshard.ir.op_traits import DOT_GENERAL, LOOP_SLICE, LOOP_STACK, TRANSPOSE


def strides(graph: Graph) -> Mapping[int, Strides]:
    """The strides of a graph's weights (its inputs, their casts and slices) and of the results of its matmuls."""
    read: dict[int, frozenset[int]] = dict.fromkeys(graph.outputs, frozenset())
    made: dict[int, frozenset[int]] = {}
    for e in range(len(graph.eqns) - 1, -1, -1):
        eqn = graph.eqns[e]
        through = read.get(graph.results[e][0]) if graph.results[e] else None
        for i, v in enumerate(graph.operands[e]):
            dims = _read(eqn, i, through)
            if dims is not None:
                read[v] = read[v] & dims if v in read else dims
    for e, eqn in enumerate(graph.eqns):
        if eqn.primitive == DOT_GENERAL:
            made[graph.results[e][0]] = _result(eqn)
        elif (eqn.traits.keeps_dims or eqn.primitive == TRANSPOSE) and graph.operands[e][0] in made:
            dims = made[graph.operands[e][0]]
            order = eqn.params["permutation"] if eqn.primitive == TRANSPOSE else range(eqn.results[0].ndim)
            made[graph.results[e][0]] = frozenset(d for d, old in enumerate(order) if old in dims)
    nothing = frozenset[int]()
    found = {v: Strides(made=dims) for v, dims in made.items()}
    weights, sent = set(graph.inputs), set[int]()
    for e, eqn in enumerate(graph.eqns):
        if (eqn.traits.keeps_dims or eqn.primitive in (TRANSPOSE, LOOP_SLICE)) and graph.operands[e][0] in weights:
            weights.update(graph.results[e])
            if eqn.traits.cast or eqn.primitive == LOOP_SLICE or graph.operands[e][0] in sent:
                sent.update(graph.results[e])
    found.update((v, Strides(read=read.get(v, nothing), sent=v in sent)) for v in weights)
    return found


def _read(eqn: Eqn, i: int, through: frozenset[int] | None) -> frozenset[int] | None:
    """The dimensions of operand i that its final readers take as a group by themselves; None without readers."""
    if eqn.primitive == DOT_GENERAL:
        (contracting, batch) = eqn.params["dimension_numbers"]
        shape = eqn.operands[i].shape
        free = [d for d in range(len(shape)) if d not in contracting[i] and d not in batch[i]]
        return frozenset(d for group in (contracting[i], batch[i], free) for d in _single(group, shape))
    if eqn.traits.keeps_dims:
        return through
    if eqn.primitive == LOOP_SLICE and through is not None:
        return frozenset(d + 1 for d in through)
    if eqn.primitive == TRANSPOSE and through is not None:
        return frozenset(old for d, old in enumerate(eqn.params["permutation"]) if d in through)
    return None if eqn.primitive in (LOOP_SLICE, LOOP_STACK, TRANSPOSE) else frozenset()


def _result(eqn: Eqn) -> frozenset[int]:
    """The dimensions of a matmul's result that are groups by themselves: batch, free of the left, free of the right."""
    (contracting, batch) = eqn.params["dimension_numbers"]
    shape, batched = eqn.results[0].shape, len(batch[0])
    left = eqn.operands[0].ndim - len(contracting[0])
    groups = (range(batched), range(batched, left), range(left, len(shape)))
    return frozenset(d for group in groups for d in _single(group, shape))


def _single(group: Sequence[int], shape: tuple[int, ...]) -> tuple[int, ...]:
    """The one dimension of a group that is more than 1, if there is just one."""
    wide = tuple(d for d in group if shape[d] > 1)
    return wide if len(wide) == 1 else ()
