"""Bind: a plan and the function that it was made for, whose shapes, paths and digest are compared."""

from collections.abc import Callable, Sequence
from typing import Any

from autoshard.errors import PlanFileError, PlanMismatchError, SpecError
from autoshard.ir import rewrite
from autoshard.ir.host_state import with_host_state
from autoshard.ir.loop_sums import summed_once
from autoshard.ir.recomputed import recomputed
from autoshard.ir.ties import ties
from autoshard.ir.trace import Traced
from autoshard.planner import program
from autoshard.planner.program import Program
from autoshard.planner.record import PlanRecord


def bound_program(record: PlanRecord, fn: Callable[..., Any], args: Sequence[Any]) -> Traced:
    """The program of `fn(*args)`, which is the one that the plan was made for.

    Raises:
      PlanMismatchError: the program is another one, or the plan lacks a layout that a misread call needs.
      PlanFileError: the plan's own layouts do not fit the program of its digest.
    """
    asked = _program(record, fn, args)
    traced = asked.traced
    _check_inputs(record, traced)
    if not traced.is_digest(record.digest):
        raise PlanMismatchError(
            f"the plan was made for another program ({record.name}): its digest is {record.digest}, "
            f"this function's is {traced.digest}; plan again"
        )
    try:
        traced = traced if asked.open_count is None or record.gradient_of else _in_microbatches(asked, record)
        if record.host_state:
            traced = with_host_state(traced, ties(traced, frozenset(record.donated)), record.host_state)
        traced = traced if record.recomputation is None else recomputed(traced, record.recomputation)
        traced = summed_once(traced, record.loop_sums) if record.loop_sums else traced
        made = [(leaf.path, leaf.shape, leaf.dtype) for leaf in record.outputs]
        if made != [(p, a.shape, str(a.dtype)) for p, a in zip(traced.out_paths, traced.out_avals, strict=True)]:
            raise SpecError("its outputs are not those of the program that its digest is of")
        rewrite.check(traced.jaxpr, record.pins, record.mesh)
    except SpecError as error:
        raise PlanFileError(f"the plan of {record.name} is damaged: {error}; plan again") from error
    if not record.emitted and (lacking := rewrite.not_laid_out(traced.jaxpr, record.pins)):
        raise PlanMismatchError(
            f"the plan of {record.name} was made by an older autoshard, which left {lacking[0]} to XLA's "
            "partitioner; that misreads it: plan again"
        )
    return traced


def _check_inputs(record: PlanRecord, traced: Traced) -> None:
    want = [(leaf.path, leaf.shape, leaf.dtype) for leaf in record.inputs]
    have = [(p, a.shape, str(a.dtype)) for p, a in zip(traced.in_paths, traced.in_avals, strict=True)]
    if want == have:
        return
    for old, new in zip(want, have, strict=False):
        if old != new:
            raise PlanMismatchError(
                f"the plan was made for {old[0]}: {old[2]}{list(old[1])}, "
                f"got {new[0]}: {new[2]}{list(new[1])}; plan again"
            )
    raise PlanMismatchError(f"the plan was made for {len(want)} input leaves, got {len(have)}; plan again")


def _program(record: PlanRecord, fn: Callable[..., Any], args: Sequence[Any]) -> Program:
    """The program, with an open accumulation in as many parts as the plan has; the first if none is the plan's."""
    variants = list(program.bind(fn, args, {}).variants(record.mesh))
    return next((one for one in variants if one.traced.is_digest(record.digest)), variants[0])


def _in_microbatches(asked: Program, record: PlanRecord) -> Traced:
    """The program in as many micro-batches as the plan has.

    Raises:
      SpecError: the plan has none, or the program does not split so.
    """
    assert asked.open_count is not None
    count = record.microbatches
    if count is None or count not in asked.open_count.counts:
        raise SpecError(f"its program takes one of {', '.join(map(str, asked.open_count.counts))} micro-batches")
    return asked.open_count.program(count).traced
