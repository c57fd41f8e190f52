"""How the decisions of a graph are built: one module per class of `problem.decisions`, over facts computed once."""

from autoshard.problem.decision_builders.decide import decide as decide
from autoshard.problem.decision_builders.facts import Requirements as Requirements
