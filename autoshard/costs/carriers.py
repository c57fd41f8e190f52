"""Carriers: the contractions whose kernels carry on a gather for the contraction behind them, on chips that do so.

libtpu 0.0.52 on v5e puts a gather that has not ended into the kernel of the contraction before the one that takes it
(`async-collective-start`, the kernel, `async-collective-done`). Each kernel carries one gather. So what hides of a
gather is what its carrier takes (`tests/compilers/test_hidden_tpu.py`). The first gather of a program or of a trip has
no carrier, nor the first behind a loop. Counted are values that no contraction of their trip precedes (weights): others
are waited for, as the contraction before has just made them, or libtpu puts off the one that takes them (a gradient of
weights). So are all other collectives.

A kernel that takes less than about two thirds of a gather shares it with the one before, if no gather has that:
together they hide what each would. But where the other operand is gathered, too, one kernel alone carries nothing that
takes more than twice as long. That is so of heads: their weights are split over the vocabulary, and the activations
gathered over the same axis.

Of what is waited for in the forward pass, and gathered once more for the backward pass, libtpu carries some and waits
for some (of heads, it waited in three programs and carried on in two). It is counted as waited for.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.costs.casts import widening
from autoshard.costs.dependences import multiplies
from autoshard.costs.strategies import Codes
from autoshard.ir.graph import Graph
from autoshard.ir.op_traits import RECALL


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """What hides of the gathers of a value in a trip.

    Attributes:
      each_s: seconds of the carrier of each gather; 0 for one without.
      first_s: seconds of the carrier of the value's first gather.
      reach_s: those and the seconds of the contraction before it. Nothing hides of gathers that take more than twice as
        long.
      beside: layouts (codes, in order) in which the value is taken while the other operand is gathered over the same
        axis: there `first_s` counts in place of `reach_s`.
    """

    each_s: tuple[float, ...]
    first_s: float
    reach_s: float
    beside: tuple[int, ...] = ()

    def hidden_s(self, gather_s: NDArray[np.float64], taken: Codes) -> NDArray[np.float64]:
        """Of the seconds of one of the gathers, those that hide, on average; `taken`: the layouts that they end in."""
        hidden = np.mean([np.minimum(gather_s, most_s) for most_s in self.each_s], axis=0)
        reach_s = np.where(np.isin(taken, self.beside), self.first_s, self.reach_s)
        return np.where(gather_s > 2 * reach_s, 0.0, hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class Carriers:
    """What precedes the contractions of a program.

    Attributes:
      takes: equation → the first contraction of its trip that takes what it makes, or itself; -1: none does.
      before: contraction → the one before it in its trip; -1 for the first.
      late: values that are computed from contractions of their trip.
      first: value → the first contraction that takes it, or another shape or type of what it is; -1: none does.
    """

    takes: tuple[int, ...]
    before: dict[int, int]
    late: frozenset[int]
    first: tuple[int, ...]

    def of(self, value: int, uses: Iterable[int]) -> int | None:
        """The contraction that carries the gather of a value for some of the equations that take it; None: it waits."""
        takers = [self.takes[e] for e in uses if self.takes[e] >= 0]
        carrier = self.before[min(takers)] if takers and value not in self.late else -1
        return carrier if carrier >= 0 else None

    def reach(self, value: int) -> list[int]:
        """The contractions that may carry the first gather of a value, or of another shape or type of what it is."""
        first = self.first[value]
        carrier = self.before[first] if first >= 0 else -1
        return [e for e in (carrier, self.before.get(carrier, -1)) if e >= 0]


def carriers(graph: Graph) -> Carriers:
    """The carriers of a program, whose equations run in their order."""
    before: dict[int, int] = {}
    last, home = -1, 0  # the last contraction so far, since a loop began or ended
    late: set[int] = set()
    for e, eqn in enumerate(graph.eqns):
        if graph.eqn_loop[e] != home:
            last, home = -1, graph.eqn_loop[e]
        if multiplies(eqn):
            before[e], last = last, e
        if e in before or (not eqn.traits.enters_loop and not late.isdisjoint(graph.operands[e])):
            late.update(graph.results[e])
    takes = [-1] * len(graph.eqns)
    for e in range(len(graph.eqns) - 1, -1, -1):
        users = (takes[u] for v in graph.results[e] for u, _ in graph.consumers.get(v, ()))
        if not graph.eqns[e].traits.link and widening(graph.eqns[e]) >= 0:  # what is narrowed moves behind the cast
            takes[e] = e if e in before else min((taker for taker in users if taker >= 0), default=-1)
    origin = _origins(graph)
    first: dict[int, int] = {}
    for v, users in graph.consumers.items():
        for taker in (takes[e] for e, _ in users):
            if taker >= 0:
                first[origin[v]] = min(taker, first.get(origin[v], taker))
    return Carriers(
        takes=tuple(takes),
        before=before,
        late=frozenset(late),
        first=tuple(first.get(v, -1) for v in origin),
    )


def _origins(graph: Graph) -> list[int]:
    """Of each value, the one of its trip that it is another shape or type of, or itself; also if that is kept."""
    origin = list(range(len(graph.avals)))
    for e, eqn in enumerate(graph.eqns):
        operands = graph.operands[e]
        renames = len(operands) == 1 and len(eqn.results) == 1 and not eqn.traits.link
        if (renames and eqn.operands[0].size == eqn.results[0].size) or eqn.primitive == RECALL:
            origin[graph.results[e][0]] = origin[operands[0]]
    return origin
