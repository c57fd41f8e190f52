"""Overlap: which communication can hide behind which compute.

A collective hides behind contractions that neither precede nor follow it. Outside of
loops there are two windows: EARLY, for values that depend on no contraction (gathers of
weights), and LATE, for values on which no contraction depends (reductions of
gradients). The first hides behind the contractions that precede every late value, the
second behind the others; on XLA:GPU, behind those of them that are late alone, and the first behind
a share of those that precede the last use of such a value: what follows (a head's product) hides none.

The body of a loop is a window of its own. Two kinds of values hide behind the contractions
of the body: those that depend neither on the trip before nor on a contraction (gathers of this
layer's weights), and those that feed neither a contraction nor the next trip (reductions of this
layer's gradients). XLA:GPU moves no collective into another trip. The first contraction's weights
are therefore gathered beside the equations that precede it (norms, slices and casts of weights),
or are exposed if there are none. The reduction of the last contraction's result is exposed: the
scheduler keeps the largest gradient for last. A program without loops behaves in the same way; it
waits for the compiler's whole first bucket of weights.

A loop over whole steps (micro-batches, each with its forward and its backward pass) is a program in a
loop: what the next trip takes are gradients, whose reductions hide as in any trip, and its gathers hide
behind a share of its forward pass, as those of a program without loops do.

A *late* contraction makes a gradient of weights, and feeds no other contraction. XLA:GPU runs it
beside communication that other contractions wait for (gradients of activations; in a loop, stacked
values, too); not the largest one of a program without loops, which runs last. Each window with late
contractions has a part of its own, in which this communication hides behind late compute alone. Two
more kinds hide in the part: all late reductions, and values stacked by an earlier loop that meet,
element by element, the result of a contraction. Outside of loops, communication and compute of a
part also count in the whole window, and some of the part's compute hides nothing; the whole window
has late contractions alone, as XLA:GPU runs gradients of weights and their reductions in turns,
after the rest of the backward pass (plans of 2 to 4 layers of llama, gpt2, BERT and Hugging Face's
llama on 8 and 32 H100). In a loop, hideable communication is divided: one share hides behind a part
of all compute of the trip; the rest hides behind a little of the part's compute or, outside of the
part, behind all compute. So the exposed seconds grow from zero, even if there is little
communication.

XLA:GPU runs one collective at a time, and none beside a loop that itself communicates. In a
program with loops (others than an optimizer's, behind the backward pass), early and late values
outside of them hide behind no contraction: only communication that contractions wait for hides,
behind contractions that do not wait for it. The moves of a program's new state, at its end, hide
behind its updates. So does, in compiled programs, the last gradient's reduction behind the updates
of other weights; that is not priced (it counts where devices update whole weights).
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import TypeVar

from autoshard.backends.model import CompilerModel
from autoshard.costs.buckets import BUCKET_BYTES, TRIP_BYTES
from autoshard.costs.dependences import (
    awaited_first,
    contractions_before,
    feeding_products,
    gradients,
    multiplies,
    sources,
    whole_steps,
)
from autoshard.costs.execution_order import loop_spans
from autoshard.costs.prices import Machine
from autoshard.costs.unmerged_sums import unmerged_sums
from autoshard.costs.unrolled_loops import merged_bytes
from autoshard.costs.windows import EARLY, LATE, OUTSIDE, OverlapWindows
from autoshard.ir.graph import Graph
from autoshard.ir.op_traits import LOOP_CARRY, LOOP_STACK

# Outside of loops: AHEAD is the share of the forward pass's compute, up to the last use of a gathered weight, that
# hides gathers (0.5 to 0.8 for hf-llama, nnx-transformer and optax-lion of `benchmarks.zoo_steps`); BUSY the share of
# a part's compute that hides any communication: XLA:GPU runs the rest beside no collective (fitted to programs without
# loops).
AHEAD = 0.68
BUSY = 0.5
# In a divided trip, of hideable communication, the share TOGETHER hides behind TAKEN of all the trip's compute, and the
# rest behind APART of the part's compute, or behind all. Fitted to 310 trips as XLA:GPU schedules them: plans of four
# layers of gpt2-xl, llama3-8b, gemma-7b and mixtral, and hand-written FSDP, on 8, 16 and 32 H100, small to huge batches
# (those of docs/comparing.md), every size with the same weight. The error of a trip's exposed share of the step has a
# root mean square of 0.013. A model in which a fixed share is always exposed reaches 0.016 at best.
TOGETHER = 0.61
TAKEN = 0.38
APART = 0.12

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """A program, as far as its windows outside of loops depend on it: not on loops behind its backward pass.

    Those are an optimizer's (Newton–Schulz iterations), one for each weight. XLA:GPU's scheduler runs what is before
    them as in a program without loops.

    Attributes:
      graph: the whole program.
      makers: its equations that communication may hide behind (`dependences.multiplies`), but for those of such loops.
      loops: whether it has other loops.
      before: equation → the contractions that it is computed from (`dependences.contractions_before`).
      gradients: values that its outputs are made of, element by element (`dependences.gradients`).
    """

    graph: Graph
    makers: frozenset[int]
    loops: bool
    before: Mapping[int, int]
    gradients: frozenset[int]


def _model(graph: Graph) -> _Model:
    """The model of a program: all of it, unless all loops are behind the last product of its backward pass."""
    makers = frozenset(e for e, eqn in enumerate(graph.eqns) if multiplies(eqn))
    last = max(makers & graph.backward, default=len(graph.eqns))
    loops = any(begin <= last for begin, _ in loop_spans(graph).values())
    return _Model(
        graph=graph,
        makers=makers if loops else frozenset(e for e in makers if not graph.eqn_loop[e]),
        loops=loops,
        before=contractions_before(graph, range(len(graph.eqns))),
        gradients=gradients(graph),
    )


def hidden_shares(machine: Machine, compiler: CompilerModel) -> Mapping[str, float]:
    """Kind of collective → the most of its seconds that hides behind compute; none where no kind hides otherwise.

    XLA:TPU waits for every collective, but for gathers on v5e, which the kernels of contractions carry on
    (`costs.carriers`; `tests/compilers/test_hidden_tpu.py`). Where rings are made of what matmuls gather and scatter
    (`Machine.unscattered_axes` are none), these hide as the chip's file says.
    """
    if not compiler.hides_gathers_alone:
        return {}
    if machine.gathers_ahead:
        return {"all-gather": 1.0}
    ring = 0.0 if machine.unscattered_axes else machine.overlap
    return {"all-gather": ring, "reduce-scatter": ring}


def overlap_windows(graph: Graph, compiler: CompilerModel) -> OverlapWindows:
    """The windows of a graph, as a compiler schedules it."""
    model = _model(graph)
    outer, inner = _outside(model), _inside(graph)
    outside = {v for v, loop in enumerate(graph.value_loop) if not loop}
    early, late = inner.early | (outer.early & outside), inner.late | (outer.late & outside)
    awaited = frozenset[int]()
    if compiler.waits_at_both_ends:
        awaited = awaited_first(graph)
        early -= awaited | _bucket(model, early, awaited)
        late -= _last(model, late)
    of_value: list[int | None] = []
    for v, loop in enumerate(graph.value_loop):
        window = OUTSIDE + loop - 1 if loop else EARLY if v in early else LATE
        of_value.append(window if v in early or v in late else None)
    forward = _forward(model, outer.late)
    of_equation = [
        OUTSIDE + loop - 1 if loop else (EARLY if forward >> e & 1 else LATE) for e, loop in enumerate(graph.eqn_loop)
    ]
    count = OUTSIDE + graph.loops
    alone = tuple(((w, 1.0),) for w in range(count))
    found = OverlapWindows(
        of_value=tuple(of_value),
        of_equation=tuple(of_equation),
        loops=(0,) * OUTSIDE + tuple(range(1, graph.loops + 1)),
        whole=tuple(range(count)),
        hides=alone,
        covers=alone,
        buckets=(BUCKET_BYTES,) * OUTSIDE + (TRIP_BYTES if compiler.merges_collectives_in_loops else 0,) * graph.loops,
        urgent=frozenset(),
        beside=frozenset(),
        idle=frozenset(),
    )
    if not compiler.hides_behind_late_work:
        return found
    found = _ahead_in_steps(model, _divide(model, found, outer, inner), inner)
    found = _add_loop_starts(graph, found, inner, awaited)
    found = _around_loops(model, found, outer, awaited) if model.loops else _at_the_end(model, found, outer)
    alone = unmerged_sums(graph, _updates(model, outer))
    of_value = [None if v in alone else w for v, w in enumerate(found.of_value)]
    return replace(found, of_value=tuple(of_value), merged=merged_bytes(graph))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Phases:
    """Values before all contractions of a program or a loop's trip, after some, and after all."""

    early: frozenset[int]
    after: frozenset[int]
    late: frozenset[int]


def _outside(model: _Model) -> _Phases:
    """The phases of the program; those after some contractions are outside of loops."""
    graph = model.graph
    after: set[int] = set()  # has a contraction among its ancestors
    for e in range(len(graph.eqns)):
        if e in model.makers or not after.isdisjoint(graph.operands[e]):
            after.update(graph.results[e])
    feeds = feeding_products(graph, model.makers, inside=False)
    return _Phases(
        early=frozenset(range(len(graph.avals))) - after,
        after=frozenset(v for v in after if not graph.value_loop[v]),
        late=frozenset(after - feeds),
    )


def _forward(model: _Model, late: Set[int]) -> int:
    """The contractions that precede every late one, as a bit set."""
    graph, common = model.graph, -1
    for e, bits in model.before.items():
        if e in model.makers and not late.isdisjoint(graph.results[e]):
            common &= bits
    return common


def _inside(graph: Graph) -> _Phases:
    """The phases of every loop's trip; the trip before and the next are contractions like those of the body."""
    carried: set[int] = set()  # depends on the trip before
    after: set[int] = set()  # has a contraction of the body among its ancestors
    for e, eqn in enumerate(graph.eqns):
        entering = eqn.traits.enters_loop
        for v in graph.results[e]:
            if eqn.primitive == LOOP_CARRY or (not entering and any(o in carried for o in graph.operands[e])):
                carried.add(v)
            if multiplies(eqn) or (not entering and any(o in after for o in graph.operands[e])):
                after.add(v)
    feeds = feeding_products(graph, {e for e, eqn in enumerate(graph.eqns) if multiplies(eqn)}, inside=True)
    inside = {v for v, loop in enumerate(graph.value_loop) if loop}
    return _Phases(
        early=frozenset(inside - carried - after),
        after=frozenset(inside & after),
        late=frozenset(inside & after - feeds),
    )


def _divide(model: _Model, found: OverlapWindows, outer: _Phases, inner: _Phases) -> OverlapWindows:
    """Adds a sub-window to every window with late work."""
    graph = model.graph
    late: set[int] = set()  # equations
    idle: set[int] = set()
    others: set[int] = set()  # contractions that are not late
    homes = [_home(graph, e) for e in range(len(graph.eqns))]
    for e, (eqn, loop) in enumerate(zip(graph.eqns, homes, strict=True)):
        phases, results = inner if loop else outer, graph.results[e]
        if multiplies(eqn):
            (late if results[0] in phases.late else others).add(e)
        elif eqn.primitive == LOOP_STACK or (loop and phases.late.issuperset(results)):
            idle.add(e)
            late.add(e)
    urgent = frozenset(
        v
        for within in (False, True)
        for v in feeding_products(graph, others if within else others & model.makers, inside=within)
        if bool(graph.value_loop[v]) == within
    )
    part: dict[int, int] = {}  # loop → its part
    for loop in sorted({homes[e] for e in late}):
        found, part[loop] = _add_part(found, loop)
    beside = _beside(model, late, homes, urgent & (outer.after | inner.after))
    hidden = {v for v in inner.late | _joining(graph, inner) if found.of_value[v] is not None}
    parted = beside | {v for v in hidden if graph.value_loop[v] in part}
    return replace(
        found,
        of_value=tuple(part[graph.value_loop[v]] if v in parted else window for v, window in enumerate(found.of_value)),
        of_equation=tuple(part[homes[e]] if e in late else window for e, window in enumerate(found.of_equation)),
        urgent=urgent,
        beside=beside,
        idle=frozenset(idle),
    )


def _add_part(found: OverlapWindows, loop: int) -> tuple[OverlapWindows, int]:
    """Adds a sub-window for late work: of the program (loop 0) or of one loop body."""
    if not loop:
        part = found.count
        hides, covers = ((part, 1.0), (LATE, 1.0)), ((part, BUSY), (LATE, 1.0))
        return found.with_window(loop=0, whole=LATE, hides=hides, covers=covers, bucket=found.buckets[LATE]), part
    body, trip, part = OUTSIDE + loop - 1, found.count, found.count + 1
    bucket = found.buckets[body]
    alone = ((trip, 1.0),)
    found = found.with_window(loop=loop, whole=trip, hides=alone, covers=alone, bucket=bucket)
    found = replace(
        found,
        whole=_with(found.whole, body, trip),
        hides=_with(found.hides, body, ((body, 1 - TOGETHER), (trip, TOGETHER))),
        covers=_with(found.covers, body, ((body, 1.0), (trip, TAKEN))),
    )
    hides, covers = ((part, 1 - TOGETHER), (trip, TOGETHER)), ((part, APART), *found.covers[body])
    return found.with_window(loop=loop, whole=trip, hides=hides, covers=covers, bucket=bucket), part


def _ahead_in_steps(model: _Model, found: OverlapWindows, inner: _Phases) -> OverlapWindows:
    """Adds a window per loop over whole steps: its gathers hide behind its forward pass alone, as without loops.

    Only products of the forward pass that precede the last one of a gathered weight hide any.
    """
    graph = model.graph
    for loop in sorted(whole_steps(graph)):
        body, new = OUTSIDE + loop - 1, found.count
        forward = [e for e, at in enumerate(graph.eqn_loop) if at == loop and multiplies(graph.eqns[e])]
        forward = [e for e in forward if e not in graph.backward]
        ahead = reduce(or_, (model.before[e] for e in forward if not inner.early.isdisjoint(graph.operands[e])), 0)
        covers = ((new, AHEAD), *found.covers[body])
        found = found.with_window(
            loop=loop, whole=found.whole[body], hides=((new, 1.0),), covers=covers, bucket=found.buckets[body]
        )
        covering = {e for e in forward if ahead >> e & 1 and found.of_equation[e] == body}
        found = replace(
            found,
            of_value=tuple(new if w == body and v in inner.early else w for v, w in enumerate(found.of_value)),
            of_equation=tuple(new if e in covering else w for e, w in enumerate(found.of_equation)),
        )
    return found


def _add_loop_starts(graph: Graph, found: OverlapWindows, inner: _Phases, awaited: Set[int]) -> OverlapWindows:
    """Adds a window per loop: its first contraction's weights hide behind the equations before it."""
    first = found.count - 1  # and a loop's number: its opening
    for loop in range(1, graph.loops + 1):
        body, new = OUTSIDE + loop - 1, found.count
        covers = ((new, 1.0), *found.covers[body])
        found = found.with_window(loop=loop, whole=found.whole[body], hides=((new, 1.0),), covers=covers, bucket=0)
    before = {v for v, loop in enumerate(graph.value_loop) if loop} - inner.after
    opening = {e for e, eqn in enumerate(graph.eqns) if not multiplies(eqn) and before.issuperset(graph.results[e])}
    opening -= found.idle
    waiting = awaited & inner.early
    return replace(
        found,
        of_value=tuple(first + graph.value_loop[v] if v in waiting else w for v, w in enumerate(found.of_value)),
        of_equation=tuple(first + graph.eqn_loop[e] if e in opening else w for e, w in enumerate(found.of_equation)),
        idle=found.idle | opening,
    )


def _around_loops(model: _Model, found: OverlapWindows, outer: _Phases, awaited: Set[int]) -> OverlapWindows:
    """The windows of a program with loops: outside of loops, contractions hide only `beside` values.

    The first contraction's weights are gathered beside equations that depend on none (the labels' part of a
    loss), except for a table that is also looked up before the loops.
    """
    graph, updates = model.graph, _updates(model, outer)
    nowhere, opening = found.count, found.count + 1
    for window, share in ((nowhere, 1.0), (opening, BUSY)):
        hides, covers = ((window, 1.0),), ((window, share),)
        found = found.with_window(loop=0, whole=window, hides=hides, covers=covers, bucket=0)
    first = {
        e
        for e, eqn in enumerate(graph.eqns)
        if _home(graph, e) == 0 and not multiplies(eqn) and outer.early.issuperset(graph.results[e])
    } - updates
    waiting = {v for v in awaited & outer.early if not graph.value_loop[v]}
    feeds = feeding_products(graph, {e for e, eqn in enumerate(graph.eqns) if multiplies(eqn)}, inside=False)
    for e, eqn in enumerate(graph.eqns):
        if not multiplies(eqn) and not feeds.isdisjoint(graph.results[e]) and awaited.isdisjoint(graph.results[e]):
            waiting.difference_update(graph.operands[e])
    for part in range(OUTSIDE, nowhere):
        if found.whole[part] == LATE:
            alone = ((part, 1.0),)
            found = replace(
                found,
                whole=_with(found.whole, part, part),
                hides=_with(found.hides, part, alone),
                covers=_with(found.covers, part, alone),
            )
    outside = (w if w >= OUTSIDE else nowhere for w in found.of_equation)
    return replace(
        found,
        of_value=tuple(opening if v in waiting else w for v, w in enumerate(found.of_value)),
        of_equation=tuple(LATE if e in updates else opening if e in first else w for e, w in enumerate(outside)),
        idle=found.idle | updates | first,
    )


def _at_the_end(model: _Model, found: OverlapWindows, outer: _Phases) -> OverlapWindows:
    """The windows of a program without loops but those at its end.

    Moves of its new state hide behind its updates alone, late reductions behind late contractions alone: XLA:GPU
    puts both at the end of the program. Nothing hides behind the contractions before them that are not late.
    """
    graph, updates = model.graph, _updates(model, outer)
    state = _new_state(model)
    end, aside = found.count, found.count + 1
    for window, bucket in ((end, found.buckets[LATE]), (aside, 0)):
        alone = ((window, 1.0),)
        found = found.with_window(loop=0, whole=window, hides=alone, covers=alone, bucket=bucket)
    forward = {e for e in model.makers if found.of_equation[e] == EARLY}
    gathered = (model.before[e] for e in forward if not outer.early.isdisjoint(graph.operands[e]))
    ahead = reduce(or_, gathered, 0)
    others = {e for e in model.makers if found.of_equation[e] == LATE} | {e for e in forward if not ahead >> e & 1}
    return replace(
        found,
        covers=_with(found.covers, EARLY, ((EARLY, AHEAD),)),
        of_value=tuple(end if w == LATE and v in state else w for v, w in enumerate(found.of_value)),
        of_equation=tuple(
            end if e in updates else aside if e in others else w for e, w in enumerate(found.of_equation)
        ),
        idle=found.idle | updates,
    )


def _with(items: tuple[_T, ...], at: int, item: _T) -> tuple[_T, ...]:
    return (*items[:at], item, *items[at + 1 :])


def _new_state(model: _Model) -> frozenset[int]:
    """The outputs of a program, under all their names, except results of contractions."""
    graph = model.graph
    found, products = set(graph.outputs), set[int]()
    for e in range(len(graph.eqns) - 1, -1, -1):
        if graph.eqns[e].traits.renames and not found.isdisjoint(graph.results[e]):
            found.update(graph.operands[e])
    for e, eqn in enumerate(graph.eqns):
        if e in model.makers or (eqn.traits.renames and not products.isdisjoint(graph.operands[e])):
            products.update(graph.results[e])
    return frozenset(found - products)


def _updates(model: _Model, outer: _Phases) -> frozenset[int]:
    """The updates of a program's state: equations outside of loops after all contractions, or apart from them."""
    graph = model.graph
    feeds = feeding_products(graph, model.makers, inside=False)
    updating = (outer.early | outer.late) - feeds
    return frozenset(
        e
        for e, eqn in enumerate(graph.eqns)
        if _home(graph, e) == 0 and not multiplies(eqn) and updating.issuperset(graph.results[e])
    )


def _home(graph: Graph, e: int) -> int:
    """The loop in whose trips an equation runs: a link out of a body runs in the body."""
    return graph.value_loop[graph.operands[e][0]] if graph.eqns[e].primitive == LOOP_STACK else graph.eqn_loop[e]


def _beside(model: _Model, late: Set[int], homes: Sequence[int], urgent: Set[int]) -> frozenset[int]:
    """Urgent values that some late contraction of their loop is not computed from.

    In a program without loops the largest gradient of weights runs last, after all that is urgent: it does not count.
    """
    graph = model.graph
    everyone = dict.fromkeys(range(graph.loops + 1), 0)  # loop → bit set of its late contractions
    for e in late:
        everyone[homes[e]] |= 1 << e
    products = {e for e in late & model.makers if not model.gradients.isdisjoint(graph.results[e])}
    if products and not model.loops:
        everyone[0] &= ~(1 << max(products, key=lambda e: (sum(graph.avals[v].nbytes for v in graph.results[e]), e)))
    feeds: dict[int, int] = {}  # value → bit set of the late contractions that are computed from it
    for e in range(len(graph.eqns) - 1, -1, -1):
        bits = 1 << e if e in late else 0
        for v in graph.results[e]:
            bits |= feeds.get(v, 0)
        for v in graph.operands[e]:
            feeds[v] = feeds.get(v, 0) | bits
    return frozenset(v for v in urgent if everyone[graph.value_loop[v]] & ~feeds.get(v, 0))


def _joining(graph: Graph, inner: _Phases) -> frozenset[int]:
    """Early values of loops that meet, element by element, the result of a contraction of the trip."""
    joining: set[int] = set()
    for e in range(len(graph.eqns) - 1, -1, -1):
        eqn, results = graph.eqns[e], graph.results[e]
        if not graph.eqn_loop[e] or multiplies(eqn) or eqn.traits.link:
            continue
        meets = not inner.after.isdisjoint(results) and not inner.early.isdisjoint(graph.operands[e])
        if meets or not joining.isdisjoint(results):
            joining.update(v for v in graph.operands[e] if v in inner.early)
    return frozenset(joining)


def _last(model: _Model, hides: Set[int]) -> frozenset[int]:
    """Per loop body, the largest contraction result whose reduction could hide, and the values made of it.

    Among equally large results, the last. The same for the gradients of a program without loops, up to its new state;
    there also the result of the contraction that follows the most others.
    """
    graph = model.graph
    last: dict[int, int] = {}
    candidates = hides if model.loops else hides & model.gradients
    for e, eqn in enumerate(graph.eqns):
        loop = graph.eqn_loop[e]
        if not multiplies(eqn) or (model.loops and not loop):
            continue
        for v in graph.results[e]:
            if v in candidates and (loop not in last or graph.avals[v].nbytes >= graph.avals[last[loop]].nbytes):
                last[loop] = v
    found = set(last.values()) | _deepest(model, hides)
    hidden = hides - _new_state(model)
    for operands, results in zip(graph.operands, graph.results, strict=True):
        loops = {graph.value_loop[v] for v in operands if v in found}
        found.update(v for v in results if v in hidden and graph.value_loop[v] in loops)
    return frozenset(found)


def _deepest(model: _Model, hides: Set[int]) -> set[int]:
    """In a program without loops, the largest result of the contraction that follows the most others; none on a tie.

    Among equally large results, the last. A `shard_map` may have several: its body makes one of them last.
    """
    graph = model.graph
    if model.loops:
        return set()
    depths = {
        e: bits.bit_count()
        for e, bits in model.before.items()
        if e in model.makers and not hides.isdisjoint(graph.results[e])
    }
    deepest = [e for e, depth in depths.items() if depth == max(depths.values())]
    if len(deepest) > 1 or not deepest:
        return set()
    results = [v for v in graph.results[deepest[0]] if v in hides]
    return {max(reversed(results), key=lambda v: graph.avals[v].nbytes)}


def _bucket(model: _Model, early: Set[int], awaited: Set[int]) -> frozenset[int]:
    """The compiler's first bucket of a program without loops: the weights gathered together with the first ones.

    These are the weights of the first contractions, in program order, that fit in a bucket. Of what all first
    contractions are computed from, only arguments are weights: activations (rows of a table) are not gathered.
    """
    graph = model.graph
    found: set[int] = set()
    left = BUCKET_BYTES
    made_by = graph.producers
    given = set(graph.inputs)
    for e, eqn in enumerate(graph.eqns):
        given.update(graph.results[e] if eqn.traits.keeps_dims and given.issuperset(graph.operands[e]) else ())
        if model.loops or e not in model.makers:
            continue
        weights = {v for v in graph.operands[e] if v in early and (v in given or v not in awaited)} - found
        left -= sum(graph.avals[v].nbytes for v in weights)
        if left < 0:
            break
        found |= weights | (sources(graph, e, made_by) & early if weights else set())
    return frozenset(found)
