"""Softmaxes: what lies in memory for the numerators of one, and which kernel makes them.

XLA:TPU (libtpu 0.0.52, by its text of attention of many orders, sizes, masks and dtypes, on v5e, v5p and v6e) makes a
softmax in one of two ways.

*In one kernel* it finds the maximum of each row, repeats it along the row, and writes the numerators and their sum:
the float32 exponentials lie in memory, once. The kernel of the scores' product does this, unless rows are long. So it
is where something is computed in float32 between the product and its softmax (a scale, a mask, a cap, a bias), or the
product itself is float32.

*By passes* it writes the scores as their product leaves them, and its maxima; a second kernel sums the exponentials,
and whatever takes one computes it again, from the scores. So it is where the softmax takes a mere cast of narrower
scores, where it is computed in their dtype, where the product is transposed on the way and read for a gradient, too
(attention of grouped heads by einsum), where its matrices are (groups of one head), where factors are float32 and
something is computed on their product, and where a device has a single row of the first dimension (one sequence).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.ir.graph import Aval, Eqn, Graph
from autoshard.ir.op_traits import DIV, EXP, KEEP, RECALL, REDUCE_MAX, REDUCE_SUM, SUB, TRANSPOSE

LONG_ROW = 2048  # keys; the kernel of a product goes on with rows up to this, on v5e up to 2,560 or 3,072

LEAST_QUOTIENTS = 2**15  # of one matrix of scores; of fewer each product divides again: of 160 × 160, not of 197 × 197

_NONE = -1
_FORWARD_READERS = 2  # of numerators: their sum and their quotient


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerator:
    """What lies in memory for the numerators of a softmax.

    Attributes:
      product: what they are computed from, element by element, if that is the product of one contraction.
      product_itemsize: bytes per element of it.
      by_passes: whether the product lies there itself, in every layout.
      few: whether devices may have one row of the first dimension each; where they do, the product lies there.
      turned: whether a product is transposed on the way.
      maximum: the equation that finds the rows' maxima, if the kernel of the product makes the numerators.
      scores: what the product's kernel writes, if another one makes the numerators of them.
    """

    product: int | None
    product_itemsize: int
    by_passes: bool
    few: bool
    turned: bool
    maximum: int | None
    scores: int | None

    @property
    def stores_gradient(self) -> bool:
        """Whether chips that store gradients of scores store that of these: not of one row, unless it is transposed."""
        return self.turned or not self.few

    @property
    def replaces_product(self) -> bool:
        """Whether the product lies nowhere beside: its kernel goes on with it, or it is what lies there."""
        return self.by_passes or self.few or self.maximum is not None or self.scores is not None

    def nbytes(self, aval: Aval) -> int:
        """Bytes of the whole array that lies in memory for numerators, where no layout decides."""
        if not (self.by_passes or self.few):
            return aval.nbytes
        return aval.nbytes * min(self.product_itemsize, aval.itemsize) // aval.itemsize

    def share(self, aval: Aval, parts: NDArray[np.int64]) -> NDArray[np.float64]:
        """The share of its own bytes that lies in memory for a numerator: all, or its product's.

        Shape (N,), as of `parts`: in how many each layout splits the first dimension.
        """
        return np.where(self.are_products(aval, parts), min(1.0, self.product_itemsize / aval.itemsize), 1.0)

    def are_products(self, aval: Aval, parts: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether what lies there is the product, from which numerators are computed again; shape (N,)."""
        return self.by_passes | (aval.shape[0] // parts == 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftmaxFacts:
    """What decides about softmaxes besides a program.

    Attributes:
      devices: how many a layout may split a value over.
      stores_quotients: whether quotients lie in memory, of the machine.
      stores_gradients: whether gradients of scores do, of the machine (`stores_score_gradients`).
    """

    devices: int
    stores_quotients: bool
    stores_gradients: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Softmax:
    """One softmax.

    Attributes:
      value: its exponentials, before they are divided by their sum.
      numerator: what lies in memory for them.
      quotient: cast, if it is cast.
      read_again: whether chips that store quotients store this one: several read it, and its scores are no mere casts.
    """

    value: int
    numerator: Numerator
    quotient: int
    read_again: bool


def softmaxes(graph: Graph, devices: int) -> Iterator[Softmax]:
    """Every softmax of a program that divides exponentials by their sums; a number is none."""
    found = _Softmaxes(graph, devices)
    for e, eqn in enumerate(graph.eqns):
        if eqn.primitive != DIV or not eqn.results[0].ndim:
            continue
        above, below = graph.operands[e]
        exponential, total = found.maker(above), found.maker(below, through=True)
        if min(exponential, total) < 0 or graph.eqns[exponential].primitive != EXP:
            continue
        if graph.eqns[total].primitive == REDUCE_SUM and graph.operands[total][0] == above:
            quotient = graph.results[e][0]
            users = [u for u, _ in graph.consumers.get(quotient, ())]
            quotient = next((graph.results[u][0] for u in users if graph.eqns[u].traits.cast), quotient)
            yield Softmax(
                value=above,
                numerator=found.numerator(above, exponential),
                quotient=quotient,
                read_again=len(graph.consumers.get(quotient, ())) > 1 and not found.casts(exponential),
            )


def recalled(graph: Graph) -> Iterator[tuple[int, int]]:
    """Value → what a backward pass outside of loops takes for it, kept or repeated."""
    for e, eqn in enumerate(graph.eqns):
        keeps = graph.producers.get(graph.operands[e][0], (_NONE, 0))[0] if eqn.primitive == RECALL else _NONE
        if keeps >= 0 and graph.eqns[keeps].primitive == KEEP:
            yield graph.operands[keeps][0], graph.results[e][0]


class _Softmaxes:
    def __init__(self, graph: Graph, devices: int) -> None:
        self.graph, self.made_by, self.devices = graph, graph.producers, devices

    def maker(self, value: int, *, through: bool = False) -> int:
        """The equation that makes a value (`through`: that makes its elements, under other names); -1 for none.

        Of what a loop keeps or repeats, the one that repeats it.
        """
        graph = self.graph
        e = self.made_by.get(value, (_NONE, 0))[0]
        while e >= 0 and (graph.recalls_slice(e) or (through and graph.eqns[e].traits.same_values)):
            e = self.made_by.get(graph.made_from(e)[0], (_NONE, 0))[0]
        return e

    def numerator(self, value: int, exponential: int) -> Numerator:
        """What lies there for a numerator, by the products that it is computed from, element by element."""
        graph = self.graph
        aval, size = graph.avals[value], graph.avals[value].size
        products, left, seen = list[int](), [value], {value}
        turned = flipped = False
        while left:
            v = left.pop()
            e = self.made_by.get(v, (_NONE, 0))[0]
            if e >= 0 and graph.eqns[e].traits.contraction:
                products.append(v)
            elif e >= 0:
                turned |= graph.eqns[e].primitive == TRANSPOSE
                flipped |= graph.eqns[e].primitive == TRANSPOSE and _transposes_matrices(graph.eqns[e])
                new = {o for o in graph.operands[e] if graph.avals[o].size == size} - seen
                seen |= new
                left += new
        itemsize = min((graph.avals[v].itemsize for v in products), default=aval.itemsize)
        maximum = self._maximum(exponential)
        scores = self._scores(exponential)
        kept = len(graph.consumers[value]) > _FORWARD_READERS
        wide = scores not in products and any(self._multiplies_wide(v) for v in products)
        by_passes = (turned and kept) or flipped or wide or self.casts(exponential)
        few = aval.shape[0] <= self.devices and not wide
        long = maximum is not None and size > LONG_ROW * graph.avals[graph.results[maximum][0]].size
        return Numerator(
            product=products[0] if len(products) == 1 else None,
            product_itemsize=min(itemsize, aval.itemsize),
            by_passes=by_passes,
            few=few,
            turned=turned,
            maximum=None if by_passes or few or long else maximum,
            scores=scores if long and not (by_passes or few or scores in products) else None,
        )

    def _scores(self, exponential: int) -> int:
        """What is exponentiated, before maxima are subtracted from it."""
        (exponent,) = self.graph.operands[exponential]
        e = self.maker(exponent)
        return self.graph.operands[e][0] if e >= 0 and self.graph.eqns[e].primitive == SUB else exponent

    def _maximum(self, exponential: int) -> int | None:
        """The equation that finds the maxima which are subtracted before numbers are exponentiated."""
        graph = self.graph
        e = self.maker(graph.operands[exponential][0])
        if e < 0 or graph.eqns[e].primitive != SUB:
            return None
        scores, v = graph.operands[e]
        while True:
            e = self.maker(v, through=True)
            if e < 0:
                return None
            if graph.eqns[e].primitive == REDUCE_MAX:
                return e if graph.operands[e][0] == scores else None
            same = [o for o in graph.operands[e] if graph.avals[o].size == graph.avals[graph.results[e][0]].size]
            if len(same) != 1 or graph.eqns[e].traits.contraction:
                return None
            (v,) = same

    def casts(self, exponential: int) -> bool:
        """Whether the scores are a mere cast of narrower ones, or narrower than a sum is themselves."""
        graph, scores = self.graph, self._scores(exponential)
        while True:
            itemsize, e = graph.avals[scores].itemsize, self.maker(scores)
            if itemsize < _SUM_BYTES:
                return True
            if e < 0 or not graph.eqns[e].traits.keeps_dims:
                return False
            scores = graph.operands[e][-1]

    def _multiplies_wide(self, product: int) -> bool:
        e = self.made_by[product][0]
        return min(aval.itemsize for aval in self.graph.eqns[e].operands) >= _SUM_BYTES


def _transposes_matrices(eqn: Eqn) -> bool:
    """Whether a transpose exchanges the last two dimensions, but for those of one element."""
    (aval,) = eqn.operands
    order = [d for d in eqn.params["permutation"] if aval.shape[d] > 1]
    return len(order) > 1 and order == [*sorted(order)[:-2], *sorted(order)[:-3:-1]]


_SUM_BYTES = 4  # of an element: sums are float32
