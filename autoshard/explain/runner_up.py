"""Runner-up: explains a layout by the cost of the best plan without it.

The plan's own problem is solved again with the decision's choice forbidden. All other decisions
may change; the difference of the two steps is the worth of the choice.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import gcd
from typing import Any

from autoshard.costs.strategies import layout_of
from autoshard.errors import SpecError
from autoshard.explain.explanation import Blocked, Change, Explanation, RunnerUp
from autoshard.ir.mesh import MeshAxes
from autoshard.ir.paths import dotted, matches
from autoshard.planner.pipeline import REL_GAP, PlanningResult, assign
from autoshard.planner.record import Leaf
from autoshard.problem.assignment import Assignment, Collective
from autoshard.problem.decisions import Copy, Equation, layout_codes
from autoshard.problem.formulation import UNIT_S
from autoshard.problem.network import INF, Problem
from autoshard.solver import Solution, solve
from autoshard.solver.evaluate import evaluate

MOST = 4  # decisions that one question explains
OTHERS = 5  # alternatives that are priced where they stand
TIME_LIMIT_S = 30.0  # of one variation


def explain(planned: PlanningResult, pattern: str | None = None, *, at: str | None = None) -> tuple[Explanation, ...]:
    """Explains the inputs that match a pattern, or the values computed at a source line.

    Args:
      planned: the plan with its problem.
      pattern: a pattern of inputs' paths, such as `"**.wq"`.
      at: a source line, such as `"model.py:61"`.

    Raises:
      SpecError: neither or both are given, or nothing is found there.
    """
    classes = decided(planned, pattern, at)
    return tuple(_explain_class(planned, c, nodes) for c, nodes in list(classes.items())[:MOST])


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
        return str(layout_of(int(layout_codes(decision)[pick]), _aval(assignment, node).ndim, d.mesh))

    def texts(codes: Sequence[Any], avals: Sequence[Any]) -> str:
        return " ".join(str(layout_of(int(c[pick]), a.ndim, d.mesh)) for c, a in zip(codes, avals, strict=True))

    eqn = d.graph.eqns[decision.equation]
    return f"{texts(decision.strategies.operands, eqn.operands)} -> {texts(decision.strategies.results, eqn.results)}"


def _aval(assignment: Assignment, node: int) -> Any:
    """The value that a decision with codes lays out."""
    d = assignment.decisions
    decision = d.nodes[node]
    if decision.equations:
        return d.graph.avals[d.graph.results[decision.equations[0]][0]]
    for ends, values in ((d.inputs, d.graph.inputs), (d.outputs, d.graph.outputs)):
        if node in ends:
            return d.graph.avals[values[ends.index(node)]]
    return next(d.graph.avals[value] for value, port in d.kept.items() if port.node == node)


def _label(planned: PlanningResult, node: int) -> str:
    """The name of a decision: its inputs' paths, or its operation and line."""
    d = planned.assignment.decisions
    paths = [
        dotted(planned.traced.in_paths[i])
        for i, n in enumerate(d.inputs)
        if n == node and i < len(planned.traced.in_paths)
    ]
    return (
        paths[0]
        if paths
        else f"{d.nodes[node].name} at {d.nodes[node].where}"
        if d.nodes[node].where
        else (d.nodes[node].name)
    )


def _explain_class(planned: PlanningResult, c: int, nodes: Sequence[int]) -> Explanation:
    formulation, assignment = planned.formulation, planned.assignment
    d, problem = assignment.decisions, formulation.problem
    node, pick = nodes[0], int(planned.solution.choice[c])
    size = int(problem.start[c + 1] - problem.start[c])
    where = d.nodes[node].where
    if not where:
        values = [v for i, v in enumerate(d.graph.inputs) if d.inputs[i] == node]
        users = [d.graph.eqns[e].where for v in values for e, _ in d.graph.consumers.get(v, ())]
        where = next((w for w in users if w != "<unknown>"), "")
    others: list[tuple[str, float]] = []
    for k in range(size):
        if k != pick:
            choice = planned.solution.choice.copy()
            choice[c] = k
            priced = evaluate(problem, choice)
            if priced.objective is not None and priced.fits:
                others.append((choice_text(assignment, node, k), priced.objective * UNIT_S))
    return Explanation(
        what=tuple(_label(planned, n) for n in nodes),
        kind=d.nodes[node].kind,
        value=d.nodes[node].name if isinstance(d.nodes[node], Equation) else str(_aval(assignment, node)),
        where=where,
        layout=choice_text(assignment, node, pick),
        choices=size,
        step_s=planned.record.cost.step_s,
        runner_up=_runner_up(planned, c, node, pick) if size > 1 else None,
        others=tuple(sorted(others, key=lambda item: item[1])[:OTHERS]),
    )


def _runner_up(planned: PlanningResult, c: int, node: int, pick: int) -> RunnerUp | None:
    """The best plan without one choice; None if there is none."""
    problem = planned.formulation.problem
    cost = problem.cost.copy()
    cost[problem.start[c] + pick] = INF
    solution = solved(planned, replace(problem, cost=cost))
    if not solution.found:
        return None
    other = assign(planned.formulation, solution)
    return RunnerUp(
        layout=choice_text(other, node, int(solution.choice[c])),
        step_s=solution.objective * UNIT_S,
        bound_s=solution.bound * UNIT_S,
        peak_bytes=other.peak()[0],
        changes=_find_changes(planned, other, node),
        collectives=_compare_collectives(planned.record.collectives, tuple(other.collectives())),
    )


def solved(
    planned: PlanningResult, problem: Problem, *, time_limit_s: float = TIME_LIMIT_S, **options: Any
) -> Solution:
    """Solves a variation of a plan's problem as far as the plan was proven; the options are those of `solve`."""
    return solve(problem, time_limit_s=time_limit_s, rel_gap=max(planned.record.certificate.gap, REL_GAP), **options)


def _find_changes(planned: PlanningResult, other: Assignment, node: int) -> tuple[Change, ...]:
    """Decisions that differ, equal ones together; of equations and chains by line."""
    mine = planned.assignment
    groups: dict[tuple[str, str, str], int] = {}
    for n, (a, b) in enumerate(zip(mine.choice, other.choice, strict=True)):
        if a != b and n != node and not isinstance(mine.decisions.nodes[n], Copy):
            key = (_label(planned, n), choice_text(mine, n, int(a)), choice_text(mine, n, int(b)))
            groups[key] = groups.get(key, 0) + 1
    return tuple(Change(what, before, after, count) for (what, before, after), count in groups.items())


def _compare_collectives(
    mine: Sequence[Collective], others: Sequence[Collective]
) -> tuple[tuple[str, tuple[str, ...], int, float], ...]:
    """(kind, axes, bytes more, seconds more), the longest first."""
    more: dict[tuple[str, tuple[str, ...]], tuple[int, float]] = {}
    for sign, found in ((-1, mine), (1, others)):
        for x in found:
            nbytes, seconds = more.get((x.kind, x.axes), (0, 0.0))
            more[x.kind, x.axes] = (nbytes + sign * x.nbytes * x.trips, seconds + sign * x.seconds * x.trips)
    rows = [(kind, axes, nbytes, seconds) for (kind, axes), (nbytes, seconds) in more.items() if nbytes]
    return tuple(sorted(rows, key=lambda row: -abs(row[3])))


def blocked(leaves: Sequence[Leaf], mesh: MeshAxes) -> tuple[Blocked, ...]:
    """Dimensions of inputs that a mesh axis does not divide, equal ones once, the widest axes first."""
    found: dict[tuple[str, int, str], Blocked] = {}
    for leaf in leaves:
        name = dotted(leaf.path).rpartition(".")[2]
        for dim, size in enumerate(leaf.shape):
            for axis, ways in mesh.shape.items():
                if size > 1 and size % ways and len(leaf.shape) > 1:
                    found.setdefault(
                        (name, dim, axis),
                        Blocked(
                            path=f"**.{name}",
                            dim=dim,
                            size=size,
                            axis=axis,
                            ways=ways,
                            padded=-(-size // ways) * ways,
                            divides=gcd(size, ways),
                        ),
                    )
    return tuple(sorted(found.values(), key=lambda b: (-b.ways, b.path, b.dim)))
