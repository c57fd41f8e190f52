"""Edges: the resharding of one value between two decisions."""

import numpy as np
from numpy.typing import NDArray

from autoshard.costs.casts import narrow_side
from autoshard.costs.resharding import NO_STRIDES
from autoshard.costs.strategies import SUM, decode, parted
from autoshard.ir.graph import Aval
from autoshard.problem import bodies
from autoshard.problem.decision_builders.draft import Draft
from autoshard.problem.decision_builders.facts import GraphFacts
from autoshard.problem.decisions import Edge, Equation, Port


def add_edge(
    draft: Draft,
    source: Port,
    target: Port,
    value: int,
    *,
    forbidden: NDArray[np.bool_] | None = None,
    times: int = 1,
) -> None:
    """Adds the edge over which a value goes from one decision to another.

    Args:
      draft: what is decided so far: both ends.
      source: where the value comes from.
      target: where it goes.
      value: the value.
      forbidden: pairs of choices that no program could have.
      times: for how many groups of its uses it is moved in every trip.
    """
    facts = draft.facts
    windows = facts.windows
    window = windows.of_value[value]
    if value in windows.beside and not _urgent(draft, target):
        window = None
    impossible = forbidden
    if value in facts.accumulators.totals:
        impossible = forbidden = source.codes[:, None] != target.codes[None, :]
    elif (never := _never(draft, source, target, value)).any():
        forbidden = never if impossible is None else impossible | never
    draft.edges.append(
        Edge(
            u=source.node,
            v=target.node,
            value=value,
            moved=_moved(facts, value),
            source=source.codes,
            target=target.codes,
            window=window,
            hides=0.0 if window is None else facts.machine.overlap * windows.share(value),
            bucket=windows.bucket(value),
            strides=facts.strides.get(value, NO_STRIDES),
            trips=facts.graph.trips[value],
            forbidden=forbidden,
            impossible=impossible,
            total=_total(facts, value),
            times=times,
        )
    )


def _never(draft: Draft, source: Port, target: Port, value: int) -> NDArray[np.bool_]:
    """Pairs in which a sum is finished as the compiler would not.

    On its way to an addition that has it come finished; or scattered over some of its axes alone, which
    is done for what contractions make: of what was added, on GPU, term by term, and not for lookups. What the
    author of a `shard_map` sums does not wait.
    """
    facts, node = draft.facts, draft.nodes[target.node]
    ndim, axes = facts.graph.avals[value].ndim, facts.mesh.ndim
    never = np.zeros((len(source.codes), len(target.codes)), bool)
    scatters_added = facts.compiler.scatters_added_sums and value in facts.traits.added
    if value not in facts.traits.products and not scatters_added:
        never |= parted(source.codes, target.codes, ndim, axes)
    if value in draft.summed:
        never |= bodies.unscattered(source.codes, target.codes, draft.made[value].codes, ndim, axes)
    if isinstance(node, Equation) and (node.strategies.finished >= 0).any():
        pending = (decode(source.codes, ndim, axes) == SUM).any(axis=1)
        position = facts.graph.operands[node.equation].index(value)
        never |= pending[:, None] & (node.strategies.finished == position)[None, :]
    return never


def _urgent(draft: Draft, target: Port) -> bool:
    """Whether what takes a value there is on the way to a contraction that is not late, or may be."""
    facts = draft.facts
    results = [v for e in draft.nodes[target.node].equations for v in facts.graph.results[e]]
    return not results or not facts.windows.urgent.isdisjoint(results)


def _total(facts: GraphFacts, value: int) -> tuple[Aval, int] | None:
    """What is reduced of the accumulator that a value is added to, and how often: XLA:GPU undoes the cast."""
    if (term := facts.accumulators.terms.get(value)) is None:
        return None
    total, trips = term
    return _moved(facts, value) if facts.compiler.moves_collectives_past_casts else facts.graph.avals[total], trips


def _moved(facts: GraphFacts, value: int) -> Aval:
    """What is moved of a value: itself, or the narrow side of the cast that makes it, by the compiler."""
    if facts.compiler.moves_collectives_past_casts:
        return narrow_side(facts.graph, facts.graph.producers, value)
    return facts.graph.avals[value]
