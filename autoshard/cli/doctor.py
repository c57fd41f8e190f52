"""`autoshard doctor`: what a program that is sharded by hand loses where, and what to change."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from autoshard import files
from autoshard.api.options import REL_GAP
from autoshard.cli import interrupt
from autoshard.cli.app import WRONG, app, errors, print_json
from autoshard.cli.audit import CompilerOption
from autoshard.cli.options import GapOption, HardwareOption, MeshOption, SetOption, TimeOption
from autoshard.cli.written import assignments, mesh_axes, writable
from autoshard.diagnosis.against import compared, saved
from autoshard.diagnosis.doctor import doctor as diagnosis_of
from autoshard.diagnosis.doctor import doctor_of_text
from autoshard.diagnosis.finding import Diagnosis
from autoshard.errors import HloError, MeshError, SpecError, TargetError
from autoshard.explore.builder import load_target
from autoshard.report import progress

_WRITE = (
    "write jax.jit(f).lower(…).compile().as_text(), or take the file of an XLA dump (XLA_FLAGS=--xla_dump_to=DIR) that "
    "ends in after_optimizations.txt"
)


class Format(StrEnum):
    """How findings are printed."""

    TEXT = "text"
    JSON = "json"
    GITHUB = "github"


@app.command()
def doctor(
    target: Annotated[str | None, typer.Argument(help="package.module:builder; the builder returns (fn, args)")] = None,
    *,
    hlo: Annotated[Path | None, typer.Option("--hlo", help="a compiled program's HLO text, in place of TARGET")] = None,
    compiler: CompilerOption = None,
    mesh: MeshOption = None,
    hardware: HardwareOption = None,
    set_: SetOption = None,
    gap: GapOption = REL_GAP,
    time_limit: TimeOption = None,
    flags: Annotated[bool, typer.Option("--flags", help="try the compiler's flags, each by compiling")] = False,
    against: Annotated[
        Path | None, typer.Option("--against", help="an earlier result of --json: tell what is new, gone or dearer")
    ] = None,
    fail_on: Annotated[
        str | None, typer.Option("--fail-on", help="exit with 1 if a finding is so much of the step, as in 5%")
    ] = None,
    format_: Annotated[
        Format, typer.Option("--format", help="text, json, or github: annotations of a build")
    ] = Format.TEXT,
    as_json: Annotated[bool, typer.Option("--json", help="the same as --format json")] = False,
    html: Annotated[Path | None, typer.Option("--html", callback=writable, help="write an offline page")] = None,
) -> None:
    """Find what the layouts of TARGET cost, by source line, and what to change; the dearest first."""
    most = None if fail_on is None else share(fail_on)
    before = None if against is None else saved(against)
    if (target is None) == (hlo is None):
        raise TargetError("name what to look at: package.module:builder, or a compiled program as --hlo FILE")
    if hlo is not None:
        if flags or compiler is not None:
            raise HloError("--flags and --compiler compile a program: give TARGET, not --hlo")
        found = _of_text(hlo, hardware, mesh)
    else:
        if mesh is not None:
            raise MeshError("the annotations of TARGET name its mesh: --mesh is for --hlo")
        if hardware is None:
            raise MeshError("say what to compile for, as in --hardware h100:1x8")
        fn, args = load_target(target or "", assignments(set_ or (), "--set"))
        name = None if compiler is None else compiler.value
        with progress.shown(errors(), "compile and plan"), interrupt.kept():
            found = diagnosis_of(
                fn, *args, hardware=hardware, flags=flags, compiler=name, rel_gap=gap, time_limit_s=time_limit
            )
    if html is not None:
        files.write_whole(html, found.to_html())
    result = found if before is None else compared(before, found)
    shown = Format.JSON if as_json else format_
    if shown is Format.JSON:
        print_json(result.to_json())
    elif shown is Format.GITHUB:
        told = result if isinstance(result, Diagnosis) else result.regressions()
        if told.findings:
            typer.echo(told.annotations())
    else:
        typer.echo(result)
    if most is not None and result.worst >= most:
        raise typer.Exit(WRONG)


def _of_text(path: Path, hardware: str | None, mesh: str | None) -> Diagnosis:
    if hardware is None:
        raise MeshError("say what the program was compiled for, as in --hardware h100:1x8")
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise HloError(f"cannot read {path}: {error}") from error
    if not text.strip():
        raise HloError(f"{path} is empty: {_WRITE}")
    try:
        return doctor_of_text(text, hardware=hardware, mesh=None if mesh is None else mesh_axes(mesh))
    except HloError as error:
        raise HloError(f"{path}: {error}. It must be the text of one compiled program: {_WRITE}") from error


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
