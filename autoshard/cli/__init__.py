"""The command line: one room per command; it only parses and calls.

A TARGET is `package.module:builder`, found from the working directory on: a function of no
arguments (but those of `--set`) that returns `(fn, args)`, the function to plan and a tuple
of its arguments, as arrays or ShapeDtypeStructs.
"""

import importlib
import os
import sys

from rich.text import Text

from autoshard import _startup
from autoshard.cli.app import REFUSED, app, errors
from autoshard.errors import AutoshardError
from autoshard.explore.builder import raised
from cost_models import CostModelError

TRACEBACK = "AUTOSHARD_TRACEBACK"  # a variable of the environment

# One room each, in the order of --help.
COMMANDS = (
    "plan",
    "search",
    "explain",
    "report",
    "scale",
    "serve",
    "compare",
    "diff",
    "verify",
    "audit",
    "doctor",
    "hardware",
)

for _command in COMMANDS:
    importlib.import_module(f"autoshard.cli.{_command}")


def main() -> None:
    """Runs the command line."""
    _startup.on_cpu_alone()
    try:
        app()
    except (AutoshardError, CostModelError) as error:
        errors().print(Text(f"{type(error).__name__}: {error}", style="red"), soft_wrap=True)
        sys.exit(REFUSED)
    except Exception as error:
        if os.environ.get(TRACEBACK):
            raise
        way_out = f"{TRACEBACK}=1 shows the whole traceback"
        errors().print(Text(f"{raised(error)}\n  {way_out}", style="red"), soft_wrap=True)
        sys.exit(REFUSED)
