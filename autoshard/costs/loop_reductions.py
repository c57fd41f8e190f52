"""Loop reductions: sums over a loop's trips whose reduction over devices the compiler moves behind the loop.

In a loop that adds one partial sum a trip to a carried value, XLA:GPU and XLA:TPU turn the
all-reduce of each trip into one all-reduce of the total, as long as the carried value is
whole along the reduced axes (`while-loop-all-reduce-code-motion`; measured on H100 and v5e:
gradient accumulation of 8 trips emits one all-reduce, on v5e of the accumulator's float32, on
H100 of the bfloat16 that is cast to it). A reduce-scatter into a sharded
accumulator stays in the loop on both, and XLA:CPU moves neither. XLA:TPU also moves a sum that is transposed
after it is finished.
"""

from dataclasses import dataclass

from autoshard.ir.graph import Eqn, Graph
from autoshard.ir.op_traits import LOOP_CARRY, TRANSPOSE


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulators:
    """`terms[v]`: the new value of the accumulator to which the body's value v is added, and how often the loop runs.

    `totals` are the new values of the accumulators, which lie as they are carried on: a
    total that is whole and carried in pieces would be reduced once a trip all the same.
    """

    terms: dict[int, tuple[int, int]]
    totals: frozenset[int]


NONE = Accumulators(terms={}, totals=frozenset())


def accumulators(graph: Graph, *, past_transposes: bool) -> Accumulators:
    """The accumulators of a graph's loops.

    Args:
      graph: the program.
      past_transposes: whether the compiler moves a sum that is finished before a transpose.
    """
    consumers, made_by = graph.consumers, graph.producers

    def passed(value: int) -> int:
        """The last name of a value: follows renames and casts while there is one consumer."""
        while len(uses := consumers.get(value, [])) == 1 and graph.eqns[uses[0][0]].traits.passes_totals:
            value = graph.results[uses[0][0]][0]
        return value

    terms: dict[int, tuple[int, int]] = {}
    totals: set[int] = set()
    for e, eqn in enumerate(graph.eqns):
        if eqn.primitive != LOOP_CARRY:
            continue
        uses = consumers.get(passed(graph.results[e][0]), [])
        if len(uses) != 1 or not graph.eqns[uses[0][0]].traits.addition:
            continue
        add, position = uses[0]
        total = graph.results[add][0]
        onward = consumers.get(passed(total), [])
        if [graph.carry.get(use) for use, _ in onward] != [graph.carry[e]]:
            continue
        totals.add(total)
        term = graph.operands[add][1 - position]
        terms[term] = total, graph.trips[graph.results[onward[0][0]][0]]
        while (maker := made_by.get(term, (-1, 0))[0]) >= 0 and _is_passed(
            graph.eqns[maker], past_transposes=past_transposes
        ):
            before = graph.operands[maker][0]
            if len(consumers[before]) != 1 or graph.avals[before].itemsize > graph.avals[term].itemsize:
                break
            terms[before] = terms[term]
            term = before
    return Accumulators(terms=terms, totals=frozenset(totals))


def _is_passed(eqn: Eqn, *, past_transposes: bool) -> bool:
    """Whether a sum that is finished before an equation is moved as one that is finished behind it."""
    return eqn.traits.cast or eqn.traits.copy or (past_transposes and eqn.primitive == TRANSPOSE)
