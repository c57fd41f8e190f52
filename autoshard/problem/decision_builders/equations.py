"""Equations: the strategy of every equation that is not element-wise."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from autoshard.costs import compute
from autoshard.costs.fusion import fused_names
from autoshard.costs.lanes import bytes_in_lanes, table_in_lanes
from autoshard.costs.matmul_fusions import is_matmul
from autoshard.costs.prices import picoseconds
from autoshard.costs.product_kernels import fused_bytes
from autoshard.costs.reductions import kernel_levels, sources_in_memory
from autoshard.costs.strategies import SUM, Strategies, decode, enumerate_strategies, given, shards
from autoshard.costs.windows import EARLY
from autoshard.ir import manual_calls
from autoshard.ir.graph import Aval, Eqn, Graph
from autoshard.ir.op_traits import (
    DERIVE,
    DOT_GENERAL,
    GATHER,
    KEEP,
    LOOP_SLICE,
    LOOP_STACK,
    PALLAS,
    RECALL,
    SCATTER_ADD,
    SHARD_MAP,
)
from autoshard.problem import bodies
from autoshard.problem.decision_builders.draft import Draft
from autoshard.problem.decision_builders.facts import GraphFacts
from autoshard.problem.decision_builders.late_gradients import add_late_gradient
from autoshard.problem.decision_builders.stage_dimensions import are_staged
from autoshard.problem.decisions import Body, Chain, Equation

_Takers: TypeAlias = dict[tuple[int, int], list[int]]  # (value in memory, level of a kernel) → what reads it


@dataclass(frozen=True, slots=True, eq=False)
class _Price:
    """The price of one run of an equation under each strategy.

    `cover_s` counts all runs: the compute that can hide communication, in `window`.
    """

    seconds: NDArray[np.float64]
    flops: NDArray[np.float64] | None = None
    cover_s: NDArray[np.float64] | None = None
    window: int = EARLY


def add_equations(draft: Draft, of_shard_maps: bodies.Bodies) -> None:
    """Adds a decision per equation that has none yet and makes anything that has a layout.

    Args:
      draft: the decisions so far: chains.
      of_shard_maps: prices the bodies of `shard_map`s.
    """
    facts, graph = draft.facts, draft.facts.graph
    readers = _reading(facts, recalled=True) if graph.optional else ()
    by_kernel = bool(readers) and facts.kernels is not None  # else a value is read once, by whatever kernels
    derived = _derived_bytes(facts, readers) if by_kernel else {}
    repeated = _repeated_bytes(facts, readers) if by_kernel else {}
    for e, eqn in enumerate(graph.eqns):
        if draft.node_of[e] >= 0 or not any(facts.decides(v) for v in graph.results[e]):
            continue
        body, strategies = _strategies(draft, of_shard_maps, e)
        choices = _choices(graph, e, len(strategies))
        strategies = strategies.at(choices.of)
        if graph.recalls_slice(e):
            price = _recalled(draft, e, strategies, choices, readers[graph.results[e][0]], repeated.get(e, 0.0))
        else:
            price = _kept(facts, e, strategies) or _derived(facts, eqn, strategies, derived.get(e, 0.0))
        price = price or _priced(facts, e, strategies, body)
        zero = np.zeros(len(strategies))
        there = 1.0 if choices.off is None else np.where(choices.off, 0.0, 1.0)
        node = draft.add(
            Equation(
                name=eqn.primitive,
                where=eqn.where,
                cost_ps=picoseconds(price.seconds * graph.runs(e) * there),
                cover_ps=picoseconds(zero if price.cover_s is None else price.cover_s * there),
                window=price.window,
                flops=zero if price.flops is None else price.flops * graph.runs(e) * there,
                equations=(e,),
                off=choices.off,
                strategies=strategies,
                body=body,
                untaken=choices.untaken,
                loose=tuple(o.shape != eqn.results[0].shape for o in eqn.operands) if eqn.primitive == DERIVE else (),
            )
        )
        if body is not None:
            beside = np.full(len(strategies), body.beside_bytes)
            draft.usages.add(node, e, e + 1, beside * np.int64(there), "activations")
        if facts.compiler.gathers_whole_lanes and (eqn.primitive == GATHER or eqn.traits.scatters):
            beyond = bytes_in_lanes(eqn, strategies, facts.mesh)
            if _copies_table(facts, e):
                beyond = beyond + table_in_lanes(eqn, strategies, facts.mesh)[1]
            draft.usages.add(node, e, e + 1, beyond * np.int64(there), "activations")
        if (scores := facts.lives.gathered.get(e)) is not None and scores.lie:
            begin = int(facts.lives.start[scores.value if scores.beside is None else scores.beside])
            written, *_ = compute.operand_bytes(eqn, strategies, facts.mesh)
            draft.usages.add(node, begin, begin + 1, written * np.int64(there), "activations")
        if e in facts.dense:
            for (begin, end), nbytes in facts.dense[e].held(compute.operand_bytes(eqn, strategies, facts.mesh)):
                draft.usages.add(node, begin, end + 1, nbytes * np.int64(there), "activations")
        for row in facts.rewritten.get(e, ()):
            beside = row.copies * row.nbytes(eqn, strategies, facts.mesh)
            draft.usages.add(node, row.begin, row.end + 1, beside * np.int64(there), "activations")
        if eqn.traits.contraction and facts.compiler.cuts_contractions:
            _add_partial_sums(draft, node, strategies, there)
        add_late_gradient(draft, node, strategies)
        for v, codes in zip(graph.results[e], strategies.results, strict=True):
            draft.make(v, node, codes)


def _add_partial_sums(draft: Draft, node: int, strategies: Strategies, there: NDArray[np.float64] | float) -> None:
    """Adds the memory of the sums that a contraction is cut into, beside its result, and of what is filled for that.

    The kernel that adds them is fused with what alone reads the result, and until then they lie in its place; if
    that is a collective, or there are several readers, they are added at once.
    """
    facts, (e,) = draft.facts, draft.nodes[node].equations
    graph, (value,) = facts.graph, facts.graph.results[e]
    sums = compute.partial_sums_bytes(graph.eqns[e], facts.rules[e], strategies, facts.mesh, facts.machine)
    sums = sums * np.int64(there)
    if not sums.any():
        return
    start, end, codes, aval = int(facts.lives.start[value]), 0, strategies.results[0], graph.avals[value]
    filled = compute.filled_bytes(graph.eqns[e], facts.rules[e], strategies, facts.mesh, facts.machine)
    draft.usages.add(node, start, start + 1, filled * np.int64(there), "activations")
    names = fused_names(graph, facts.traits.fuses, value)
    readers = [u for name in names for u, _ in graph.consumers[name] if not graph.eqns[u].traits.renames]
    if len({draft.node_of[u] if draft.node_of[u] >= 0 else -1 - u for u in readers}) == 1:
        end = max(int(facts.lives.end[name]) for name in names)
    waits = end > start + 1 and (decode(codes, aval.ndim, facts.mesh.ndim) != SUM).all(axis=1)
    waits |= end > start + 1 and all(facts.traits.flows[u] for u in readers)
    draft.usages.add(node, start, start + 1, np.where(waits, 0, sums), "activations")
    result = aval.nbytes // shards(codes, aval.ndim, facts.mesh)
    draft.usages.add(node, start, max(end, start + 1), np.where(waits, np.maximum(sums - result, 0), 0), "activations")


@dataclass(frozen=True, slots=True, eq=False)
class _Choices:
    """Which strategy each choice of an equation is, under which it is left out, and which operands it does not take."""

    of: NDArray[np.int64]
    off: NDArray[np.bool_] | None
    untaken: tuple[NDArray[np.bool_], ...] = ()


def _choices(graph: Graph, e: int, count: int) -> _Choices:
    """One choice per strategy, of a recall per operand that it takes, too; one more if it may be left out."""
    of, untaken = np.arange(count), list[NDArray[np.bool_]]()
    if graph.eqns[e].primitive == RECALL:
        sources = len(graph.operands[e])
        of, taken = np.tile(of, sources), np.repeat(np.arange(sources)[::-1], count)
        untaken = [taken != i for i in range(sources)]
    if e not in graph.optional:
        return _Choices(of, np.zeros(len(of), bool) if untaken else None, tuple(untaken))
    off = np.append(np.zeros(len(of), bool), True)
    return _Choices(np.append(of, 0), off, tuple(np.append(left, True) for left in untaken))


def _strategies(draft: Draft, of_shard_maps: bodies.Bodies, e: int) -> tuple[Body | None, Strategies]:
    """The strategies of an equation that are allowed; of a `shard_map` its author's only one, and its body."""
    facts, eqn = draft.facts, draft.facts.graph.eqns[e]
    body = None
    if eqn.primitive == SHARD_MAP and facts.manual is None:
        laid_out = manual_calls.manual_layouts(eqn, facts.mesh)
        body = of_shard_maps.of(eqn, laid_out[len(eqn.operands) :], _live(facts, e))
        draft.summed.update(facts.graph.results[e][i] for i in body.summed)
        strategies = given(bodies.pending(laid_out, body), len(eqn.operands), facts.mesh)
    else:
        flows = facts.traits.flows[e]
        strategies = enumerate_strategies(facts.rules[e], facts.mesh, sums_flow=flows)
        if flows and len(set(facts.graph.operands[e])) > 1 and facts.compiler.merges_terms_of_sums:
            strategies = strategies.merging()
        if eqn.primitive == SHARD_MAP:
            body = of_shard_maps.of(eqn, (), _live(facts, e))
    strategies = strategies.only(_staged(facts, e, strategies))
    if e in facts.required.equations:
        strategies = strategies.only(np.isin(strategies.results[0], facts.required.equations[e]))
    return body, strategies


def _staged(facts: GraphFacts, e: int, strategies: Strategies) -> NDArray[np.bool_]:
    """Whether each strategy of an equation has one stage per shard, of all values with stages; if none has, all."""
    graph, kept = facts.graph, np.ones(len(strategies), bool)
    values = (*graph.operands[e], *graph.results[e])
    for v, codes in zip(values, (*strategies.operands, *strategies.results), strict=True):
        kept &= are_staged(codes, graph.avals[v].ndim, facts.mesh, facts.stages.get(v))
    return kept if kept.any() else ~kept


def _live(facts: GraphFacts, e: int) -> list[bool]:
    """Which results of an equation anything takes."""
    return [v in facts.graph.consumers or v in facts.graph.outputs for v in facts.graph.results[e]]


def _priced(facts: GraphFacts, e: int, strategies: Strategies, body: Body | None) -> _Price:
    """The price of an equation under each strategy: of its body, its FLOPs, or the bytes that it touches."""
    graph, eqn = facts.graph, facts.graph.eqns[e]
    reductions_s = compute.in_op_s(eqn, facts.rules[e], strategies, facts.mesh, facts.machine)
    window = facts.windows.of_equation[e]
    if body is not None:
        multiplying_s = np.full(len(strategies), body.multiplying_s)
        flops = np.full(len(strategies), body.flops)
        return _Price(reductions_s + body.seconds, flops, _covering(facts, e, multiplying_s), window)
    if facts.manual is not None and bodies.over(eqn, facts.manual):
        return _Price(reductions_s)  # a collective is priced as such
    if eqn.primitive == PALLAS and manual_calls.estimate(eqn) is not None:
        return _Price(*compute.kernel_s(eqn, strategies, facts.mesh, facts.machine))
    if eqn.traits.contraction:
        seconds, flops = _multiplying(facts, e, strategies)
        if (part := facts.lives.parts.get(graph.results[e][0])) is not None:
            computed = compute.is_part_computed(eqn.results[0], strategies.results[0], facts.mesh)
            of_part = _multiplying(facts, e, strategies, part)
            seconds, flops = np.where(computed, of_part[0], seconds), np.where(computed, of_part[1], flops)
        if facts.compiler.adds_up_single_rows and eqn.primitive == DOT_GENERAL and not is_matmul(eqn):
            seconds = compute.single_row_s(eqn, facts.rules[e], strategies, facts.mesh, facts.machine, seconds)
        elif facts.compiler.cuts_contractions and e not in facts.merged:
            seconds = compute.added_up_s(eqn, facts.rules[e], strategies, facts.mesh, facts.machine, seconds)
        for row in facts.rewritten.get(e, ()):
            seconds = seconds + np.asarray(facts.machine.hbm_s(row.times * row.nbytes(eqn, strategies, facts.mesh)))
        return _Price(reductions_s + seconds, flops, _covering(facts, e, seconds), window)
    return _bound_by_memory(facts, e, strategies, reductions_s)


def _multiplying(
    facts: GraphFacts, e: int, strategies: Strategies, part: Aval | None = None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Seconds (S,) and FLOPs (S,) of a contraction's kernel, which may compute no more than a part of its product."""
    kernel = facts.products.kernels[e] if facts.products else None
    beside: NDArray[np.float64] | float = 0.0
    if kernel is not None:
        beside = fused_bytes(facts.graph, facts.lives, e, kernel, strategies, facts.mesh, part)
    return compute.contraction_s(
        facts.graph.eqns[e],
        facts.rules[e] if part is None else compute.rule_of_part(facts.rules[e], part),
        strategies,
        facts.mesh,
        facts.machine,
        beside_bytes=beside,
        merged=facts.merged.get(e),
        dense=facts.dense.get(e),
    )


def _is_product(graph: Graph, value: int) -> bool:
    """Whether a contraction makes a value."""
    return value in graph.producers and graph.eqns[graph.producers[value][0]].traits.contraction


def _in_a_product(facts: GraphFacts, e: int) -> bool:
    """Whether a fusible equation is computed in kernels of contractions alone, which pay for what they read."""
    if facts.products is None or not facts.traits.fuses[e]:
        return False
    if facts.graph.eqns[e].traits.ends_fusion:
        return e in facts.products.reduced
    return not any(facts.products.apart[v] for v in facts.graph.results[e])


def _bound_by_memory(facts: GraphFacts, e: int, strategies: Strategies, reductions_s: NDArray[np.float64]) -> _Price:
    """The price of an equation that reads and writes memory; a loop's idle ones hide communication."""
    graph, eqn = facts.graph, facts.graph.eqns[e]
    if any(map(facts.on_host, (*graph.operands[e], *graph.results[e]))):
        return _Price(reductions_s)  # see `host_links`
    if any(e == term.addition for term in facts.lives.scattered):
        return _Price(reductions_s)  # a scatter does it
    reads = [facts.reads(v) and not _in_a_product(facts, e) for v in graph.operands[e]]
    if eqn.primitive == LOOP_STACK and facts.products is not None and _is_product(graph, graph.operands[e][0]):
        reads[0] = False  # its kernel writes the slice
    if eqn.traits.cuts and facts.traits.fuses[e] and not any(facts.elsewhere[v] for v in graph.results[e]):
        reads[0] = False  # the reductions that take it have kernels of their own, which read what is cut
    if any(e == term.scatter for term in facts.lives.scattered):
        reads[0] = True  # its table is what it is added to, which lies in memory
    writes = [facts.writes(v) and not _in_a_product(facts, e) for v in graph.results[e]]
    if eqn.traits.updates and facts.traits.fuses[e]:
        reads[0] = True  # its readers compare positions: no table of zeros is written first
    elif eqn.traits.updates:
        writes = [e not in facts.in_place]
    taking = facts.kernels_of_slice if eqn.primitive == LOOP_SLICE else facts.readers
    readers = sum(taking(v) for v in graph.results[e])
    nbytes = compute.touched_bytes(eqn, strategies, facts.mesh, reads, writes, readers)
    if eqn.traits.cuts and facts.traits.fuses[e] and facts.products is not None and not any(writes):
        nbytes = nbytes * max(1, *(len(facts.products.apart[v]) for v in graph.results[e]))  # each kernel reads it
    for v, codes, read in zip(graph.operands[e], strategies.operands, reads, strict=True):
        if read and v in facts.lives.numerators and not eqn.traits.moves_nothing:
            aval = graph.avals[v]
            nbytes = nbytes - (1.0 - facts.read_share(v, codes)) * aval.nbytes / shards(codes, aval.ndim, facts.mesh)
    if e in facts.reread:
        operand = eqn.operands[0]
        nbytes = nbytes + facts.reread[e] * operand.size / shards(strategies.operands[0], operand.ndim, facts.mesh)
    if e in facts.reread_to_keep:
        nbytes = nbytes + facts.reread_to_keep[e] / shards(strategies.operands[0], eqn.operands[0].ndim, facts.mesh)
    if (scores := facts.lives.gathered.get(e)) is not None and scores.lie and scores.apart:
        nbytes = nbytes + compute.operand_bytes(eqn, strategies, facts.mesh)[0]
    if facts.compiler.gathers_whole_lanes and _copies_table(facts, e):
        own, filled = table_in_lanes(eqn, strategies, facts.mesh)
        nbytes = nbytes + own + filled + (filled - own if eqn.traits.scatters else 0)
    touched_s = np.asarray(facts.machine.hbm_s(nbytes))
    if eqn.traits.updates and facts.traits.fuses[e]:
        touched_s = touched_s + readers * compute.comparing_s(eqn, strategies, facts.mesh, facts.machine)
    if e not in facts.windows.idle:
        return _Price(reductions_s + touched_s)
    cover_s = _covering(facts, e, touched_s)
    if eqn.primitive == LOOP_STACK:  # zeroed before the loop, and written by the equation that makes it
        cover_s = cover_s * (2 / 3 if reads[0] else 0.0)
    return _Price(reductions_s + touched_s, None, cover_s, facts.windows.of_equation[e])


def _copies_table(facts: GraphFacts, e: int) -> bool:
    """Whether a gather takes rows of a table that is given, or a scatter adds them to one of zeros."""
    graph, eqn = facts.graph, facts.graph.eqns[e]
    if eqn.primitive == GATHER:
        return graph.operands[e][0] in graph.inputs
    return eqn.primitive == SCATTER_ADD and not facts.traits.fuses[e] and not facts.decides(graph.operands[e][0])


def _kept(facts: GraphFacts, e: int, strategies: Strategies) -> _Price | None:
    """The price of keeping a product that its kernel would not write: of writing it."""
    graph = facts.graph
    if graph.eqns[e].primitive != KEEP or graph.operands[e][0] not in facts.lives.unwritten_products:
        return None
    (aval,), (codes,) = graph.eqns[e].operands, strategies.operands
    return _Price(np.asarray(facts.machine.hbm_s(aval.nbytes / shards(codes, aval.ndim, facts.mesh))))


def _derived(facts: GraphFacts, eqn: Eqn, strategies: Strategies, nbytes: float) -> _Price | None:
    """The price of computing something where it is read: of reading so many bytes of whole arrays for it."""
    if not nbytes:
        return None
    pieces = shards(strategies.results[0], eqn.results[0].ndim, facts.mesh)
    return _Price(np.asarray(facts.machine.hbm_s(nbytes / pieces)))


def _derived_bytes(facts: GraphFacts, readers: Sequence[frozenset[int]]) -> dict[int, float]:
    """What a backward pass outside of loops computes from kept values → their bytes that kernels read for it.

    These are of whole arrays. A kernel reads a kept value once, for all that it computes from it; nothing more, if it
    also takes it as it is. What is computed from repeated values reads as much. Counted are the kernels that run
    whatever is kept.
    """
    graph = facts.graph

    def taking(value: int) -> frozenset[int]:
        """The levels of the kernels that take a kept value, or what is computed from it, as a recall has it."""
        levels = frozenset[int]()
        for e, _ in graph.consumers.get(value, ()):
            for v in graph.results[e] if e not in graph.optional or graph.eqns[e].primitive == RECALL else ():
                if graph.eqns[e].primitive == RECALL:
                    levels |= taking(v)
                elif not _reads_by_itself(facts, e):
                    levels |= {int(facts.levels[v])} if facts.held[v] else readers[v]
        return levels

    takers: _Takers = {}
    for e, eqn in enumerate(graph.eqns):
        for u, _ in graph.consumers.get(graph.results[e][0], ()) if eqn.primitive == DERIVE else ():
            pays = u if graph.eqns[u].primitive == RECALL else e
            for v in graph.operands[e]:
                for level in taking(graph.results[pays][0]) - taking(v):
                    takers.setdefault((v, level), []).append(pays)
    return _shared_bytes(graph, takers)


def _repeated_bytes(facts: GraphFacts, readers: Sequence[frozenset[int]]) -> dict[int, float]:
    """What is recalled in a loop → the bytes, of whole arrays, that kernels read to compute it again.

    A kernel reads a value once, for all that it computes from it; nothing more, if it takes it in any case. What is
    sliced or recalled itself pays for its readers.
    """
    graph = facts.graph
    repeated = {e: graph.operands[e][-1] for e in range(len(graph.eqns)) if graph.recalls_slice(e)}
    if not repeated:
        return {}
    taking = _reading(facts, recalled=False)
    sources = sources_in_memory(graph, facts.traits.fuses, facts.held)
    paid = {graph.results[e][0] for e, eqn in enumerate(graph.eqns) if eqn.primitive in (LOOP_SLICE, RECALL)}
    takers: _Takers = {}
    for e, repeat in repeated.items():
        for v in () if facts.held[repeat] else sources.get(repeat, frozenset[int]()) - paid:
            for level in readers[graph.results[e][0]] - taking[v] - {int(facts.levels[v])}:
                takers.setdefault((v, level), []).append(e)
    return _shared_bytes(graph, takers)


def _shared_bytes(graph: Graph, takers: _Takers) -> dict[int, float]:
    """The bytes that each equation pays: those of each value for each kernel, by equal shares."""
    found: dict[int, float] = {}
    for (v, _), those in takers.items():
        for e in those:
            found[e] = found.get(e, 0.0) + graph.avals[v].nbytes / len(those)
    return found


def _recalled(
    draft: Draft, e: int, strategies: Strategies, choices: _Choices, levels: frozenset[int], repeated_bytes: float
) -> _Price:
    """The price of what a loop keeps or repeats: kernels of these levels read it, or what they repeat it from.

    What is repeated is read if it lies in memory. A slice of a stack is priced as such.
    """
    facts, (result,) = draft.facts, draft.facts.graph.results[e]
    graph, aval = facts.graph, facts.graph.avals[result]
    kernels = [len(levels - _inside(draft, v)) if facts.held[v] and facts.decides(v) else 0 for v in graph.operands[e]]
    read = sum(np.where(left, 0, times) for left, times in zip(choices.untaken, kernels, strict=True))
    nbytes = aval.nbytes * read + np.where(choices.untaken[-1], 0.0, repeated_bytes)
    return _Price(np.asarray(facts.machine.hbm_s(nbytes / shards(strategies.results[0], aval.ndim, facts.mesh))))


def _inside(draft: Draft, value: int) -> frozenset[int]:
    """The level of the kernel that has a value of a chain in registers, as it writes it."""
    node = draft.node_of[draft.facts.graph.producers[value][0]] if value in draft.facts.graph.producers else -1
    chained = node >= 0 and isinstance(draft.nodes[node], Chain)
    return frozenset({int(draft.facts.levels[value])}) if chained else frozenset()


def _reading(facts: GraphFacts, *, recalled: bool) -> Sequence[frozenset[int]]:
    """Per value, the levels of the kernels that read it, but for equations that pay for that.

    `recalled`: also of those that read what is recalled from it.
    """
    graph, fuses = facts.graph, facts.traits.fuses
    paid = {e for e in range(len(graph.eqns)) if _reads_by_itself(facts, e)} | facts.reread.keys()
    made = facts.lives.made
    return kernel_levels(graph, fuses, facts.held, facts.levels, paid, made=made, recalled=recalled).reading


def _reads_by_itself(facts: GraphFacts, e: int) -> bool:
    """Whether the price of an equation has its operands' bytes, or it reads none, or a product's kernel does."""
    eqn = facts.graph.eqns[e]
    reads = eqn.traits.contraction or eqn.traits.moves_nothing or eqn.primitive == LOOP_STACK
    return reads or _in_a_product(facts, e)


def _covering(facts: GraphFacts, e: int, seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """The seconds of all runs of an equation behind which the machine can hide communication."""
    return seconds * facts.hiding * facts.graph.runs(e)
