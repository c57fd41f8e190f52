"""Evaluate: what a hand-written layout costs, in the planner's own model."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Unpack

import cost_models
from autoshard.api.evaluation import Completion, Evaluation
from autoshard.api.options import Options, ProgramOptions, keywords_of, listing, refuse_misspelt
from autoshard.backends.devices import MeshLike
from autoshard.backends.shardy.propagation import Annotations, propagated
from autoshard.costs.resharding import Resharder
from autoshard.costs.strategies import layout_of
from autoshard.errors import InfeasibleError
from autoshard.ir import constraints
from autoshard.planner import pipeline
from autoshard.planner.build_record import describe, program_pins
from autoshard.planner.nearest import before_casts, gathered, nearest, of_partitioner
from autoshard.planner.pipeline import Budget
from autoshard.planner.record import Certificate
from autoshard.planner.request import PlanRequest, request_of_call
from autoshard.planner.requested_shardings import AUTO
from autoshard.problem.assignment import Assignment
from autoshard.problem.formulation import UNIT_S, formulate
from autoshard.solver.evaluate import evaluate as price

_NO_LIMIT = 2**60  # bytes: more than any device has


@listing(ProgramOptions, rest="kwargs")
def evaluate(
    fn: Callable[..., Any],
    *args: Any,
    mesh: MeshLike = None,
    hardware: str | cost_models.Hardware | None = None,
    in_specs: Any = AUTO,
    out_specs: Any = AUTO,
    completion: Completion = "shardy",
    **options: Unpack[ProgramOptions],
) -> Evaluation:
    """Prices the layout that a hand annotates `fn(*args, **kwargs)` with.

    The annotations are `in_specs`, `out_specs` and the `with_sharding_constraint`s in `fn`.
    A donated argument's output lies as the argument does.

    Args:
      fn: a jittable function.
      args: pytrees of arrays or ShapeDtypeStructs; nothing is allocated.
      mesh: as in `autoshard.plan`.
      hardware: as in `autoshard.plan`.
      in_specs: PartitionSpecs (or NamedShardings) of the arguments, a pytree prefix; `AUTO`
        or None leaves a leaf open.
      out_specs: likewise, of the outputs.
      completion: what the open layouts are: "shardy", those that the partitioner's own
        propagation gives them; "best", those of the best plan that keeps the annotations.
      **options: of `autoshard.plan`: memory (a layout that does not fit is priced all the same,
        see `Evaluation.fits`), unknown, donate_argnums, donate_argnames, static_argnums,
        static_argnames, for_grad; time_limit_s and rel_gap, for "best". Other keywords are
        arguments of `fn`, which a type checker does not let pass: give them by position.

    Raises:
      InfeasibleError: the annotations exclude each other ("best").
      MissingRuleError: a primitive without a rule, with its source line.
      SpecError: a spec that cannot be kept.
      MeshError: mesh, hardware and devices do not fit each other.
      ShardyError: propagation fails ("shardy").
    """
    known: Any = {name: value for name, value in options.items() if name in ProgramOptions.__annotations__}
    kwargs = {name: value for name, value in options.items() if name not in known}
    refuse_misspelt(fn, kwargs, "evaluate", keywords_of(evaluate))
    asked = Options(mesh=mesh, hardware=hardware, in_shardings=in_specs, out_shardings=out_specs, **known)
    question = request_of_call(
        fn,
        args,
        kwargs,
        mesh=mesh,
        hardware=hardware,
        in_shardings=in_specs,
        out_shardings=out_specs,
        memory=asked.memory_bytes,
        donate_argnums=asked.donate_argnums,
        donate_argnames=asked.donate_argnames,
        static_argnums=asked.static_argnums,
        static_argnames=asked.static_argnames,
        for_grad=asked.for_grad,
        unknown=asked.unknown,
    )
    if completion == "shardy":
        return _by_shardy(question)
    return _by_plan(question, time_limit_s=asked.time_limit_s, rel_gap=asked.rel_gap)


def _by_hand(question: PlanRequest) -> Annotations:
    """What is annotated by hand."""
    inputs, outputs = dict(question.wanted.inputs), dict(question.wanted.outputs)
    for output, position in question.setting.tied.items():
        if position in inputs:
            outputs.setdefault(output, inputs[position])
        elif output in outputs:
            inputs[position] = outputs[output]
    graph = question.setting.decisions.graph
    return Annotations(inputs=inputs, outputs=outputs, pins=constraints.own(graph), donated=question.wanted.donated)


def _by_shardy(question: PlanRequest) -> Evaluation:
    """The assignment nearest to what propagation makes of the annotations."""
    setting, place, annotations = question.setting, question.place, _by_hand(question)
    compiler, decisions = place.compiler, of_partitioner(setting.decisions)
    if compiler.moves_collectives_past_casts:
        decisions = before_casts(decisions)
    outermost = compiler.collectives_along_outermost_only
    resharder = Resharder(decisions.mesh, place.machine, pinned=False, outermost=outermost)
    layouts = propagated(setting.priced, decisions.graph, decisions.made, place.axes, annotations, compiler.platform)
    choice, inexact = nearest(decisions, resharder, layouts, compiler)
    if place.machine.gathers_ahead:
        decisions = gathered(decisions, choice)
    problem = formulate(decisions, resharder, memory_bytes=None, folded=False).problem
    objective = price(problem, choice).objective
    assert objective is not None  # `nearest` takes no forbidden choice
    seconds = objective * UNIT_S
    notes = list(question.notes)
    if inexact:
        notes.append(f"{inexact} values lie in split or uneven layouts, which are priced as if whole there")
    assignment = Assignment(decisions=decisions, resharder=resharder, choice=choice)
    record = describe(
        setting,
        assignment,
        certificate=Certificate(
            status="priced",
            objective_s=seconds,
            bound_s=seconds,
            gap=0.0,
            solver="none",
            space=(
                "one assignment: for every decision the choice nearest to the layouts of Shardy's propagation; "
                f"priced by autoshard's model of {place.hardware.name}"
            ),
        ),
        name=question.name,
        mesh=place.axes,
        hardware=place.hardware,
        machine=place.machine,
        wanted=question.wanted,
        memory_bytes=question.memory_bytes,
        notes=notes,
    )
    return Evaluation(
        record=replace(record, pins=annotations.pins),
        completion="shardy",
        assignment=assignment,
        annotations=annotations,
        setting=setting,
    )


def _by_plan(question: PlanRequest, *, time_limit_s: float, rel_gap: float) -> Evaluation:
    """The best plan that keeps the annotations; where none fits in memory, the best of all."""
    setting, place = question.setting, question.place

    def made(memory_bytes: int) -> pipeline.PlanningResult:
        return pipeline.solve_request(
            setting,
            name=question.name,
            mesh=place.axes,
            hardware=place.hardware,
            machine=place.machine,
            wanted=question.wanted,
            budget=Budget(memory_bytes=memory_bytes, time_limit_s=time_limit_s, rel_gap=rel_gap),
            notes=question.notes,
        )

    try:
        planned = made(question.memory_bytes)
    except InfeasibleError:
        planned = made(_NO_LIMIT)  # annotations that exclude each other do so there, too
    record = planned.record
    inputs, outputs = (
        {i: layout_of(code, len(avals[i].shape), setting.decisions.mesh).spec() for i, code in enumerate(codes)}
        for avals, codes in (
            (setting.priced.in_avals, map(planned.assignment.input_code, range(len(setting.priced.in_avals)))),
            (setting.priced.out_avals, map(planned.assignment.output_code, range(len(setting.priced.out_avals)))),
        )
    )
    return Evaluation(
        record=replace(record, memory=replace(record.memory, limit_bytes=question.memory_bytes)),
        completion="best",
        assignment=planned.assignment,
        annotations=Annotations(
            inputs=inputs,
            outputs=outputs,
            pins=program_pins(planned.assignment),
            donated=question.wanted.donated,
        ),
        setting=setting,
    )
