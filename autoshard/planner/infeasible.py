"""Infeasible: why no plan fits, at which equation, and the way out."""

from collections.abc import Mapping
from dataclasses import replace

from autoshard.errors import InfeasibleError
from autoshard.ir.constraints import spec_of
from autoshard.ir.op_traits import CONSTRAINT
from autoshard.ir.recomputation import ADD, AUTO_OFFLOAD, STATE, WRITTEN, offloads_residuals, offloads_state
from autoshard.ir.recomputed import savable
from autoshard.planner.host_state_space import has_host_state
from autoshard.planner.record import PlanRecord
from autoshard.planner.request import PlanRequest
from autoshard.planner.search_space import SearchSpace
from autoshard.problem import memory_profile
from autoshard.problem.decisions import place_of
from autoshard.problem.formulation import UNIT_S, Formulation
from autoshard.problem.network import INF
from autoshard.report.tables import bytes_text
from autoshard.solver.solution import Solution, Status

DAY_S = 86_400.0
CHECKPOINT = "jax.checkpoint around a layer"
KEEPING_LESS = f'remat="add", or {CHECKPOINT}'
WHATEVER_IS_KEPT = ", as far as was tried of what backward passes keep or repeat"
PINS_NAMED = 6  # of those that exclude each other


def infeasible(
    space: SearchSpace, formulation: Formulation, solution: Solution, time_limit_s: float
) -> InfeasibleError:
    """The error of a problem without a solution.

    Args:
      space: the search space of the request.
      formulation: its problem.
      solution: the solver's result: the smallest peak if memory is the reason, else that no choice
        is allowed.
      time_limit_s: the solver's limit.
    """
    limit, mesh = space.request.memory_bytes, space.request.target.axes
    if solution.status is Status.UNKNOWN:
        return InfeasibleError(
            f"no plan was found within {time_limit_s:g} s (limit {bytes_text(limit)} per device on {mesh}); "
            "raise time_limit_s, or the memory limit",
            limit_bytes=limit,
        )
    if solution.forbidden:
        return InfeasibleError(_forbidden(space), limit_bytes=limit)
    if solution.smallest_peak_bytes is None:
        return InfeasibleError(
            f"no plan fits {bytes_text(limit)} per device on {mesh}; how much the least one needs was not found within "
            f"{time_limit_s:g} s: raise memory=, or time_limit_s to be told",
            limit_bytes=limit,
        )
    decisions = space.decisions
    choice = formulation.read(solution.choice)
    peak, at, kinds = memory_profile.peak(decisions, choice)
    bound = min(solution.peak_bound_bytes or 0, peak)
    tried = WHATEVER_IS_KEPT if _tried(space) else ""
    proven = "" if bound >= peak else f" (none has less than {bytes_text(bound)})" if bound else ""
    return InfeasibleError(
        f"no plan fits {bytes_text(limit)} per device on {mesh}{tried}; "
        f"the smallest peak found is {bytes_text(peak)}{proven}\n"
        f"  at {place_of(decisions, at)}: {_parts(kinds)}\n"
        f"  {_way_out(space, kinds)}",
        peak_bytes=peak,
        bound_bytes=bound,
        limit_bytes=limit,
        where=place_of(decisions, at),
        kinds=kinds,
    )


def with_gaps(record: PlanRecord, space: SearchSpace) -> InfeasibleError:
    """The error of a problem whose plans fit but for the gaps of a heap; `record`: the smallest that was tried."""
    memory = record.memory
    return InfeasibleError(
        f"no plan was found that fits {bytes_text(memory.limit_bytes)} per device on {record.mesh} with the gaps that "
        f"the compiler leaves between buffers; the smallest peak found is {bytes_text(memory.peak_bytes)}\n"
        f"  at {memory.at}: {_parts(memory.kinds)}\n"
        f"  {_way_out(space, memory.kinds)}",
        peak_bytes=memory.peak_bytes,
        limit_bytes=memory.limit_bytes,
        where=memory.at,
        kinds=memory.kinds,
    )


def _parts(kinds: Mapping[str, int]) -> str:
    """The parts of a peak, the largest first."""
    return " + ".join(f"{kind} {bytes_text(n)}" for kind, n in sorted(kinds.items(), key=lambda item: -item[1]) if n)


def _forbidden(space: SearchSpace) -> str:
    """The requests that exclude each other, if costs alone forbid every choice."""
    priced, wanted = space.priced, space.request.shardings
    pinned = [f"{priced.in_paths[i]} in {spec}" for i, spec in sorted(wanted.inputs.items())]
    pinned += [f"output {priced.out_paths[i]} in {spec}" for i, spec in sorted(wanted.outputs.items())]
    pinned += [f"{spec_of(eqn)} at {eqn.where}" for eqn in space.decisions.graph.eqns if eqn.primitive == CONSTRAINT]
    if not pinned:
        return (
            f"every layout costs more than can be counted ({INF * UNIT_S / DAY_S:.0f} days a step): "
            "a loop has too many trips; plan its body as a function of its own"
        )
    more = f" and {len(pinned) - PINS_NAMED} more" if len(pinned) > PINS_NAMED else ""
    return (
        "the pins exclude each other: no layout satisfies all of them, however much memory there is; loosen one of "
        f"{', '.join(pinned[:PINS_NAMED])}{more}"
    )


def _tried(space: SearchSpace) -> bool:
    """Whether it is decided what backward passes keep: that they keep less is no way out any more."""
    request = space.request
    if request.recomputation is not None:
        return True
    return not request.gradient_of and request.remat != WRITTEN and bool(savable(request.traced, request.remat).saved)


def nothing_fits(request: PlanRequest, peak_bytes: int | None) -> InfeasibleError:
    """The error of a request for which no choice of what is kept helps."""
    least = "" if peak_bytes is None else f"; the smallest peak found is {bytes_text(peak_bytes)}"
    option = offloading(request)
    offload = f"{option}; " if option else ""
    return InfeasibleError(
        f"no plan fits {bytes_text(request.memory_bytes)} per device on {request.target.axes}, "
        f"as far as was tried of what backward passes keep or repeat{least}\n"
        f"  what helps: {offload}a smaller batch (autoshard.accumulate splits it); more devices, or mesh axes that "
        "divide more dimensions; or raise memory=",
        peak_bytes=peak_bytes,
        limit_bytes=request.memory_bytes,
    )


def offloading(request: PlanRequest) -> str:
    """The option with which the host's memory could hold more of a program; empty where it could not."""
    if request.gradient_of or not request.target.compiler.keeps_host_values_apart:
        return ""
    asked, traced = request.offload, request.traced
    traced = traced if traced.source is None else replace(traced, jaxpr=traced.source)
    residuals = not offloads_residuals(asked) and request.remat != WRITTEN and savable(traced, request.remat).stackable
    state = not offloads_state(asked) and has_host_state(request)
    if residuals or (state and offloads_residuals(asked)):
        return f'offload="{AUTO_OFFLOAD}"'
    return f'offload="{STATE}"' if state else ""


def _way_out(space: SearchSpace, kinds: Mapping[str, int]) -> str:
    """The change that helps most, given the parts of a peak."""
    ways: list[str] = []
    state = sum(kinds.get(kind, 0) for kind in ("parameters", "optimizer", "arguments"))
    passing = sum(kinds.get(kind, 0) for kind in ("activations", "copies"))
    if not space.tied:
        ways.append("donate the state (donate_argnums=), so that the new one takes its place")
    if passing >= state and space.request.microbatches is None:
        ways.append("a smaller batch (autoshard.accumulate splits it)")
    if passing and space.request.gradient_of:
        ways.append(f"{CHECKPOINT}, or to plan the step that takes the gradient: what it keeps is decided")
    elif passing and not _tried(space) and savable(space.traced, ADD).saved:
        ways.append(KEEPING_LESS)
    if (passing or kinds.get("optimizer")) and (option := offloading(space.request)):
        ways.append(option)
    ways.append("more devices, or mesh axes that divide more dimensions")
    return "what helps: " + "; ".join(ways) + "; or raise memory="
