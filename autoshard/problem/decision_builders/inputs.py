"""Inputs: the layout of every program input."""

import numpy as np

from autoshard.costs.execution_order import feeding
from autoshard.costs.strategies import Codes, layouts, shards
from autoshard.problem.decision_builders.draft import Draft
from autoshard.problem.decisions import Input, priced_by_edges
from autoshard.problem.memory_usage import local_bytes


def add_inputs(draft: Draft) -> list[int]:
    """Adds a decision per program input, with the memory that it takes.

    Returns:
      Of each input, its decision.
    """
    facts, required = draft.facts, draft.facts.required
    graph = facts.graph
    found: list[int] = []
    end = len(graph.eqns) + 1
    tied = set(required.tied.values())
    pins = _pinned(draft)
    feeds = feeding(graph)
    for position, value in enumerate(graph.inputs):
        aval = graph.avals[value]
        codes = pins[position] if position in pins else layouts(aval.shape, facts.mesh, unreduced=False)
        # What a new value replaces is the model's if a contraction depends on it, else its optimizer's.
        holds = "arguments" if position not in tied else "parameters" if feeds[value] else "optimizer"
        node = draft.add(priced_by_edges(Input, f"input {position}", "", codes, holds=holds))
        draft.make(value, node, codes)
        lasts = position not in required.donated or position in tied
        nbytes = np.zeros(len(codes), np.int64) if facts.on_host(value) else local_bytes(aval, codes, facts.mesh)
        draft.usages.add(node, 0, end if lasts else int(facts.lives.end[value]), nbytes, holds)
        if (cast := facts.lives.cast_ahead.get(value)) is not None:
            draft.usages.add(node, cast.first, cast.last + 1, nbytes * cast.dtype.itemsize // aval.itemsize, "copies")
        if position in required.held_bytes:
            pieces = shards(codes, aval.ndim, facts.mesh)
            draft.usages.add(node, 0, end, aval.size * required.held_bytes[position] // pieces, "optimizer")
        found.append(node)
    return found


def _pinned(draft: Draft) -> dict[int, Codes]:
    """Input position → the codes that it may have, by itself or as the output that replaces it."""
    required = draft.facts.required
    pins = dict(required.inputs)
    for output, position in required.tied.items():
        if output in required.outputs:
            pins.setdefault(position, required.outputs[output])
    return pins
