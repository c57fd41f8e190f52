"""Evaluate: the price of a hand-written layout in the planner's own model."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Unpack

import cost_models
from autoshard.api.evaluation import Completion, Evaluation
from autoshard.api.options import Options, ProgramOptions, keywords_of, listing, refuse_misspelt
from autoshard.backends.devices import MeshLike
from autoshard.backends.shardy.propagation import Annotations, propagated
from autoshard.costs.overlap import hidden_shares
from autoshard.costs.resharding import Resharder
from autoshard.costs.strategies import layout_of
from autoshard.errors import InfeasibleError
from autoshard.ir import constraints
from autoshard.planner import pipeline
from autoshard.planner.budget import Budget
from autoshard.planner.build_record import describe, program_pins
from autoshard.planner.nearest import before_casts, gathered, nearest, of_partitioner
from autoshard.planner.record import Certificate
from autoshard.planner.request import request_of
from autoshard.planner.requested_shardings import AUTO
from autoshard.planner.search_space import SearchSpace, build_search_space
from autoshard.problem.assignment import Assignment
from autoshard.problem.formulation import UNIT_S, formulate
from autoshard.problem.symmetry import unfolded
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
      completion: how open layouts are filled in: "shardy", by the partitioner's own propagation;
        "best", by the best plan that keeps the annotations.
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
    request = request_of(asked.call(fn, args, kwargs), asked.request.target(mesh, hardware), asked.request)
    space = build_search_space(request)
    if completion == "shardy":
        return _by_shardy(space)
    return _by_plan(space, asked.budget)


def _by_hand(space: SearchSpace) -> Annotations:
    """The annotations written by hand."""
    asked = space.request.shardings
    inputs, outputs = dict(asked.inputs), dict(asked.outputs)
    for output, position in space.tied.items():
        if position in inputs:
            outputs.setdefault(output, inputs[position])
        elif output in outputs:
            inputs[position] = outputs[output]
    own = constraints.own(space.decisions.graph)
    return Annotations(inputs=inputs, outputs=outputs, pins=own, donated=asked.donated)


def _by_shardy(space: SearchSpace) -> Evaluation:
    """The assignment nearest to the layouts that propagation gives the annotated program."""
    target, annotations = space.request.target, _by_hand(space)
    compiler, decisions = target.compiler, of_partitioner(space.decisions)
    if compiler.moves_collectives_past_casts:
        decisions = before_casts(decisions)
    outermost = compiler.collectives_along_outermost_only
    shares = hidden_shares(target.machine, compiler)
    resharder = Resharder(decisions.mesh, target.machine, pinned=False, outermost=outermost, shares=shares)
    layouts = propagated(space.priced, decisions.graph, decisions.made, target.axes, annotations, compiler.platform)
    choice, inexact = nearest(decisions, resharder, layouts, compiler)
    if target.machine.gathers_ahead:
        decisions = gathered(decisions, choice)
    problem = formulate(decisions, resharder, memory_bytes=None, folding=unfolded(decisions)).problem
    objective = price(problem, choice).objective
    assert objective is not None  # `nearest` takes no forbidden choice
    seconds = objective * UNIT_S
    also: list[str] = []
    if inexact:
        also.append(f"{inexact} values lie in split or uneven layouts, which are priced as if whole there")
    assignment = Assignment(decisions=decisions, resharder=resharder, choice=choice)
    record = describe(
        space,
        assignment,
        Certificate(
            status="priced",
            objective_s=seconds,
            bound_s=seconds,
            gap=0.0,
            solver="none",
            space=(
                "one assignment: for every decision the choice nearest to the layouts of Shardy's propagation; "
                f"priced by autoshard's model of {target.hardware.name}"
            ),
        ),
        also=also,
    )
    return Evaluation(
        record=replace(record, pins=annotations.pins),
        completion="shardy",
        assignment=assignment,
        annotations=annotations,
        space=space,
    )


def _by_plan(space: SearchSpace, budget: Budget) -> Evaluation:
    """The best plan that keeps the annotations; where none fits in memory, the best of all."""
    try:
        planned = pipeline.solve_space(space, budget)
    except InfeasibleError:  # annotations that exclude each other do so without a limit, too
        planned = pipeline.solve_space(space.within(_NO_LIMIT), budget)
    record = planned.record
    inputs, outputs = (
        {i: layout_of(code, len(avals[i].shape), space.decisions.mesh).spec() for i, code in enumerate(codes)}
        for avals, codes in (
            (space.priced.in_avals, map(planned.assignment.input_code, range(len(space.priced.in_avals)))),
            (space.priced.out_avals, map(planned.assignment.output_code, range(len(space.priced.out_avals)))),
        )
    )
    return Evaluation(
        record=replace(record, memory=replace(record.memory, limit_bytes=space.request.memory_bytes)),
        completion="best",
        assignment=planned.assignment,
        annotations=Annotations(
            inputs=inputs,
            outputs=outputs,
            pins=program_pins(planned.assignment),
            donated=space.request.shardings.donated,
        ),
        space=space,
    )
