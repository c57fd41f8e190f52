"""Options: those that several commands share, and the plan that they ask for."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer

import autoshard
from autoshard.cli.app import errors
from autoshard.cli.written import assignments, byte_count, mesh_axes, pin_of
from autoshard.errors import MeshError
from autoshard.planner import Constraints
from autoshard.report import progress
from autoshard.target import load_target


class Compiler(StrEnum):
    """Compilers that work without a device."""

    GPU = "gpu"
    TPU = "tpu"
    CPU = "cpu"
    SHARDY = "shardy"


TargetArgument = Annotated[str, typer.Argument(help="package.module:builder; the builder returns (fn, args)")]
MeshOption = Annotated[str | None, typer.Option("--mesh", help="axes, major to minor: data=2,model=4")]
HardwareOption = Annotated[str | None, typer.Option("--hardware", help="chip and topology: h100:1x8, tpu-v5e:2x4")]
MemoryOption = Annotated[
    str | None,
    typer.Option("--memory", help="per device: 64GB; default: all usable"),
]
DonateOption = Annotated[list[str] | None, typer.Option("--donate", help="an argument by position or name; repeatable")]
PinOption = Annotated[
    list[str] | None,
    typer.Option(
        "--pin", help="'PATTERN=SPEC' for inputs: '**.embed=model,-'; - is whole, ? is open, data+model is both"
    ),
]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="of the builder: batch=16; repeatable")]
GradOption = Annotated[
    bool, typer.Option("--for-grad/--forward", help="plan for its gradient a function that takes none")
]
GapOption = Annotated[float, typer.Option("--gap", help="stop when proven optimal to this fraction")]
TimeOption = Annotated[float, typer.Option("--time-limit", help="seconds; then the best plan so far")]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON alone on standard output")]


def planned(
    target: str,
    mesh: str | None,
    hardware: str | None,
    memory: str | None,
    donate: Sequence[str] | None,
    pin: Sequence[str] | None,
    set_: Sequence[str] | None,
    for_grad: bool,  # noqa: FBT001  (a flag of the command line, passed on)
    gap: float,
    time_limit: float,
    *,
    refine: str | None = None,
    candidates: int = 3,
    constraints: Constraints = "needed",
) -> autoshard.Plan:
    """The plan that a command's options ask for, with progress on standard error."""
    if mesh is None or hardware is None:
        raise MeshError("say what to plan for, as in --mesh data=2,model=4 --hardware h100:1x8")
    options: dict[str, Any] = {
        "mesh": mesh_axes(mesh),
        "hardware": hardware,
        "memory": None if memory is None else byte_count(memory),
        "donate_argnums": [int(d) for d in donate or () if d.isdigit()],
        "donate_argnames": [d for d in donate or () if not d.isdigit()],
        "pins": dict(pin_of(text) for text in pin or ()),
        "for_grad": for_grad,
        "rel_gap": gap,
        "time_limit_s": time_limit,
        "refine": refine,
        "candidates": candidates,
        "constraints": constraints,
    }
    with progress.shown(errors(), f"build {target}"):
        fn, args = load_target(target, assignments(set_ or (), "--set"))
    with progress.shown(errors(), progress.STAGES[0]):
        return autoshard.plan(fn, *args, **options)
