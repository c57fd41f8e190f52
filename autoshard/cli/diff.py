"""`autoshard diff`: the differences between two plan files."""

from pathlib import Path
from typing import Annotated

import typer

from autoshard.cli.app import app, print_json
from autoshard.cli.options import JsonOption
from autoshard.explain.diff import diff as compare
from autoshard.planner.record import read_plan_file


@app.command()
def diff(
    before: Annotated[Path, typer.Argument(help="a plan file")],
    after: Annotated[Path, typer.Argument(help="another, of the same program as a rule")],
    *,
    as_json: JsonOption = False,
) -> None:
    """Compare two plan files: step, memory, layouts and traffic that differ, and the state that has to move."""
    found = compare(read_plan_file(before), read_plan_file(after))
    if as_json:
        print_json(found.to_json())
    else:
        typer.echo(found)
