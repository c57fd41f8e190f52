"""Dimension orders: in which order the dimensions of products lie in memory, and what is transposed because of it.

XLA:GPU writes a product with its dimensions in the order of the equation: batch, left, right. What is computed from it
element by element keeps that order, under whichever names a program's transposes give to the dimensions. Where two
products of different orders meet element by element, a kernel first writes the later one in the order of the earlier,
as wide as it is by then: the gradient of grouped heads' scores, which `einsum` and its transpose write in different
orders. A reduction along other dimensions than the minor ones has a kernel of its own, and shares none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autoshard.ir.graph import Eqn, Graph
from autoshard.ir.op_traits import TRANSPOSE

_Order = tuple[int, ...]  # dimensions of more than one element, the major ones first


@dataclass(frozen=True, slots=True, kw_only=True)
class DimensionOrders:
    """What follows from the orders of products' dimensions.

    Attributes:
      turned: values that are written in another order than that of the product that they are made from.
      across: reductions along other dimensions than the minor ones of what they reduce.
      onto: value → the product of which it has the order and the size, if that is reduced across: no kernel reads a
        row of it twice, so that it may be overwritten.
    """

    turned: frozenset[int] = frozenset()
    across: frozenset[int] = frozenset()
    onto: Mapping[int, int] = field(default_factory=dict[int, int])


@dataclass(frozen=True, slots=True)
class _Lying:
    """How a value lies: its order, the product that gave it, and the first value that was computed from that alone."""

    order: _Order
    product: int
    first: int | None = None


def dimension_orders(graph: Graph, fuses: Sequence[bool]) -> DimensionOrders:
    """What is transposed in a graph, and reduced across; `fuses`: per equation, whether XLA fuses it."""
    lying: dict[int, _Lying] = {}
    turned: set[int] = set()
    across: set[int] = set()
    crossed: set[int] = set()  # products that are reduced across
    for e, eqn in enumerate(graph.eqns):
        operands, results = graph.operands[e], graph.results[e]
        known = [v for v in operands if v in lying]
        if eqn.traits.contraction:
            lying[results[0]] = _Lying(_long(range(eqn.results[0].ndim), eqn.results[0].shape), e)
        elif not known or not (fuses[e] or eqn.traits.renames or eqn.traits.choice):
            continue
        elif eqn.traits.ends_fusion:
            if _reduces_across(eqn, lying[known[0]].order):
                across.add(e)
                crossed.add(lying[known[0]].product)
        elif eqn.traits.reshapes:
            order = reordered(eqn, lying[known[0]].order)
            if order is not None:
                lying[results[0]] = _Lying(order, lying[known[0]].product, lying[known[0]].first)
        else:
            whole = [v for v in known if graph.avals[v].shape == eqn.results[0].shape]
            orders = {lying[v].order for v in whole}
            if not whole:
                continue
            kept = min(whole, key=lambda v: lying[v].product)
            alone = len({lying[v].product for v in whole}) == 1
            first = lying[kept].first
            if first is None and alone and not (eqn.traits.renames or eqn.traits.choice):
                first = results[0]
            if len(orders) > 1:
                late = (lying[v] for v in whole if lying[v].order != lying[kept].order)
                turned.update(results[0] if found.first is None else found.first for found in late)
            lying[results[0]] = _Lying(lying[kept].order, lying[kept].product, first)
    products = {v: graph.results[found.product][0] for v, found in lying.items() if found.product in crossed}
    onto = {v: product for v, product in products.items() if graph.avals[v].size == graph.avals[product].size}
    return DimensionOrders(turned=frozenset(turned), across=frozenset(across), onto=onto)


def _long(dims: Sequence[int], shape: Sequence[int]) -> _Order:
    return tuple(d for d in dims if shape[d] > 1)


def reordered(eqn: Eqn, order: _Order) -> _Order | None:
    """The order of a transposed or reshaped value; None where a reshape does not say."""
    (before, after), long = (eqn.operands[0].shape, eqn.results[0].shape), sorted(order)
    if eqn.primitive == TRANSPOSE:
        to = {d: i for i, d in enumerate(eqn.params["permutation"])}
        return tuple(to[d] for d in order)
    named = [d for d, size in enumerate(after) if size > 1]
    if [before[d] for d in long] == [after[d] for d in named]:
        to = dict(zip(long, named, strict=True))
        return tuple(to[d] for d in order)
    return tuple(named) if list(order) == long else None


def _reduces_across(eqn: Eqn, order: _Order) -> bool:
    reduced = {d for d in eqn.params.get("axes", ()) if d in order}
    return bool(reduced) and set(order[len(order) - len(reduced) :]) != reduced
