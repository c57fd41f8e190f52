"""`autoshard hardware`: the catalogue, every number with its source; and the machine at hand, measured."""

import os
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import cost_models
from autoshard.cli.app import app, print_json
from autoshard.cli.options import JsonOption
from autoshard.cli.written import writable
from autoshard.report import hardware
from autoshard.report import hardware as hardware_report
from cost_models.machines import catalogue
from cost_models.machines.model import chip_named

QUICK = ("--scale", "0.1", "--repeats", "3", "--program-s", "0.005")


class Platform(StrEnum):
    """Platforms that jax can be started on."""

    CPU = "cpu"
    GPU = "gpu"
    TPU = "tpu"


class Dtype(StrEnum):
    """Element types of timed matmuls."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


class ShowsByDefault(TyperGroup):
    """`hardware h100` is `hardware show h100`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] != "--help"):
            args = ["show", *args]
        return super().parse_args(ctx, args)


commands = typer.Typer(cls=ShowsByDefault, help="The catalogue of hardware; without a command, `show`.")
app.add_typer(commands, name="hardware")


@commands.command()
def show(
    name: Annotated[
        str | None, typer.Argument(help="a chip, with or without a topology (h100, h100:2x8), or a JSON file")
    ] = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """List the chips of the catalogue, or every number of one with its source; of a topology, rules of thumb, too."""
    if name is None:
        chips = [catalogue.chip(chip) for chip in cost_models.chips()]
        if as_json:
            print_json([hardware.hardware(chip) for chip in chips])
        else:
            typer.echo(hardware_report.catalogue(chips))
        return
    found = cost_models.hardware(name) if ":" in name else None
    if found is not None:
        chip, topology = found.chip, found.topology
    else:
        chip, topology = chip_named(name), None
    if as_json:
        print_json(hardware.hardware(chip, topology))
        return
    typer.echo(hardware_report.numbers(chip, topology))
    if found is not None:
        typer.echo(hardware_report.limits(cost_models.hardware_limits(found)))


@commands.command()
def measure(
    *,
    out: Annotated[
        Path | None,
        typer.Option("--out", callback=writable, help="write the hardware file here, not on standard output"),
    ] = None,
    platform: Annotated[Platform | None, typer.Option("--platform", help="default: what jax starts on")] = None,
    cpu_devices: Annotated[int, typer.Option("--cpu-devices", min=1, help="devices that the CPU is seen as")] = 8,
    name: Annotated[str | None, typer.Option("--name", help="of the file; default: the chip's, -measured")] = None,
    based_on: Annotated[
        str | None, typer.Option("--based-on", help="chip that states what is not measured; default: recognised")
    ] = None,
    dtype: Annotated[
        list[Dtype] | None, typer.Option("--dtype", help="of matmuls; may be repeated; default: all")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="small sizes, few repeats: a try, not a measurement")] = False,
) -> None:
    """Time matmuls, memory and collectives of the devices at hand; plan for them with `--hardware FILE`."""
    options = {"--out": out, "--name": name, "--based-on": based_on, "--cpu-devices": cpu_devices}
    command = [sys.executable, "-m", "autoshard.backends.measure", *(QUICK if quick else ())]
    for option, value in (*options.items(), *(("--dtype", d.value) for d in dtype or ())):
        command += [] if value is None else [option, str(value)]
    # A process of its own: this one's jax has started on the CPU, as a single device.
    environment = {key: value for key, value in os.environ.items() if key != "JAX_PLATFORMS"}
    if platform is not None:
        from autoshard.backends.known_compilers import named  # with JAX, which the other commands do without

        environment["JAX_PLATFORMS"] = named(platform.value).platform
    code = subprocess.run(command, env=environment, check=False).returncode
    if code:
        raise typer.Exit(code)
    if out is not None:
        typer.echo(f"{out}: {cost_models.hardware(out).name}; plan for it with --hardware {out}")
