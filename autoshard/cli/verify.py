"""`autoshard verify`: a plan beside the program that the real compiler makes of it."""

import json
import signal
from pathlib import Path
from typing import Annotated

import typer

import autoshard
from autoshard import files
from autoshard.api.options import REL_GAP
from autoshard.cli.app import WRONG, app, errors, print_json
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
from autoshard.cli.written import assignments, writable
from autoshard.errors import PlanMismatchError
from autoshard.explore.builder import load_target
from autoshard.ir.recomputation import ADD, NO_OFFLOAD
from autoshard.report import progress
from autoshard.verification import machine_json
from autoshard.verification.verify import TOLERANCE


@app.command()
def verify(
    target: TargetArgument,
    *,
    plan_file: Annotated[
        Path | None, typer.Option("--plan", help="a plan file of TARGET; without it TARGET is planned")
    ] = None,
    compiler: Annotated[
        Compiler | None, typer.Option("--compiler", help="default: the hardware's own; shardy needs no compiler")
    ] = None,
    tolerance: Annotated[
        float, typer.Option("--tolerance", help="relative difference in bytes that still counts as equal")
    ] = TOLERANCE,
    layouts: Annotated[
        bool, typer.Option("--layouts", help="read every layout back, too, and list those that were not kept")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", callback=writable, help="write both timelines as one Perfetto/Chrome trace"),
    ] = None,
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
    as_json: JsonOption = False,
) -> None:
    """Compile TARGET with its plan, without a device, and compare; exit code 1 if something does not match."""
    if plan_file is None:
        made = planned(Asked.of(locals()))
    else:
        if layouts:
            raise PlanMismatchError("--layouts: a plan file holds those of inputs and outputs alone; leave --plan out")
        with progress.shown(errors(), f"build {target}"):
            fn, args = load_target(target, assignments(set_ or (), "--set"))
            made = autoshard.load(plan_file).bind(fn, *args)
    try:
        with progress.shown(errors(), "compile"):
            found = made.verify(compiler=None if compiler is None else compiler.value, tolerance=tolerance)
            kept = made.honoured() if layouts and isinstance(made, autoshard.SolvedPlan) else None
    except KeyboardInterrupt:
        lost = (
            "" if plan_file is not None else "; `autoshard plan … --out plan.json` writes the plan for --plan plan.json"
        )
        errors().print(f"interrupted while it compiled: nothing is compared{lost}", markup=False, soft_wrap=True)
        raise typer.Exit(128 + signal.SIGINT) from None
    if trace is not None:
        files.write_whole(trace, json.dumps(found.trace()))
    if as_json:
        print_json(
            machine_json.verification(found) | ({} if kept is None else {"layouts": machine_json.honoured(kept)})
        )
    else:
        typer.echo(found)
        if kept is not None:
            typer.echo(f"\n{kept}")
    if not found.ok or (kept is not None and not kept.ok):
        raise typer.Exit(WRONG)
