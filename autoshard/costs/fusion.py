"""Fusion: which equations are element-wise, fuse, or pass partial sums on; which values have no layout of their own."""

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from autoshard.backends.model import CompilerModel
from autoshard.ir.graph import Aval, Eqn, Graph
from autoshard.ir.op_traits import DEVICE_PUT, IOTA, LOOP_CONST, PAD, SCATTER_ADD, SLICE, TRANSPOSE
from autoshard.rules.rule import FactorKind, ShardingRule


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionTraits:
    """Per equation: `pointwise`, `fuses`, `flows` (its operands may all be unreduced).

    Values: `free` are constants, and values computed from constants alone without a contraction, in loops, too, if
    these repeat them along some dimension (a mask of all heads, a lowest number for all scores). Of the
    values that may be unreduced, `products` come from one contraction and `added` from several sums (or from a renamed
    one of another kind), and `turned_terms` are transposed or reshaped for additions of such values alone.
    """

    pointwise: tuple[bool, ...]
    fuses: tuple[bool, ...]
    flows: tuple[bool, ...]
    free: frozenset[int]
    products: frozenset[int]
    added: frozenset[int]
    turned_terms: frozenset[int]


def fusion_traits(
    graph: Graph, rules: Sequence[ShardingRule], pinned: Collection[int], compiler: CompilerModel
) -> FusionTraits:
    """The traits of a graph under the rules of its equations, some of which are pinned."""
    alone = {*pinned, *host_copies(graph, compiler)}
    pointwise = [
        is_pointwise(rule) and e not in alone and not (graph.eqns[e].traits.link or graph.eqns[e].traits.choice)
        for e, rule in enumerate(rules)
    ]
    fuses = [
        fusible(eqn, pointwise=point or draws_per_key(eqn, rule, compiler), compiler=compiler)
        for eqn, rule, point in zip(graph.eqns, rules, pointwise, strict=True)
    ]
    for e in _spaced(graph, rules) if compiler.spaces_in_kernels_of_their_own else ():
        fuses[e] = False
    flows = _sum_flows(graph, rules, compiler)
    products, added = _find_sums(graph, flows)
    return FusionTraits(
        pointwise=tuple(pointwise),
        fuses=tuple(fuses),
        flows=flows,
        free=_free(graph, rules, fuses, compiler),
        products=products,
        added=added,
        turned_terms=_turned_terms(graph, flows),
    )


def fusible(eqn: Eqn, *, pointwise: bool, compiler: CompilerModel) -> bool:
    """Whether XLA fuses the equation with its neighbours."""
    return pointwise or eqn.traits.fusible or (compiler.compares_positions_for_scatters and _marks(eqn))


def _spaced(graph: Graph, rules: Sequence[ShardingRule]) -> frozenset[int]:
    """The equations that put elements apart, or take every k-th element of a row, or every k-th row of a matrix.

    None of those that take every k-th of equal ones.
    """
    found = {e for e, eqn in enumerate(graph.eqns) if eqn.primitive == PAD and _between(eqn)}
    takes = {e: dims for e, eqn in enumerate(graph.eqns) if eqn.primitive == SLICE and (dims := _strides(eqn))}
    varies: dict[int, frozenset[int]] = {}
    for e, rule in enumerate(rules) if takes else ():
        if len(graph.results[e]) != 1:
            continue
        varies[graph.results[e][0]] = along = _varies(graph, e, rule, varies)
        if any(d in along and d >= graph.eqns[e].results[0].ndim - 2 for d in takes.get(e, ())):
            found.add(e)
    return frozenset(found)


def _between(pad: Eqn) -> bool:
    """Whether a pad puts elements between those of its operand."""
    return any(between for _, _, between in pad.params["padding_config"])


def _strides(cut: Eqn) -> tuple[int, ...]:
    """The dimensions of a slice along which it leaves elements out between those that it takes."""
    return tuple(d for d, stride in enumerate(cut.params["strides"] or ()) if stride > 1)


def draws_per_key(eqn: Eqn, rule: ShardingRule, compiler: CompilerModel) -> bool:
    """Whether kernels draw numbers of several keys (dropout under `vmap`) themselves, by the key and the position."""
    draws = compiler.draws_where_taken and eqn.traits.draws
    return draws and len(rule.results) == 1 and all(f.kind is FactorKind.PASS for f in rule.factors)


def _marks(eqn: Eqn) -> bool:
    """Whether a scatter adds one element to each row of its operand: the transpose of taking one of each.

    XLA:TPU compares positions instead, in the fusion that reads the result (the labels' scores of
    gpt2-small, libtpu 0.0.52).
    """
    if eqn.primitive != SCATTER_ADD:
        return False
    rows = eqn.params["dimension_numbers"].operand_batching_dims
    operand, _, updates = eqn.operands
    return len(rows) == operand.ndim - 1 > 0 and updates.size == prod(operand.shape[d] for d in rows)


def host_copies(graph: Graph, compiler: CompilerModel) -> frozenset[int]:
    """The equations that copy to the host's memory or back; none by a compiler that has one memory."""
    if not compiler.keeps_host_values_apart or not graph.on_host:
        return frozenset()
    return frozenset(
        e
        for e, eqn in enumerate(graph.eqns)
        if eqn.primitive == DEVICE_PUT
        and any(
            (v in graph.on_host) != (r in graph.on_host)
            for v, r in zip(graph.operands[e], graph.results[e], strict=True)
        )
    )


def is_pointwise(rule: ShardingRule) -> bool:
    """One result, and every operand dimension is whole or the result's own."""
    if len(rule.results) != 1 or any(f.kind is not FactorKind.PASS for f in rule.factors):
        return False
    result = rule.results[0]
    return all(
        not dims or (len(dims) == len(result) and all(d in ((), r) for d, r in zip(dims, result, strict=True)))
        for dims in rule.operands
    )


def fused_names(graph: Graph, fuses: Sequence[bool], value: int) -> tuple[int, ...]:
    """All names of a value that only equations read which fuse; none if anything else reads it, or nothing."""
    names: list[int] = []
    left = [value]
    while left:
        name = left.pop()
        readers = [e for e, _ in graph.consumers.get(name, ())]
        renamed = [e for e in readers if graph.eqns[e].traits.renames]
        if name in graph.outputs or not readers or not all(fuses[e] or e in renamed for e in readers):
            return ()
        names.append(name)
        left += [graph.results[e][0] for e in renamed]
    return tuple(names)


def _free(
    graph: Graph, rules: Sequence[ShardingRule], fuses: Sequence[bool], compiler: CompilerModel
) -> frozenset[int]:
    """The free values. A loop's operand is none unless the loop repeats it: it lies in memory, and has a layout.

    What is repeated is smaller by as much, and is not counted.
    """
    given, made_by = set(graph.inputs), graph.producers
    free = {v for v in graph.consumers if v not in made_by and v not in given}
    read = {v for e, eqn in enumerate(graph.eqns) if eqn.traits.link for v in graph.operands[e]}
    read = {v for v in read if graph.avals[v].ndim and v in made_by}
    varies: dict[int, frozenset[int]] = {}  # free value that an equation computes → the dimensions that it varies along
    for e, fused in enumerate(fuses):
        if (fused or graph.eqns[e].primitive == LOOP_CONST) and all(v in free for v in graph.operands[e]):
            along = _varies(graph, e, rules[e], varies)
            for v in graph.results[e]:
                varies[v] = along
                if v not in read or _repeated(graph.avals[v], along, compiler):
                    free.add(v)
    return frozenset(free - set(graph.outputs))


def _varies(graph: Graph, e: int, rule: ShardingRule, varies: Mapping[int, frozenset[int]]) -> frozenset[int]:
    """The dimensions that the results of an equation vary along, if they have the same."""
    eqn = graph.eqns[e]
    if eqn.primitive == SLICE:
        (v,) = graph.operands[e]
        return varies.get(v, frozenset(range(graph.avals[v].ndim)))
    if eqn.primitive == IOTA:
        return frozenset({eqn.params["dimension"]})
    by_element = is_pointwise(rule) or eqn.traits.repeats or eqn.primitive in (TRANSPOSE, LOOP_CONST)
    if eqn.traits.draws or not by_element:
        return frozenset(range(eqn.results[0].ndim))
    varying = {
        factor
        for v, dims in zip(graph.operands[e], rule.operands, strict=True)
        for d, factors in enumerate(dims)
        for factor in factors
        if d in varies.get(v, range(graph.avals[v].ndim)) and graph.avals[v].shape[d] > 1
    }
    return frozenset(d for d, factors in enumerate(rule.results[0]) if not varying.isdisjoint(factors))


def _repeated(aval: Aval, along: Collection[int], compiler: CompilerModel) -> bool:
    """Whether a loop repeats an operand itself, from one element or, by some compilers, along some dimensions."""
    return prod(aval.shape[d] for d in along) < (aval.size if compiler.loops_repeat_constants else 2)


def _find_sums(graph: Graph, flows: Sequence[bool]) -> tuple[frozenset[int], frozenset[int]]:
    products, added = set[int](), set[int]()
    for e, (eqn, flow) in enumerate(zip(graph.eqns, flows, strict=True)):
        terms = set(graph.operands[e])
        if eqn.traits.contraction or (flow and len(terms) == 1 and terms <= products):
            products.update(graph.results[e])
        elif flow:
            added.update(graph.results[e])
    return frozenset(products), frozenset(added)


def _turned_terms(graph: Graph, flows: Sequence[bool]) -> frozenset[int]:
    """The values that are taken for additions alone, in another order of dimensions; all of it may be unreduced."""
    outputs = frozenset(graph.outputs)
    terms: set[int] = set()  # of additions alone, under whatever name
    turned: set[int] = set()
    for e in range(len(graph.eqns) - 1, -1, -1):
        for v in graph.results[e]:
            uses = [u for u, _ in graph.consumers.get(v, ())]
            if not uses or v in outputs or not all(flows[u] for u in uses):
                continue
            renamed = [u for u in uses if graph.eqns[u].traits.reshapes and terms.issuperset(graph.results[u])]
            if len(renamed) == len(uses):
                turned.add(v)
            if all(graph.eqns[u].traits.addition or u in renamed for u in uses):
                terms.add(v)
    return frozenset(turned)


def _sum_flows(graph: Graph, rules: Sequence[ShardingRule], compiler: CompilerModel) -> tuple[bool, ...]:
    """Whether the operands of each equation may all be unreduced: not where the compiler finishes them first.

    A compiler that finishes every term of an addition by itself is known to add those of contractions alone.
    """
    added: set[int] = set()  # also under the names that transposes give to a term, one after the other
    for e in range(len(graph.eqns) - 1, -1, -1):
        traits = graph.eqns[e].traits
        if traits.addition or (traits.passes_sums and not added.isdisjoint(graph.results[e])):
            added.update(graph.operands[e])
    flows = [False] * len(graph.eqns)
    products: set[int] = set()
    others: set[int] = set()  # sums that wait for additions alone, and for those that wait themselves
    for e, (eqn, rule) in enumerate(zip(graph.eqns, rules, strict=True)):
        results = graph.results[e]
        if eqn.traits.passes_sums and rule.linear:
            terms = {graph.operands[e][i] for i in rule.linear[0]}
            adds = eqn.traits.addition or not added.isdisjoint(results)
            waits = adds or not (compiler.renames_sums_for_additions_only or terms & others)
            flows[e] = waits and terms <= products | others
            if flows[e]:
                (products if terms <= products else others).update(results)
        if any(f.reduction == "sum" for f in rule.factors):
            if eqn.traits.contraction:
                products.update(results)
            elif compiler.merges_terms_of_sums:
                others.update(results)
    for e in range(len(graph.eqns) - 1, -1, -1):
        if flows[e] and not graph.eqns[e].traits.addition and not others.isdisjoint(graph.results[e]):
            flows[e] = all(flows[u] for v in graph.results[e] for u, _ in graph.consumers.get(v, ()))
    return tuple(flows)


def levels(graph: Graph, fuses: Sequence[bool], turned: Container[int], repeated: Container[int]) -> NDArray[np.int64]:
    """The level of every value: the most fusions that end before its own, on any path to it.

    Values of one chain and one level depend on each other only through the chain: one kernel makes them. A reduction
    of dimensions of size 1 ends no fusion, nor does one of rows that its kernel repeats along them (`repeated`); a
    kernel that writes a value in another order of dimensions (`turned`) does.
    """
    levels = np.zeros(len(graph.avals), np.int64)
    for e, eqn in enumerate(graph.eqns):
        level = max((int(levels[v]) + (v in turned) for v in graph.operands[e]), default=0)
        reduces = eqn.traits.ends_fusion and e not in repeated
        reduces &= any(o.size > r.size for o, r in zip(eqn.operands, eqn.results, strict=False))
        levels[list(graph.results[e])] = level + (not fuses[e] or reduces)
    return levels
