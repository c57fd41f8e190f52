"""Draft: the decisions of a graph as far as they are built."""

from collections.abc import Iterable

from autoshard import deadline
from autoshard.costs.strategies import Codes
from autoshard.problem.decision_builders.facts import GraphFacts
from autoshard.problem.decisions import Decision, Decisions, Edge, Equation, HostLink, consumer_port, layout_codes
from autoshard.problem.memory_usage import MemoryUsageBuilder
from autoshard.problem.ports import Port


class Draft:
    """Collects decisions, where values are made and kept, edges and memory; the builders add to it in turn.

    Builders of decisions come first (inputs, chains, equations, outputs), then `connections`, which adds the edges
    and, where a value has several consumers, copies.
    """

    def __init__(self, facts: GraphFacts) -> None:
        self.facts = facts
        self.nodes: list[Decision] = []
        self.edges: list[Edge] = []
        self.made: dict[int, Port] = {}  # value → where it is made
        self.kept: dict[int, Port] = {}  # value → its copy
        self.node_of = [-1] * len(facts.graph.eqns)
        self.cast_apart: set[int] = set()  # values whose copies are what products cast
        self.links: list[HostLink] = []
        self.summed: set[int] = set()  # results of a `shard_map` that end in a sum of its author's
        self.usages = MemoryUsageBuilder(
            facts.graph,
            facts.mesh,
            facts.lives,
            facts.traits,
            facts.windows,
            facts.compiler,
            before=facts.gathered_before(),
            defers=facts.compiler.defers_gradients_behind_loops and not facts.machine.gathers_ahead,
        )

    def add(self, decision: Decision) -> int:
        """Adds a decision, which from now on decides its equations.

        Returns:
          Its index.
        """
        deadline.check("listing and pricing its splits")
        self.nodes.append(decision)
        node = len(self.nodes) - 1
        for e in decision.equations:
            self.node_of[e] = node
        return node

    def make(self, value: int, node: int, codes: Codes) -> None:
        """Says under which code each choice of a decision makes a value."""
        self.made[value] = Port(node, codes, self.nodes[node].off)

    def taker(self, e: int, i: int) -> Port | None:
        """How equation e takes its operand i; None if the equation decides nothing."""
        return consumer_port(self.nodes, self.facts.rules, self.node_of, self.facts.mesh, e, i)

    def end(self, node: int) -> Port:
        """Where a value enters or leaves the program."""
        return Port(node, layout_codes(self.nodes[node]))

    def finish(self, inputs: Iterable[int], outputs: Iterable[int]) -> Decisions:
        """The decisions.

        Args:
          inputs: of each program input.
          outputs: of each program output.
        """
        facts = self.facts
        return Decisions(
            graph=facts.graph,
            mesh=facts.mesh,
            rules=facts.rules,
            nodes=tuple(self.nodes),
            edges=tuple(self.edges),
            usages=self.usages.all(),
            node_of=tuple(self.node_of),
            made=self.made,
            kept=self.kept,
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            windows=facts.windows,
            strides=facts.strides,
            lives=facts.lives,
            apart=facts.apart,
            cast_apart=frozenset(self.cast_apart),
            links=tuple(self.links),
            counts_gaps=facts.compiler.counts_gaps,
            staged=tuple(sorted({facts.mesh.names[axis] for _, axis in facts.stages.values()})),
            pruned=sum(node.strategies.pruned for node in self.nodes if isinstance(node, Equation)),
        )
