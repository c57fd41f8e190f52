"""Decide: a graph on a mesh and a machine → its decisions, with every choice priced."""

from functools import partial

from autoshard.backends.model import CompilerModel
from autoshard.costs.prices import Machine
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import MeshAxes
from autoshard.problem import bodies
from autoshard.problem.decision_builders.chains import add_chains
from autoshard.problem.decision_builders.connections import connect
from autoshard.problem.decision_builders.draft import Draft
from autoshard.problem.decision_builders.equations import add_equations
from autoshard.problem.decision_builders.facts import GraphFacts, Requirements, facts_of
from autoshard.problem.decision_builders.host_links import add_host_links
from autoshard.problem.decision_builders.inputs import add_inputs
from autoshard.problem.decision_builders.outputs import add_outputs
from autoshard.problem.decisions import Decisions


def decide(
    graph: Graph,
    mesh: MeshAxes,
    machine: Machine,
    compiler: CompilerModel,
    required: Requirements,
    *,
    unknown: str,
) -> Decisions:
    """Builds the decisions of a graph.

    Args:
      graph: the program.
      mesh: the logical mesh.
      machine: the cost model with the mesh placed on it.
      compiler: the compiler of the program.
      required: layouts and memory that are fixed beforehand.
      unknown: "error", or "replicate" to keep equations without a rule whole.
    """
    return _of_facts(facts_of(graph, mesh, machine, compiler, required, unknown=unknown))


def _of_facts(facts: GraphFacts) -> Decisions:
    draft = Draft(facts)
    inputs = add_inputs(draft)
    add_chains(draft)
    add_equations(draft, _bodies(facts))
    add_host_links(draft)
    outputs = add_outputs(draft, inputs)
    connect(draft, outputs)
    return draft.finish(inputs, outputs)


def _bodies(facts: GraphFacts) -> bodies.Bodies:
    """The bodies of a graph's `shard_map`s, each a program on one device."""
    mesh = facts.manual or facts.mesh
    return bodies.Bodies(mesh, facts.machine, facts.compiler, partial(_on_one_device, facts, mesh))


def _on_one_device(around: GraphFacts, mesh: MeshAxes, graph: Graph) -> Decisions:
    """The decisions of a `shard_map`'s body.

    Args:
      around: the facts of the program that it is in.
      mesh: of the outermost `shard_map`.
      graph: the body.
    """
    return _of_facts(
        facts_of(graph, bodies.ALONE, around.machine, around.compiler, Requirements(), unknown="replicate", manual=mesh)
    )
