"""Matmul fusions: what XLA:GPU's matmuls compute of their operands, and cast of their products.

A matmul computes an operand itself where that is made, element by element, of one array that has no more bytes (a
relu, a scale): each that takes it does, and it is not stored. Not where an operation takes two arrays, or one twice
(a square, a selection, a clamp; sums of exponentials are none). And it writes its product as it is cast, in float32
sums that are narrowed (`preferred_element_type`), with several dimensions of rows also behind a bias: the wide product
is nowhere in memory (jax-cuda12-pjrt 0.10.2 and 0.12.0.1).
"""

from collections.abc import Mapping, Sequence
from math import prod

from autoshard.ir.graph import Eqn, Graph
from autoshard.ir.op_traits import BOUNDS, BROADCAST, CONSTRAINT, DOT_GENERAL, SEVERAL


def is_matmul(eqn: Eqn) -> bool:
    """Whether a dot has several rows and several columns: those of a single one are added up by a fusion."""
    return eqn.traits.contraction and min(_own_size(eqn, i) for i in range(2)) > 1


def _own_size(eqn: Eqn, operand: int) -> int:
    """How many rows, or columns, a dot's operand has."""
    sides, shape = eqn.params["dimension_numbers"], eqn.operands[operand].shape
    return prod(n for d, n in enumerate(shape) if d not in (*sides[0][operand], *sides[1][operand]))


def made_operands(graph: Graph, fuses: Sequence[bool]) -> Mapping[int, int]:
    """The operands that matmuls compute themselves → the array in memory of which they do; of none that is given."""
    found: dict[int, int] = {}
    for e, eqn in enumerate(graph.eqns):
        if eqn.primitive == DOT_GENERAL and is_matmul(eqn):
            sources = {v: _computed_of(graph, fuses, v) for v in graph.operands[e]}
            found |= {v: source for v, source in sources.items() if source != v and source in graph.producers}
    return found


def narrowed_products(graph: Graph, fuses: Sequence[bool]) -> Mapping[int, int]:
    """Product that nothing but a cast to a narrower type takes, maybe behind a bias → the cast's result."""
    found: dict[int, int] = {}
    for e, eqn in enumerate(graph.eqns):
        if eqn.primitive != DOT_GENERAL or not is_matmul(eqn):
            continue
        (product,) = graph.results[e]
        (left, right), (batch, _) = eqn.params["dimension_numbers"]
        own = (a.ndim - len(c) - len(batch) for a, c in zip(eqn.operands, (left, right), strict=True))
        if (cast := _cast_of(graph, fuses, product, reshaped=max(*own, len(batch)) > 1)) is not None:
            found[product] = cast
    return found


def _cast_of(graph: Graph, fuses: Sequence[bool], value: int, *, reshaped: bool) -> int | None:
    """What a product is narrowed to; None where it is not, or something else takes it.

    `reshaped`: it is the reshape of a matmul, which XLA moves behind a bias; else the sum with that is a kernel's.
    """
    wide = graph.avals[value]
    while len(uses := graph.consumers.get(value, ())) == 1 and value not in graph.outputs:
        ((e, _),) = uses
        eqn = graph.eqns[e]
        if not fuses[e] or graph.eqn_loop[e] != graph.value_loop[value]:
            return None
        if eqn.traits.cast:
            (narrow,) = graph.results[e]
            return narrow if graph.avals[narrow].itemsize < wide.itemsize else None
        if not reshaped or not eqn.traits.addition or _array_of(graph, e, biased=True) != value:
            return None
        (value,) = graph.results[e]
    return None


def _computed_of(graph: Graph, fuses: Sequence[bool], value: int) -> int:
    """The array of no more bytes of which a value is computed, one operation after the other; at least itself."""
    made_by, nbytes, found = graph.producers, graph.avals[value].nbytes, value
    while value in made_by:
        e, _ = made_by[value]
        eqn = graph.eqns[e]
        if eqn.primitive == CONSTRAINT:
            (value,) = graph.operands[e]
            continue
        if not fuses[e] or eqn.primitive in SEVERAL or eqn.traits.fusible or eqn.traits.moves_nothing:
            break
        source = _array_of(graph, e)
        if source is None or graph.avals[source].nbytes > nbytes or _clamps(graph, eqn.primitive, source):
            break
        value = found = source
    return found


def _clamps(graph: Graph, primitive: str, source: int) -> bool:
    """Whether a bound of what is bounded on the other side makes a clamp of both."""
    maker = graph.producers.get(source, (-1, 0))[0]
    return maker >= 0 and frozenset((primitive, graph.eqns[maker].primitive)) == BOUNDS


def _array_of(graph: Graph, e: int, *, biased: bool = False) -> int | None:
    """The one array of the result's shape that an equation takes, beside numbers, and maybe a bias; None else."""
    (result, *more), sources = graph.results[e], {v: _source(graph, v) for v in graph.operands[e]}
    shape = graph.avals[result].shape
    whole = [v for v, source in sources.items() if prod(source) == prod(shape) and graph.avals[v].shape == shape]
    allowed = ((), (shape[-1],)) if biased and shape else ((),)
    if more or len(whole) != 1 or graph.operands[e].count(whole[0]) != 1:
        return None
    return whole[0] if all(v in whole or source in allowed for v, source in sources.items()) else None


def _source(graph: Graph, value: int) -> tuple[int, ...]:
    """The sizes, other than 1, of what an operand is repeated from."""
    made_by = graph.producers
    while value in made_by and graph.eqns[made_by[value][0]].primitive == BROADCAST:
        (value,) = graph.operands[made_by[value][0]]
    return tuple(size for size in graph.avals[value].shape if size > 1)
