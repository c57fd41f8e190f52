"""Decided program: the request behind a plan's record, for the program that the plan runs."""

from dataclasses import replace

from autoshard.ir.recomputation import WRITTEN
from autoshard.planner.host_state_space import on_host
from autoshard.planner.loop_sums_space import summing_once
from autoshard.planner.recomputation_space import keeping
from autoshard.planner.record import PlanRecord
from autoshard.planner.request import PlanRequest


def decided_by(record: PlanRecord, request: PlanRequest) -> PlanRequest:
    """The request whose number of micro-batches, kept values and sums after loops are those of a record."""
    request = request if record.microbatches is None else request.in_microbatches(record.microbatches)
    request = on_host(request, record.host_state) if record.host_state else request
    chosen = record.recomputation
    request = replace(request, remat=WRITTEN) if chosen is None else keeping(request, chosen)
    return summing_once(request, record.loop_sums) if record.loop_sums else request
