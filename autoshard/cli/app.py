"""App: the typer application, its exit codes, and the printing that commands share."""

import json
from typing import Annotated, Any

import typer
from rich.console import Console

import autoshard

WRONG, REFUSED = 1, 2  # exit codes: a check failed; the request cannot be served

app = typer.Typer(
    help="Finds the sharding of unannotated JAX functions, for hardware that need not be here.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:  # noqa: FBT001  (typer's callback)
    if asked:
        typer.echo(f"autoshard {autoshard.__version__}")
        raise typer.Exit


@app.callback()
def _every_command(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """Options that stand before any command."""


def print_json(value: Any) -> None:
    """Prints a value on standard output, which carries results alone."""
    typer.echo(json.dumps(value, indent=1, ensure_ascii=False))


def errors() -> Console:
    """Standard error, for progress and refusals."""
    return Console(stderr=True, highlight=False)
