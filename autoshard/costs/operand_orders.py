"""Operand orders: which operands of products are written again, because their dimensions lie in another order.

A matmul reads its batch, what it contracts and what is left of an operand as one dimension each, with any stride: the
dimensions of each group must lie in memory next to each other, in their order. What is given to a program lies as it is
given, and so does what is updated in its place: XLA:GPU transposes caches of keys [batch, position, head, width] that
heads are a batch of, which reads and writes them. If it is updated outside of loops, it is also copied, so that the
dot's is updated in its place, and what was transposed first is updated and transposed back at the end of the program.
What a loop slices or carries is transposed as a whole in front of the loop, and behind it once more if it is updated
there. Fusions write in an order that their reader takes. Products do not, and are transposed, too, where nothing is
fused between them and their reader: that is not priced. A product with a single row, or column, is no matmul, and
transposes nothing. What is left of the left operand may be in two parts where there is no batch; by later releases, of
either operand, and beside a batch.

Where a loop, or an update, hands an operand to a dot whose batch has several dimensions that are not its first ones,
even of one element each (one group of heads on a device), they are merged before it is known how the operand lies: the
dot has it in the order batch, own, contracted, or on the right batch, contracted, own. What has one element in the
program is left out, unless earlier releases compile for a single device; not what has one on each device.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autoshard.costs.dimension_orders import reordered
from autoshard.costs.strategies import Strategies, shards, split
from autoshard.ir.graph import Eqn, Graph
from autoshard.ir.mesh import MeshAxes
from autoshard.ir.op_traits import CONSTRAINT, DOT_GENERAL, LOOP_CARRY, LOOP_CONST, LOOP_SLICE

_Dims = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Taken:
    """By which dimensions a dot takes an operand.

    `left`: it is the left one; `in_parts`: its own may be in two; `merges`: the batch is merged before it is known how
    the operand lies.
    """

    contracted: _Dims
    batch: _Dims
    own: _Dims
    left: bool
    in_parts: bool
    merges: bool

    def fits(self, order: _Dims) -> bool:
        """Whether it takes the operand as it lies: `order` are its dimensions of more than one element."""
        if self.merges:
            rest = (*self.own, *self.contracted) if self.left else (*self.contracted, *self.own)
            return order == tuple(d for d in (*self.batch, *rest) if d in order)
        parts = 2 if self.in_parts or (self.left and not set(self.batch) & set(order)) else 1
        return max(_parts(order, self.contracted), _parts(order, self.batch)) <= 1 and _parts(order, self.own) <= parts


def _parts(order: _Dims, group: _Dims) -> int:
    """Into how many parts other dimensions, or another order, cut a group of dimensions in memory."""
    places = [order.index(d) for d in group if d in order]
    return sum(place != before + 1 for before, place in pairwise((-2, *places)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewritten:
    """An operand of a dot that is written again where its dimensions do not lie as the dot takes them.

    Attributes:
      operand: of the dot, 0 or 1.
      order: its dimensions of more than one element as they lie in memory, the major ones first.
      taken: how the dot takes both of its operands.
      times: how often its bytes are read or written for that in each run of the dot.
      copies: how many times its bytes lie in memory for it.
      begin: since when.
      end: until when.
    """

    operand: int
    order: _Dims
    taken: tuple[_Taken, _Taken]
    times: float
    copies: int
    begin: int
    end: int

    def nbytes(self, eqn: Eqn, strategies: Strategies, mesh: MeshAxes) -> NDArray[np.int64]:
        """Bytes per device (S,) of the operand of a dot, where it is written again; else 0."""
        sizes = [
            np.stack([size // split(codes, d, aval.ndim, mesh) for d, size in enumerate(aval.shape)], axis=1)
            for codes, aval in zip(strategies.operands, eqn.operands, strict=True)
        ]
        long, of = np.unique(sizes[self.operand] > 1, axis=0, return_inverse=True)
        orders = (tuple(d for d in self.order if there[d]) for there in long)
        turned = np.array([not self.taken[self.operand].fits(order) for order in orders])[of.ravel()]
        for taken, size in zip(self.taken, sizes, strict=True):
            turned &= size[:, list(taken.own)].prod(axis=1) > 1
        aval, codes = eqn.operands[self.operand], strategies.operands[self.operand]
        return np.where(turned, aval.nbytes // shards(codes, aval.ndim, mesh), 0)


@dataclass(frozen=True, slots=True)
class _Lying:
    """How a value lies that is given, or a part of what is; in which loop, and how it comes to be there."""

    order: _Dims
    loop: int = 0
    sliced: bool = False
    carried: bool = False
    updated: bool = False

    @property
    def times(self) -> int:
        """How often its bytes are read or written to have it in another order."""
        if not self.updated:
            return 2
        return 4 if self.loop else 6


def rewritten_operands(
    graph: Graph, spans: Mapping[int, tuple[int, int]], *, in_parts: bool, devices: int
) -> Mapping[int, tuple[Rewritten, ...]]:
    """Dot → its operands that are written again if their dimensions do not lie as it takes them.

    A value that several dots take is written again for the first.

    Args:
      graph: the program.
      spans: loop → its first and last equation.
      in_parts: whether what is left of an operand may lie in two parts, whatever the dot.
      devices: how many the program is for.
    """
    lying = {v: _Lying(tuple(d for d, size in enumerate(graph.avals[v].shape) if size > 1)) for v in graph.inputs}
    found = defaultdict[int, list[Rewritten]](list)
    turned = set[int]()
    for e, eqn in enumerate(graph.eqns):
        operands, results = graph.operands[e], graph.results[e]
        if eqn.primitive == DOT_GENERAL and eqn.traits.contraction:
            for i, v in enumerate(operands):
                how = lying.get(v)
                if how is None or v in turned:
                    continue
                free, units = how.updated or how.loop > 0, devices == 1 and not in_parts
                left, right = (_taken(eqn, k, in_parts=in_parts, free=free, units=units) for k in range(2))
                if (left, right)[i].fits(how.order):
                    continue
                turned.add(v)
                runs = max(graph.runs(e), 1) if how.loop else 1
                found[e].append(
                    Rewritten(
                        operand=i,
                        order=how.order,
                        taken=(left, right),
                        times=how.times / (1 if how.sliced else runs),
                        copies=runs if how.sliced else 0 if how.carried else 1,
                        begin=spans[how.loop][0] if how.loop else e,
                        end=spans[how.loop][1] if how.loop else len(graph.eqns) - 1 if how.updated else e,
                    )
                )
            continue
        known = lying.get(operands[0]) if operands and len(results) == 1 else None
        if known is None:
            continue
        if eqn.traits.updates:
            lying[results[0]] = replace(known, updated=True)
        elif eqn.primitive in (LOOP_CONST, LOOP_CARRY):
            carried = known.carried or eqn.primitive == LOOP_CARRY
            lying[results[0]] = replace(known, loop=known.loop or graph.eqn_loop[e], carried=carried)
        elif eqn.primitive == LOOP_SLICE and not known.loop and known.order[:1] == (0,):
            order = tuple(d - 1 for d in known.order[1:])
            lying[results[0]] = _Lying(order, graph.eqn_loop[e], sliced=True)
        elif eqn.primitive == CONSTRAINT:
            lying[results[0]] = known
        elif eqn.traits.reshapes and (order := reordered(eqn, known.order)) is not None:
            lying[results[0]] = replace(known, order=order)
    return {e: tuple(rows) for e, rows in found.items()}


def _taken(eqn: Eqn, operand: int, *, in_parts: bool, free: bool, units: bool) -> _Taken:
    """How a dot takes an operand.

    `free`: it is updated, or a loop's, and lies as the compiler chooses; `units`: dimensions of one element are merged.
    """
    (contracted, batch), shape = (of[operand] for of in eqn.params["dimension_numbers"]), eqn.operands[operand].shape
    own = tuple(d for d in range(len(shape)) if d not in (*contracted, *batch))
    known = [d for d, size in enumerate(shape) if size > 1 or units]
    merged = [d for d in batch if d in known]
    return _Taken(
        contracted=tuple(contracted),
        batch=tuple(batch),
        own=own,
        left=operand == 0,
        in_parts=in_parts,
        merges=free and len(merged) > 1 and merged != known[: len(merged)],
    )
