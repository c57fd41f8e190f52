"""`autoshard audit`: a program that is sharded by hand, against the compiler and the optimum."""

from collections.abc import Sequence
from typing import Annotated

import typer

from autoshard.api.audit import Audit
from autoshard.api.audit import audit as audited
from autoshard.api.options import REL_GAP
from autoshard.cli.app import WRONG, app, errors, print_json
from autoshard.cli.options import Compiler, GapOption, HardwareOption, JsonOption, SetOption, TargetArgument, TimeOption
from autoshard.cli.written import assignments
from autoshard.errors import MeshError
from autoshard.explore.builder import load_target
from autoshard.report import progress
from autoshard.verification import machine_json

CompilerOption = Annotated[Compiler | None, typer.Option("--compiler", help="default: the hardware's own")]


@app.command()
def audit(
    target: TargetArgument,
    *,
    compiler: CompilerOption = None,
    hardware: HardwareOption = None,
    set_: SetOption = None,
    gap: GapOption = REL_GAP,
    time_limit: TimeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compile TARGET as it is sharded already; exit code 1 if it emits collectives that no annotation asks for."""
    found = audit_of(target, set_, hardware, compiler=compiler, rel_gap=gap, time_limit_s=time_limit)
    if as_json:
        print_json(
            {
                "unasked_bytes": found.unasked_bytes,
                "gap": found.gap,
                "hand_s": found.hand.cost,
                "best_s": found.best.cost,
                "emitted": [{**machine_json.row(x.line), "asked": x.asked} for x in found.emitted],
                "verification": machine_json.verification(found.verification),
            }
        )
    else:
        typer.echo(found)
    if found.unasked_bytes:
        raise typer.Exit(WRONG)


def audit_of(
    target: str,
    set_: Sequence[str] | None,
    hardware: str | None,
    *,
    compiler: Compiler | None,
    rel_gap: float,
    time_limit_s: float | None,
) -> Audit:
    """The audit of a command's target.

    Raises:
      MeshError: no hardware is named.
    """
    if hardware is None:
        raise MeshError("say what to compile for, as in --hardware h100:1x8")
    fn, args = load_target(target, assignments(set_ or (), "--set"))
    name = None if compiler is None else compiler.value
    with progress.shown(errors(), "compile and plan"):
        return audited(fn, *args, hardware=hardware, compiler=name, rel_gap=rel_gap, time_limit_s=time_limit_s)
