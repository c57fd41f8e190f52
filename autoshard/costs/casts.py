"""Casts: a value beside a cast is moved on the side with fewer bytes.

XLA:GPU moves the operand of a widening cast in place of its result. XLA:TPU casts stacks before the loops that
take slices of them and narrow these, and moves what it has cast. It multiplies float32 in bfloat16 unless it is asked
for more (`jax.default_matmul_precision`), by casts of its own that others cannot be told from.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import jax.numpy as jnp
import numpy as np
from jax.lax import Precision

from autoshard.costs.execution_order import loop_spans
from autoshard.ir.graph import Aval, Eqn, Graph
from autoshard.ir.op_traits import BRANCH_JOIN, GATHER, LOOP_CONST, LOOP_SLICE, MUL, PAD, REDUCE_SUM

FLOAT32, BFLOAT16 = np.dtype(jnp.float32), np.dtype(jnp.bfloat16)
_CAST_SHARE = BFLOAT16.itemsize / FLOAT32.itemsize


@dataclass(frozen=True, slots=True)
class CastAhead:
    """How a stack is read that XLA:TPU casts whole, before the loops that take slices of it.

    Attributes:
      dtype: of the cast.
      first, last: the equations at which the first of these loops begins and the last one ends.
      alone: whether nothing else reads the stack, so that what moves is its cast.
    """

    dtype: np.dtype
    first: int
    last: int
    alone: bool


@dataclass(frozen=True, slots=True)
class Multiplied:
    """How a value is read that XLA:TPU casts for products.

    Attributes:
      alone: whether nothing else reads it: it lies in memory as it is cast then.
      otherwise: the equations that take it, or a name of it, as it is.
    """

    alone: bool
    otherwise: frozenset[int]


def product_dtype(eqn: Eqn) -> np.dtype | None:
    """The dtype to which XLA:TPU casts the operands of a product; None if it multiplies them as they are."""
    if not eqn.traits.contraction or "precision" not in eqn.params:
        return None
    asked = eqn.params["precision"]
    default = all(one in (None, Precision.DEFAULT) for one in (asked if isinstance(asked, tuple) else (asked,)))
    left, right = eqn.operands[:2]  # a ragged product has the sizes of its groups, too
    return BFLOAT16 if default and left.dtype == right.dtype == FLOAT32 else None


def multiplied(graph: Graph) -> dict[int, Multiplied]:
    """Values that are cast for every product that takes them, as they are, under other names, or padded.

    A sum (of a bias's gradient) takes such a value as it is, and yet it may lie in memory as it is cast: the kernel
    adds that makes the value, if it is not padded. What is cast once it is padded, is cast before.
    What leaves a branch lies there as it does inside. Without those of which rows are looked up, too: these are
    gathered as they are.
    """

    @cache
    def readers(value: int) -> frozenset[str]:
        return frozenset(kind for e, _ in graph.consumers.get(value, ()) for kind in kinds(e))

    def kinds(e: int) -> frozenset[str]:
        eqn = graph.eqns[e]
        inside = eqn.primitive in (LOOP_CONST, LOOP_SLICE)
        if eqn.primitive == PAD:
            return frozenset(kind for u, _ in graph.consumers.get(graph.results[e][0], ()) for kind in padded(u))
        if inside or (eqn.traits.renames and not eqn.traits.link):
            return readers(graph.results[e][0])
        if eqn.primitive == REDUCE_SUM and graph.operands[e][0] in graph.producers:
            return frozenset()
        return frozenset({"product" if product_dtype(eqn) else "lookup" if eqn.primitive == GATHER else "other"})

    def padded(e: int) -> frozenset[str]:
        eqn = graph.eqns[e]
        if eqn.primitive == REDUCE_SUM:  # of a kernel of its own
            return frozenset({"other"})
        cast = widening(eqn) < 0 and eqn.results[0].dtype == BFLOAT16
        return frozenset({"product"}) if cast else kinds(e)

    found = {v: readers(v) for v, aval in enumerate(graph.avals) if aval.dtype == FLOAT32}
    besides = {graph.results[e][0] for e, eqn in enumerate(graph.eqns) if eqn.primitive == BRANCH_JOIN}
    besides.update(graph.outputs)
    return {
        v: Multiplied(
            len(by) == 1 and v not in besides,
            frozenset(e for e, _ in graph.consumers.get(v, ()) if kinds(e) != frozenset({"product"})),
        )
        for v, by in found.items()
        if "product" in by and "lookup" not in by
    }


def lying_share(graph: Graph, cast: Mapping[int, Multiplied], value: int) -> float:
    """The share of a value's bytes that lies in memory: half, if it lies there as products cast it (`multiplied`).

    So does what is computed, if nothing else takes it; not what is updated where it was given.
    """
    while (how := cast.get(value)) is not None and how.alone and value in graph.producers:
        e, _ = graph.producers[value]
        if not graph.eqns[e].traits.renames:
            return 1.0 if graph.eqns[e].traits.link or graph.eqns[e].traits.updates else _CAST_SHARE
        value = graph.made_from(e)[0]
    return 1.0


def cast_ahead(graph: Graph, *, products: bool) -> dict[int, CastAhead]:
    """Values outside of loops that are cast whole before the loops that take slices of them and narrow these.

    They enter the loops as they are or under other names, and may pass through loops to get there.

    Args:
      graph: the program.
      products: whether products narrow their operands, too.
    """
    spans, consumers = loop_spans(graph), graph.consumers

    @cache
    def read_as(value: int, *, sliced: bool) -> frozenset[np.dtype | None]:
        """The dtypes to which loops narrow slices of a value; None for what reads it otherwise."""
        return frozenset(dtype for e, _ in consumers.get(value, ()) for dtype in read_by(e, sliced=sliced))

    def read_by(e: int, *, sliced: bool) -> frozenset[np.dtype | None]:
        eqn = graph.eqns[e]
        if eqn.traits.renames or eqn.primitive == LOOP_SLICE:
            return read_as(graph.results[e][0], sliced=sliced or eqn.primitive == LOOP_SLICE)
        narrow = eqn.results[0].dtype if widening(eqn) < 0 else product_dtype(eqn) if products else None
        return frozenset({narrow if sliced else None})

    @cache
    def entered(e: int) -> frozenset[int]:
        """The outermost loops into which an equation takes its operand, under whatever name."""
        if graph.eqns[e].primitive in (LOOP_CONST, LOOP_SLICE):
            return frozenset({graph.eqn_loop[e]})
        if not graph.eqns[e].traits.renames:
            return frozenset()
        return frozenset(loop for reader, _ in consumers.get(graph.results[e][0], ()) for loop in entered(reader))

    outside = {v for e, results in enumerate(graph.results) if not graph.eqn_loop[e] for v in results}
    found: dict[int, CastAhead] = {}
    for value in sorted({*graph.inputs, *outside}):
        readers = [e for e, _ in consumers.get(value, ())]
        enters = [e for e in readers if entered(e)]
        dtypes = {dtype for e in enters for dtype in read_by(e, sliced=False)}
        if len(dtypes) == 1 and (dtype := dtypes.pop()) is not None:
            inside = [spans[loop] for e in enters for loop in entered(e)]
            first, last = min(first for first, _ in inside), max(last for _, last in inside)
            found[value] = CastAhead(dtype, first, last, enters == readers)
    return found


def widening(eqn: Eqn) -> int:
    """Bytes per element that a cast adds, fewer than none for a narrowing one; 0 for all other equations."""
    if not eqn.traits.cast:
        return 0
    return eqn.results[0].itemsize - eqn.operands[0].itemsize


def narrow_side(graph: Graph, made_by: Mapping[int, tuple[int, int]], value: int) -> Aval:
    """The array that XLA:GPU moves for a value: the operand of a widening cast, if one makes the value.

    A scale may follow the cast. XLA:GPU moves the collective before both
    (xla/hlo/transforms/collectives/collective_quantizer.cc).

    Args:
      graph: the program.
      made_by: value → the equation that makes it, and which of its results it is.
      value: the value to move.
    """

    def maker(v: int) -> int:
        return made_by[v][0] if v in made_by else -1

    def one_number(v: int) -> bool:
        e = maker(v)
        repeated = e >= 0 and graph.eqns[e].traits.repeats
        return not graph.avals[graph.operands[e][0] if repeated else v].ndim

    aval, e = graph.avals[value], maker(value)
    while e >= 0 and graph.eqns[e].traits.reshapes:  # may stand between a cast and a collective
        e = maker(graph.operands[e][0])
    if e >= 0 and graph.eqns[e].traits.scale:
        left, right = graph.operands[e]
        if one_number(left) and graph.eqns[e].primitive == MUL:
            left, right = right, left
        e = maker(left) if one_number(right) else -1
    return Aval(aval.shape, graph.eqns[e].operands[0].dtype) if e >= 0 and widening(graph.eqns[e]) > 0 else aval
