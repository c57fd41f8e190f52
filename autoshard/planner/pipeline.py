"""Pipeline: the way from a request to its plan's record, stage by stage.

    call              planner/program.py      bind
    → program         planner/program.py      Call.program, Call.variants    "trace"
    → request         planner/request.py      request_of, requests_of
    → search space    planner/search_space.py build_search_space             "graph", "strategies"
    → problem         problem/formulation.py  formulate                      "price"
    → solution        solver/solver.py        solve                          "solve"
    → assignment      problem/assignment.py   Assignment
    → record          planner/build_record.py describe                       "record"
    → constraints     planner/minimal_constraints.py                         "constraints"

Every verb goes this way: `solve_request` from a request to its plan, `solve_space` from a search space that was
changed on the way. The names in quotes are those of the stages that `planner/stages.py` tells its observers.
A request that leaves its micro-batches open goes this way in each number (`planner/microbatches.py`).
"""

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import NamedSharding

from autoshard import _jax, deadline
from autoshard.backends.shardy.propagation import Annotations
from autoshard.costs.strategies import layout_of
from autoshard.errors import InfeasibleError, StoppedError, TimeLimitError, refusing_depth
from autoshard.garbage import collected_rarely
from autoshard.ir.constraints import Constraints
from autoshard.ir.gradient import emitted
from autoshard.ir.loop_sums import LoopSum
from autoshard.ir.recomputation import ADD, WRITTEN, Recomputation, offloads_residuals, offloads_state
from autoshard.planner import certificate, minimal_constraints
from autoshard.planner.alike_layers import AlikeLayers
from autoshard.planner.budget import SETTLE_S, USUAL_BUDGET, WORTH, Budget
from autoshard.planner.build_record import describe
from autoshard.planner.cost_of_keeping import most_saved_s
from autoshard.planner.host_state_space import best_with_state
from autoshard.planner.infeasible import infeasible, nothing_fits, with_gaps
from autoshard.planner.latencies import sharing_latencies, waits_longer
from autoshard.planner.like_layers import equal_places
from autoshard.planner.loop_sums_space import in_use, splittable, summing_once
from autoshard.planner.planning_result import PlanningResult, fitting
from autoshard.planner.recomputation_space import RecomputationSpace, keeping
from autoshard.planner.record import PlanRecord, summed_in_trips_s
from autoshard.planner.request import PlanRequest
from autoshard.planner.search_space import SearchSpace, build_search_space
from autoshard.planner.stages import Stages
from autoshard.problem import memory_profile
from autoshard.problem.assignment import Assignment
from autoshard.problem.formulation import UNIT_S, Formulation, formulate
from autoshard.problem.network import Int
from autoshard.problem.warm_start import PortableChoice
from autoshard.rules.control_flow import HOST_CALLS
from autoshard.rules.kernels import CUDNN_BACKWARD, CUDNN_FORWARD
from autoshard.solver import Solution, Status, solve
from autoshard.solver.evaluate import evaluate
from autoshard.solver.second_objective import break_ties, make_alike

log = logging.getLogger("autoshard")

ConstraintPolicy = Literal["needed", "compiled", "all"]

# What is kept is decided to this fraction, together with the layouts; these again on the program that keeps it, to a
# fraction that the proof, which is of the first decision, does not hide.
CHOICE_GAP = 5e-3
UNROLLED_WORK = 4  # times as much as usual, where many values may be kept and some have to be repeated
LAYOUT_GAP = 2.5e-3
ATTEMPTS = 4  # at what is kept, where the program turns out to need more memory than the graph with the choices said
# Sums after loops must be faster by the first, of a step; or not slower than by the second, where the plan without them
# sums longer in the trips of loops: of all prices, those of many small reductions are the least certain.
FASTER, AS_FAST = 1e-3, 0.02
MARGIN = 0.98  # of the limit that the last attempt missed; where a choice comes again, twice as far below each time
MISPRICED = 1e-2  # by which a program may cost more than the graph with the choices said
NEAR_GAP, NEAR_S = 5e-3, 1.0  # how far plans are solved of which one is taken only if it saves far more than it loses
FOR_MOVES = 0.25  # of the time limit, where no more than some collectives can be saved


@collected_rarely()
@refusing_depth
def solve_request(
    request: PlanRequest,
    budget: Budget = USUAL_BUDGET,
    *,
    known: Sequence[PortableChoice] = (),
    constraints: ConstraintPolicy = "needed",
) -> PlanningResult:
    """The best plan of a request.

    Args:
      request: the program, its target and the requested layouts.
      budget: how far to solve.
      known: choices on other meshes, or of the same program, with which the search begins.
      constraints: "needed" leaves out the constraints that Shardy's own propagation reaches;
        so does "compiled", and `compiler_minimal_constraints` then leaves out more; "all" emits every one.

    Raises:
      InfeasibleError: no plan fits in memory, or the pins exclude each other.
      MissingRuleError: a primitive without a rule.
      SpecError: a pin that cannot be kept.
    """
    decided = request.remat == WRITTEN or request.loop_sums or request.recomputation is not None or request.gradient_of
    way = _as_written if decided else _recomputing
    if offloads_state(request.offload) and not request.host_state and request.recomputation is None:
        found = best_with_state(request, lambda asked, within: way(asked, within, known), budget, WORTH)
    else:
        found = way(request, budget, known)
    return found if constraints == "all" else thinned(found)


def _as_written(request: PlanRequest, budget: Budget, known: Sequence[PortableChoice]) -> PlanningResult:
    """The best plan of a program that keeps for its backward passes what it says; with all constraints."""
    return _best_sums(build_search_space(request), budget, known)


def _best_sums(space: SearchSpace, budget: Budget, known: Sequence[PortableChoice] = ()) -> PlanningResult:
    """The best plan of a program as it is, or with sums over loops' trips that are finished once, after their loops.

    First all sums are in as many parts as the mesh allows; then each in as many as lie on different devices, and
    those that do not are as they were. With all constraints.
    """
    sums = splittable(space.request)
    return _fastest_sums(space, sums, budget, known) if sums else _best(space, budget, known)


def _fastest_sums(
    space: SearchSpace, sums: tuple[LoopSum, ...], budget: Budget, known: Sequence[PortableChoice]
) -> PlanningResult:
    """The best plan with some of these sums after their loops, or none; with all constraints."""
    request = space.request

    def whole(budget: Budget) -> PlanningResult:
        return _best(space, budget, known)

    best: PlanningResult | None = None
    while sums:
        try:
            made = _best(build_search_space(summing_once(request, sums), space.resharder), budget)
        except InfeasibleError:
            break
        used = in_use(request, sums, made.assignment)
        if used == sums:
            best = made
            break
        sums = used
    if best is None:
        return whole(budget)
    step_s = best.solution.objective * UNIT_S
    try:
        plain = whole(replace(budget, cutoff_s=lambda: min(step_s, budget.cutoff_s())))
    except InfeasibleError:
        return best
    except TimeLimitError as error:
        return _unfinished(best, error, "whether sums are better finished in every trip of a loop")
    fewer = summed_in_trips_s(best.record) < summed_in_trips_s(plain.record)
    most = plain.solution.objective * (1 + AS_FAST if fewer else 1 - FASTER)
    return best if best.solution.objective < most else plain


def _recomputing(request: PlanRequest, budget: Budget, known: Sequence[PortableChoice]) -> PlanningResult:
    """The best plan of a program that may repeat in its backward passes what it does not keep; with all constraints.

    The program as it is written is planned first, unless it cannot fit. If keeping costs that plan something, what is
    kept is decided together with the layouts, on a graph that has both, but only as far as that shows whether it is
    worth repeating anything; then the layouts again, on the program that keeps this alone, whose memory and overlap are
    priced as they are.
    """
    begin = time.perf_counter()
    space = build_search_space(request)
    errors: list[InfeasibleError] = []
    written: PlanningResult | None = None
    found: PlanningResult | None = None
    if memory_profile.least_peak(space.decisions) <= request.memory_bytes:
        try:
            written = _best_sums(space, budget, known)
        except InfeasibleError as error:
            errors.append(error)
    if written is not None:
        saved_s = most_saved_s(written.formulation, written.solution, written.assignment, budget, WORTH)
        if request.remat == ADD and saved_s <= WORTH * written.solution.objective * UNIT_S:
            return _kept(written)
        if saved_s < inf:
            budget = replace(budget, time_limit_s=budget.time_limit_s * FOR_MOVES)
    try:
        choices = RecomputationSpace.of(space)
        if choices is not None:
            found = _choosing(choices, written, budget, known, errors)
            if offloads_residuals(request.offload):
                found = _offloading(space, found, budget, known, errors)
    except TimeLimitError as error:
        if written is None:
            raise
        return _unfinished(written, error, "what is better repeated than kept")
    if choices is None and errors:
        raise errors[0]
    if choices is None:
        return written or _best_sums(space, budget)  # the latter says why nothing fits
    if found is None:
        raise min(errors, key=lambda error: inf if error.peak_bytes is None else error.peak_bytes)
    rest_s = time.perf_counter() - begin - sum(found.seconds.values())
    return replace(found, seconds={**found.seconds, "recomputation": max(rest_s, 0.0)})


def _choosing(
    choices: RecomputationSpace,
    written: PlanningResult | None,
    budget: Budget,
    known: Sequence[PortableChoice],
    errors: list[InfeasibleError],
) -> PlanningResult | None:
    """The best plan that was found to fit of a program that repeats something, or of that which is written.

    Why some do not fit is added to `errors`.
    """
    worth_s = inf if written is None else written.solution.objective * UNIT_S * (1 - WORTH)
    tried = _repeating(choices, budget, known, worth_s, errors)
    found: PlanningResult | None = None
    if tried.best is not None and tried.best.solution.objective * UNIT_S < worth_s:
        found = _proven(tried.best, tried, choices)
    elif written is not None:
        found = _not_worth(written, tried)
    if found is None:
        found = _keeping_little(choices, tried.chosen, budget, errors)
    return _in_groups(choices, tried.chosen, budget, errors) if found is None else found


def _offloading(
    space: SearchSpace,
    found: PlanningResult | None,
    budget: Budget,
    known: Sequence[PortableChoice],
    errors: list[InfeasibleError],
) -> PlanningResult | None:
    """The best plan that also keeps values in the host's memory, if it is worth it; else the one that was found.

    Why some do not fit is added to `errors`.
    """
    try:
        choices = RecomputationSpace.of(space, space.request.offload)
        if choices is None or not choices.whole.offloads:
            return found
        worth_s = inf if found is None else found.solution.objective * UNIT_S * (1 - WORTH)
        tried = _repeating(choices, budget, known, worth_s, errors)
    except TimeLimitError as error:
        if found is None:
            raise
        return _unfinished(found, error, "what is better kept in the host's memory")
    if tried.best is not None and tried.best.solution.objective * UNIT_S < worth_s:
        return _proven(tried.best, tried, choices)
    return None if found is None else _not_worth(found, tried)


class _Repeating(NamedTuple):
    """The best plan that repeats something, what was chosen last to be kept, and a bound on all of a space."""

    best: PlanningResult | None
    chosen: Recomputation | None
    bound: int | None
    said: str


def _repeating(
    choices: RecomputationSpace,
    budget: Budget,
    known: Sequence[PortableChoice],
    worth_s: float,
    errors: list[InfeasibleError],
) -> _Repeating:
    """The best plan that repeats something, unless none is worth it.

    Where the program that is chosen takes more memory than the graph said, the limit of the choice is lowered by as
    much; where it takes more time, another choice is tried that needs less memory, and one that comes again is not
    planned again: the limit goes lower and lower until another comes. Where the graph fits nowhere, its choice of the
    smallest peak is tried: the program itself may need less.

    Args:
      choices: the layouts, and what is kept.
      budget: how far to solve.
      known: choices with which the search for layouts begins, where they are of a program that keeps the same.
      worth_s: a step of so many seconds or more is not worth repeating anything.
      errors: why what was tried does not fit; more is added.
    """
    request = choices.request
    useless_s = budget.cutoff_s
    budget = replace(budget, cutoff_s=lambda: min(useless_s(), worth_s))
    best: PlanningResult | None = None
    limit, bound, chosen = request.memory_bytes, None, None
    tried = {choices.everything} if request.remat == ADD and worth_s < inf else set[Recomputation]()
    planned = again = 0
    kept = len(choices.whole.recalls)
    alike = AlikeLayers.of(choices.decisions, choices.resharder, choices.repeating, kept=kept)
    said = choices.said(alike.problems[-1].folding)
    many = worth_s == inf and alike.unrolled
    work = UNROLLED_WORK if many else 1
    choosing = replace(budget, rel_gap=max(budget.rel_gap, CHOICE_GAP))
    last = replace(choosing, time_limit_s=work * budget.time_limit_s)
    while planned < ATTEMPTS and again < ATTEMPTS:
        formulation, solution = alike.solved(limit, choosing, _run, last=last, settle_s=work * SETTLE_S)
        fits = solution.status not in (Status.INFEASIBLE, Status.UNKNOWN)
        if best is not None and (not fits or solution.objective >= best.solution.objective):
            break
        if not fits:
            errors.append(nothing_fits(request, solution.smallest_peak_bytes if bound is None else None))
            if solution.smallest_peak_bytes is None:
                break
        elif bound is None:  # of the whole limit, which is the one that was asked for
            bound, said = solution.bound, choices.said(formulation.folding)
        if fits and solution.objective * UNIT_S >= worth_s:
            break
        choice = formulation.read(solution.choice)
        chosen = choices.read(choice)
        if chosen in tried:  # it does not fit, or costs more, whatever the graph says of its layouts
            again += 1
            limit = int(memory_profile.live_peak(choices.decisions, choice) * MARGIN ** (2**again))
            continue
        tried.add(chosen)
        planned += 1
        layouts = replace(budget, rel_gap=max(budget.rel_gap, LAYOUT_GAP))
        try:
            found = _best_sums(build_search_space(keeping(request, chosen), choices.resharder), layouts, known)
        except InfeasibleError as error:
            errors.append(error)
            if error.peak_bytes is None or not fits:
                break
            limit = int(limit * min(request.memory_bytes / error.peak_bytes, 1.0) * MARGIN)
            continue
        except TimeLimitError:
            if best is None:
                raise
            break
        best = found if best is None or found.solution.objective < best.solution.objective else best
        if not fits or many or found.solution.objective <= solution.objective * (1 + MISPRICED):
            break
        limit = int(memory_profile.live_peak(choices.decisions, choice) * MARGIN)
    return _Repeating(best, chosen, bound, said)


def _keeping_little(
    choices: RecomputationSpace, chosen: Recomputation | None, budget: Budget, errors: list[InfeasibleError]
) -> PlanningResult | None:
    """A plan, if one fits, of a program that keeps little, for which no choice has to be found.

    It is asked for where no choice fits, or none was found in the solver's time: what repeats the least first. The
    proof is of the plan's own program. Why some do not fit is added to `errors`.
    """
    for kept in choices.little:
        if kept == chosen:
            continue
        try:
            space = build_search_space(keeping(choices.request, kept), choices.resharder)
            return _noted(_best_sums(space, budget), choices)
        except InfeasibleError as error:
            errors.append(error)
    return None


def _in_groups(
    choices: RecomputationSpace, chosen: Recomputation | None, budget: Budget, errors: list[InfeasibleError]
) -> PlanningResult | None:
    """The best plan, if any fits, of a program that keeps what its loops carry of one trip in every few alone.

    They repeat whole trips, so they are asked for where nothing else fits, and those that repeat the least first.
    The proof is of the plan's own program. Why some do not fit is added to `errors`.
    """
    for groups in choices.groupings(chosen):
        found: list[PlanningResult] = []
        for kept in groups:
            try:
                found.append(_best(build_search_space(keeping(choices.request, kept), choices.resharder), budget))
            except InfeasibleError as error:
                errors.append(error)
        if found:
            return _noted(min(found, key=lambda planned: planned.solution.objective), choices)
    return None


def _unfinished(found: PlanningResult, error: TimeLimitError, unknown: str) -> PlanningResult:
    return replace(found, record=certificate.unfinished(found.record, error, unknown))


def _noted(found: PlanningResult, choices: RecomputationSpace) -> PlanningResult:
    note = choices.summary(found.record, found.assignment)
    return replace(found, record=certificate.noted(found.record, note))


def _proven(found: PlanningResult, tried: _Repeating, choices: RecomputationSpace) -> PlanningResult:
    note = choices.summary(found.record, found.assignment)
    return replace(found, record=certificate.proven(found.record, tried.bound, tried.said, note))


def _not_worth(written: PlanningResult, tried: _Repeating) -> PlanningResult:
    return replace(written, record=certificate.not_worth(written.record, tried.bound, tried.said))


def _kept(written: PlanningResult) -> PlanningResult:
    has_backward = bool(written.formulation.decisions.graph.backward)
    return replace(written, record=certificate.kept(written.record)) if has_backward else written


@collected_rarely()
@refusing_depth
def solve_space(
    space: SearchSpace,
    budget: Budget = USUAL_BUDGET,
    *,
    known: Sequence[PortableChoice] = (),
    constraints: ConstraintPolicy = "needed",
) -> PlanningResult:
    """The best plan in a search space; as `solve_request`."""
    found = _best(space, budget, known)
    return found if constraints == "all" else thinned(found)


def _best(space: SearchSpace, budget: Budget, known: Sequence[PortableChoice] = ()) -> PlanningResult:
    """The best plan in a search space, with every constraint."""
    limit = space.request.memory_bytes
    return fitting(
        lambda nbytes: _within(space, budget, known, nbytes), limit, lambda found: with_gaps(found.record, space)
    )


def _within(space: SearchSpace, budget: Budget, known: Sequence[PortableChoice], memory_bytes: int) -> PlanningResult:
    """The best plan in a search space of which no more lives at once than some bytes per device."""
    stages = Stages(space.request.title)
    formulation = stages.done("price", formulate(space.decisions, space.resharder, memory_bytes=memory_bytes))
    solution = stages.done("solve", _solved(space, formulation, budget, known))
    assignment = assign(formulation, solution)
    proof = certificate.of_layouts(formulation, solution, space.request.target.hardware)
    record = stages.passed("record", describe(space, assignment, proof))
    return PlanningResult(
        record=record,
        space=space,
        formulation=formulation,
        solution=solution,
        assignment=assignment,
        seconds={**space.seconds, **stages.seconds},
    )


@collected_rarely()
def thinned(found: PlanningResult) -> PlanningResult:
    """A plan with all constraints → the plan with those alone that the partitioner's own propagation does not reach."""
    if not _can_be_probed(found.space):
        return found
    stages = Stages(found.space.request.title)
    record = _with_needed(found.record, found.space, found.formulation)
    record = stages.done("constraints", record)
    return replace(found, record=record, seconds={**found.seconds, **stages.seconds})


def _solved(space: SearchSpace, formulation: Formulation, budget: Budget, known: Sequence[PortableChoice]) -> Solution:
    """The best solution; of those that are as fast the one that reshards less, holds less memory, and has equal layers.

    Raises:
      InfeasibleError: there is none.
    """
    choices = [choice for one in known if (choice := one.on(space.decisions)) is not None]
    solution = _run(formulation, budget, choices)
    if solution.status is Status.UNKNOWN and deadline.is_stopped():
        raise StoppedError("solving")
    if solution.status in (Status.INFEASIBLE, Status.UNKNOWN):
        raise infeasible(space, formulation, solution, budget.time_limit_s)
    priced, choice = formulation, solution.choice
    if budget.rel_gap:  # else the best at these prices was asked for, and no other

        def at_prices(other: Formulation, begun: Int) -> Solution:
            return _run(other, replace(budget, rel_gap=max(budget.rel_gap, NEAR_GAP)), (begun,), settle_s=NEAR_S)

        priced, choice = sharing_latencies(formulation, choice, at_prices)
    tied = break_ties(priced.problem, choice, priced.moves())
    if space.gradient is None:
        tied = make_alike(priced.problem, tied, equal_places(space.traced, priced.decisions, priced.folding))
    if priced is formulation or not waits_longer(priced, tied, than=choice):
        choice = tied
    choice = formulation.write(priced.read(choice))
    objective = evaluate(formulation.problem, choice).objective
    assert objective is not None  # `break_ties` forbids what the problem does
    return solution.instead(choice, objective)


def _run(formulation: Formulation, budget: Budget, known: Sequence[Int], *, settle_s: float = SETTLE_S) -> Solution:
    """Solves a problem within a budget."""
    return solve(
        formulation.problem,
        time_limit_s=budget.time_limit_s,
        rel_gap=budget.rel_gap,
        settle_s=settle_s,
        cutoff=lambda: budget.cutoff_s() / UNIT_S,
        known=[formulation.write(choice) for choice in known],
        on_progress=_log_progress,
    )


def assign(formulation: Formulation, solution: Solution) -> Assignment:
    """Reads a solution back as a choice for every decision."""
    return Assignment(
        decisions=formulation.decisions,
        resharder=formulation.resharder,
        choice=formulation.read(solution.choice),
    )


def _log_progress(best: int | None, bound: int | None, elapsed_s: float) -> None:
    """Logs the solver's best objective so far and its bound."""
    if best is not None and bound is not None:
        gap = (best - bound) / best if best else 0.0
        now = f"solve: {best * UNIT_S * 1e3:.4g} ms, within {gap:.1%} of the optimum, after {elapsed_s:.0f} s"
        log.debug("%s", now, extra={"now": now})


NEED_DEVICES = frozenset({*HOST_CALLS, CUDNN_FORWARD, CUDNN_BACKWARD})


def _can_be_probed(space: SearchSpace) -> bool:
    """Whether Shardy can probe a program: JAX must be able to lower it without devices.

    A program that calls the host, or cuDNN, is lowered only for real devices. Equations without readers
    are not in the graph, but are lowered: a callback that returns nothing.
    """
    if space.gradient is not None or not space.decisions.mesh.ndim:
        return False
    return not any(eqn.primitive.name in NEED_DEVICES for eqn in _jax.equations(space.traced.jaxpr))


def _with_needed(record: PlanRecord, space: SearchSpace, formulation: Formulation) -> PlanRecord:
    """The record with the constraints that are needed; with all of them, if there is no time to find out which."""
    try:
        return replace(record, pins=_needed(record, space, formulation))
    except TimeLimitError as error:
        note = f"all constraints are emitted: {error.why} before some could be left out"
        return replace(record, notes=(*record.notes, note))


def _needed(record: PlanRecord, space: SearchSpace, formulation: Formulation) -> Constraints:
    annotations = Annotations(
        inputs={i: leaf.spec for i, leaf in enumerate(record.inputs)},
        outputs={i: leaf.spec for i, leaf in enumerate(record.outputs)},
        pins=record.pins,
        donated=frozenset(),
    )
    return minimal_constraints.minimal_constraints(
        space.traced,
        space.decisions,
        formulation.folding,
        record.mesh,
        annotations,
        space.compiler,
        unscattered=space.resharder.machine.unscattered_axes,
    )


def traced_gradient(planned: PlanningResult, mesh: Any) -> Any:
    """The gradient of a planned forward function, jitted on a mesh in the planned layouts and traced.

    Its arguments are flat: the function's leaves, then the cotangents of outputs that are no scalars.
    """
    space, assignment = planned.space, planned.assignment
    assert space.gradient is not None  # asked only of plans for a gradient
    priced, axes = space.priced, space.decisions.mesh

    def shardings(codes: Iterable[int], avals: Sequence[Any]) -> list[NamedSharding]:
        return [NamedSharding(mesh, layout_of(c, len(a.shape), axes).spec()) for c, a in zip(codes, avals, strict=True)]

    jitted = jax.jit(
        emitted(space.traced, space.gradient, planned.record.pins, mesh),
        in_shardings=tuple(shardings(map(assignment.input_code, range(len(priced.in_avals))), priced.in_avals)),
        out_shardings=shardings(map(assignment.output_code, range(len(priced.out_avals))), priced.out_avals),
    )
    return jitted.trace(*priced.in_avals)
