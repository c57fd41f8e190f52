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
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autoshard import shardy
from autoshard.completion import SCOPE, Annotations, annotated
from autoshard.graph import Graph, Path, Spot
from autoshard.layout import Layout
from autoshard.mesh import MeshAxes
from autoshard.pins import Pins
from autoshard.problem.decisions import Decisions
from autoshard.problem.folding import Folding
from autoshard.shardy import ValueLayout
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
    lowered = annotated(program, mesh, replace(annotations, pins=fixed)).lower(lowering_platforms=(platform,))
    held: set[int] = set()
    numbers: dict[int, int] = {}
    wave = 0
    for wave in range(WAVES + 1):
        found = shardy.propagate(lowered, {numbers[v]: wanted[v] for v in held if v in numbers})
        values = _values(graph, found.values)
        numbers |= {v: op.number for v, op in values.items() if op.number is not None}
        wrong = {v for v, layout in wanted.items() if v not in held and _axes(values, v) != layout}
        if not wrong:
            break
        few = len(wrong) <= FEW * len(wanted)
        first = wrong if few or wave == WAVES else _frontier(graph, wrong)
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


def _axes(values: Mapping[int, ValueLayout], v: int) -> Layout | None:
    return values[v].layout if v in values else None


def _frontier(graph: Graph, wrong: set[int]) -> set[int]:
    """The wrong values that depend on no other wrong value."""
    tainted: set[int] = set()
    first: set[int] = set()
    for operands, results in zip(graph.operands, graph.results, strict=True):
        behind = any(v in tainted for v in operands)
        for v in results:
            if v in wrong and not behind:
                first.add(v)
            if behind or v in wrong:
                tainted.add(v)
    return first


def _values(graph: Graph, ops: Sequence[ValueLayout]) -> dict[int, ValueLayout]:
    """Value → the op result that it lowers to: the last of its shape in its equation's scope."""
    by_path: dict[Path, list[ValueLayout]] = {}
    for op in ops:
        scopes = re.findall(SCOPE, op.name)
        if scopes:
            by_path.setdefault(tuple(int(step) for step in scopes[-1].split(".")), []).append(op)
    found: dict[int, ValueLayout] = {}
    for (path, _), v in _value_at(graph).items():
        fitting = [op for op in by_path.get(path, ()) if op.shape == graph.avals[v].shape]
        if fitting:
            found[v] = fitting[-1]
    return found
