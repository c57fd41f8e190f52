"""Chains: the one layout of connected element-wise equations, and of the links that carry a value round a loop."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.costs.casts import widening
from autoshard.costs.prices import picoseconds
from autoshard.costs.strategies import Codes, layouts, shards
from autoshard.costs.windows import EARLY
from autoshard.problem.decision_builders.draft import Draft
from autoshard.problem.decision_builders.facts import GraphFacts
from autoshard.problem.decision_builders.stage_dimensions import are_staged
from autoshard.problem.decisions import Chain, or_off


def add_chains(draft: Draft) -> None:
    """Adds the chains of a graph, then its loops' carries."""
    for members in [*_connected(draft.facts), *draft.facts.graph.carries()]:
        _add_chain(draft, members)


def _connected(facts: GraphFacts) -> list[list[int]]:
    """Element-wise equations that share one layout, cut where a cast makes moving cheaper on one side of it."""
    graph = facts.graph
    parent: dict[int, int] = {}

    def find(e: int) -> int:
        while parent[e] != e:
            parent[e] = parent[parent[e]]
            e = parent[e]
        return e

    for e, rule in enumerate(facts.rules):
        if not facts.traits.pointwise[e] or facts.traits.flows[e] or not facts.decides(graph.results[e][0]):
            continue
        parent[e] = e
        for v, dims in zip(graph.operands[e], rule.operands, strict=True):
            maker = facts.graph.producers.get(v, (-1, 0))[0]
            cut = maker in parent and (widening(graph.eqns[maker]) < 0 or widening(graph.eqns[e]) > 0)
            cut = cut or (maker in graph.optional) != (e in graph.optional)
            if maker in parent and dims == rule.results[0] and not cut:
                parent[find(maker)] = find(e)
    chains: dict[int, list[int]] = {}
    for e in parent:
        chains.setdefault(find(e), []).append(e)
    return list(chains.values())


def _add_chain(draft: Draft, members: Sequence[int]) -> None:
    """Adds the chain of some equations, bound by the bytes that they read and write in memory."""
    facts, graph = draft.facts, draft.facts.graph
    first = graph.eqns[members[0]]
    aval = graph.avals[graph.results[members[0]][0]]
    codes, off = layouts(aval.shape, facts.mesh, unreduced=False), None
    kept = np.ones(len(codes), bool)
    for stage in {facts.stages[v] for e in members for v in graph.results[e] if v in facts.stages}:
        kept &= are_staged(codes, aval.ndim, facts.mesh, stage)
    codes = codes[kept] if kept.any() else codes
    if members[0] in graph.optional:
        codes, off = or_off(codes)
    nbytes = np.zeros(len(codes)) if first.traits.link else _touched_bytes(facts, members, codes)
    seconds = np.asarray(facts.machine.hbm_s(nbytes)) * graph.runs(members[0])
    if off is not None:
        seconds = np.where(off, 0.0, seconds)
    idle = facts.windows.idle.issuperset(members)
    node = draft.add(
        Chain(
            name=f"{first.primitive} …" if len(members) > 1 else first.primitive,
            where=first.where,
            cost_ps=picoseconds(seconds),
            cover_ps=picoseconds(seconds * facts.hiding if idle else np.zeros(len(codes))),
            window=facts.windows.of_equation[members[0]] if idle else EARLY,
            flops=np.zeros(len(codes)),
            equations=tuple(members),
            codes=codes,
            off=off,
        )
    )
    for e in members:
        draft.make(graph.results[e][0], node, codes)


def _touched_bytes(facts: GraphFacts, members: Sequence[int], codes: Codes) -> NDArray[np.float64]:
    """HBM bytes per device (S,) of a chain: what each of its kernels reads in memory, and what it writes there.

    A slice that is written into a value in memory, in its place (a cache of keys), touches nothing but the slice.
    """
    graph = facts.graph
    pieces = shards(codes, graph.avals[graph.results[members[0]][0]].ndim, facts.mesh)
    inside = {graph.results[e][0] for e in members}
    nbytes = np.zeros(len(codes))
    readers: dict[int, set[int]] = {}  # value in memory → the levels of the kernels that read it
    scattered = {term.addition for term in facts.lives.scattered}
    inside -= {graph.results[e][0] for e in scattered}  # written by a scatter, whatever kernel makes its term
    inside -= facts.lives.narrowed  # written by their products
    for e in members:
        if e in scattered:
            continue
        result, operands = graph.results[e][0], graph.operands[e]
        if graph.eqns[e].traits.updates and e in facts.in_place and facts.held[operands[0]]:
            written = graph.avals[operands[1]]
            nbytes += written.nbytes / np.minimum(pieces, max(written.size, 1))
            operands = operands[1:]
        elif facts.writes(result):
            nbytes += graph.avals[result].nbytes / pieces * facts.written_share(result, codes)
        for v in map(facts.narrow, operands):
            if facts.reads(v) and facts.elsewhere[result]:
                readers.setdefault(v, set()).update(facts.reading(v, result, inside=v in inside))
    for v, kernels in readers.items():
        local = graph.avals[v].nbytes / np.minimum(pieces, max(graph.avals[v].size, 1))
        nbytes += len(kernels) * local * facts.read_share(v, codes)
    return nbytes
