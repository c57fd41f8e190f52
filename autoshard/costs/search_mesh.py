"""Search mesh: groups neighbouring axes of a mesh until all layouts over the groups can be priced.

On a mesh of many axes a value has too many layouts, and paths between all of them take about the
cube of their number. Most of them only differ in which of two equal axes splits a dimension. If
there are too many, layouts are left out in which neighbouring axes have different purposes too
often. The remaining ones are all layouts of every mesh that joins neighbours into one axis, down to
a number of axes. Work is counted, not timed: a program has the same layouts on every machine.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from autoshard.costs.strategies import (
    MOST_LAYOUTS,
    MOST_STRATEGIES,
    finished_count,
    groups_of,
    layout_count,
    strategy_count,
)
from autoshard.ir.graph import Graph
from autoshard.ir.layout import Layout
from autoshard.ir.mesh import MeshAxes
from autoshard.rules import ShardingRule

# What may be counted of one program: about half a minute of one core (llama3-8b on four axes of two, in three groups).
MOST_CELLS = 3_500_000_000
_OF_EDGES = 20  # a cell of an edge's prices is read and written by the solver, too


def search_mesh(graph: Graph, rules: Sequence[ShardingRule], mesh: MeshAxes, asked: Iterable[Layout]) -> MeshAxes:
    """The mesh, with as many groups as can be searched, and as layouts that are asked for need.

    Args:
      graph: the program.
      rules: of its equations.
      mesh: without axes of size 1.
      asked: layouts that the plan is to have.
    """
    least = max((_groups(layout, mesh) for layout in asked), default=1)
    for groups in (None, *range(mesh.ndim - 1, 0, -1)):
        found = replace(mesh, groups=groups)
        if (groups or mesh.ndim) <= least or _searchable(graph, rules, found):
            return found
    return mesh  # of one axis, or none


def _groups(layout: Layout, mesh: MeshAxes) -> int:
    purpose = {axis: d for d, axes in enumerate(layout.dims) for axis in axes}
    return groups_of([purpose.get(name, -1) for name in mesh.names])


def _searchable(graph: Graph, rules: Sequence[ShardingRule], mesh: MeshAxes) -> bool:
    """Whether neither layouts nor strategies nor the cells of their prices are too many."""
    counts: dict[tuple[int, ...], int] = {}
    tables: set[tuple[tuple[int, ...], int]] = set()
    edges: set[tuple[ShardingRule, tuple[int, ...]]] = set()
    work = 0
    for eqn, rule in zip(graph.eqns, rules, strict=True):
        for aval in (*eqn.operands, *eqn.results):
            if aval.shape not in counts:
                counts[aval.shape] = layout_count(aval.shape, mesh)
            if (aval.shape, aval.itemsize) not in tables:
                tables.add((aval.shape, aval.itemsize))
                work += counts[aval.shape] * finished_count(aval.shape, mesh) ** 2
        own = tuple(counts[aval.shape] for aval in eqn.operands)
        if (rule, own) in edges:
            continue
        edges.add((rule, own))
        strategies = strategy_count(rule, mesh)
        if strategies > MOST_STRATEGIES or max(counts.values(), default=0) > MOST_LAYOUTS:
            return False
        work += _OF_EDGES * strategies * sum(own)
        if work > MOST_CELLS:
            return False
    return True
