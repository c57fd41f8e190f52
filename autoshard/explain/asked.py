"""Asked: the decisions that a question is about, their choices as text, and the plan's problem solved once more."""

from collections.abc import Sequence
from typing import Any

from autoshard.costs.strategies import layout_of
from autoshard.errors import SpecError
from autoshard.ir.paths import dotted, matches
from autoshard.planner.budget import REL_GAP, SETTLE_S
from autoshard.planner.planning_result import PlanningResult
from autoshard.problem.assignment import Assignment
from autoshard.problem.decisions import Equation, layout_codes
from autoshard.problem.network import Problem
from autoshard.solver import Solution, solve

TIME_LIMIT_S = 30.0  # of one variation


def decided(planned: PlanningResult, pattern: str | None, at: str | None) -> dict[int, list[int]]:
    """Classes of equal decisions → those of their decisions that are asked for, as by `explain`."""
    if (pattern is None) == (at is None):
        raise SpecError('say what to explain: an input, "**.wq", or a line, at="model.py:61" (--at model.py:61)')
    nodes = _find_inputs(planned, pattern) if pattern is not None else _decided_at(planned, at or "")
    classes: dict[int, list[int]] = {}
    for node in nodes:
        classes.setdefault(int(planned.formulation.folding.class_of[node]), []).append(node)
    return classes


def _find_inputs(planned: PlanningResult, pattern: str) -> list[int]:
    paths = planned.traced.in_paths
    found = [i for i, path in enumerate(paths) if matches(pattern, path)]
    if not found:
        known = ", ".join(dict.fromkeys(dotted(path).rpartition(".")[2] for path in paths if path))
        raise SpecError(f"no input matches {pattern!r}; there are **.NAME of: {known}")
    return [planned.assignment.decisions.inputs[i] for i in found]


def _decided_at(planned: PlanningResult, at: str) -> list[int]:
    d = planned.assignment.decisions
    lines = [eqn.where.partition(" (")[0] for eqn in d.graph.eqns]
    found = [d.node_of[e] for e, line in enumerate(lines) if line.endswith(at) and d.node_of[e] >= 0]
    if not found:
        known = sorted({line.rpartition("/")[2] for e, line in enumerate(lines) if d.node_of[e] >= 0 and ":" in line})
        here = [line for line in known if line.partition(":")[0] == at.rpartition("/")[2].partition(":")[0]]
        raise SpecError(f"nothing is decided at {at!r}; lines with decisions: {', '.join(here or known)}")
    return list(dict.fromkeys(found))


def choice_text(assignment: Assignment, node: int, pick: int) -> str:
    """A choice of a decision as layouts: `[x,-]`, or `[-,x] [x,-] -> [-,-] Σ{x}` of an equation."""
    d = assignment.decisions
    decision = d.nodes[node]
    if not isinstance(decision, Equation):
        return str(layout_of(int(layout_codes(decision)[pick]), value_of(assignment, node).ndim, d.mesh))

    def texts(codes: Sequence[Any], avals: Sequence[Any]) -> str:
        return " ".join(str(layout_of(int(c[pick]), a.ndim, d.mesh)) for c, a in zip(codes, avals, strict=True))

    eqn = d.graph.eqns[decision.equation]
    return f"{texts(decision.strategies.operands, eqn.operands)} -> {texts(decision.strategies.results, eqn.results)}"


def value_of(assignment: Assignment, node: int) -> Any:
    """The value that a decision with codes lays out."""
    d = assignment.decisions
    decision = d.nodes[node]
    if decision.equations:
        return d.graph.avals[d.graph.results[decision.equations[0]][0]]
    for ends, values in ((d.inputs, d.graph.inputs), (d.outputs, d.graph.outputs)):
        if node in ends:
            return d.graph.avals[values[ends.index(node)]]
    return next(d.graph.avals[value] for value, port in d.kept.items() if port.node == node)


def solved(
    planned: PlanningResult, problem: Problem, *, time_limit_s: float = TIME_LIMIT_S, **options: Any
) -> Solution:
    """Solves a variation of a plan's problem as far as the plan was proven; the options are those of `solve`."""
    rel_gap = max(planned.record.certificate.gap, REL_GAP)
    return solve(problem, time_limit_s=time_limit_s, rel_gap=rel_gap, settle_s=SETTLE_S, **options)
