"""Doubtful constraints: those that stay, because XLA's partitioner may treat their values differently from Shardy.

A probe says what Shardy does without a constraint. Where XLA has a choice of its own, it may do something else.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from math import prod
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from autoshard.backends.model import CompilerModel
from autoshard.backends.shardy.probe import values_at
from autoshard.backends.shardy.propagation import Annotations
from autoshard.costs import shared_gathers
from autoshard.costs.matrices import LANES
from autoshard.ir.constraints import Constraints, Specs
from autoshard.ir.graph import Graph
from autoshard.ir.layout import Layout
from autoshard.ir.mesh import MeshAxes
from autoshard.ir.op_traits import BRANCH_JOIN, DOT_GENERAL, GATHER, RESHAPE, SCATTER_ADD, TRANSPOSE
from autoshard.ir.rewrite import ConstraintSite


def doubtful(
    graph: Graph, annotations: Annotations, once: Set[int], mesh: MeshAxes, compiler: CompilerModel
) -> tuple[frozenset[int], frozenset[int]]:
    """Values that XLA's partitioner may treat differently from Shardy, whose constraints stay; and values that move.

    The former are

    - Values that move from one split layout to another: XLA has several ways from one to the other
      (if a contraction's operand is gathered over one of its two axes, over another one), unless
      the way is clear: see `_Moves`.
    - Values that are whole and that a contraction takes cut: XLA may gather the other operand where
      Shardy scatters the sum.
    - Values that one contraction makes and several take: each consumer pulls them towards its own
      layout, and XLA propagates in an order of its own.
    - Activations that several contractions take gathered: each may gather for itself (openxla/xla
      dot_handler.cc), and XLA does not merge these gathers; also weights that must be gathered `once`.
    - Values that several contractions take gathered, one of them in groups of devices, unless the compiler
      `shares_grouped_gathers`: see `_Moves.is_gathered_apart`.
    - Values that are gathered for one contraction, and once more for another: without the first gather XLA gathered
      the other operand.
    - Results of branches that are split, and elsewhere lie otherwise: XLA lays them out in the branches as they are
      taken.
    - Tables that lookups take gathered: XLA may look up in what each device has, if that finds less: see `_looked_up`.
    - Sums of scatters that are added to something: XLA may gather the updates where Shardy scatters the sum, and
      scatters onto the other term without a constraint between them (`problem.routes`).
    - Values that are cut along a split dimension: see `_sliced`.
    - Values that a reduction takes, whose sum is scattered: see `_pulled`.
    - Values that meet one broadcast in different layouts, if the compiler `merges_broadcasts`: see `_drawn_together`.
    - Values of one loop that are moved in front of another one, and what its body has of them: see `_entering`.
    - Products that are transposed, and of which the transposed sum would not be scattered, if it `scatters_even_tiles`:
      see `_scattered_before`.
    - Casts of one value in different layouts, if it `merges_casts`: see `_cast_alike`.
    """
    pins, of = annotations.pins, values_at(graph)
    ends = _ends(graph, pins, annotations.inputs, of)
    split = {v: {spec for spec in specs if any(spec)} for v, specs in ends.items()}
    contractions = [e for e, eqn in enumerate(graph.eqns) if eqn.traits.contraction]
    taken = Counter(v for e in contractions for v in graph.operands[e])
    moved = {v for v, specs in split.items() if len(specs) > 1 and any(ends[v][0])}
    moves = _Moves(graph, annotations, mesh)
    clear = set(filter(moves.are_clear, moved))
    if not compiler.shares_grouped_gathers:
        clear -= {v for v in clear if taken[v] > 1 and moves.is_gathered_apart(v)}
    cut = {v for v in taken if split.get(v) and not any(ends[v][0])}
    products = {v for e in contractions for v in graph.results[e]}
    for e, eqn in enumerate(graph.eqns):
        if eqn.primitive == TRANSPOSE and graph.operands[e][0] in products:
            products.add(graph.results[e][0])
    drawn = {v for v in products if taken[v] > 1 and split.get(v)}
    gathered = {v for v in taken if taken[v] > 1 and split.get(v) and any(ends[v][0]) and not all(map(any, ends[v]))}
    gathered &= _activations(graph, contractions) | once
    gathered |= _looked_up(graph, ends, mesh)
    pending = {of.get(("taken", spot)) for spot in pins.taken}
    pending -= {of.get(("made", spot)) for spot in pins.made}  # a sum that is not finished where it is made
    added = {v for e, eqn in enumerate(graph.eqns) if eqn.traits.addition for v in graph.operands[e]}
    scatters = (e for e, eqn in enumerate(graph.eqns) if eqn.primitive == SCATTER_ADD)
    scattered = {v for e in scatters for v in graph.results[e]} & added
    summed = {v for v in scattered if v not in pending or split.get(v)}
    again = {of[site] for site in (("taken", spot) for spot in pins.again) if site in of} & moved
    joins = (e for e, eqn in enumerate(graph.eqns) if eqn.primitive == BRANCH_JOIN)
    joined = {v for e in joins for v in graph.results[e] if split.get(v) and len(set(ends[v])) > 1}
    stays = (moved - clear) | again | cut | drawn | gathered | joined | summed
    stays |= _sliced(graph, ends) | _pulled(graph, ends) | _entering(graph, ends)
    if compiler.merges_broadcasts:
        stays |= _drawn_together(graph, ends)
    if compiler.merges_casts:
        stays |= _cast_alike(graph, ends)
    if compiler.scatters_even_tiles:
        stays |= _scattered_before(graph, ends, mesh)
    return frozenset(stays), frozenset(moved)


def _drawn_together(graph: Graph, ends: Mapping[int, Sequence[PartitionSpec]]) -> set[int]:
    """Results of equal shapes and different layouts that one smaller value is broadcast for.

    XLA makes one broadcast for all of them before it propagates layouts, and Shardy's in-process propagation sees one
    each. What is split more draws the others: behind a gather XLA split the rows again that a norm's scale meets, as
    the scale also meets their gradients, and gathered the weights of the matmuls behind the norm.
    """
    meeting: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for e, eqn in enumerate(graph.eqns):
        if eqn.traits.contraction or eqn.traits.link or len(graph.results[e]) != 1:
            continue
        v = graph.results[e][0]
        for u in graph.operands[e]:
            if v in ends and graph.avals[u].size < graph.avals[v].size:
                meeting.setdefault((u, graph.avals[v].shape), []).append(v)
    return {v for values in meeting.values() if len({ends[v][0] for v in values}) > 1 for v in values}


def _looked_up(graph: Graph, ends: Mapping[int, Sequence[PartitionSpec]], mesh: MeshAxes) -> set[int]:
    """Tables that a lookup takes gathered, and of which it finds less than they are, on each of their devices."""
    found: set[int] = set()
    for e, eqn in enumerate(graph.eqns):
        if eqn.primitive != GATHER:
            continue
        table, result = graph.operands[e][0], graph.results[e][0]
        axes = [{axis for dim in layout.dims for axis in dim} for layout in _layouts(graph, ends, table)]
        gathered = set[str]().union(*axes) - axes[0].intersection(*axes) if axes else set[str]()
        devices = prod(mesh.shape[axis] for axis in gathered)
        if graph.avals[result].nbytes < devices * graph.avals[table].nbytes and devices > 1:
            found.add(table)
    return found


def _scattered_before(graph: Graph, ends: Mapping[int, Sequence[PartitionSpec]], mesh: MeshAxes) -> set[int]:
    """Products that are transposed behind, of which an odd number of tiles is left along a split dimension.

    The last dimension of the transposed product may be that, along which the sum is not scattered: it is scattered
    where it is made, and made transposed if nothing says so.
    """
    found: set[int] = set()
    for e, eqn in enumerate(graph.eqns):
        if not eqn.traits.contraction or not (specs := _layouts(graph, ends, v := graph.results[e][0])):
            continue
        if all(graph.eqns[u].primitive != TRANSPOSE for u, _ in graph.consumers.get(v, ())):
            continue
        pieces = (prod(mesh.shape[axis] for axis in dim) for dim in specs[-1].dims)
        left = [(size // n, n) for size, n in zip(graph.avals[v].shape, pieces, strict=True)]
        if any(n > 1 and size % (2 * LANES) == LANES for size, n in left):
            found.add(v)
    return found


def _entering(graph: Graph, ends: Mapping[int, Sequence[PartitionSpec]]) -> set[int]:
    """Values of one loop that are moved in front of another one, and what the body of this has of them.

    All of it lies as planned, too, where the loop takes the value as it is made, and each trip moves its part: of what
    an LSTM keeps for its backward pass, XLA gathered 1,024 times what is gathered once in front of the loop.
    """
    found: set[int] = set()
    for e, eqn in enumerate(graph.eqns):
        if not eqn.traits.enters_loop or (v := graph.operands[e][0]) not in graph.producers:
            continue
        made = graph.eqns[graph.producers[v][0]]
        if made.traits.leaves_loop and len(set(_layouts(graph, ends, v))) > 1:
            found |= {v, graph.results[e][0]}
    return found


def _cast_alike(graph: Graph, ends: Mapping[int, Sequence[PartitionSpec]]) -> set[int]:
    """Casts of one value to one dtype, transposed or not, that do not all lie in one layout all the time.

    XLA makes one cast of them before it propagates layouts, and a constraint that moves one moves what reads another:
    a table whose rows are looked up in pieces was multiplied in these pieces, too, and whole scores were summed.
    """
    cast: dict[tuple[int, np.dtype[Any]], dict[int, tuple[int, ...]]] = {}
    for e, eqn in enumerate(graph.eqns):
        if not eqn.traits.cast:
            continue
        (u, *_), (v, *_) = graph.operands[e], graph.results[e]
        order = tuple(range(graph.avals[v].ndim))
        while u in graph.producers and graph.eqns[(made := graph.producers[u][0])].primitive == TRANSPOSE:
            order = tuple(graph.eqns[made].params["permutation"][d] for d in order)
            u = graph.operands[made][0]
        cast.setdefault((u, graph.avals[v].dtype), {})[v] = order
    found: set[int] = set()
    for orders in cast.values():
        layouts = {
            tuple(dims for _, dims in sorted(zip(order, layout.dims, strict=True)))
            for v, order in orders.items()
            for layout in _layouts(graph, ends, v)
        }
        if len(orders) > 1 and len(layouts) > 1:
            found |= orders.keys() & ends.keys()
    return found


def _pulled(graph: Graph, ends: Mapping[int, Sequence[PartitionSpec]]) -> set[int]:
    """Values that are split along dimensions over which a reduction sums, where it scatters the sum over another one.

    The sum's constraint pulls the value towards its own layout, if it can go along: if it is computed from results of
    contractions alone, and not from what a loop carries or an input, whose layouts hold it. Of scores whose vocabulary
    is split, XLA made scores whose batch is, for a number per token.
    """
    found: set[int] = set()
    for e, eqn in enumerate(graph.eqns):
        if not eqn.traits.ends_fusion or "axes" not in eqn.params:
            continue
        v, (result, *_) = graph.operands[e][0], graph.results[e]
        summed = {axis for layout in _layouts(graph, ends, v) for d in eqn.params["axes"] for axis in layout.dims[d]}
        split = {axis for layout in _layouts(graph, ends, result) for dim in layout.dims for axis in dim}
        if summed & split and _follows_from_contractions(graph, v):
            found.add(v)
    return found


def _layouts(graph: Graph, ends: Mapping[int, Sequence[PartitionSpec]], value: int) -> list[Layout]:
    """The layouts at the ends of a value."""
    return [Layout.from_spec(spec, graph.avals[value].ndim) for spec in ends.get(value, ())]


def _follows_from_contractions(graph: Graph, value: int) -> bool:
    """Whether contractions make all values of its size that a value is computed from element by element."""
    size, seen, open_ = graph.avals[value].size, {value}, [value]
    while open_:
        made = graph.producers.get(open_.pop())
        if made is None or graph.eqns[made[0]].traits.link:
            return False
        if not graph.eqns[made[0]].traits.contraction:
            more = {u for u in graph.operands[made[0]] if graph.avals[u].size >= size} - seen
            seen |= more
            open_ += more
    return True


def _ends(
    graph: Graph, pins: Constraints, inputs: Mapping[int, PartitionSpec], of: Mapping[ConstraintSite, int]
) -> dict[int, list[PartitionSpec]]:
    """Value → the layouts that it has as an input, and is constrained to."""
    ends = {v: [inputs[i]] for i, v in enumerate(graph.inputs)}
    for name, group in (("made", pins.made), ("taken", pins.taken), ("input", pins.inputs), ("output", pins.outputs)):
        for key, specs in group.items():
            if (name, key) in of:
                ends.setdefault(of[name, key], []).extend(specs)
    return ends


def wrong_without(graph: Graph, pins: Constraints, inputs: Mapping[int, PartitionSpec]) -> set[int]:
    """Values that XLA's partitioner may compute wrongly without their constraints, whatever else it emits."""
    return _sliced(graph, _ends(graph, pins, inputs, values_at(graph)))


def _sliced(graph: Graph, ends: Mapping[int, Sequence[PartitionSpec]]) -> set[int]:
    """Values that are split along a dimension from which a part is cut out.

    If a padded part is as long per device as the value, XLA's partitioner takes it for the value's own shard: when
    both are gathered, it confuses them (`x[i] + x[0]`), unless the value is gathered before it is cut.
    """
    found: set[int] = set()
    for e, eqn in enumerate(graph.eqns):
        if not eqn.traits.cuts:
            continue
        v, shape = graph.operands[e][0], eqn.operands[0].shape
        cut = [any(out.shape[d] != size for out in eqn.results) for d, size in enumerate(shape)]
        if any(axes and cut[d] for spec in ends.get(v, ()) for d, axes in enumerate(spec)):
            found.add(v)
    return found


class _Moves:
    """The moves of values to where they are taken, and whether XLA makes them as planned without constraints.

    It does where a value is only gathered, or only cut further, and its reader leaves no choice: a reader that
    computes element by element, or hands its operand on; and a contraction whose other operand and result are split
    alike over the axes that the value gives up, along a dimension that is not summed over. XLA's partitioner groups
    the devices by such axes (openxla/xla dot_handler.cc), and each group gathers.
    """

    def __init__(self, graph: Graph, annotations: Annotations, mesh: MeshAxes) -> None:
        self._graph, self._pins, self._sizes = graph, annotations.pins, mesh.shape
        self._inputs = {v: annotations.inputs[i] for i, v in enumerate(graph.inputs)}
        self._input_pins = {v: annotations.pins.inputs.get(i, ()) for i, v in enumerate(graph.inputs)}

    def are_clear(self, v: int) -> bool:
        """Whether every move of a value is."""
        before = self._made(v)
        if before is None:
            return False
        at_ends = [specs[-1] for o, specs in self._pins.outputs.items() if self._graph.outputs[o] == v]
        ends = (Layout.from_spec(spec, self._graph.avals[v].ndim) for spec in at_ends)
        return all(_is_finer(before, end) or _is_finer(end, before) for end in ends) and all(
            self._is_clear(before, e, i) for e, i in self._graph.consumers.get(v, ())
        )

    def _is_clear(self, before: Layout, e: int, i: int) -> bool:
        after, eqn = self._taken(e, i), self._graph.eqns[e]
        if after is None or not (_is_finer(before, after) or _is_finer(after, before)):
            return False
        if before == after:
            return True
        if eqn.traits.link or eqn.traits.addition or eqn.traits.cast:
            return True
        return eqn.primitive == DOT_GENERAL and _is_finer(before, after) and self._grouped(before, after, e, i)

    def _grouped(self, before: Layout, after: Layout, e: int, i: int) -> bool:
        """Whether a dot's other operand and its result are split alike over what operand i gives up."""
        other, result = self._taken(e, 1 - i), self._made(self._graph.results[e][0])
        if other is None or result is None:  # a sum that its reader finishes says no layout, and XLA chooses one
            return False
        summed, batched = self._graph.eqns[e].params["dimension_numbers"]
        free = [axes for d, axes in enumerate(other.dims) if d not in (*summed[1 - i], *batched[1 - i])]
        given_up = {axis for dim in before.dims for axis in dim} - {axis for dim in after.dims for axis in dim}
        return given_up <= {axis for axes in free for axis in axes if axes in result.dims}

    def is_gathered_apart(self, v: int) -> bool:
        """Whether a dot gathers a value in groups of devices, and other contractions take it gathered, too."""
        before, gathering = self._made(v), list[bool]()
        for e, i in self._graph.consumers.get(v, ()):
            after = self._taken(e, i)
            if self._graph.eqns[e].traits.contraction and before is not None and after is not None and after != before:
                gathering.append(self._in_groups(e, i))
        return len(gathering) > 1 and any(gathering)

    def _in_groups(self, e: int, i: int) -> bool:
        """Whether a dot gathers its operand i inside of groups of devices (`shared_gathers.in_groups`)."""
        if self._graph.eqns[e].primitive != DOT_GENERAL:
            return False
        layouts = self._taken(e, 0), self._taken(e, 1)
        summed, batched = self._graph.eqns[e].params["dimension_numbers"]
        groups, nbytes = [1, 1], [0, 0]
        for k, (layout, v) in enumerate(zip(layouts, self._graph.operands[e], strict=True)):
            lies = self._made(v)
            if layout is None or lies is None:
                return False
            free = [axes for d, axes in enumerate(layout.dims) if d not in (*summed[k], *batched[k])]
            groups[k] = self._parts(free)
            nbytes[k] = self._graph.avals[v].nbytes // self._parts(lies.dims)
        return shared_gathers.in_groups(groups, nbytes) == i

    def _parts(self, dims: Iterable[Sequence[str]]) -> int:
        """Into how many parts axes split."""
        return prod(self._sizes[axis] for axes in dims for axis in axes)

    def _made(self, v: int) -> Layout | None:
        """The layout in which a value is made, or given."""
        specs = (self._inputs[v],) if v in self._inputs else self._specs_made(v)
        return Layout.from_spec(specs[0], self._graph.avals[v].ndim) if specs else None

    def _taken(self, e: int, i: int) -> Layout | None:
        """The layout in which an equation takes an operand."""
        v = self._graph.operands[e][i]
        kept = self._input_pins[v] or (self._inputs[v],) if v in self._inputs else self._specs_made(v)
        specs = self._pins.taken.get(self._graph.takes[e][i]) or kept
        return Layout.from_spec(specs[-1], self._graph.avals[v].ndim) if specs else None

    def _specs_made(self, v: int) -> Specs:
        """The constraints of a value where an equation makes it."""
        made = self._graph.producers.get(v)
        return () if made is None else self._pins.made.get(self._graph.makes[made[0]][made[1]], ())


def _is_finer(one: Layout, other: Layout) -> bool:
    """Whether a layout splits every dimension as another one does, or further."""
    return all(dim[: len(axes)] == axes for dim, axes in zip(one.dims, other.dims, strict=True))


def gathered_once(graph: Graph, apart: Set[int]) -> frozenset[int]:
    """Values that a compiler which gathers once more for a far use must gather once; `apart` are not to be."""
    return shared_gathers.doubtful(graph) | (_reshaped(graph) - apart)


def _reshaped(graph: Graph) -> frozenset[int]:
    """Operands of contractions whose results are only reshaped.

    XLA:TPU reshapes the operand in place of the result before it partitions, and so gathers it once more
    (of grouped-query attention the output projection, where its operand's gradient is split into groups).
    """
    users = graph.consumers
    return frozenset(
        v
        for e, eqn in enumerate(graph.eqns)
        if eqn.traits.contraction
        and [graph.eqns[u].primitive for u, _ in users.get(graph.results[e][0], ())] == [RESHAPE]
        for v in graph.operands[e]
    )


def _activations(graph: Graph, contractions: Iterable[int]) -> set[int]:
    """Results of contractions, and all values computed from them."""
    found = {v for e in contractions for v in graph.results[e]}
    for operands, results in zip(graph.operands, graph.results, strict=True):
        if not found.isdisjoint(operands):
            found.update(results)
    return found
