"""Certificates: what is proven of a plan, and of which space of plans, in words."""

from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata

from autoshard.errors import TimeLimitError
from autoshard.planner.budget import WORTH
from autoshard.planner.record import Certificate, PlanRecord
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


def unfinished(record: PlanRecord, error: TimeLimitError, unknown: str) -> PlanRecord:
    """A plan that says what was not tried any more when its time ended: "… before it was known what is better kept"."""
    return replace(record, notes=(*record.notes, f"{error.why} before it was known {unknown}"))


def noted(record: PlanRecord, note: str) -> PlanRecord:
    """A plan with what it keeps and repeats, in words; nothing is proven of other choices."""
    certificate = record.certificate
    smaller = replace(certificate, space=f"{certificate.space}; what is kept is no part of the proof")
    return replace(record, certificate=smaller, notes=(*record.notes, note))


def proven(record: PlanRecord, bound: int | None, said: str, note: str) -> PlanRecord:
    """A plan with the certificate of the larger space: no choice of what is kept is cheaper than its bound.

    Without a bound of that space, none is claimed: 0.

    Args:
      record: the plan.
      bound: in the solver's units.
      said: the larger space, in words.
      note: what the plan keeps and repeats, in words.
    """
    certificate = record.certificate
    bound_s = min(certificate.bound_s, (bound or 0) * UNIT_S)
    larger = replace(
        certificate,
        bound_s=bound_s,
        gap=(certificate.objective_s - bound_s) / certificate.objective_s if certificate.objective_s else 0.0,
        space=f"{certificate.space}; {said}",
    )
    return replace(record, certificate=larger, notes=(*record.notes, note))


def not_worth(record: PlanRecord, bound: int | None, said: str) -> PlanRecord:
    """The plan of a program as it is written, whose certificate says how much repeating something could save.

    Args:
      record: the plan.
      bound: of those that repeat something, in the solver's units.
      said: their space, in words.
    """
    if bound is None:
        return record
    certificate = record.certificate
    objective_s = certificate.objective_s
    saved = max(0.0, (objective_s - bound * UNIT_S) / objective_s) if objective_s else 0.0
    space = f"{certificate.space}; {said}, of which none saves more than {saved:.1%}"
    return replace(record, certificate=replace(certificate, space=space))


def kept(record: PlanRecord) -> PlanRecord:
    """The plan of a program as it is written, whose certificate says why nothing is repeated."""
    certificate = record.certificate
    space = f"{certificate.space}; nothing is repeated, as keeping costs the plan less than {WORTH:.1%} of its step"
    return replace(record, certificate=replace(certificate, space=space))
