"""`autoshard explain`: why a value lies as it does, and what would turn it."""

from typing import Annotated

import typer

import cost_models
from autoshard import explain as reasons
from autoshard.api import REL_GAP
from autoshard.cli.app import app, errors, print_json
from autoshard.cli.options import (
    DonateOption,
    ForwardOption,
    HardwareOption,
    JsonOption,
    MemoryOption,
    MeshOption,
    PinOption,
    SetOption,
    TargetArgument,
    TimeOption,
    planned,
)
from autoshard.cli.written import assignments, byte_count, mesh_axes
from autoshard.errors import InfeasibleError
from autoshard.remedies import remedies
from autoshard.report import explanation, progress
from autoshard.tables import bytes_text, time_text
from autoshard.trial import Task


@app.command()
def explain(
    target: TargetArgument,
    what: Annotated[str | None, typer.Argument(help="inputs by path pattern, such as '**.wq'")] = None,
    *,
    at: Annotated[str | None, typer.Option("--at", help="or a source line: model.py:61")] = None,
    flips: Annotated[
        bool, typer.Option("--flips", help="also where link rates and memory turn the decision (plans about ten times)")
    ] = False,
    mesh: MeshOption = None,
    hardware: HardwareOption = None,
    memory: MemoryOption = None,
    donate: DonateOption = None,
    pin: PinOption = None,
    set_: SetOption = None,
    forward: ForwardOption = False,
    time_limit: TimeOption = 20.0,
    as_json: JsonOption = False,
) -> None:
    """Say why WHAT lies as it does in TARGET's plan: the runner-up, its price, what turns the decision."""
    try:
        made = planned(target, mesh, hardware, memory, donate, pin, set_, forward, REL_GAP, time_limit)
    except InfeasibleError as error:
        task = Task(
            target=target,
            keywords=assignments(set_ or (), "--set"),
            donate=None if donate is None else tuple(int(d) if d.isdigit() else d for d in donate),
            for_grad=False if forward else None,
            memory=None if memory is None else byte_count(memory),
        )
        with progress.shown(errors(), "what would fit"):
            ways = remedies(task, mesh_axes(mesh or ""), hardware or "")
        for way in ways:
            fits = f"{bytes_text(way.peak_bytes)} of {bytes_text(way.limit_bytes)}, a step of {time_text(way.step_s)}"
            typer.echo(f"fits with {way.change}: {fits}")
        raise InfeasibleError(str(error), peak_bytes=error.peak_bytes, limit_bytes=error.limit_bytes) from error
    assert made.planned is not None  # planned just now
    with progress.shown(errors(), "explain"):
        found = reasons.explain(made.planned, what, at=at)
        turned = ()
        if flips:
            turned = reasons.flip_points(made.planned, cost_models.hardware(hardware or ""), what, at=at)
        undivided = reasons.blocked(made.record.inputs, made.record.mesh)
    if as_json:
        print_json(explanation.to_json(found, turned, undivided))
    else:
        typer.echo(explanation.text(found, turned, undivided))
