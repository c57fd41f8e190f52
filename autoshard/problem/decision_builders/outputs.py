"""Outputs: the layout of every program output that replaces no input."""

from collections.abc import Sequence

from autoshard.costs.strategies import layouts
from autoshard.problem.decision_builders.draft import Draft
from autoshard.problem.decisions import Output, priced_by_edges


def add_outputs(draft: Draft, inputs: Sequence[int]) -> list[int]:
    """Adds a decision per program output that shares none with an input.

    Args:
      draft: the decisions so far.
      inputs: program input → its decision.

    Returns:
      Program output → its decision.
    """
    facts, required = draft.facts, draft.facts.required
    found: list[int] = []
    for position, value in enumerate(facts.graph.outputs):
        if position in required.tied:
            found.append(inputs[required.tied[position]])
            continue
        pinned = required.outputs.get(position)
        codes = layouts(facts.graph.avals[value].shape, facts.mesh, unreduced=False) if pinned is None else pinned
        found.append(draft.add(priced_by_edges(Output, f"output {position}", "", codes)))
    return found
