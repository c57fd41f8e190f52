"""`autoshard doctor`: what a program that is sharded by hand loses where, and what to change."""

from typing import Annotated

import typer

from autoshard.api.doctor import diagnosed
from autoshard.api.options import REL_GAP
from autoshard.cli.app import WRONG, app, print_json
from autoshard.cli.audit import CompilerOption, audit_of
from autoshard.cli.options import GapOption, HardwareOption, JsonOption, SetOption, TargetArgument, TimeOption
from autoshard.errors import SpecError


@app.command()
def doctor(
    target: TargetArgument,
    *,
    compiler: CompilerOption = None,
    hardware: HardwareOption = None,
    set_: SetOption = None,
    gap: GapOption = REL_GAP,
    time_limit: TimeOption = None,
    fail_on: Annotated[
        str | None, typer.Option("--fail-on", help="exit with 1 if a finding is so much of the step, as in 5%")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Find what the layouts of TARGET cost, by source line, and what to change; the dearest first."""
    most = None if fail_on is None else share(fail_on)
    found = diagnosed(audit_of(target, set_, hardware, compiler=compiler, rel_gap=gap, time_limit_s=time_limit))
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
