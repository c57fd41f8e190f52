"""Plans that fit with the gaps of the compiler's heap."""

from collections.abc import Callable
from dataclasses import replace

import jax.numpy as jnp
import pytest

from autoshard.errors import InfeasibleError
from autoshard.planner.infeasible import with_gaps
from autoshard.planner.planning_result import ATTEMPTS, PlanningResult, fitting
from autoshard.solver import Status
from tests.programs import Program, planned_of

LIMIT = 1000


@pytest.fixture(name="planned", scope="module")
def planned_() -> PlanningResult:
    found = planned_of(Program(fn=lambda x: x @ x, args=(jnp.ones((8, 8)),), names=("x",)))
    space = replace(found.space, request=replace(found.space.request, memory_bytes=LIMIT))
    return replace(found, space=space)


def taking(planned: PlanningResult, peak: int, objective: int = 10, bound: int = 10) -> PlanningResult:
    """A plan that takes so many bytes and picoseconds."""
    status = Status.OPTIMAL if objective == bound else Status.FEASIBLE
    memory = replace(planned.record.memory, peak_bytes=peak, limit_bytes=LIMIT, kinds={"gaps": 7})
    solution = replace(planned.solution, objective=objective, bound=bound, status=status)
    return replace(planned, record=replace(planned.record, memory=memory), solution=solution)


def fitted(solve: Callable[[int], PlanningResult], planned: PlanningResult) -> PlanningResult:
    return fitting(solve, LIMIT, lambda found: with_gaps(found.record, planned.space))


def asked_in_turn(*answers: PlanningResult | None) -> tuple[Callable[[int], PlanningResult], list[int]]:
    """A solver with these answers, where None is that nothing fits; and the limits that it is asked for."""
    limits: list[int] = []

    def solve(nbytes: int) -> PlanningResult:
        limits.append(nbytes)
        answer = answers[len(limits) - 1]
        if answer is None:
            raise InfeasibleError("nothing fits", limit_bytes=nbytes)
        return answer

    return solve, limits


def test_what_fits_is_solved_once(planned: PlanningResult) -> None:
    first = taking(planned, LIMIT)
    solve, limits = asked_in_turn(first)
    assert fitted(solve, planned) is first
    assert limits == [LIMIT]


def test_the_limit_is_lowered_by_what_a_plan_takes_too_much_and_the_first_bound_stays(planned: PlanningResult) -> None:
    """Below it no plan is that fits with gaps; the second's is of fewer plans."""
    solve, limits = asked_in_turn(
        taking(planned, LIMIT + 30), taking(planned, LIMIT + 5, 11, 11), taking(planned, LIMIT - 1, 12, 12)
    )
    found = fitted(solve, planned)
    assert limits == [LIMIT, LIMIT - 30, LIMIT - 35]
    assert found.record.memory.peak_bytes == LIMIT - 1
    assert (found.solution.objective, found.solution.bound, found.solution.status) == (12, 10, Status.FEASIBLE)
    proof = found.record.certificate
    assert (proof.status, proof.gap) == (str(Status.FEASIBLE), pytest.approx(2 / 12))
    assert proof.bound_s == pytest.approx(10e-12)


@pytest.mark.parametrize("then", [[None], [30] * ATTEMPTS], ids=["nothing lives in less", "always too much"])
def test_where_no_plan_fits_with_gaps_the_error_says_so(planned: PlanningResult, then: list[int | None]) -> None:
    over = [None if more is None else taking(planned, LIMIT + more) for more in (30, *then)]
    solve, _ = asked_in_turn(*over)
    with pytest.raises(InfeasibleError, match="with the gaps that the compiler leaves between buffers") as caught:
        fitted(solve, planned)
    error = caught.value
    assert (error.peak_bytes, error.limit_bytes, error.kinds) == (LIMIT + 30, LIMIT, {"gaps": 7})


def test_the_error_is_of_the_smallest_peak_that_was_tried(planned: PlanningResult) -> None:
    solve, limits = asked_in_turn(
        taking(planned, LIMIT + 9), taking(planned, LIMIT + 2), taking(planned, LIMIT + 5), None
    )
    with pytest.raises(InfeasibleError) as caught:
        fitted(solve, planned)
    assert caught.value.peak_bytes == LIMIT + 2
    assert limits == [LIMIT, LIMIT - 9, LIMIT - 11, LIMIT - 16]


def test_nothing_is_asked_for_in_no_bytes(planned: PlanningResult) -> None:
    solve, limits = asked_in_turn(taking(planned, 2 * LIMIT))
    with pytest.raises(InfeasibleError, match="smallest peak found"):
        fitted(solve, planned)
    assert limits == [LIMIT]


def test_what_does_not_fit_without_gaps_is_told_as_it_is(planned: PlanningResult) -> None:
    solve, _ = asked_in_turn(None)
    with pytest.raises(InfeasibleError, match="nothing fits"):
        fitted(solve, planned)
