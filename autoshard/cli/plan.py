"""`autoshard plan`: the layout with the least step time that fits in memory."""

from pathlib import Path
from typing import Annotated

import typer

from autoshard.api.options import REL_GAP
from autoshard.cli.app import app
from autoshard.cli.options import (
    Asked,
    Compiler,
    DonateOption,
    GapOption,
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
from autoshard.cli.written import writable
from autoshard.ir.recomputation import ADD, NO_OFFLOAD
from autoshard.planner.pipeline import ConstraintPolicy


@app.command()
def plan(
    target: TargetArgument,
    *,
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
    gap: GapOption = REL_GAP,
    time_limit: TimeOption = None,
    refine: Annotated[
        Compiler | None, typer.Option("--refine", help="compile the best plans and keep the shortest schedule")
    ] = None,
    candidates: Annotated[int, typer.Option("--candidates", help="plans that --refine compiles")] = 3,
    constraints: Annotated[
        ConstraintPolicy,
        typer.Option("--constraints", help="compiled: none that the compiler does without, which takes minutes"),
    ] = "needed",
    out: Annotated[Path | None, typer.Option("--out", callback=writable, help="write the plan file here")] = None,
    as_json: JsonOption = False,
) -> None:
    """Plan TARGET: the layout with the least step time that fits in memory."""
    made = planned(
        Asked.of(locals()),
        refine=None if refine is None else refine.value,
        candidates=candidates,
        constraints=constraints,
    )
    if out is not None:
        made.save(out)
    if as_json:
        typer.echo(made.record.dumps(), nl=False)
    else:
        typer.echo(made.summary())
