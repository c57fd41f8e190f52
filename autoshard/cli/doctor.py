"""`autoshard doctor`: what a program that is sharded by hand loses where, and what to change."""

from typing import Annotated

import typer

from autoshard.api.doctor import doctor as diagnosed
from autoshard.api.options import REL_GAP
from autoshard.cli.app import WRONG, app, errors, print_json
from autoshard.cli.options import Compiler, GapOption, HardwareOption, JsonOption, SetOption, TargetArgument, TimeOption
from autoshard.cli.written import assignments
from autoshard.errors import MeshError, SpecError
from autoshard.explore.builder import load_target
from autoshard.report import progress


@app.command()
def doctor(
    target: TargetArgument,
    *,
    compiler: Annotated[Compiler | None, typer.Option("--compiler", help="default: the hardware's own")] = None,
    hardware: HardwareOption = None,
    set_: SetOption = None,
    gap: GapOption = REL_GAP,
    time_limit: TimeOption = 20.0,
    fail_on: Annotated[
        str | None, typer.Option("--fail-on", help="exit with 1 if a finding is so much of the step, as in 5%")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Find what the layouts of TARGET cost, by source line, and what to change; the dearest first."""
    if hardware is None:
        raise MeshError("say what to compile for, as in --hardware h100:1x8")
    most = None if fail_on is None else share(fail_on)
    fn, args = load_target(target, assignments(set_ or (), "--set"))
    with progress.shown(errors(), "compile and plan"):
        found = diagnosed(
            fn,
            *args,
            hardware=hardware,
            compiler=None if compiler is None else compiler.value,
            rel_gap=gap,
            time_limit_s=time_limit,
        )
    if as_json:
        print_json(found.to_json())
    else:
        typer.echo(found)
    if most is not None and found.worst >= most:
        raise typer.Exit(WRONG)


def share(written: str) -> float:
    """A share of a step as it is written: 5% or 0.05.

    Raises:
      SpecError: it is neither.
    """
    number, percent, rest = written.partition("%")
    try:
        value = float(number) / (100 if percent else 1)
    except ValueError:
        value = -1.0
    if rest or not 0 <= value <= 1:
        raise SpecError(f"--fail-on {written}: write a share of the step, such as 5%")
    return value
