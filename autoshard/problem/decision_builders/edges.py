"""Edges: the resharding of one value between two decisions."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autoshard.costs.carriers import Carried
from autoshard.costs.casts import BFLOAT16, narrow_side
from autoshard.costs.prices import PS_PER_S
from autoshard.costs.resharding import NO_STRIDES, Unfused
from autoshard.costs.strategies import SUM, decode, parted, unscattered
from autoshard.ir.graph import Aval
from autoshard.ir.op_traits import DOT_GENERAL
from autoshard.problem.decision_builders.draft import Draft
from autoshard.problem.decision_builders.facts import GraphFacts
from autoshard.problem.decisions import Copy, Edge, Equation
from autoshard.problem.ports import Port


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kernels:
    """What runs between two decisions but collectives: the fields of those names of an `Edge`."""

    unfused: Unfused | None = None
    cut_bytes: NDArray[np.int64] | None = None


NO_KERNELS = Kernels()


def add_edge(
    draft: Draft,
    source: Port,
    target: Port,
    value: int,
    *,
    forbidden: NDArray[np.bool_] | None = None,
    unplanned: NDArray[np.bool_] | None = None,
    times: int = 1,
    kernels: Kernels = NO_KERNELS,
) -> None:
    """Adds the edge over which a value goes from one decision to another.

    Args:
      draft: the decisions so far: both ends.
      source: the place that the value comes from.
      target: the place that it goes to.
      value: the value.
      forbidden: pairs of choices that no program could have.
      unplanned: pairs of choices that no plan has.
      times: the number of groups of uses for which it moves in every trip.
      kernels: what runs where the value moves, or is cut.
    """
    facts = draft.facts
    windows = facts.windows
    window, carried = windows.of_value[value], None
    if facts.carriers is not None:
        window, carried = _carried(draft, target, value, times)
    elif value in windows.beside and not _urgent(draft, target):
        window = None
    impossible = forbidden
    if value in facts.accumulators.totals or facts.on_host(value):
        impossible = forbidden = source.codes[:, None] != target.codes[None, :]
    elif (never := _never(draft, source, target, value)).any():
        forbidden = never if impossible is None else impossible | never
    waived = np.ones(len(target.codes), bool) if target.loose else target.off
    if waived is not None and forbidden is not None and impossible is not None:
        forbidden, impossible = forbidden & ~waived, impossible & ~waived
    if unplanned is not None:
        unplanned = unplanned if waived is None else unplanned & ~waived
        forbidden = unplanned if forbidden is None else forbidden | unplanned
    if source.off is not None and source.off.any():
        absent = source.off[:, None] & ~(np.zeros(len(target.codes), bool) if target.off is None else target.off)
        forbidden = absent if forbidden is None else forbidden | absent
        impossible = absent if impossible is None else impossible | absent
    draft.edges.append(
        Edge(
            u=source.node,
            v=target.node,
            value=value,
            moved=_moved(facts, value, cast=value not in draft.cast_apart or not takes_as_it_is(draft, target, value)),
            source=source.codes,
            target=target.codes,
            window=window,
            hides=0.0 if window is None else facts.hides * windows.share(value),
            bucket=windows.bucket(value),
            strides=facts.strides.get(value, NO_STRIDES),
            trips=facts.graph.trips[value],
            forbidden=forbidden,
            impossible=impossible,
            total=_total(facts, value),
            pending=_pending(facts, source, value),
            times=times,
            waived=waived,
            unfused=kernels.unfused,
            cut_bytes=kernels.cut_bytes,
            carried=carried,
        )
    )


def _carried(draft: Draft, target: Port, value: int, times: int) -> tuple[int | None, Carried | None]:
    """The window in which a value's gathers hide, if contractions carry any on, and what hides of them.

    Args:
      draft: the decisions so far: all but copies.
      target: the place that the value goes to.
      value: the value.
      times: the number of groups of uses for which it moves in every trip.
    """
    facts = draft.facts
    assert facts.carriers is not None
    uses = [e for e, _ in facts.graph.consumers.get(value, ())]
    here = set(draft.nodes[target.node].equations)
    groups = facts.apart[value] if times > 1 else [[e for e in uses if e in here] or uses]
    found = [facts.carriers.of(value, group) for group in groups]
    last = next((e for e in reversed(found) if e is not None), None)
    if last is None:
        return None, None
    reach_s = [_fastest_s(draft, e) for e in facts.carriers.reach(value)]
    carried = Carried(
        each_s=tuple(0.0 if e is None else _fastest_s(draft, e) for e in found),
        first_s=sum(reach_s[:1]),
        reach_s=sum(reach_s),
        beside=_beside(draft, target, value, uses),
    )
    return facts.windows.of_equation[last], carried


def _fastest_s(draft: Draft, e: int) -> float:
    """Seconds of an equation in a trip, however it is split."""
    return float(draft.nodes[draft.node_of[e]].cost_ps.min()) / PS_PER_S / draft.facts.graph.runs(e)


def _beside(draft: Draft, target: Port, value: int, uses: list[int]) -> tuple[int, ...]:
    """Layouts of a target in which the first contraction of a value takes it split along a dimension that it keeps."""
    graph = draft.facts.graph
    first = next((e for e in sorted(uses) if graph.eqns[e].primitive == DOT_GENERAL), None)
    if first is None:
        return ()
    operand, ndim = graph.operands[first].index(value), graph.avals[value].ndim
    summed, batched = graph.eqns[first].params["dimension_numbers"]
    kept = [d for d in range(ndim) if d not in (*summed[operand], *batched[operand])]
    codes = np.unique(target.codes)
    split = np.isin(decode(codes, ndim, draft.facts.mesh.ndim), kept).any(axis=1)
    return tuple(codes[split].tolist())


def _never(draft: Draft, source: Port, target: Port, value: int) -> NDArray[np.bool_]:
    """Pairs of choices in which a sum is finished in a way that the compiler never uses.

    These are sums on the way to an addition that takes them finished, also if they are transposed on the way, and sums
    that are scattered over only some of their axes. Compilers do the latter for results of contractions (on GPU for
    each term of an addition by itself), and not for lookups. Sums by the author of a `shard_map` are never pending.
    """
    facts, node = draft.facts, draft.nodes[target.node]
    ndim, axes = facts.graph.avals[value].ndim, facts.mesh.ndim
    never = np.zeros((len(source.codes), len(target.codes)), bool)
    scatters_added = facts.compiler.scatters_added_sums and value in facts.traits.added
    if value not in facts.traits.products and not scatters_added:
        never |= parted(source.codes, target.codes, ndim, axes)
    if value in draft.summed:
        never |= unscattered(source.codes, target.codes, draft.made[value].codes, ndim, axes)
    if isinstance(node, Equation) and (node.strategies.finished >= 0).any():
        pending = (decode(source.codes, ndim, axes) == SUM).any(axis=1)
        position = facts.graph.operands[node.equation].index(value)
        never |= pending[:, None] & (node.strategies.finished == position)[None, :]
    if value in facts.traits.turned_terms and facts.compiler.merges_terms_of_sums:
        before, behind = (decode(codes, ndim, axes) == SUM for codes in (source.codes, target.codes))
        if behind.any():
            never |= (before[:, None] & ~behind[None, :]).any(axis=2)
    return never


def _urgent(draft: Draft, target: Port) -> bool:
    """Whether the consumer at a port is, or may be, on the way to a contraction that is not late."""
    facts = draft.facts
    results = [v for e in draft.nodes[target.node].equations for v in facts.graph.results[e]]
    return not results or not facts.windows.urgent.isdisjoint(results)


def _total(facts: GraphFacts, value: int) -> tuple[Aval, int] | None:
    """The reduced array of the accumulator that a value is added to, and how often: XLA:GPU undoes the cast."""
    if (term := facts.accumulators.terms.get(value)) is None:
        return None
    total, trips = term
    if facts.compiler.moves_collectives_past_casts:
        return _moved(facts, value, cast=True), trips
    return replace(facts.graph.avals[value], dtype=facts.graph.avals[total].dtype), trips


def unfused_kernel(facts: GraphFacts, value: int, *, edges: int = 1) -> Unfused | None:
    """The kernel that runs where a value moves, shared between edges; none for sums that are finished behind a loop."""
    found = None if facts.products is None else facts.products.unfused.get(value)
    if found is None or value in facts.accumulators.terms:
        return None
    return replace(found, nbytes=found.nbytes // edges)


def _pending(facts: GraphFacts, source: Port, value: int) -> Aval | None:
    """The array that moves for a pending sum where that is not what moves else: sums are not narrowed."""
    aval = facts.graph.avals[value]
    summed = (decode(source.codes, aval.ndim, facts.mesh.ndim) == SUM).any()
    return aval if summed and value in facts.lives.multiplied else None


def takes_as_it_is(draft: Draft, target: Port, value: int) -> bool:
    """Whether the consumer at a port takes a value, which products cast, as it is; a copy does not."""
    node, cast = draft.nodes[target.node], draft.facts.lives.multiplied[value]
    return not isinstance(node, Copy) and (not node.equations or not cast.otherwise.isdisjoint(node.equations))


def _moved(facts: GraphFacts, value: int, *, cast: bool) -> Aval:
    """The array that moves for a value: the value, or the narrow side of a cast that makes it or takes it.

    Args:
      facts: of the graph.
      value: the value.
      cast: whether it is moved for products that cast it, if any do.
    """
    aval, ahead = facts.graph.avals[value], facts.lives.cast_ahead.get(value)
    if facts.compiler.moves_collectives_past_casts:
        return narrow_side(facts.graph, facts.graph.producers, value)
    if value in facts.lives.multiplied:
        return replace(aval, dtype=BFLOAT16) if cast else aval
    return replace(aval, dtype=ahead.dtype) if ahead is not None and ahead.alone else aval
