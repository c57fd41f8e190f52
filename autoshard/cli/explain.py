"""`autoshard explain`: the reason for a value's layout, and the changes that would turn it."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import numpy as np
import typer

from autoshard.api.options import REL_GAP
from autoshard.cli.app import app, errors, print_json
from autoshard.cli.options import (
    Asked,
    DonateOption,
    GradOption,
    HardwareOption,
    HostLocalOption,
    HostsOption,
    JsonOption,
    MemoryOption,
    MeshOption,
    OffloadChoice,
    PinOption,
    RematChoice,
    SetOption,
    TargetArgument,
    TimeOption,
    planned,
)
from autoshard.cli.written import assignments, byte_count, is_position, mesh_axes
from autoshard.errors import AutoshardError, InfeasibleError, SpecError
from autoshard.explain import runner_up, text
from autoshard.explain.recalls import recalls
from autoshard.explain.sensitivity import Varied, turning_points
from autoshard.explore.builder import load_builder
from autoshard.explore.remedies import remedies
from autoshard.explore.trial import Task
from autoshard.ir.recomputation import ADD, NO_OFFLOAD
from autoshard.planner.planning_result import PlanningResult
from autoshard.report import progress
from autoshard.report.tables import bytes_text, time_text


@app.command()
def explain(
    target: TargetArgument,
    what: Annotated[str | None, typer.Argument(help="inputs by path pattern, such as '**.wq'")] = None,
    *,
    at: Annotated[str | None, typer.Option("--at", help="or a source line: model.py:61")] = None,
    flips: Annotated[
        bool,
        typer.Option(
            "--flips", help="also where link rates, memory, batch and sequence turn it (plans about 30 times)"
        ),
    ] = False,
    mesh: MeshOption = None,
    hardware: HardwareOption = None,
    memory: MemoryOption = None,
    donate: DonateOption = None,
    pin: PinOption = None,
    host_local: HostLocalOption = None,
    hosts: HostsOption = None,
    set_: SetOption = None,
    for_grad: GradOption = False,
    remat: RematChoice = ADD,
    offload: OffloadChoice = NO_OFFLOAD,
    time_limit: TimeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say why WHAT lies as it does in TARGET's plan: the runner-up, its price, what turns the decision."""
    asked = Asked.of(locals(), gap=REL_GAP)
    try:
        made = planned(asked)
    except InfeasibleError as error:
        if mesh is None:  # what would fit is planned on the mesh that is asked for
            raise
        task = Task(
            target=target,
            keywords=assignments(set_ or (), "--set"),
            donate=None if donate is None else tuple(int(d) if is_position(d) else d for d in donate),
            for_grad=for_grad,
            memory=None if memory is None else byte_count(memory),
            remat=remat,
            offload=offload,
        )
        with progress.shown(errors(), "what would fit"):
            ways = remedies(task, mesh_axes(mesh), hardware or "")
        for way in ways:
            fits = f"{bytes_text(way.peak_bytes)} of {bytes_text(way.limit_bytes)}, a step of {time_text(way.step_s)}"
            typer.echo(f"fits with {way.change}: {fits}")
        raise InfeasibleError(str(error), peak_bytes=error.peak_bytes, limit_bytes=error.limit_bytes) from error
    with progress.shown(errors(), "explain"):
        found = runner_up.explain(made.planned, what, at=at)
        undivided = runner_up.blocked(made.record.inputs, made.record.mesh)
        read = () if at is None else recalls(made.planned, at)
    turned = ()
    if flips:
        axes = ",".join(f"{name}={size}" for name, size in made.record.mesh.shape.items())

        def plan_at(assignment: str) -> PlanningResult:
            other = planned(
                replace(asked, mesh=axes, set_=[*(set_ or ()), assignment]),
                constraints="all",
            )
            return other.planned

        varied = sizes(target, assignments(set_ or (), "--set"), made.planned, plan_at)
        with progress.shown(errors(), "turns"):
            turned = turning_points(
                made.planned, made.planned.space.request.target.hardware, what, at=at, varied=varied
            )
    if as_json:
        print_json(text.to_json(found, turned, undivided, read))
    else:
        more = runner_up.unexplained(made.planned, what, at=at)
        typer.echo(text.text(found, turned, undivided, read, unexplained=more))


SIZES = ("batch", "sequence")  # arguments of builders, and the dimensions of token ids


def sizes(
    target: str, keywords: Mapping[str, Any], planned: PlanningResult, plan_at: Callable[[str], PlanningResult]
) -> Varied:
    """The sizes that a builder takes, with their present values.

    A value that is neither set nor a default is read off the largest integer input, [batch, sequence].

    Args:
      target: the builder.
      keywords: that it was called with.
      planned: the plan.
      plan_at: the plan with one more assignment, such as `batch=16`.
    """
    ids = [a.shape for a in planned.traced.in_avals if a.shape and np.issubdtype(a.dtype, np.integer)]
    shape = max(ids, key=lambda s: int(np.prod(s)), default=())
    parameters = inspect.signature(load_builder(target)).parameters
    found: dict[str, tuple[int, Callable[[int], PlanningResult]]] = {}

    def at(name: str, size: int) -> PlanningResult:
        try:
            return plan_at(f"{name}={size}")
        except InfeasibleError:
            raise
        except (AutoshardError, ValueError) as error:  # the builder's own refusals, such as of a long sequence
            raise SpecError(f"{target} has no {name} of {size}: {error}") from error

    for dim, name in enumerate(SIZES):
        if name not in parameters:
            continue
        now = keywords.get(name, parameters[name].default)
        if not isinstance(now, int) and dim < len(shape):
            now = int(shape[dim])
        if isinstance(now, int):
            found[name] = (now, partial(at, name))
    return found
