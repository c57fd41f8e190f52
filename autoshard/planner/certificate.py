"""Certificates: what is proven of a plan, and of which space of plans, in words."""

from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata

from autoshard.planner.budget import WORTH
from autoshard.planner.planning_result import PlanningResult
from autoshard.planner.recomputation_space import RecomputationSpace
from autoshard.planner.record import Certificate
from autoshard.problem.decisions import Decisions
from autoshard.problem.formulation import UNIT_S, Formulation
from autoshard.problem.unpriced import unpriced
from autoshard.solver import Solution
from cost_models import Hardware


def of_layouts(formulation: Formulation, solution: Solution, hardware: Hardware) -> Certificate:
    """What the solver proved of a plan: a bound on all layouts of its decisions."""
    nodes, classes = len(formulation.decisions.nodes), formulation.folding.classes
    return Certificate(
        status=str(solution.status),
        objective_s=solution.objective * UNIT_S,
        bound_s=solution.bound * UNIT_S,
        gap=solution.gap,
        solver=f"{solution.solver}, ortools {metadata.version('ortools')}",
        space=(
            f"{_every(formulation.decisions)} of {nodes} decisions ({classes} after decisions in equal places "
            "share one), element-wise chains in one layout, one shared copy per value; priced by autoshard's model of "
            f"{hardware.name}{_without(unpriced(formulation.decisions))}"
        ),
    )


def _every(decisions: Decisions) -> str:
    """Which layouts of each decision are searched."""
    mesh, found = decisions.mesh, "every evenly dividing layout"
    if mesh.groups is not None:
        found = f"evenly dividing layouts that use the {mesh.ndim} axes in {mesh.groups} groups of neighbours at most"
    for axis in decisions.staged:
        found += f", in a pipeline's layers with one stage per shard of {axis},"
    return found


def _without(names: Sequence[str]) -> str:
    """The parts of a program that a proof does not cover."""
    if not names:
        return ""
    return f", without {'; '.join(names[:3])}{f'; and {len(names) - 3} more' if len(names) > 3 else ''}"


def noted(found: PlanningResult, choices: RecomputationSpace) -> PlanningResult:
    """A plan with what it keeps and repeats, in words; nothing is proven of other choices."""
    record, note = found.record, choices.summary(found.record, found.assignment)
    smaller = replace(record.certificate, space=f"{record.certificate.space}; what is kept is no part of the proof")
    return replace(found, record=replace(record, certificate=smaller, notes=(*record.notes, note)))


def proven(found: PlanningResult, bound: int | None, choices: RecomputationSpace) -> PlanningResult:
    """A plan with the certificate of the larger space: no choice of what is kept is cheaper than its bound.

    Without a bound of that space, none is claimed: 0.
    """
    certificate = found.record.certificate
    bound_s = min(certificate.bound_s, (bound or 0) * UNIT_S)
    larger = replace(
        certificate,
        bound_s=bound_s,
        gap=(certificate.objective_s - bound_s) / certificate.objective_s if certificate.objective_s else 0.0,
        space=f"{certificate.space}; {choices.said}",
    )
    note = choices.summary(found.record, found.assignment)
    record = replace(found.record, certificate=larger, notes=(*found.record.notes, note))
    return replace(found, record=record)


def not_worth(written: PlanningResult, bound: int | None, choices: RecomputationSpace) -> PlanningResult:
    """The plan of a program as it is written, whose certificate says how much repeating something could save."""
    if bound is None:
        return written
    certificate, objective = written.record.certificate, written.solution.objective
    saved = max(0.0, (objective - bound) / objective) if objective else 0.0
    space = f"{certificate.space}; {choices.said}, of which none saves more than {saved:.1%}"
    return replace(written, record=replace(written.record, certificate=replace(certificate, space=space)))


def kept(written: PlanningResult) -> PlanningResult:
    """The plan of a program as it is written, whose certificate says why nothing is repeated."""
    if not written.formulation.decisions.graph.backward:
        return written
    certificate = written.record.certificate
    space = f"{certificate.space}; nothing is repeated, as keeping costs the plan less than {WORTH:.1%} of its step"
    return replace(written, record=replace(written.record, certificate=replace(certificate, space=space)))
