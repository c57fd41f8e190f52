"""`autoshard hardware`: the catalogue, every number with its source."""

from typing import Annotated

import typer

import cost_models
from autoshard.cli.app import app, print_json
from autoshard.cli.options import JsonOption
from autoshard.report import hardware as hardware_report
from autoshard.report import machine
from cost_models import catalogue


@app.command()
def hardware(
    name: Annotated[
        str | None, typer.Argument(help="a chip, with or without a topology (h100, h100:2x8), or a JSON file")
    ] = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """List the chips of the catalogue, or every number of one with its source."""
    if name is None:
        chips = [catalogue.chip(chip) for chip in cost_models.chips()]
        if as_json:
            print_json([machine.hardware(chip) for chip in chips])
        else:
            typer.echo(hardware_report.catalogue(chips))
        return
    if ":" in name:
        found = cost_models.hardware(name)
        chip, topology = found.chip, found.topology
    else:
        chip, topology = catalogue.read(name) if name.endswith(".json") else catalogue.chip(name), None
    if as_json:
        print_json(machine.hardware(chip, topology))
    else:
        typer.echo(hardware_report.numbers(chip, topology))
