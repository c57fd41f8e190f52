"""Host state's space: a request, and the same with a part of the step's state in the host's memory.

What may lie there comes in groups of leaves that are updated together (`ir/host_state.py`). They are tried in fixed
shares of all of their bytes, the largest groups first, whatever the limit: so a plan within less memory was tried
within more, too.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import Any, NamedTuple, TypeAlias

from autoshard.errors import InfeasibleError, SpecError, TimeLimitError
from autoshard.ir.host_state import StateGroup, state_groups, with_host_state
from autoshard.ir.paths import dotted
from autoshard.ir.recomputation import STATE
from autoshard.ir.ties import ties
from autoshard.ir.trace import Traced
from autoshard.planner.budget import Budget
from autoshard.planner.certificate import unfinished
from autoshard.planner.record import HOST_STATE
from autoshard.planner.request import PlanRequest
from autoshard.problem import bill, memory_profile
from autoshard.problem.formulation import UNIT_S
from autoshard.report.tables import bytes_text, time_text

SHARES = (0.25, 0.5, 0.75, 1.0)
NAMED = 3  # parts of the state, in words

Planned: TypeAlias = Any  # a `PlanningResult`, which stands above this room
Planner = Callable[[PlanRequest, Budget], Planned]


class HostShare(NamedTuple):
    """The inputs of a share of the state, and their bytes on all devices together."""

    inputs: tuple[int, ...]
    nbytes: int


def host_shares(request: PlanRequest) -> tuple[HostShare, ...]:
    """The shares of a request's state that may lie in the host's memory, rising.

    Raises:
      SpecError: the state is to lie there, and none can.
    """
    groups = _groups(request.traced, request.shardings.donated)
    if not groups and request.offload == STATE:
        raise SpecError(
            f"offload={STATE!r}: {request.name} has no state that is donated and that its update alone reads\n"
            "  what helps: donate the state (donate_argnums=), and return the new one under the same paths; or leave "
            "offload out"
        )
    total = sum(group.nbytes for group in groups)
    shares = dict.fromkeys(_first(groups, share * total) for share in SHARES) if groups else {}
    return tuple(shares)


def _first(groups: Sequence[StateGroup], least: float) -> HostShare:
    """The first groups that have so many bytes together."""
    inputs: list[int] = []
    nbytes = 0
    for group in groups:
        if nbytes >= least:
            break
        inputs += group.inputs
        nbytes += group.nbytes
    return HostShare(tuple(sorted(inputs)), nbytes)


def has_host_state(request: PlanRequest) -> bool:
    """Whether some of a request's state could lie in the host's memory."""
    return bool(_groups(request.traced, request.shardings.donated))


def _groups(traced: Traced, donated: frozenset[int]) -> tuple[StateGroup, ...]:
    return state_groups(traced, ties(traced, donated))


def on_host(request: PlanRequest, inputs: tuple[int, ...]) -> PlanRequest:
    """The request for the program with these inputs, and what replaces them, in the host's memory.

    Raises:
      SpecError: they are no such state.
    """
    traced = with_host_state(request.traced, ties(request.traced, request.shardings.donated), inputs)
    return replace(request, program=request.program.rewritten(traced, "state on the host"), host_state=inputs)


def best_with_state(request: PlanRequest, plan: Planner, budget: Budget, worth: float) -> Planned:
    """The best plan of a request, with none of its state in the host's memory, or with a share of it.

    Args:
      request: whose state may lie there.
      plan: a request → its best plan, whatever its state.
      budget: how far to solve, each time.
      worth: the part of the step that is saved, at least, where state lies there although it need not.

    Raises:
      InfeasibleError: no plan fits, with all of the state in the host's memory either.
      SpecError: the state is to lie there, and none can.
      TimeLimitError: the time ended before there was a plan.
    """
    shares = host_shares(request)
    best: Planned = None
    errors: list[InfeasibleError] = []
    try:
        best = plan(request, budget)
    except InfeasibleError as error:
        if not shares:
            raise
        errors.append(error)
    try:
        least_s = 0.0 if best is None else _least_s(request, plan, budget, best)
    except TimeLimitError as error:
        return _unfinished(best, error)
    # Where nothing fits without, the whole state says first whether anything does; then the smaller shares follow.
    for share in shares if best is not None else (shares[-1], *shares[:-1]):
        worth_s = inf if best is None else best.solution.objective * UNIT_S * (1 - worth)
        if least_s + _copies_s(request, share) >= worth_s:
            continue
        below = replace(budget, cutoff_s=lambda worth_s=worth_s: min(worth_s, budget.cutoff_s()))
        try:
            found = plan(on_host(request, share.inputs), below)
        except InfeasibleError as error:
            errors.append(error)
            if best is None:
                break
            continue
        except TimeLimitError as error:
            if best is None:
                raise
            return _unfinished(_said(best), error)
        if found.solution.objective * UNIT_S < worth_s:
            best = found
    if best is None:
        raise min(errors, key=lambda error: inf if error.peak_bytes is None else error.peak_bytes)
    return _said(best) if shares else best


def _unfinished(best: Planned, error: TimeLimitError) -> Planned:
    """A plan that says that not every share was tried, when its time ended."""
    not_known = "whether more of the state is better kept in the host's memory"
    return replace(best, record=unfinished(best.record, error, not_known))


def _least_s(request: PlanRequest, plan: Planner, budget: Budget, best: Planned) -> float:
    """The step of the best plan that needs no more memory than there is, however much that is."""
    most = memory_profile.most_peak(best.space.decisions)
    if best.record.recomputation is None and most <= request.memory_bytes:
        return best.solution.objective * UNIT_S
    return plan(replace(request, memory_bytes=max(most, request.memory_bytes) * 8), budget).solution.objective * UNIT_S


def _copies_s(request: PlanRequest, share: HostShare) -> float:
    """The seconds that the copies of a share take at least: of as little of it as a device can have."""
    target = request.target
    return share.nbytes / target.axes.size / target.machine.host_bytes_per_s


def _said(found: Planned) -> Planned:
    """A plan that says what of its state lies in the host's memory; nothing is proven of other shares."""
    record = found.record
    shares = ", ".join(f"{share:.0%}" for share in SHARES)
    space = f"{record.certificate.space}; which state lies in the host's memory ({shares} or none was tried) is no part"
    certificate = replace(record.certificate, space=f"{space} of the proof")
    there = found.space.request.host_state
    notes = (*record.notes, _note(found, there)) if there else record.notes
    return replace(found, record=replace(record, certificate=certificate, notes=notes))


def _note(found: Planned, inputs: Sequence[int]) -> str:
    """`state in the host's memory: 4 leaves of opt.mu, opt.nu: 3.7 GB per device, …`."""
    assignment, paths = found.assignment, found.record.inputs
    nbytes = memory_profile.host_state_bytes(assignment.decisions, assignment.choice)
    waited_s = sum(copy.waited_s for copy in bill.host_copies(assignment))
    roots = dict.fromkeys(_root([dotted(paths[j].path) for j in inputs], dotted(paths[i].path)) for i in inputs)
    names = ", ".join(list(roots)[:NAMED]) + (", …" if len(roots) > NAMED else "")
    return (
        f"{HOST_STATE} {len(inputs)} leaves of {names}: {bytes_text(nbytes)} per device, whose copies the step waits "
        f"{time_text(waited_s)} for"
    )


def _root(paths: Sequence[str], path: str) -> str:
    """The part of a path before what another one ends in, too: of `opt.mu.w`, beside `opt.nu.w`, `opt.mu`."""
    own = path.split(".")[::-1]
    others = (other.split(".")[::-1] for other in paths if other != path)
    shared = max((_equal_at_first(own, other) for other in others), default=0)
    return ".".join(own[shared:][::-1]) or path


def _equal_at_first(some: Sequence[str], others: Sequence[str]) -> int:
    """How many of the first items are equal."""
    return next((k for k, (a, b) in enumerate(zip(some, others, strict=False)) if a != b), min(len(some), len(others)))
