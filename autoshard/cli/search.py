"""`autoshard search`: every slice and mesh for a number of chips, planned and ranked."""

from pathlib import Path
from typing import Annotated, Any

import typer

from autoshard import files
from autoshard.cli.app import app, errors, print_json
from autoshard.cli.options import (
    GradOption,
    JsonOption,
    MemoryOption,
    OffloadChoice,
    RematChoice,
    SetOption,
    TargetArgument,
)
from autoshard.cli.written import assignments, byte_count, chip_counts, is_position, writable
from autoshard.errors import SpecError
from autoshard.explore import live_view
from autoshard.explore import search as mesh_search
from autoshard.ir.accumulation import AUTO, Steps
from autoshard.ir.recomputation import ADD, NO_OFFLOAD
from autoshard.report import progress


@app.command()
def search(
    target: TargetArgument,
    *,
    hardware: Annotated[str, typer.Option("--hardware", help="chips to compare: tpu-v5p, or h100,h200")],
    chips: Annotated[str | None, typer.Option("--chips", help="256, or 8,16,32 for a curve")] = None,
    vary: Annotated[list[str] | None, typer.Option("--vary", help="batch=64,128; repeatable")] = None,
    set_: SetOption = None,
    donate: Annotated[list[str] | None, typer.Option("--donate", help="default: what outputs replace")] = None,
    tokens: Annotated[str | None, typer.Option("--tokens", help="to train on: 15T, or 20x parameters")] = None,
    price: Annotated[str | None, typer.Option("--price", help="$ per chip-hour: 4.2, or h100=2.5,h200=3")] = None,
    memory: MemoryOption = None,
    axes: Annotated[int, typer.Option("--axes", help="most mesh axes; default: 3", show_default=False)] = 3,
    microbatches: Annotated[str | None, typer.Option("--microbatches", help="8, or auto to choose them")] = None,
    for_grad: GradOption = False,
    remat: RematChoice = ADD,
    offload: OffloadChoice = NO_OFFLOAD,
    processes: Annotated[int | None, typer.Option("--processes", help="default: one per core")] = None,
    executor: Annotated[str | None, typer.Option("--executor", help="dask://host:8786, ray://…")] = None,
    as_json: JsonOption = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="print Markdown")] = False,
    html: Annotated[Path | None, typer.Option("--html", callback=writable, help="write an offline page")] = None,
) -> None:
    """Rank every slice and mesh of so many chips for TARGET: which is fastest, what it costs."""
    numbers = chip_counts(chips)
    with live_view.shown(errors()) as tell:
        found = mesh_search.search(
            target,
            hardware=hardware.split(","),
            chips=numbers,
            vary=dict(varied(text) for text in vary or ()),
            keywords=assignments(set_ or (), "--set"),
            axes=axes,
            microbatches=None if microbatches is None else steps(microbatches),
            donate_argnums=None if donate is None else [int(d) for d in donate if is_position(d)] or None,
            donate_argnames=None if donate is None else [d for d in donate if not is_position(d)] or None,
            for_grad=for_grad,
            remat=remat,
            offload=offload,
            memory=None if memory is None else byte_count(memory),
            budget_tokens=tokens or 0,
            prices=None if price is None else prices(price),
            processes=processes,
            executor=executor,
            on_progress=tell,
        )
    if html is not None:
        with progress.shown(errors(), "report"):
            files.write_whole(html, found.to_html())
    if as_json:
        print_json(found.to_json())
    else:
        typer.echo(found.to_markdown() if as_markdown else found)


def steps(written: str) -> Steps:
    """`8`, or `auto`.

    Raises:
      SpecError: it is neither.
    """
    if written == AUTO:
        return AUTO
    try:
        return int(written)
    except ValueError:
        raise SpecError(f"cannot read --microbatches {written}: write a number, as in 8, or auto") from None


def varied(written: str) -> tuple[str, list[Any]]:
    """`batch=64,128` → an argument of the builder and its values.

    Raises:
      SpecError: it has no values.
      TargetError: it is no assignment.
    """
    key, _, values = written.partition("=")
    if not all(values.split(",")):
        raise SpecError(f"cannot read --vary {written}: write an argument and its values, as in batch=64,128")
    return key, [assignments([f"{key}={value}"], "--vary")[key] for value in values.split(",")]


def prices(written: str) -> float | dict[str, float]:
    """`4.2`, or `h100=2.5,h200=3` → dollars per chip and hour.

    Raises:
      SpecError: it is neither.
    """
    try:
        if "=" not in written:
            return float(written)
        pairs = (part.split("=") for part in written.split(","))
        return {chip.strip(): float(value) for chip, value in pairs}
    except ValueError:
        raise SpecError(f"cannot read --price {written}: write 4.2, or h100=2.5,h200=3") from None
