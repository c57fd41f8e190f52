"""Runner-up: explains a layout by the cost of the best plan without it.

The plan's own problem is solved again with the decision's choice forbidden. All other decisions
may change; the difference of the two steps is the worth of the choice.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import gcd

from autoshard import _jax
from autoshard.explain.asked import choice_text, decided, solved, value_of
from autoshard.explain.explanation import Blocked, Change, Explanation, RunnerUp
from autoshard.ir.mesh import MeshAxes
from autoshard.ir.paths import dotted
from autoshard.planner.pipeline import assign
from autoshard.planner.planning_result import PlanningResult
from autoshard.planner.record import Leaf
from autoshard.problem import bill, memory_profile
from autoshard.problem.assignment import Assignment
from autoshard.problem.collective import Collective
from autoshard.problem.decisions import Copy, Equation
from autoshard.problem.formulation import UNIT_S
from autoshard.problem.network import INF
from autoshard.solver.evaluate import evaluate

MOST = 4  # decisions that one question explains
OTHERS = 5  # alternatives that are priced where they stand


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


def unexplained(planned: PlanningResult, pattern: str | None = None, *, at: str | None = None) -> int:
    """How many more decisions are there than those that `explain` explains."""
    return max(0, len(decided(planned, pattern, at)) - MOST)


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
        where = next((w for w in users if w != _jax.NO_LINE), "")
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
        value=d.nodes[node].name if isinstance(d.nodes[node], Equation) else str(value_of(assignment, node)),
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
        peak_bytes=memory_profile.peak(other.decisions, other.choice)[0],
        changes=_find_changes(planned, other, node),
        collectives=_compare_collectives(planned.record.collectives, tuple(bill.collectives(other))),
    )


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
