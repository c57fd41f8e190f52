"""Reading: which values a choice of every decision keeps."""

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from autoshard.ir.saved_values import ForwardPass, SavedValues, ValueId
from autoshard.problem.decisions import Decisions, Equation
from autoshard.problem.whole_step.enlarged import WholeStep


def kept_values(
    whole: WholeStep, saved: SavedValues, decisions: Decisions, choice: NDArray[np.int64]
) -> frozenset[ValueId]:
    """The values that the backward passes find kept, in terms of the program.

    Args:
      whole: the graph with its choices.
      saved: of the program.
      decisions: of the graph.
      choice: one per decision.
    """
    live = _live(decisions, choice)
    there = {of for e, of in whole.keeps.items() if e in live}
    chosen = frozenset(whole.keeps.values()) | frozenset(whole.recalls.values())
    steps = {v.id: one.steps[v.step].operands for one in saved.passes for v in one.values if v.step is not None}
    lasts = {v.id for one in saved.passes for v in one.values if v.free or v.must_keep}
    flat = [v.id for one in saved.passes if one.source.is_flat for v in one.values]
    known: dict[ValueId, bool] = {}
    for v in flat:  # in program order: operands first
        computed = all(o is None or known.get(o, True) for o in steps.get(v, ()))  # from what is not repeated
        known[v] = v in there if v in chosen else v in lasts or v in whole.final or computed
    stacked = {v for v in saved.saved if v not in known and v not in chosen and not v.stacked}
    kept = {*there, *stacked, *(v for v, kept in known.items() if kept)}
    for one in saved.passes:
        if one.source.is_flat:
            kept = as_stored(one, kept, whole.held)
    return saved.stacks(kept)


def offloaded_values(whole: WholeStep, decisions: Decisions, choice: NDArray[np.int64]) -> frozenset[ValueId]:
    """Those of the kept values that the host's memory holds."""
    return frozenset(whole.keeps[e] for e in whole.offloads & _live(decisions, choice))


def as_stored(one: ForwardPass, kept: Collection[ValueId], held: Collection[ValueId]) -> set[ValueId]:
    """The values that a flat pass keeps, in terms of the values that lie in memory.

    What is computed from that where it is read is kept at no cost; repeated, a barrier would stand before it. As an
    operand of a step that is repeated behind a barrier, it would be stored: there it is repeated, too.
    """
    fused: dict[ValueId, bool] = {}  # of what does not lie in memory: whether it is computed from what does

    def is_given(at: ValueId | None) -> bool:
        return at is None or bool(one.value[at].free) or (at in held and at in kept) or fused.get(at, False)

    for v in one.values:
        if v.step is not None and not v.free and not v.must_keep and v.id not in held:
            fused[v.id] = all(map(is_given, one.steps[v.step].operands))
    found = {*kept, *(v for v, is_fused in fused.items() if is_fused)}
    while True:
        repeated = one.demand(found).first
        read = {at for k in repeated for at in one.steps[k].operands if at is not None}
        stored = {at for at in read if at in found and fused.get(at, False)}
        if not stored:
            return found
        found -= stored


def _live(decisions: Decisions, choice: NDArray[np.int64]) -> set[int]:
    """The equations whose results something takes, if only another one that is taken; all that is not optional.

    What is chosen and not taken costs nothing, so a choice may have it.
    """
    graph, live = decisions.graph, set[int]()
    for e in range(len(graph.eqns) - 1, -1, -1):
        if e not in graph.optional:
            live.add(e)
            continue
        takers = [taker for v in graph.results[e] for taker in graph.consumers.get(v, ())]
        if any(u in live and _takes(decisions, u, i, choice) for u, i in takers):
            live.add(e)
    return live


def _takes(decisions: Decisions, e: int, i: int, choice: NDArray[np.int64]) -> bool:
    """Whether an equation takes its operand i; of a recall's two, one."""
    node = decisions.node_of[e]
    decision = decisions.nodes[node] if node >= 0 else None
    if not isinstance(decision, Equation) or not decision.untaken:
        return True
    return not decision.untaken[i][choice[node]]
