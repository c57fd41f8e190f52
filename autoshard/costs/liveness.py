"""Liveness: which values lie in a device's memory, and from when to when.

XLA writes to memory the operands and results of equations that do not fuse (a contraction,
a scatter, a loop's argument), the results of reductions, and the outputs of the program.
Every other value is *recomputed* inside the fusions that read it, from the values that
lie in memory, so these live on until the last such fusion: the f32 scores of a softmax
are never stored, but their bf16 source outlives the forward pass. One kind of value is stored
all the same: several equations read it, it is made of more bytes than it has, and storing it
moves fewer bytes (a sum of two residual branches is read, not added up again).

A transpose, a reshape or a constraint is its operand under another name.

A loop holds its operands for as long as it runs, and its stacked outputs from the first trip on:
each slice is written there directly, and lies nowhere else. XLA:GPU of jaxlib 0.10 zeroes them behind
the loop before: those of gradients lie beside the scores of a head. The operands of weights' gradients
live until the gradients are made, which may be much later (`autoshard.costs.execution_order`).

XLA:GPU computes an expensive value (a tanh) once for all fusions that read it, and so it may what is cast
for one of them (`autoshard.costs.widened_arguments`). A fusion writes its
result over a value that it reads for the last time, if that has as many elements of its type and
each is read where it is written (not through a slice, then padded again); not if it reads a row
twice, as for a softmax and its gradient. What is added to scattered elements is written, scattered
onto in its place, and read as the sum (`autoshard.costs.scattered_terms`); it is written over nothing.

XLA:TPU differs (libtpu 0.0.52, `benchmarks.verification`). Its contractions make their operands:
casts, gates, norms, the gradient of a softmax's cross entropy are recomputed in each, from values
in memory. Of a softmax its exponentials lie there, or the scores (`autoshard.costs.softmaxes`). Stacked
weights are cast whole, before the loops. The loss is computed last, unless it communicates: if
scores are split along the vocabulary, the loss reduces its reads of them at once, and the scores die.
"""

from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from autoshard.backends.model import CompilerModel
from autoshard.costs.casts import FLOAT32, CastAhead, Multiplied, cast_ahead, multiplied
from autoshard.costs.dimension_orders import DimensionOrders
from autoshard.costs.execution_order import (
    behind_loops,
    deferred,
    feeding,
    loop_spans,
    made_inside,
    next_loop,
    positions,
    updating,
)
from autoshard.costs.gathered_scores import GatheredScores, computed_scores, gathered_scores, products_of
from autoshard.costs.gradients_behind_loops import gradients_behind_loops
from autoshard.costs.matmul_fusions import made_operands, narrowed_products
from autoshard.costs.matrices import Matrix, matrices, part_in_lanes
from autoshard.costs.row_kernels import sliced_rows
from autoshard.costs.scattered_terms import ScatteredTerm, scattered_terms
from autoshard.costs.softmaxes import LEAST_QUOTIENTS, Numerator, SoftmaxFacts, recalled, softmaxes
from autoshard.costs.taken_parts import taken_parts
from autoshard.costs.widened_arguments import widened_arguments
from autoshard.ir.graph import Aval, Graph
from autoshard.ir.op_traits import (
    BRANCH_JOIN,
    DEVICE_PUT,
    LOOP_CARRY,
    LOOP_CONST,
    LOOP_RESULT,
    LOOP_SLICE,
    LOOP_STACK,
    RAGGED_DOT,
    RECALL,
    REV,
    SPLIT,
    TRANSPOSE,
)
from autoshard.rules.rule import ShardingRule

# Rows (of scores, of a norm) that one kernel of XLA:GPU reduces and reads again; those of a vocabulary it does not.
SHORT_ROW = 16_384

Waiting = Literal["nowhere", "in loops", "everywhere"]  # where gradients of weights wait for all else

_MOST_SOURCES = 16  # stored values that one expression is recomputed from; XLA bounds a fusion's parameters, too


@dataclass(frozen=True, slots=True, eq=False)
class LiveRanges:
    """Of every value, the equations [start, end) between which it is alive.

    `copied`: until when a copy of it lives: what only updates an input takes it as it lies.
    `stored`: whether it has memory of its own; `named`: whether it is a stored value under
    another name; `held`: whether it lies in memory, of its own or another's, as what a loop carries does where it
    entered; `absorbed`: whether the contractions that take it make it themselves, so that
    it has memory only if it is moved first. `across`: for values that the loss reads at the end, the
    dimensions over which the loss communicates, and for gradients behind loops and their operands the dimensions over
    which what enters the loop is summed (`costs.gradients_behind_loops`; empty where a value has none): split along one
    of them, an operand only lives until `soon`, and a gradient from `early` on.
    `numerators`: those of softmaxes, where they are stored.
    `made`: the operands without memory that matmuls compute themselves; `narrowed`: the casts that products write.
    `matrices`: of values that lie in whole lanes, by a compiler that has such (`costs.lanes`).
    `scattered`: the additions that are done by a scatter, which takes no memory of its own. `gathered`: gather → the
    scores that are computed for it. `cast_ahead`: the stacks
    that are cast whole before the loops that take slices of them. `multiplied`: what products cast, and who
    reads it otherwise (`costs.casts`). `parts`: product → the part of it that is computed (`costs.taken_parts`).
    """

    stored: NDArray[np.bool_]
    named: NDArray[np.bool_]
    held: NDArray[np.bool_]
    absorbed: NDArray[np.bool_]
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    copied: NDArray[np.int64]
    soon: NDArray[np.int64]
    early: NDArray[np.int64]
    across: Mapping[int, frozenset[int]]
    numerators: Mapping[int, Numerator]
    made: frozenset[int]
    narrowed: frozenset[int]
    matrices: Mapping[int, Matrix]
    scattered: tuple[ScatteredTerm, ...]
    gathered: Mapping[int, GatheredScores]
    cast_ahead: Mapping[int, CastAhead]
    multiplied: Mapping[int, Multiplied]
    parts: Mapping[int, Aval]

    @property
    def maxima(self) -> frozenset[int]:
        """The equations that find the maxima of rows in the kernels of products that make numerators of softmaxes."""
        return frozenset(n.maximum for n in self.numerators.values() if n.maximum is not None)

    @property
    def unwritten_products(self) -> frozenset[int]:
        """The products that are written only where a plan keeps them: their kernels make numerators of softmaxes."""
        inside = (n.product for n in self.numerators.values() if n.maximum is not None)
        return frozenset(v for v in inside if v is not None)


def live_ranges(
    graph: Graph,
    rules: Sequence[ShardingRule],
    fuses: Sequence[bool],
    compiler: CompilerModel,
    *,
    orders: DimensionOrders,
    softmax_facts: SoftmaxFacts,
    loss_last: bool,
) -> LiveRanges:
    """The lives of a graph's values.

    Args:
      graph: the program.
      rules: of its equations.
      fuses: per equation, whether XLA fuses it with its neighbours.
      compiler: who compiles it.
      orders: of the dimensions of products in memory.
      softmax_facts: of the machine; only of compilers that store numerators.
      loss_last: whether equations that lead to scalars alone run last.
    """
    spans = loop_spans(graph)
    taken = np.zeros(len(graph.avals), bool)
    stated = set(orders.turned)
    numerators: dict[int, Numerator] = {}
    if compiler.contractions_make_their_operands:
        for e, eqn in enumerate(graph.eqns):
            if eqn.traits.contraction and eqn.primitive != RAGGED_DOT:
                taken[list(graph.operands[e])] = True
    made = made_operands(graph, fuses) if compiler.matmuls_make_simple_operands else {}
    taken[list(made)] = True
    stated |= set(made.values())
    narrowed = _narrowed(graph, fuses, compiler)
    in_lanes = matrices(graph, rules) if compiler.multiplies_whole_lanes else {}
    if compiler.stores_softmax_numerators:
        for softmax in softmaxes(graph, softmax_facts.devices):
            divides = softmax_facts.stores_quotients and softmax.read_again
            matrix = in_lanes.get(softmax.quotient)
            divides &= matrix is None or prod(matrix.sizes) >= LEAST_QUOTIENTS
            stated |= {softmax.value, softmax.quotient} if divides else {softmax.value}
            numerators[softmax.value] = softmax.numerator
            stated |= {softmax.numerator.scores} - {None}
        kept = {again: numerators[v] for v, again in recalled(graph) if v in numerators}
        numerators |= kept
        stated |= set(kept)
    if compiler.reduces_in_kernels_of_their_own:
        stated |= sliced_rows(graph, fuses, SHORT_ROW)
    order = positions(graph, fuses, compiler)
    scattered = scattered_terms(graph, fuses, compiler)
    held = _find_held(graph, fuses, taken, stated, compiler, scattered, numerators, softmax_facts)
    named = np.zeros(len(graph.avals), bool)
    named[[graph.results[term.addition][0] for term in scattered]] = True
    for e, eqn in enumerate(graph.eqns):
        if eqn.traits.renames:
            named[graph.results[e][0]] = held[graph.results[e][0]]
    gathered = {} if compiler.gathers_make_their_operands else gathered_scores(graph, fuses, held)
    at_once = {e for e, scores in gathered.items() if not scores.waits}
    stored, late = held & ~named, deferred(graph) - at_once if loss_last else frozenset[int]()
    start = np.zeros(len(graph.avals), np.int64)
    zeroed = _zeroed(graph, spans, early=compiler.zeroes_stacks_early)
    for e, results in enumerate(graph.results):
        loop = graph.value_loop[graph.operands[e][0]] if graph.eqns[e].primitive == LOOP_STACK else 0
        start[list(results)] = zeroed[loop] if loop else order[e]
    early, lazy, across = start, not compiler.makes_weight_gradients_in_order, _across(graph, rules, stored, late)
    if lazy:
        waiting_gradients = gradients_behind_loops(graph, rules, spans)
        early, across = np.maximum(start, waiting_gradients.before), waiting_gradients.across
        start = np.maximum(start, waiting_gradients.behind)

    def ends(
        put_off: Collection[int],
        unread: Collection[int] = (),
        *,
        waiting: Waiting = "everywhere" if lazy else "nowhere",
    ) -> NDArray[np.int64]:
        """The ends of all lives if these equations run last, and what others read is not counted."""
        last = _last_uses(graph, stored, spans, order, put_off, unread, orders.turned, waiting=waiting)
        end = np.maximum(last, start) + 1
        end[list(graph.outputs)] = len(graph.eqns) + 1
        return end

    end = ends(late)
    for v, numerator in numerators.items():
        product, onto = numerator.product, v if numerator.scores is None else numerator.scores
        if product is not None and numerator.replaces_product and end[product] == start[onto] + 1:
            stored[product], named[product], start[onto] = False, True, start[product]
    for e, eqn in enumerate(graph.eqns):
        if eqn.primitive == LOOP_RESULT and end[graph.operands[e][0]] == start[graph.results[e][0]] + 1:
            end[graph.operands[e][0]] -= 1  # what a loop carried last is its result
        elif eqn.primitive == BRANCH_JOIN and (compiler.joins_in_place or graph.results[e][0] not in graph.outputs):
            (result,) = graph.results[e]
            for v in filter(stored.item, made_inside(graph, e)):  # the result lies there
                stored[v], named[v], start[result] = False, True, min(start[result], start[v])
    anew = {term.onto for term in scattered}
    everywhere = compiler.overwrites_last_read
    end[_find_overwritten(graph, fuses, stored, start, end, anew, everywhere=everywhere)] -= 1
    if everywhere:
        end[_find_written_over(graph, stored, start, end, orders.onto)] -= 1
    for first, last in _updates(graph):
        end[(end > order[first]) & (end <= order[last])] = order[last] + 1
    updates, copied = updating(graph, fuses), end.copy()
    computed_with = {v for e, operands in enumerate(graph.operands) if e not in updates for v in operands}
    inputs = [v for v in graph.inputs if v in computed_with]
    copied[inputs] = ends(late, updates)[inputs]
    carried = np.zeros(len(graph.avals), bool)
    carried[[graph.results[e][0] for e, eqn in enumerate(graph.eqns) if eqn.primitive == LOOP_CARRY]] = True
    casts_products = compiler.multiplies_in_bfloat16
    return LiveRanges(
        stored=stored,
        named=named,
        held=stored | named | carried,
        absorbed=taken & ~held,
        start=start,
        end=end,
        copied=copied,
        soon=ends((), waiting="in loops" if lazy else "nowhere") if late or lazy else end,
        early=early,
        across=across,
        numerators=numerators,
        made=frozenset(v for v in made if not held[v]),
        narrowed=frozenset(narrowed.values()),
        matrices=in_lanes,
        scattered=scattered,
        gathered=gathered,
        cast_ahead=cast_ahead(graph, products=casts_products) if compiler.casts_stacked_inputs_ahead else {},
        multiplied=multiplied(graph) if casts_products else {},
        parts=taken_parts(graph) if compiler.multiplies_what_is_taken else {},
    )


def _zeroed(graph: Graph, spans: Mapping[int, tuple[int, int]], *, early: bool) -> Mapping[int, int]:
    """Loop → where its stacks are zeroed: before it, or `early`, behind the loop before it in the same scope."""
    if not early:
        return {loop: begin for loop, (begin, _) in spans.items()}
    around = {
        graph.value_loop[result]: graph.value_loop[v]
        for e, eqn in enumerate(graph.eqns)
        if eqn.traits.enters_loop
        for v, result in zip(graph.operands[e], graph.results[e], strict=True)
    }
    found: dict[int, int] = {}
    ends: dict[int, int] = {}  # scope → the end of the last loop in it so far
    for loop, (_, end) in sorted(spans.items(), key=lambda one: one[1]):
        scope = around.get(loop, 0)
        found[loop] = ends.get(scope, spans[scope][0] - 1 if scope else -1) + 1
        ends[scope] = end
    return found


def _updates(graph: Graph) -> Iterator[tuple[int, int]]:
    """Where state comes from the host's memory, and where the first of it goes back, each time.

    One kernel updates what came together, and writes over none of it (XLA:GPU, jax-cuda12-pjrt 0.10.2): all that it
    reads is there until it has written everything.
    """
    first: int | None = None
    for e, eqn in enumerate(graph.eqns):
        if eqn.primitive != DEVICE_PUT or graph.eqn_loop[e]:
            continue
        if graph.operands[e][0] in graph.on_host and graph.operands[e][0] in graph.inputs:
            first = e if first is None else first
        elif graph.results[e][0] in graph.on_host and first is not None:
            yield first, e
            first = None


def _across(
    graph: Graph, rules: Sequence[ShardingRule], stored: NDArray[np.bool_], late: Container[int]
) -> dict[int, frozenset[int]]:
    """Value → its dimensions over which late equations reduce, other than to a scalar."""
    found: dict[int, frozenset[int]] = {}
    for e in range(len(graph.eqns) - 1, -1, -1):
        rule, results = rules[e], graph.results[e]
        factors = {f for v, dims in zip(results, rule.results, strict=True) for d in found.get(v, ()) for f in dims[d]}
        if e not in late:
            factors = set() if any(stored[v] for v in results) else factors
        elif any(graph.avals[v].ndim for v in results):
            factors |= {f for f, factor in enumerate(rule.factors) if factor.reduction}
        for v, dims in zip(graph.operands[e], rule.operands, strict=True) if factors else ():
            split = frozenset(d for d, of in enumerate(dims) if factors & set(of))
            if split:
                found[v] = found.get(v, frozenset()) | split
    return found


def _find_overwritten(
    graph: Graph,
    fuses: Sequence[bool],
    stored: NDArray[np.bool_],
    start: NDArray[np.int64],
    end: NDArray[np.int64],
    anew: Container[int],
    *,
    everywhere: bool,
) -> list[int]:
    """Stored values whose last reader, a fusion, writes as many elements of their type: it does so in place.

    Values that one kernel reads twice, to reduce their rows first, are excluded, and those of which it reads an
    element elsewhere than where it writes (of a slice, of what is padded). `anew`: values that are written over none.
    Without `everywhere` only those that loops carry: any compiler adds onto a sum where it lies.
    """
    made_by = graph.producers
    reads: dict[int, frozenset[int]] = {}  # value → the stored values that a fusion reads to compute it
    elsewhere: dict[int, frozenset[int]] = {}  # value → those of them of which it reads other elements than its own
    reduced: dict[int, frozenset[int]] = {}  # reduction → the values whose rows it reduces, if they are short
    found: set[int] = set()
    carried: set[int] = set()  # what is carried on, as the loop's body has it

    def reads_of(v: int) -> frozenset[int]:
        if stored[v] and v not in carried:
            return frozenset({v}) if everywhere else frozenset()
        return reads.get(v, frozenset())

    for e, fused in enumerate(fuses):
        eqn = graph.eqns[e]
        if eqn.primitive == LOOP_CARRY:  # lies where the value does that enters the loop
            (v,) = graph.operands[e]
            (within,) = graph.results[e]
            carried.add(within)
            lies = within if stored[within] else v
            reads[within] = frozenset({lies}) if stored[lies] else reads.get(v, frozenset())
        if not fused or eqn.primitive == TRANSPOSE or not graph.results[e]:
            continue
        result = graph.results[e][0]
        reads[result] = frozenset[int]().union(*(reads_of(v) for v in graph.operands[e]))
        twice = frozenset[int]().union(*(reduced.get(v, frozenset()) for v in reads[result]))
        aval = graph.avals[result]
        moves = eqn.primitive == REV
        elsewhere[result] = frozenset[int]().union(
            *(
                reads_of(v) if moves or graph.avals[v].size != aval.size else elsewhere.get(v, frozenset())
                for v in graph.operands[e]
            )
        )
        for part in graph.results[e][1:]:  # of what is split
            reads[part], elsewhere[part] = reads[result], elsewhere[result]
        if eqn.traits.ends_fusion:
            row = graph.avals[graph.operands[e][0]].size // max(aval.size, 1)
            reduced[result] = twice | (reads[result] if row <= SHORT_ROW else frozenset())
        if not stored[result] or eqn.traits.ends_fusion or eqn.traits.renames or result in anew:
            continue
        for v in sorted(reads[result] - twice - elsewhere[result] - found):
            if v in made_by and graph.avals[v] == aval and end[v] == start[result] + 1:
                found.add(v)
                break
    return sorted(found)


def _find_written_over(
    graph: Graph,
    stored: NDArray[np.bool_],
    start: NDArray[np.int64],
    end: NDArray[np.int64],
    onto: Mapping[int, int],
) -> list[int]:
    """Stored products that are read for the last time by a kernel that writes as many elements in their order.

    Both have their dimensions under different names; what has them under the same is `_find_overwritten`'s.
    """
    found: set[int] = set()
    for v, product in onto.items():
        before, after = graph.avals[product], graph.avals[v]
        renamed = before.shape != after.shape and before.dtype == after.dtype
        if stored[v] and stored[product] and renamed and end[product] == start[v] + 1:
            found.add(product)
    return sorted(found)


def _find_held(
    graph: Graph,
    fuses: Sequence[bool],
    taken: NDArray[np.bool_],
    stated: Container[int],
    compiler: CompilerModel,
    scattered: Sequence[ScatteredTerm],
    numerators: Mapping[int, Numerator],
    softmax_facts: SoftmaxFacts,
) -> NDArray[np.bool_]:
    """Whether each value lies in memory, also under another's name.

    Args:
      graph: the program.
      fuses: per equation, whether XLA fuses it with its neighbours.
      taken: operands that contractions can make themselves.
      stated: values that are always held.
      compiler: who compiles the program.
      scattered: additions that are done by a scatter.
      numerators: those of softmaxes, of which the products may lie there.
      softmax_facts: of the machine: whether the gradients of scores lie there, too, if several read them.
    """
    differentiated = {v for v, n in numerators.items() if softmax_facts.stores_gradients and n.stores_gradient}
    sums = {term.addition for term in scattered}
    scatters = {term.scatter for term in scattered}
    onto = {term.onto for term in scattered}
    held = np.zeros(len(graph.avals), bool)
    made = np.zeros(len(graph.avals), bool)
    costly = np.zeros(len(graph.avals), bool)
    held[list(graph.inputs)] = True
    held[list(graph.outputs)] = True
    readers = np.zeros(len(graph.avals), np.int64)
    carried: set[int] = set()  # what entered a loop to be carried on
    makes = compiler.gathers_make_their_operands
    for e, eqn in enumerate(graph.eqns):
        operands, results = list(graph.operands[e]), list(graph.results[e])
        made[results] = True
        costly[results] = eqn.traits.costly
        aside = e in graph.optional and eqn.primitive in (LOOP_STACK, DEVICE_PUT)  # keeps what a plan may leave out
        readers[operands] += not aside
        if eqn.traits.enters_loop:
            held[operands] = True
            held[results] = eqn.primitive == LOOP_CARRY and operands[0] in carried  # a loop carries one value once
            carried.update(operands if eqn.primitive == LOOP_CARRY else ())
        elif e in scatters:  # the table lies where the other term does
            held[operands[1:]] = True
        elif e in sums or eqn.traits.ends_fusion or eqn.primitive == LOOP_STACK:
            held[results] = True
        elif eqn.primitive == SPLIT and compiler.writes_rotations and _is_cast(graph, operands[0]):
            held[operands + results] = True
        elif not fuses[e] and not eqn.traits.renames and not aside:
            drawn = operands[:1] if eqn.traits.reads_part and (makes or computed_scores(graph, fuses, e)) else []
            held[[v for v in operands if v not in drawn and not (taken[v] and eqn.traits.contraction)]] = True
            held[results] = True
        elif eqn.traits.places and compiler.writes_what_is_placed:
            held[[v for v in operands if graph.avals[v].ndim]] = True
        held[[v for v in results if aside or v in stated or v in onto]] = True
    for product, cast in _narrowed(graph, fuses, compiler).items():
        held[product], held[cast] = product in stated, True
    for e in range(len(graph.eqns) - 1, -1, -1):
        if graph.eqns[e].primitive == RECALL:
            readers[graph.operands[e][-1]] += readers[graph.results[e][0]] - 1
    for e, eqn in enumerate(graph.eqns):
        if eqn.primitive == LOOP_STACK and e not in graph.optional:
            v = graph.operands[e][0]
            held[v] |= costly[v] and readers[v] > 1
    for e in range(len(graph.eqns) - 1, -1, -1):
        if graph.eqns[e].traits.renames and held[graph.results[e][0]]:
            held[graph.operands[e][-1]] = True
    uses = readers.copy()  # under all names
    for e in range(len(graph.eqns) - 1, -1, -1):
        if graph.eqns[e].traits.renames:
            uses[graph.operands[e][-1]] += uses[graph.results[e][0]] - 1
    widened = widened_arguments(graph, fuses, compiler.widens_apart)
    stores = not compiler.contractions_make_their_operands or softmax_facts.stores_gradients
    goes_to: dict[int, frozenset[int]] = {}  # value that is not held → values in memory that are computed from it
    made_in: dict[int, frozenset[int]] = {}  # value that is not held → the contractions that compute it
    for e in range(len(graph.eqns) - 1, -1, -1):
        inside = compiler.contractions_make_their_operands and graph.eqns[e].traits.contraction
        for o in graph.operands[e] if inside else ():
            made_in[o] = made_in.get(o, frozenset[int]()) | ({e} if taken[o] and not held[o] else frozenset())
        for v in graph.results[e] if fuses[e] else ():
            once = graph.eqns[e].primitive in compiler.computes_once and (stores or _of_narrow(graph, fuses, v))
            once |= v in widened
            held[v] |= once and len(goes_to.get(v, ())) + len(made_in.get(v, ())) > 1
            ends = frozenset({v}) if held[v] else goes_to.get(v, frozenset[int]())
            computing = frozenset[int]() if held[v] else made_in.get(v, frozenset[int]())
            for o in graph.made_from(e):
                goes_to[o] = goes_to.get(o, frozenset[int]()) | ends
                made_in[o] = made_in.get(o, frozenset[int]()) | computing
    lanes = compiler.multiplies_whole_lanes
    sources: dict[int, dict[int, int]] = {}  # value that is not held → what in memory it is recomputed from, and bytes
    for e, eqn in enumerate(graph.eqns):
        if eqn.traits.renames:
            held[graph.results[e][0]] |= held[graph.operands[e][-1]]
        for result in graph.results[e]:
            if held[result] or not (fuses[e] or eqn.traits.renames or eqn.primitive == LOOP_SLICE):
                continue
            found: dict[int, int] = {}
            for v in graph.made_from(e):
                if held[v]:  # of a stack, a trip's part is read
                    aval = graph.avals[result if eqn.primitive == LOOP_SLICE else v]
                    lying = part_in_lanes(aval, graph.avals[result]) if eqn.traits.places and lanes else aval.nbytes
                    found[v] = numerators[v].nbytes(aval) if v in numerators else lying
                elif made[v]:
                    found.update(sources.get(v, {}))
            sources[result] = found
            if eqn.traits.renames or eqn.traits.choice:
                continue
            takers = {reader for reader, _ in graph.consumers.get(result, ())}
            kernels = len(goes_to.get(result, ())) + sum(not fuses[reader] for reader in takers)
            write, read, times = graph.avals[result].nbytes, sum(found.values()), min(int(readers[result]), kernels)
            again = times * read - sum(_read_anyway(graph, reader, found) for reader in takers)
            held[result] = again > read + write + times * write or len(found) > _MOST_SOURCES
            if uses[result] > 1 and any(v in differentiated for v in found):
                held[result] |= sum(graph.avals[v].size == graph.avals[result].size for v in found) > 1
    return held


def _read_anyway(graph: Graph, e: int, sources: Mapping[int, int]) -> int:
    """What an equation takes itself of the sources of another operand: bytes."""
    return sum(sources.get(v, 0) for v in set(graph.operands[e]))


def _of_narrow(graph: Graph, fuses: Sequence[bool], value: int) -> bool:
    """Whether a value is computed from a product of narrower elements than float32, element by element."""
    return any(graph.avals[v].itemsize < FLOAT32.itemsize for v in products_of(graph, fuses, value))


def _narrowed(graph: Graph, fuses: Sequence[bool], compiler: CompilerModel) -> Mapping[int, int]:
    """Product that lies in memory as it is cast → the cast."""
    return narrowed_products(graph, fuses) if compiler.matmuls_cast_their_products else {}


def _is_cast(graph: Graph, value: int) -> bool:
    """Whether an equation made a value by a cast."""
    return value in graph.producers and graph.eqns[graph.producers[value][0]].traits.cast


def _last_uses(
    graph: Graph,
    stored: NDArray[np.bool_],
    spans: dict[int, tuple[int, int]],
    order: Sequence[int],
    deferred: Collection[int],
    unread: Collection[int],
    turned: Container[int],
    *,
    waiting: Waiting,
) -> NDArray[np.int64]:
    """The last equation that reads each value, directly or through values that are not stored; `unread` do not count.

    Equation e runs at position `order[e]` of the program; `waiting`: where weights' gradients are deferred. An operand
    of a contraction lives until the next one (or loop), but not until one behind a kernel that writes a value in
    another order (`turned`): in a loop until that kernel has run, else not at all.
    Operands of deferred equations live until the end. Their results (f32 scores) do not; they lie on
    top of XLA:TPU's heap then, as if they had been there before, and keep their place in the program.
    """
    last = np.full(len(graph.avals), -1, np.int64)
    feeds, made_by = feeding(graph), graph.producers
    following: dict[int, int] = {}  # loop → its next contraction in program order
    for e in range(len(graph.eqns) - 1, -1, -1):
        when, loop = order[e], graph.eqn_loop[e]
        if waiting != "nowhere" and graph.eqns[e].traits.enters_loop:
            following[graph.value_loop[graph.operands[e][0]]] = e
        if graph.eqns[e].primitive in (LOOP_CONST, LOOP_SLICE):
            when = spans[loop][1]
        elif any(v in turned for v in graph.results[e]):
            if loop and waiting != "nowhere":
                following[loop] = e
            else:
                following.pop(loop, None)
        elif graph.eqns[e].traits.contraction:
            when, following[loop] = following.get(loop, e), e
            if waiting != "nowhere" and not any(feeds[v] for v in graph.results[e]):
                outside = behind_loops(spans, e) if waiting == "everywhere" else next_loop(graph, spans, e)
                when = spans[loop][1] if loop else outside
        when = max(when, *(int(last[v]) for v in graph.results[e] if not stored[v]), order[e])
        operands = list(graph.operands[e]) if e not in unread else []
        last[operands] = np.maximum(last[operands], when)
        if e in deferred:
            last[[v for v in operands if made_by.get(v, (-1, 0))[0] not in deferred]] = len(graph.eqns) - 1
    return last
