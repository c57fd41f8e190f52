"""Together: functions that share state are planned at once, for the least weighted sum of their step times.

Each function is a problem of its own, with its own memory over its own time. A leaf that
several share is one choice: its decisions are tied by an edge that forbids whatever
differs, which the solver's presolve contracts. The joint optimum decides the layouts of
what is shared; each function's plan is then the best one that has them, so that every
plan carries its own proof.

What one function holds between its steps (its donated state, and what is shared) is in
memory while another runs, too.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import product
from math import gcd, lcm
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

import cost_models
from autoshard.api.options import FunctionOptions, Options, SolvingOptions, keywords_of, listing, refuse_unknown
from autoshard.api.planning import plan_request, requests_of
from autoshard.api.solved_plan import SolvedPlan
from autoshard.backends.devices import MeshLike
from autoshard.costs.strategies import layout_of
from autoshard.errors import InfeasibleError, SpecError
from autoshard.ir.paths import dotted
from autoshard.ir.recomputation import WRITTEN
from autoshard.planner import pipeline
from autoshard.planner.budget import SETTLE_S
from autoshard.planner.recomputation_space import RecomputationSpace
from autoshard.planner.request import PlanRequest
from autoshard.planner.search_space import SearchSpace, build_search_space
from autoshard.problem import memory_profile
from autoshard.problem.assignment import Assignment
from autoshard.problem.decisions import Decisions, layout_codes, place_of
from autoshard.problem.formulation import Formulation, formulate
from autoshard.problem.joint import JointProblem, Part, ResidentBytes, Tie, union
from autoshard.report.tables import bytes_text
from autoshard.solver import Solution, Status, solve

Int = NDArray[np.int64]
Own = FunctionOptions | Mapping[str, Any]
Function = tuple[Callable[..., Any], tuple[Any, ...]] | tuple[Callable[..., Any], tuple[Any, ...], Own]
Share = str | Mapping[str, str] | Sequence[str | Mapping[str, str]] | None

# Weights are kept exact as fractions with denominators up to this.
_FINEST_WEIGHT = 1000

_OWN = tuple(FunctionOptions.__annotations__)


@listing(SolvingOptions)
def plan_many(
    functions: Mapping[str, Function],
    *,
    share: Share = None,
    weights: Mapping[str, float] | None = None,
    mesh: MeshLike = None,
    hardware: str | cost_models.Hardware | None = None,
    constraints: pipeline.ConstraintPolicy = "needed",
    **options: Unpack[SolvingOptions],
) -> dict[str, SolvedPlan]:
    """Plans functions with common state for the least weighted sum of their step times.

        plans = autoshard.plan_many(
            {
                "train": (train_step, (state, batch), {"donate_argnums": 0}),
                "eval": (evaluate, (params, batch)),
            },
            share={"train": "state.params", "eval": "params"},
            weights={"train": 100, "eval": 1},
        )

    Args:
      functions: name → (function, arguments) or (function, arguments, options): the options
        of `autoshard.plan` that concern one function's arguments and outputs. Functions are
        planned as they are, not for their gradients (`for_grad` is an option, too).
      share: which leaves are one and the same: a path prefix per function (leaves below it
        with equal further paths are shared), one prefix that holds for all, or a sequence of
        such. None shares leaves of equal paths and shapes.
      weights: how often each runs, relative to the others; 1 where none is given.
      mesh: as in `autoshard.plan`; one mesh for all.
      hardware: as in `autoshard.plan`.
      constraints: as in `autoshard.plan`.
      **options: of `autoshard.plan`: memory (what one function keeps between its steps counts
        while the others run), unknown, rel_gap; time_limit_s, for the joint problem and for each
        function.

    Returns:
      A plan per function. Its certificate is that of its own step under the shared layouts;
      a note says what was proven of the weighted sum.

    Raises:
      SpecError: nothing is shared, a prefix matches nothing, shapes differ, or an option or a
        weight is wrong.
      InfeasibleError: no common layout fits.
    """
    refuse_unknown(options, keywords_of(plan_many), "plan_many")
    common: dict[str, Any] = {
        "mesh": mesh,
        "hardware": hardware,
        "constraints": constraints,
        **options,
    }
    names = tuple(functions)
    posed: list[tuple[PlanRequest, ...]] = []
    each: dict[str, Options] = {}
    for name, (fn, args, *own) in functions.items():
        given = dict(own[0]) if own else {}
        wrong = [key for key in given if key not in _OWN]
        if wrong:
            raise SpecError(f"{name}: {wrong[0]!r} is no option of one function; there are: {', '.join(_OWN)}")
        all_of_it: dict[str, Any] = {"for_grad": False, **common, **given}
        each[name] = Options(**all_of_it)
        posed.append(requests_of(fn, args, {}, each[name]))
        if any(question.counts for question in posed[-1]):
            raise SpecError(
                f'{name}: steps="auto" (autoshard.accumulate) is chosen for one function alone; these share layouts: '
                "give steps a number, such as that of the function's own plan (plan.microbatches)"
            )
    scale = _scale(names, weights or {})
    best: tuple[Fraction, dict[str, SolvedPlan]] | None = None
    for questions in product(*posed):
        if len({question.target.axes for question in questions}) > 1:
            continue
        plans = _together(dict(zip(names, questions, strict=True)), each, share, scale)
        total = sum((scale[n] * Fraction(p.record.cost.step_s) for n, p in plans.items()), Fraction(0))
        if best is None or total < best[0]:
            best = total, plans
    assert best is not None  # every function is posed on the same meshes
    return best[1]


def _scale(names: Sequence[str], weights: Mapping[str, float]) -> dict[str, int]:
    """Weights as integers in the same proportions."""
    for name, weight in weights.items():
        if name not in names:
            raise SpecError(f"weights: there is no function {name!r}; there are: {', '.join(names)}")
        if not 0 < weight < float("inf"):
            raise SpecError(f"weights: {name!r} has weight {weight}; weights are positive")
    exact = {name: Fraction(weights.get(name, 1)).limit_denominator(_FINEST_WEIGHT) for name in names}
    small = [name for name, weight in exact.items() if not weight]
    if small:
        raise SpecError(f"weights: {small[0]!r} has less than a thousandth; multiply all weights")
    together = lcm(*(weight.denominator for weight in exact.values()))
    return {name: int(weight * together) for name, weight in exact.items()}


Leaf = tuple[str, int]  # of a function, the position of an input


def _together(
    questions: Mapping[str, PlanRequest], options: Mapping[str, Options], share: Share, scale: Mapping[str, int]
) -> dict[str, SolvedPlan]:
    names = tuple(questions)
    groups = shared_leaves(questions, share)
    spaces = {n: build_search_space(question) for n, question in questions.items()}
    holders = _holders(spaces, groups)
    parts = {n: formulate(s.decisions, s.resharder, memory_bytes=None) for n, s in spaces.items()}
    limit = min(q.memory_bytes for q in questions.values())
    joint = _joint(parts, groups, holders, scale, limit)
    first = options[names[0]]
    solution = _solved(joint, first)
    if not solution.found and not solution.forbidden and (repeating := _repeating(spaces)):
        parts = {**parts, **repeating}
        joint = _joint(parts, groups, holders, scale, limit)
        solution = _solved(joint, first)
    if not solution.found:
        raise _infeasible(questions, groups, parts, joint, solution, limit)
    choices = {n: parts[n].read(c) for n, c in zip(names, joint.split(solution.choice), strict=True)}
    fixed = dict.fromkeys([*(leaf for group in groups for leaf in group), *holders])
    plans: dict[str, SolvedPlan] = {}
    for n, question in questions.items():
        assignment = Assignment(decisions=parts[n].decisions, resharder=parts[n].resharder, choice=choices[n])
        avals, axes = spaces[n].priced.in_avals, parts[n].decisions.mesh
        specs = {i: layout_of(assignment.input_code(i), len(avals[i].shape), axes).spec() for m, i in fixed if m == n}
        others = sum(
            int(_bytes(parts[m].decisions, i)[choices[m][parts[m].decisions.inputs[i]]])
            for (m, i), users in holders.items()
            if n not in users
        )
        note = _note(names, scale, solution, sum(m == n for group in groups for m, _ in group), others)
        pinned = replace(
            question.asking({**question.shardings.inputs, **specs}),
            target=replace(question.target, notes=(*question.target.notes, note)),
            memory_bytes=question.memory_bytes - others,
        )
        plans[n] = plan_request(pinned, options[n])
    return plans


def _joint(
    parts: Mapping[str, Formulation],
    groups: Sequence[Sequence[Leaf]],
    holders: Mapping[Leaf, frozenset[str]],
    scale: Mapping[str, int],
    limit: int,
) -> JointProblem:
    """The functions' problems as one, in which what is shared is one choice, and in memory while others run."""
    names = tuple(parts)

    def node(leaf: Leaf) -> tuple[int, int]:
        name, i = leaf
        return names.index(name), int(parts[name].folding.class_of[parts[name].decisions.inputs[i]])

    return union(
        [Part(problem=parts[n].problem, weight=scale[n]) for n in names],
        _ties(groups, node, parts),
        [
            ResidentBytes(node=node(leaf), during=k, usage=_bytes(parts[leaf[0]].decisions, leaf[1]))
            for leaf, users in holders.items()
            for k, n in enumerate(names)
            if n not in users
        ],
        usage_limit=limit,
    )


def _solved(joint: JointProblem, options: Options) -> Solution:
    return solve(joint.problem, time_limit_s=options.solver_limit_s, rel_gap=options.rel_gap, settle_s=SETTLE_S)


def _repeating(spaces: Mapping[str, SearchSpace]) -> dict[str, Formulation]:
    """The problems of those functions whose backward passes may repeat what they do not keep, with that choice."""
    asked = {n: s for n, s in spaces.items() if s.request.remat != WRITTEN and not s.request.gradient_of}
    choices = {n: RecomputationSpace.of(space) for n, space in asked.items()}
    return {n: formulate(c.decisions, c.resharder, memory_bytes=None) for n, c in choices.items() if c is not None}


def shared_leaves(questions: Mapping[str, PlanRequest], share: Share) -> list[tuple[Leaf, ...]]:
    """Groups of input leaves that are one and the same.

    Raises:
      SpecError: a prefix or function does not exist, shapes differ, a leaf is in two groups,
        or nothing is shared.
    """
    paths = {n: [dotted(path) for path in q.traced.in_paths] for n, q in questions.items()}
    avals = {n: q.traced.in_avals for n, q in questions.items()}
    groups: list[dict[str, int]] = []
    if share is None:
        equal: dict[Any, dict[str, int]] = {}
        for n in questions:
            for i, path in enumerate(paths[n]):
                equal.setdefault((path, avals[n][i].shape, avals[n][i].dtype), {})[n] = i
        groups = list(equal.values())
    else:
        for entry in [share] if isinstance(share, str | Mapping) else share:
            groups += _below(entry, paths)
    found = [tuple(group.items()) for group in groups if len(group) > 1]
    if not found:
        raise SpecError(f"{', '.join(questions)} share nothing: say what with share=, or plan them one by one")
    seen: set[Leaf] = set()
    for group in found:
        shapes = {avals[n][i].shape for n, i in group}
        where = " and ".join(f"{n}'s {questions[n].traced.in_paths[i]} {list(avals[n][i].shape)}" for n, i in group)
        if len(shapes) > 1:
            raise SpecError(f"share: {where} differ in shape")
        if seen & set(group):
            raise SpecError(f"share: {where}: a leaf is shared twice")
        seen |= set(group)
    return found


def _below(entry: str | Mapping[str, str], paths: Mapping[str, Sequence[str]]) -> list[dict[str, int]]:
    """Leaves below a prefix per function, by their further path."""
    prefixes = {n: dotted(entry) for n in paths} if isinstance(entry, str) else {n: dotted(p) for n, p in entry.items()}
    groups: dict[str, dict[str, int]] = {}
    for n, prefix in prefixes.items():
        if n not in paths:
            raise SpecError(f"share: there is no function {n!r}; there are: {', '.join(paths)}")
        below = [(path[len(prefix) :], i) for i, path in enumerate(paths[n]) if f"{path}.".startswith(f"{prefix}.")]
        if not below and not isinstance(entry, str):
            raise SpecError(f"share: {n} has no input below {prefix!r}; there are: {', '.join(paths[n][:8])}")
        for rest, i in below:
            groups.setdefault(rest, {})[n] = i
    return list(groups.values())


def _holders(spaces: Mapping[str, SearchSpace], groups: Sequence[Sequence[Leaf]]) -> dict[Leaf, frozenset[str]]:
    """What stays in memory between steps → the functions that have it among their arguments."""
    found = {group[0]: frozenset(n for n, _ in group) for group in groups}
    shared = {leaf for group in groups for leaf in group}
    for n, space in spaces.items():
        for i in space.tied.values():
            if (n, i) not in shared:
                found[n, i] = frozenset({n})
    return found


def _ties(
    groups: Sequence[Sequence[Leaf]], node: Callable[[Leaf], tuple[int, int]], parts: Mapping[str, Formulation]
) -> list[Tie]:
    found: dict[tuple[tuple[int, int], tuple[int, int]], Tie] = {}
    for first, *others in groups:
        for other in others:
            left, right = node(first), node(other)
            found[left, right] = Tie(
                left=left, right=right, left_codes=_codes(parts, first), right_codes=_codes(parts, other)
            )
    return list(found.values())


def _codes(parts: Mapping[str, Formulation], leaf: Leaf) -> Int:
    d = parts[leaf[0]].decisions
    return layout_codes(d.nodes[d.inputs[leaf[1]]])


def _bytes(decisions: Decisions, position: int) -> Int:
    """Bytes per device of an input under each of its choices."""
    node = decisions.inputs[position]
    zero = np.zeros(len(decisions.nodes[node]), np.int64)
    return sum((use.nbytes for use in decisions.usages if use.node == node), zero)


def _note(names: Sequence[str], scale: Mapping[str, int], solution: Solution, leaves: int, others: int) -> str:
    divisor = gcd(*scale.values())
    times = " + ".join(f"{scale[n] // divisor}·{n}" for n in names)
    text = (
        f"{leaves} leaves are shared, in the layouts that are best for {times}: "
        f"{solution.status}, gap {solution.gap:.2%}"
    )
    return f"{text}; {bytes_text(others)} of memory are left to what the others keep" if others else text


def _infeasible(
    questions: Mapping[str, PlanRequest],
    groups: Sequence[Sequence[Leaf]],
    parts: Mapping[str, Formulation],
    joint: JointProblem,
    solution: Solution,
    limit: int,
) -> InfeasibleError:
    place = _place(parts, joint, solution)
    peak = solution.smallest_peak_bytes
    if solution.status is Status.UNKNOWN:
        why = "no common plan was found in time; raise time_limit_s, or the memory limit"
    elif solution.forbidden:
        why = f"the pins exclude each other, however much memory there is: loosen {_excluded(questions, groups, parts)}"
    elif peak is None:
        why = (
            f"no common plan fits {bytes_text(limit)} per device; use more devices, donate the state, or raise memory="
        )
    else:
        why = (
            f"no common plan fits {bytes_text(limit)} per device; the smallest peak found is {bytes_text(peak)}, with "
            f"what each keeps while the others run, {place}; use more devices, donate the state, or raise memory="
        )
    return InfeasibleError(f"{', '.join(questions)}: {why}", peak_bytes=peak, limit_bytes=limit, where=place)


def _place(parts: Mapping[str, Formulation], joint: JointProblem, solution: Solution) -> str | None:
    """Where the smallest peak is: the function, and the equation in it."""
    if solution.smallest_peak_bytes is None or solution.peak_at is None:
        return None
    at = solution.peak_at
    for (name, part), choice in zip(parts.items(), joint.split(solution.choice), strict=True):
        length = int(part.problem.use_interval.max(initial=0))  # each function has a stretch of time of its own
        if at < length:
            assignment = Assignment(decisions=part.decisions, resharder=part.resharder, choice=part.read(choice))
            return f"in {name} at {place_of(part.decisions, memory_profile.peak(part.decisions, assignment.choice)[1])}"
        at -= length
    return None


def _excluded(
    questions: Mapping[str, PlanRequest], groups: Sequence[Sequence[Leaf]], parts: Mapping[str, Formulation]
) -> str:
    """Pins of one shared leaf that have no layout in common, or where none do, whatever is pinned."""
    for group in groups:
        allowed = [set(_codes(parts, leaf).tolist()) for leaf in group]
        if not set.intersection(*allowed):
            specs = (
                f"{n}'s {questions[n].traced.in_paths[i]} in {questions[n].shardings.inputs.get(i)}" for n, i in group
            )
            return f"one of {', '.join(specs)}, which are one and the same"
    return "one of " + ", ".join(
        f"{n}'s pins" for n, q in questions.items() if q.shardings.inputs or q.shardings.outputs
    )
