"""`autoshard report`: a plan in pictures, as one page that opens offline."""

from pathlib import Path
from textwrap import shorten
from typing import Annotated

import jax
import typer

import autoshard
from autoshard import files
from autoshard.api.options import REL_GAP
from autoshard.cli.app import app, errors, print_json
from autoshard.cli.options import (
    Asked,
    Built,
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
    build,
    planned,
)
from autoshard.cli.written import writable
from autoshard.errors import AutoshardError
from autoshard.ir.recomputation import ADD, NO_OFFLOAD
from autoshard.planner import baseline_layouts, view
from autoshard.report import page, progress, tables

LONGEST = 160  # of why a layout is left out


@app.command()
def report(
    target: TargetArgument,
    *,
    out: Annotated[Path, typer.Option("--out", callback=writable, help="the page to write")] = Path("report.html"),
    compare: Annotated[bool, typer.Option("--compare/--no-compare", help="price the standard layouts, too")] = True,
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
    as_markdown: Annotated[bool, typer.Option("--markdown", help="print Markdown")] = False,
) -> None:
    """Plan TARGET and write a page: layouts as tiles, timeline, memory, roofline, collectives, sources."""
    asked = Asked.of(locals(), gap=REL_GAP)
    built = build(target, set_)
    made = planned(
        asked,
        built=built,
    )
    rows: list[view.Json] = []
    if compare and not for_grad:
        with progress.shown(errors(), "standard layouts"):
            rows = _evaluate_baselines(built, made, hardware or "", time_limit)
    shown = view.of_plan(made.planned, made.planned.space.request.target.hardware, rows)
    if as_json:
        print_json(shown)
    elif as_markdown:
        typer.echo(view.markdown(shown))
    else:
        files.write_whole(out, page.page(plan=shown))
        typer.echo(f"{tables.paragraph(shown['verdict'], tables.columns())}\n{out}")


def _evaluate_baselines(
    built: Built, made: autoshard.SolvedPlan, hardware: str, time_limit: float | None
) -> list[view.Json]:
    """The standard layouts in the same model; one that cannot be is left out."""
    fn, args = built
    traced = made.planned.traced
    rows: list[view.Json] = []
    for name, specs in progress.counted(list(baseline_layouts.layouts(made.planned)), "standard layout"):
        try:
            found = autoshard.evaluate(
                fn,
                *args,
                mesh=made.record.mesh.shape,
                hardware=hardware,
                in_specs=jax.tree.unflatten(traced.in_tree, specs),
                completion="best",
                donate_argnums=sorted({traced.argument_of[i] for i in made.record.donated}),
                memory=made.record.memory.limit_bytes,
                time_limit_s=time_limit,
                rel_gap=REL_GAP,
            )
        except AutoshardError as error:
            errors().print(f"{name} is left out: {shorten(str(error), LONGEST)}", markup=False)
            continue
        rows.append(view.compared_row(name, found.record))
    return rows
