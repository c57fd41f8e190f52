"""Options: those that several commands share, and the plan that they ask for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Annotated, Any

import typer

import autoshard
from autoshard.cli import interrupt
from autoshard.cli.app import errors
from autoshard.cli.written import assignments, byte_count, host_local, is_position, mesh_axes, pin_of
from autoshard.errors import MeshError
from autoshard.explore.builder import load_target
from autoshard.ir.recomputation import Offload, Remat
from autoshard.planner.pipeline import ConstraintPolicy
from autoshard.report import progress


class Compiler(StrEnum):
    """Compilers that work without a device."""

    GPU = "gpu"
    TPU = "tpu"
    CPU = "cpu"
    SHARDY = "shardy"


TargetArgument = Annotated[str, typer.Argument(help="package.module:builder; the builder returns (fn, args)")]
MeshOption = Annotated[
    str | None,
    typer.Option("--mesh", help="axes: data=2,model=4; default: the best"),
]
HardwareOption = Annotated[str | None, typer.Option("--hardware", help="chip and topology: h100:1x8, tpu-v5e:2x4")]
MemoryOption = Annotated[
    str | None,
    typer.Option("--memory", help="per device: 64GB; default: all usable"),
]
DonateOption = Annotated[list[str] | None, typer.Option("--donate", help="argument, by position or name")]
PinOption = Annotated[
    list[str] | None,
    typer.Option(
        "--pin", help="'PATTERN=SPEC' for inputs: '**.embed=model,-'; - is whole, ? is open, data+model is both"
    ),
]
HostLocalOption = Annotated[
    list[str] | None,
    typer.Option("--host-local", help="batch: each host loads its part"),
]
HostsOption = Annotated[int | None, typer.Option("--hosts", help="over how many; default: nodes")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="of the builder: batch=16")]
GradOption = Annotated[bool, typer.Option("--for-grad/--forward", help="plan its gradient")]
GapOption = Annotated[float, typer.Option("--gap", help="stop when proven optimal to this fraction")]
TimeOption = Annotated[float | None, typer.Option("--time-limit", help="seconds; then the best so far")]
RematChoice = Annotated[
    Remat,
    typer.Option("--remat", metavar="<str>", help="written, add or free", show_default=False),
]
OffloadChoice = Annotated[
    Offload,
    typer.Option("--offload", metavar="<str>", help="residuals, state, auto: to the host's memory", show_default=False),
]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON alone")]


Built = tuple[Any, tuple[Any, ...]]


def build(target: str, set_: Sequence[str] | None) -> Built:
    """Calls a target once, with progress on standard error: static values of two calls may differ."""
    with progress.shown(errors(), f"build {target}"):
        return load_target(target, assignments(set_ or (), "--set"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a command's options ask of a plan, as they are written."""

    target: str
    mesh: str | None
    hardware: str | None
    memory: str | None
    donate: Sequence[str] | None
    pin: Sequence[str] | None
    set_: Sequence[str] | None
    for_grad: bool
    gap: float
    time_limit: float | None
    remat: Remat
    offload: Offload
    host_local: Sequence[str] | None
    hosts: int | None

    @classmethod
    def of(cls, parameters: Mapping[str, Any], **further: Any) -> "Asked":
        """Of a command's parameters: `locals()` where it begins. `further` are those that it does not have."""
        every = {**parameters, **further}
        return cls(**{field.name: every[field.name] for field in fields(cls)})


def planned(
    asked: Asked,
    *,
    refine: str | None = None,
    candidates: int = 3,
    constraints: ConstraintPolicy = "needed",
    built: Built | None = None,
) -> autoshard.SolvedPlan:
    """The plan that a command's options ask for, with progress on standard error; `built` if that was made before."""
    if asked.hardware is None:
        raise MeshError(
            "say what to plan for, as in --hardware h100:1x8; the mesh is the best one, or as in --mesh data=2,model=4"
        )
    options: dict[str, Any] = {
        "mesh": None if asked.mesh is None else mesh_axes(asked.mesh),
        "hardware": asked.hardware,
        "memory": None if asked.memory is None else byte_count(asked.memory),
        "donate_argnums": [int(d) for d in asked.donate or () if is_position(d)]
        or None,  # [] would say: no position, as in jax.jit
        "donate_argnames": [d for d in asked.donate or () if not is_position(d)] or None,
        "pins": dict(pin_of(text) for text in asked.pin or ()),
        "host_local": dict(host_local(text) for text in asked.host_local or ()) or None,
        "hosts": asked.hosts,
        "for_grad": asked.for_grad,
        "rel_gap": asked.gap,
        "time_limit_s": asked.time_limit,
        "refine": refine,
        "candidates": candidates,
        "constraints": constraints,
        "remat": asked.remat,
        "offload": asked.offload,
    }
    fn, args = build(asked.target, asked.set_) if built is None else built
    with progress.shown(errors(), progress.STAGES[0]), interrupt.kept():
        return autoshard.plan(fn, *args, **options)
