"""Planner: a setting → its best plan.

decisions → problem → solution → assignment → record.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any, Literal

import jax
from jax.sharding import NamedSharding

from autoshard import _jax
from autoshard.backends.shardy.propagation import Annotations
from autoshard.costs.strategies import layout_of
from autoshard.errors import refusing_depth
from autoshard.ir.constraints import Constraints
from autoshard.ir.gradient import emitted
from autoshard.ir.mesh import MeshAxes
from autoshard.ir.trace import Traced
from autoshard.planner import minimal_constraints
from autoshard.planner.build_record import describe
from autoshard.planner.infeasible import infeasible
from autoshard.planner.record import Certificate, PlanRecord
from autoshard.planner.requested_shardings import RequestedShardings
from autoshard.planner.search_space import SearchSpace
from autoshard.planner.stage_clock import StageClock
from autoshard.problem.assignment import Assignment
from autoshard.problem.formulation import UNIT_S, Formulation, formulate
from autoshard.problem.network import Int
from autoshard.problem.unpriced import unpriced
from autoshard.rules.control_flow import HOST_CALLS
from autoshard.rules.kernels import CUDNN_BACKWARD, CUDNN_FORWARD
from autoshard.solver import Solution, Status, solve
from autoshard.solver.evaluate import evaluate
from autoshard.solver.incumbent import Cutoff, no_cutoff
from autoshard.solver.second_objective import break_ties
from cost_models import Hardware, Machine

log = logging.getLogger("autoshard")

ConstraintPolicy = Literal["needed", "compiled", "all"]

# Of counted work, about: then ten times the gap that was asked for will do; nobody waits a minute for the last percent.
SETTLE_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of the search; a step of `cutoff_s()` or more is of no use, and is not improved for long."""

    memory_bytes: int
    time_limit_s: float
    rel_gap: float
    cutoff_s: Cutoff = no_cutoff


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanningResult:
    """A record with everything that led to it, for explanations and further questions."""

    record: PlanRecord
    traced: Traced
    setting: SearchSpace
    formulation: Formulation
    solution: Solution
    assignment: Assignment
    seconds: Mapping[str, float]  # wall-clock per stage


def _log_progress(best: int | None, bound: int | None, elapsed_s: float) -> None:
    """Logs the solver's best objective so far and what it has proven of it."""
    if best is not None and bound is not None:
        gap = (best - bound) / best if best else 0.0
        now = f"solve: {best * UNIT_S * 1e3:.4g} ms, within {gap:.1%} of the optimum, after {elapsed_s:.0f} s"
        log.debug("%s", now, extra={"now": now})


@refusing_depth
def solve_request(
    setting: SearchSpace,
    *,
    name: str,
    mesh: MeshAxes,
    hardware: Hardware,
    machine: Machine,
    wanted: RequestedShardings,
    budget: Budget,
    known: Sequence[Int] = (),
    notes: Sequence[str],
    constraints: ConstraintPolicy = "needed",
) -> PlanningResult:
    """Solves a setting and reads the solution as a plan.

    Args:
      setting: the program's decisions.
      name: the function's.
      mesh: its logical mesh.
      hardware: what is planned for.
      machine: the mesh placed on it.
      wanted: the user's specs and donations.
      budget: limits of memory and search.
      known: choices per decision with which the search begins.
      notes: for the plan, such as what was assumed for the user.
      constraints: "needed" asks Shardy which constraints its own propagation reaches
        anyway and leaves those out; so does "compiled", of which `compiler_minimal_constraints` leaves out more;
        "all" emits every one.

    Raises:
      InfeasibleError: no plan fits in memory, or the pins exclude each other.
    """
    clock = StageClock()
    formulation = formulate(setting.decisions, setting.resharder, memory_bytes=budget.memory_bytes)
    clock.lap("price")
    solution = solve(
        formulation.problem,
        time_limit_s=budget.time_limit_s,
        rel_gap=budget.rel_gap,
        settle_s=SETTLE_S,
        cutoff=lambda: budget.cutoff_s() / UNIT_S,
        known=[formulation.write(choice) for choice in known],
        on_progress=_log_progress,
    )
    if solution.status in (Status.INFEASIBLE, Status.UNKNOWN):
        raise infeasible(setting, wanted, formulation, solution, budget.memory_bytes, budget.time_limit_s, mesh)
    choice = break_ties(formulation.problem, solution.choice, formulation.moves())
    objective = evaluate(formulation.problem, choice).objective
    assert objective is not None  # `break_ties` forbids what the problem does
    solution = solution.instead(choice, objective)
    clock.lap("solve")
    assignment = Assignment(
        decisions=setting.decisions, resharder=setting.resharder, choice=formulation.read(solution.choice)
    )
    record = describe(
        setting,
        assignment,
        certificate=_certificate(formulation, solution, hardware),
        name=name,
        mesh=mesh,
        hardware=hardware,
        machine=machine,
        wanted=wanted,
        memory_bytes=budget.memory_bytes,
        notes=notes,
    )
    probed = setting.gradient is None and setting.decisions.mesh.ndim and not _needs_devices(setting)
    if constraints != "all" and probed:
        record = replace(record, pins=_needed(record, setting, formulation))
        clock.lap("constraints")
    seconds = {**setting.seconds, **clock.seconds}
    return PlanningResult(
        record=record,
        traced=setting.traced,
        setting=setting,
        formulation=formulation,
        solution=solution,
        assignment=assignment,
        seconds=seconds,
    )


NEED_DEVICES = frozenset({*HOST_CALLS, CUDNN_FORWARD, CUDNN_BACKWARD})


def _needs_devices(setting: SearchSpace) -> bool:
    """Whether JAX lowers a program for real devices alone (it calls the host, or cuDNN): no probing.

    What nobody takes the results of is no part of the graph, but is lowered: a callback that returns nothing.
    """
    return any(eqn.primitive.name in NEED_DEVICES for eqn in _jax.equations(setting.traced.jaxpr))


def _needed(record: PlanRecord, setting: SearchSpace, formulation: Formulation) -> Constraints:
    annotations = Annotations(
        inputs={i: leaf.spec for i, leaf in enumerate(record.inputs)},
        outputs={i: leaf.spec for i, leaf in enumerate(record.outputs)},
        pins=record.pins,
        donated=frozenset(),
    )
    return minimal_constraints.minimal_constraints(
        setting.traced,
        setting.decisions,
        formulation.folding,
        record.mesh,
        annotations,
        setting.compiler,
        scatters_whole=setting.resharder.machine.scatters_whole,
    )


def _certificate(formulation: Formulation, solution: Solution, hardware: Hardware) -> Certificate:
    nodes, classes = len(formulation.decisions.nodes), formulation.folding.classes
    return Certificate(
        status=str(solution.status),
        objective_s=solution.objective * UNIT_S,
        bound_s=solution.bound * UNIT_S,
        gap=solution.gap,
        solver=f"{solution.solver}, ortools {metadata.version('ortools')}",
        space=(
            f"{_every(formulation.decisions.mesh)} of {nodes} decisions ({classes} after decisions in equal places "
            "share one), element-wise chains in one layout, one shared copy per value; priced by autoshard's model of "
            f"{hardware.name}{_without(unpriced(formulation.decisions))}"
        ),
    )


def _every(mesh: MeshAxes) -> str:
    """Which layouts of each decision are searched."""
    if mesh.groups is None:
        return "every evenly dividing layout"
    return f"evenly dividing layouts that use the {mesh.ndim} axes in {mesh.groups} groups of neighbours at most"


def _without(names: Sequence[str]) -> str:
    """What a proof does not speak of."""
    if not names:
        return ""
    return f", without {'; '.join(names[:3])}{f'; and {len(names) - 3} more' if len(names) > 3 else ''}"


def traced_gradient(planned: PlanningResult, mesh: Any) -> Any:
    """The gradient of a planned forward function, jitted on a mesh in the planned layouts and traced.

    Its arguments are flat: the function's leaves, then the cotangents of outputs that are no scalars.
    """
    setting, assignment = planned.setting, planned.assignment
    assert setting.gradient is not None  # asked only of plans for a gradient
    priced, axes = setting.priced, setting.decisions.mesh

    def shardings(codes: Iterable[int], avals: Sequence[Any]) -> list[NamedSharding]:
        return [NamedSharding(mesh, layout_of(c, len(a.shape), axes).spec()) for c, a in zip(codes, avals, strict=True)]

    jitted = jax.jit(
        emitted(setting.traced, setting.gradient, planned.record.pins, mesh),
        in_shardings=tuple(shardings(map(assignment.input_code, range(len(priced.in_avals))), priced.in_avals)),
        out_shardings=shardings(map(assignment.output_code, range(len(priced.out_avals))), priced.out_avals),
    )
    return jitted.trace(*priced.in_avals)
