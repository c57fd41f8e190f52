"""Like layers: which decisions are in equal places of a program's equal layers.

Decisions with equal surroundings share a variable of the problem (`problem/symmetry.py`). The layers of an unrolled
program are equal, but the first and the last have other surroundings, and so have all others in the end: they are
decided one by one, and may come out differently for no reason that matters (`solver/second_objective.py: make_alike`).
"""

from collections.abc import Iterator

import numpy as np

from autoshard.ir.layers import Layers, Steps
from autoshard.ir.trace import Traced
from autoshard.problem.decisions import Decision, Decisions, Equation, digest, layout_codes
from autoshard.problem.network import Int
from autoshard.problem.symmetry import Folding

Place = tuple[int, tuple[object, ...]]  # a layer, and where in it


def equal_places(program: Traced, decisions: Decisions, folding: Folding) -> list[Int]:
    """For every stack of equal layers its problem nodes by layer and place; -1 where a layer has none there.

    Nodes of one place choose among the same layouts.
    """
    found = [_nodes_at(layers, decisions, folding) for layers in program.layers]
    return [nodes for nodes in found if nodes.size]


def _nodes_at(layers: Layers, decisions: Decisions, folding: Folding) -> Int:
    columns: dict[tuple[object, ...], int] = {}
    entries: list[tuple[int, int, int]] = []
    for n, (layer, place) in _places(layers, decisions):
        key = (*place, _choices(decisions.nodes[n]))
        entries.append((layer, columns.setdefault(key, len(columns)), int(folding.class_of[n])))
    nodes = np.full((layers.count, len(columns)), -1, dtype=np.int64)
    for layer, column, node in entries:
        nodes[layer, column] = node
    return nodes


def _places(layers: Layers, decisions: Decisions) -> Iterator[tuple[int, Place]]:
    """Every decision of a layer, with its place there."""
    graph, steps = decisions.graph, Steps(layers)
    for e, path in enumerate(graph.paths):
        at = steps.layer_of(path)
        if at is None:
            continue
        layer, place = at
        node = decisions.node_of[e]
        if node >= 0 and decisions.nodes[node].equations[:1] == (e,):
            yield node, (layer, ("equation", *place))
        for i, v in enumerate(graph.results[e]):
            if v in decisions.kept:
                yield decisions.kept[v].node, (layer, ("copy", *place, i))
    for i, (*where, layer) in layers.inputs.items():
        yield decisions.inputs[i], (layer, ("input", *where))
        if (v := graph.inputs[i]) in decisions.kept:
            yield decisions.kept[v].node, (layer, ("copy of input", *where))
    for o, (*where, layer) in layers.outputs.items():
        yield decisions.outputs[o], (layer, ("output", *where))


def _choices(decision: Decision) -> bytes:
    """A hash of what a decision chooses among."""
    if isinstance(decision, Equation):
        strategies = decision.strategies
        return digest("equation", strategies.factor, *strategies.operands, *strategies.results, decision.off)
    return digest(decision.kind, layout_codes(decision), decision.off)
