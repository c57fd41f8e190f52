"""Minimal: which of a plan's constraints the partitioner would not reach by itself.

Constraints block fusions and clutter a program, but a missing one can cost more than
many (a residual pinned alone made XLA gather weights). So none is dropped without a
probe: Shardy's own propagation is run in-process on the program with fewer
constraints, and every value must come out in its planned layout.

Constraints on the way of a resharding always stay. Of the others, none is emitted at
first; then, wave by wave, those values that come out wrong although everything they
are computed from came out right get theirs, with all values in equal places.
"""

import logging
from collections.abc import Mapping, Set
from dataclasses import replace

from autoshard import _jax
from autoshard.completion import Annotations, annotated, as_operand, layout_in, ops_of
from autoshard.graph import LINKS, Graph, Spot
from autoshard.layout import Layout
from autoshard.mesh import MeshAxes
from autoshard.pins import Pins
from autoshard.problem.decisions import Decisions
from autoshard.problem.folding import Folding
from autoshard.shardy import Lowering, ValueLayout
from autoshard.trace import Traced

log = logging.getLogger("autoshard")

WAVES = 24  # then all that are still wrong are pinned at once
FEW = 1 / 50  # of all: so few are pinned at once, too, since sparing some is not worth a probe


def needed(
    program: Traced,
    decisions: Decisions,
    folding: Folding,
    mesh: MeshAxes,
    annotations: Annotations,
    platform: str,
) -> Pins:
    """The constraints of `annotations.pins` without those that propagation reaches anyway.

    Args:
      program: what is planned, and annotated.
      decisions: its decisions.
      folding: which of them stand in equal places.
      mesh: the mesh of the annotations.
      annotations: every input's and output's spec, and all constraints.
      platform: to lower for.

    Raises:
      ShardyError: propagation fails.
    """
    graph = decisions.graph
    value_at = _value_at(graph)
    pins = annotations.pins
    open_ = {spot: specs for spot, specs in pins.made.items() if len(specs) == 1 and spot in value_at}
    wanted = {(v := value_at[spot]): Layout.from_spec(specs[0], graph.avals[v].ndim) for spot, specs in open_.items()}
    spot_of = {value_at[spot]: spot for spot in open_}
    fixed = replace(pins, made={spot: specs for spot, specs in pins.made.items() if spot not in open_})
    lowering = Lowering(_jax.lower(annotated(program, mesh, replace(annotations, pins=fixed)), platform))
    inputs = {v: Layout.from_spec(annotations.inputs[i], graph.avals[v].ndim) for i, v in enumerate(graph.inputs)}
    held: set[int] = set()
    ops: dict[int, ValueLayout] = {}
    wave = 0
    for wave in range(WAVES + 1):
        found = lowering.propagate(_held(ops, {v: wanted[v] for v in held}))
        ops = ops_of(graph, found.values)
        layouts = _layouts(graph, ops, inputs)
        wrong = {v for v, layout in wanted.items() if v not in held and layouts.get(v) != layout}
        if not wrong:
            break
        few = len(wrong) <= FEW * len(wanted)
        first = wrong if few or wave == WAVES else _frontier(graph, wrong, wanted.keys() - wrong)
        classes = {int(folding.class_of[decisions.made[v].node]) for v in first}
        held |= {v for v in wrong if int(folding.class_of[decisions.made[v].node]) in classes} | first
    log.debug("%d of %d constraints are needed, after %d probes", len(held), len(wanted), wave + 1)
    made = {**fixed.made, **{spot_of[v]: pins.made[spot_of[v]] for v in held}}
    return replace(pins, made=dict(sorted(made.items())))


def _value_at(graph: Graph) -> dict[Spot, int]:
    """Where apply meets a result → the value."""
    return {
        spot: v
        for spots, values in zip(graph.makes, graph.results, strict=True)
        for spot, v in zip(spots, values, strict=True)
    }


def _held(ops: Mapping[int, ValueLayout], layouts: Mapping[int, Layout]) -> dict[int, Layout]:
    """Pins of the values that have an op of their own, by its number; whole where the op has more dimensions."""
    return {
        op.number: Layout(layout.dims + ((),) * (len(op.shape) - layout.ndim))
        for v, layout in layouts.items()
        if (op := ops.get(v)) is not None and op.number is not None
    }


def _layouts(graph: Graph, ops: Mapping[int, ValueLayout], inputs: Mapping[int, Layout]) -> dict[int, Layout]:
    """Value → its layout; that of the operand where an equation lowers to nothing."""
    layouts = dict(inputs)
    for e, results in enumerate(graph.results):
        for v in results:
            layout: Layout | None = None
            if v in ops:
                layout = layout_in(ops[v], graph.avals[v])
            elif graph.eqns[e].primitive not in LINKS:
                layout = as_operand(graph, e, v, layouts)
            if layout is not None:
                layouts[v] = layout
    return layouts


def _frontier(graph: Graph, wrong: Set[int], right: Set[int]) -> set[int]:
    """The wrong values that depend on no other wrong value, but through values that came out right."""
    tainted: set[int] = set()
    first: set[int] = set()
    for operands, results in zip(graph.operands, graph.results, strict=True):
        behind = any(v in tainted for v in operands)
        for v in results:
            if v in wrong and not behind:
                first.add(v)
            if v in wrong or (behind and v not in right):
                tainted.add(v)
    return first
