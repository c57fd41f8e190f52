"""Refine: the compiler in the loop. Several near-optimal plans are compiled, the shortest schedule wins.

Candidates are the optimum and the plans that are best without one of its choices: the
layout of one large input. They are compiled for the plan's hardware and their schedules
priced by the plan's own cost model (`timeline`). A candidate that the compiler gives more
memory than the device has drops out. The winner's notes say what changed the order.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jax.sharding import PartitionSpec

from autoshard.errors import SpecError
from autoshard.planner import Planned
from autoshard.plans import Plan
from autoshard.problem.assignment import Assignment
from autoshard.problem.network import INF
from autoshard.solver import solve
from autoshard.strategies import layout_of
from autoshard.tables import bytes_text, time_text
from autoshard.verification import Verification

TRIED = 2  # inputs whose layout is forbidden, per candidate that is wanted: some lead to the same plan
TIME_LIMIT_S = 30.0

Inputs = Mapping[int, PartitionSpec]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """A plan and what the compiler made of it."""

    plan: Plan
    found: Verification

    @property
    def schedule_s(self) -> float:
        """Seconds of the compiled schedule, priced."""
        assert self.found.timeline is not None  # a compiler's program has a schedule
        return self.found.timeline.step_s

    @property
    def fits(self) -> bool:
        """Whether the compiled program's peak is within the plan's limit."""
        compiled = self.found.memory.compiled
        return compiled is None or compiled.peak <= self.plan.record.memory.limit_bytes


def refined(first: Plan, again: Callable[[Inputs], Plan], *, compiler: str, candidates: int) -> Plan:
    """The plan whose compiled schedule is shortest, with a note of what was compared.

    Args:
      first: the optimum.
      again: plans the same question with these layouts of inputs.
      compiler: "gpu", "tpu" or "cpu".
      candidates: how many plans to compile, the optimum included.

    Raises:
      SpecError: fewer than two candidates, or no such compiler.
      CompilerMissingError: that compiler is not installed.
    """
    if candidates < 2 or compiler not in ("gpu", "tpu", "cpu"):
        raise SpecError(
            f"refine={compiler!r} with candidates={candidates}: compile two plans or more, by 'gpu', 'tpu' or 'cpu'"
        )
    assert first.planned is not None  # a plan of a question can be planned again
    plans = [first, *(again(inputs) for inputs in alternatives(first.planned, candidates - 1))]
    tried = [Candidate(plan=plan, found=plan.verify(compiler)) for plan in plans]
    fitting = [x for x in tried if x.fits] or tried
    best = min(fitting, key=lambda x: x.schedule_s)
    return best.plan.noted(told(tried, best))


def alternatives(planned: Planned, count: int) -> list[Inputs]:
    """Input layouts of other plans, the least predicted step first: each is best without one choice of the optimum."""
    problem, d = planned.formulation.problem, planned.assignment.decisions
    nbytes: dict[int, int] = {}
    for position, v in enumerate(d.graph.inputs):
        c = int(planned.formulation.folding.class_of[d.inputs[position]])
        nbytes[c] = nbytes.get(c, 0) + d.graph.avals[v].nbytes
    largest = sorted(nbytes, key=lambda c: -nbytes[c])[: TRIED * count]
    seen = [_inputs(planned.assignment)]
    found: list[tuple[int, Inputs]] = []
    for c in largest:
        cost = problem.cost.copy()
        cost[problem.start[c] + planned.solution.choice[c]] = INF
        if np.all(cost[problem.start[c] : problem.start[c + 1]] >= INF):
            continue
        rel_gap = max(planned.record.certificate.gap, 1e-3)
        solution = solve(replace(problem, cost=cost), time_limit_s=TIME_LIMIT_S, rel_gap=rel_gap)
        if not solution.found:
            continue
        inputs = _inputs(replace(planned.assignment, choice=planned.formulation.read(solution.choice), _ports={}))
        if inputs not in seen:
            seen.append(inputs)
            found.append((solution.objective, inputs))
    return [inputs for _, inputs in sorted(found, key=lambda item: item[0])[:count]]


def told(tried: Sequence[Candidate], best: Candidate) -> str:
    """What was compared, and what changed the order, if anything did."""
    ranks = sorted(range(len(tried)), key=lambda i: tried[i].schedule_s)
    listed = ", ".join(
        f"{time_text(tried[i].schedule_s)} (predicted {time_text(tried[i].plan.cost)})"
        + ("" if tried[i].fits else ", does not fit")
        for i in ranks
    )
    head = f"refined by {best.found.compiler}: the schedules of {len(tried)} plans take {listed}"
    first = tried[0]
    if best is first:
        return f"{head}; the predicted optimum stays"
    if not first.fits:
        assert first.found.memory.compiled is not None  # else it would fit
        peak = bytes_text(first.found.memory.compiled.peak)
        return f"{head}; the predicted optimum does not fit: the compiler needs {peak} for it"
    one, other = first.found.timeline, best.found.timeline
    assert one is not None
    assert other is not None
    parts = [
        ("compute", one.compute_s - other.compute_s, first.plan.record.cost.compute_s, one.compute_s),
        ("exposed communication", one.exposed_s - other.exposed_s, first.plan.record.cost.exposed_s, one.exposed_s),
    ]
    why, _, predicted_s, compiled_s = max(parts, key=lambda part: part[1])
    return (
        f"{head}; the order changed by {why}: the predicted optimum has {time_text(compiled_s)} of it as compiled, "
        f"{time_text(predicted_s)} as predicted"
    )


def _inputs(assignment: Assignment) -> dict[int, PartitionSpec]:
    d = assignment.decisions
    return {
        i: layout_of(assignment.input_code(i), d.graph.avals[v].ndim, d.mesh).spec()
        for i, v in enumerate(d.graph.inputs)
    }
