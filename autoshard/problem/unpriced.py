"""Unpriced: the equations whose time no rule or cost model knows, by name and source line."""

from collections.abc import Iterator
from itertools import chain

from autoshard.ir import manual_calls
from autoshard.ir.graph import WHILE_TRIPS
from autoshard.ir.op_traits import PALLAS
from autoshard.problem.decisions import Decisions, Equation
from autoshard.rules.linalg import KERNEL_RANK
from autoshard.rules.rule import registry_name


def unpriced(decisions: Decisions) -> tuple[str, ...]:
    """Equations priced only by the bytes that they read and write, and loops with an assumed trip count."""
    return tuple(dict.fromkeys(chain.from_iterable(part(decisions) for part in (_of_equations, _of_loops, _of_bodies))))


def _of_equations(decisions: Decisions) -> Iterator[str]:
    for eqn in decisions.graph.eqns:
        if eqn.traits.link:
            continue
        kernel = eqn.primitive == PALLAS and manual_calls.estimate(eqn) is None
        if kernel or eqn.primitive in KERNEL_RANK:
            yield f"the arithmetic of {registry_name(eqn)} at {eqn.where}"
        elif eqn.traits.foreign:
            yield f"{registry_name(eqn)} at {eqn.where}"


def _of_loops(decisions: Decisions) -> Iterator[str]:
    for where in decisions.graph.guessed:
        yield f"the trips of the while loop at {where}, taken to be {WHILE_TRIPS}"


def _of_bodies(decisions: Decisions) -> Iterator[str]:
    for node in decisions.nodes:
        if isinstance(node, Equation) and node.body is not None:
            yield from node.body.unpriced
