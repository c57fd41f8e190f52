"""Accumulators: sums over a loop's trips whose reduction over devices the compiler moves behind the loop.

In a loop that adds one partial sum a trip to a carried value, XLA:GPU and XLA:TPU turn the
all-reduce of each trip into one all-reduce of the total, as long as the carried value is
whole along the reduced axes (`while-loop-all-reduce-code-motion`; measured on H100 and v5e:
gradient accumulation of 8 trips emits one all-reduce). A reduce-scatter into a sharded
accumulator stays in the loop on both, and XLA:CPU moves neither.
"""

from collections.abc import Mapping

from autoshard.graph import Graph

# From the contraction to the addition: one operand, the same values in another dtype or order.
_PASSING = frozenset({"convert_element_type", "transpose", "reshape", "sharding_constraint", "copy"})


def accumulated(graph: Graph) -> Mapping[int, int]:
    """Value of a loop's body that is summed up over its trips → how often the loop itself runs."""
    consumers, made_by = graph.consumers(), graph.producers()

    def passed(value: int) -> list[int]:
        """The value and those that it becomes, as long as there is one consumer and nothing is computed."""
        found = [value]
        while len(uses := consumers.get(found[-1], [])) == 1 and graph.eqns[uses[0][0]].primitive in _PASSING:
            found.append(graph.results[uses[0][0]][0])
        return found

    found: dict[int, int] = {}
    for e, eqn in enumerate(graph.eqns):
        if eqn.primitive != "loop_carry":
            continue
        carry = graph.results[e][0]
        uses = consumers.get(passed(carry)[-1], [])
        if len(uses) != 1 or graph.eqns[uses[0][0]].primitive not in ("add", "add_any"):
            continue
        add, position = uses[0]
        onward = consumers.get(passed(graph.results[add][0])[-1], [])
        if [graph.carry.get(use) for use, _ in onward] != [graph.carry[e]]:
            continue
        term: int | None = graph.operands[add][1 - position]
        trips = graph.trips[graph.results[onward[0][0]][0]]
        while term is not None:
            found[term] = trips
            maker = made_by.get(term, (-1, 0))[0]
            through = maker >= 0 and graph.eqns[maker].primitive in _PASSING
            term = graph.operands[maker][0] if through and len(consumers[graph.operands[maker][0]]) == 1 else None
    return found
