"""The command line: `autoshard plan | verify | hardware`; it only parses and calls.

A TARGET is `package.module:builder`, found from the working directory on: a function of no
arguments (but those of `--set`) that returns `(fn, args)`, the function to plan and a tuple
of its arguments, as arrays or ShapeDtypeStructs.
"""

import ast
import difflib
import importlib
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from jax.sharding import PartitionSpec
from rich.console import Console
from rich.text import Text

import autoshard
import cost_models
from autoshard import _quiet
from autoshard.api import REL_GAP
from autoshard.errors import AutoshardError, MeshError, SpecError, TargetError
from autoshard.report import hardware as hardware_report
from autoshard.report import machine, progress
from cost_models import catalogue

WRONG, REFUSED = 1, 2  # exit codes: a check failed; what was asked for is no good

app = typer.Typer(
    help="Finds the sharding of unannotated JAX functions, for hardware that need not be here.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


class Compiler(StrEnum):
    """Compilers that work without a device."""

    GPU = "gpu"
    TPU = "tpu"
    CPU = "cpu"


TargetArgument = Annotated[str, typer.Argument(help="package.module:builder; the builder returns (fn, args)")]
MeshOption = Annotated[str | None, typer.Option("--mesh", help="axes, major to minor: data=2,model=4")]
HardwareOption = Annotated[str | None, typer.Option("--hardware", help="chip and topology: h100:1x8, tpu-v5e:2x4")]
MemoryOption = Annotated[
    str | None,
    typer.Option("--memory", help="limit per device: 64GB, 60GiB; default: the chip's, less the runtime's share"),
]
DonateOption = Annotated[
    list[str] | None, typer.Option("--donate", help="a donated argument, by position or name; may be repeated")
]
PinOption = Annotated[
    list[str] | None,
    typer.Option(
        "--pin", help="'PATTERN=SPEC' for inputs: '**.embed=model,-'; - is whole, ? is open, data+model is both"
    ),
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="an argument of the builder: batch=16; may be repeated")
]
ForwardOption = Annotated[bool, typer.Option("--forward", help="plan the function as it is, not for its gradient")]
GapOption = Annotated[float, typer.Option("--gap", help="stop when proven optimal to this fraction")]
TimeOption = Annotated[float, typer.Option("--time-limit", help="seconds for the solver; then the best plan so far")]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON, and nothing else, on standard output")]


@app.command()
def plan(
    target: TargetArgument,
    *,
    mesh: MeshOption = None,
    hardware: HardwareOption = None,
    memory: MemoryOption = None,
    donate: DonateOption = None,
    pin: PinOption = None,
    set_: SetOption = None,
    forward: ForwardOption = False,
    gap: GapOption = REL_GAP,
    time_limit: TimeOption = 60.0,
    out: Annotated[Path | None, typer.Option("--out", help="write the plan file here")] = None,
    as_json: JsonOption = False,
) -> None:
    """Plan TARGET: the layout with the least step time that fits in memory."""
    made = _plan(target, mesh, hardware, memory, donate, pin, set_, forward, gap, time_limit)
    if out is not None:
        made.save(out)
    if as_json:
        typer.echo(made.record.dumps(), nl=False)
    else:
        typer.echo(made.summary())


@app.command()
def verify(
    target: TargetArgument,
    *,
    plan_file: Annotated[
        Path | None, typer.Option("--plan", help="a plan file of TARGET; without it TARGET is planned")
    ] = None,
    compiler: Annotated[Compiler | None, typer.Option("--compiler", help="default: the hardware's own")] = None,
    mesh: MeshOption = None,
    hardware: HardwareOption = None,
    memory: MemoryOption = None,
    donate: DonateOption = None,
    pin: PinOption = None,
    set_: SetOption = None,
    forward: ForwardOption = False,
    gap: GapOption = REL_GAP,
    time_limit: TimeOption = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Compile TARGET with its plan, without a device, and compare; exit code 1 if they do not match."""
    if plan_file is None:
        made = _plan(target, mesh, hardware, memory, donate, pin, set_, forward, gap, time_limit)
    else:
        fn, args = load_target(target, assignments(set_ or (), "--set"))
        made = autoshard.load(plan_file).bind(fn, *args)
    with progress.shown(_errors(), "compile"):
        found = made.verify(compiler=None if compiler is None else compiler.value)
    if as_json:
        _print_json(machine.verification(found))
    else:
        typer.echo(found)
    if not found.ok:
        raise typer.Exit(WRONG)


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
            _print_json([machine.hardware(chip) for chip in chips])
        else:
            typer.echo(hardware_report.catalogue(chips))
        return
    if ":" in name:
        found = cost_models.hardware(name)
        chip, topology = found.chip, found.topology
    else:
        chip, topology = catalogue.read(name) if name.endswith(".json") else catalogue.chip(name), None
    if as_json:
        _print_json(machine.hardware(chip, topology))
    else:
        typer.echo(hardware_report.numbers(chip, topology))


def _plan(
    target: str,
    mesh: str | None,
    hardware: str | None,
    memory: str | None,
    donate: Sequence[str] | None,
    pin: Sequence[str] | None,
    set_: Sequence[str] | None,
    forward: bool,  # noqa: FBT001  (a flag of the command line, passed on)
    gap: float,
    time_limit: float,
) -> autoshard.Plan:
    if mesh is None or hardware is None:
        raise MeshError("say what to plan for, as in --mesh data=2,model=4 --hardware h100:1x8")
    options: dict[str, Any] = {
        "mesh": mesh_axes(mesh),
        "hardware": hardware,
        "memory": None if memory is None else byte_count(memory),
        "donate_argnums": [int(d) for d in donate or () if d.isdigit()],
        "donate_argnames": [d for d in donate or () if not d.isdigit()],
        "pins": dict(pin_of(text) for text in pin or ()),
        "for_grad": False if forward else None,
        "rel_gap": gap,
        "time_limit_s": time_limit,
    }
    with progress.shown(_errors(), f"build {target}"):
        fn, args = load_target(target, assignments(set_ or (), "--set"))
    with progress.shown(_errors(), progress.STAGES[0]):
        return autoshard.plan(fn, *args, **options)


def load_target(target: str, keywords: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """Imports and calls a builder: `(fn, args)`.

    Args:
      target: `package.module:builder`.
      keywords: arguments of the builder.

    Raises:
      TargetError: no such module or builder, keywords that it does not take, or another result.
    """
    module_name, _, name = target.partition(":")
    if not module_name or not name:
        raise TargetError(f"cannot read the target `{target}`: write package.module:builder, such as models:gpt2_small")
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name + ".").startswith(error.name + "."):
            way_out = f"it is neither in {Path.cwd()} nor installed"
        else:
            way_out = f"`{module_name}` needs it: install it"
        raise TargetError(f"no module named `{error.name}`; {way_out}") from error
    builder = getattr(module, name, None)
    if builder is None:
        near = difflib.get_close_matches(name, dir(module), n=3)
        raise TargetError(f"`{module_name}` has no `{name}`" + (f"; near it: {', '.join(near)}" if near else ""))
    if not callable(builder):
        raise TargetError(f"`{target}` is a {type(builder).__name__}, not a function that returns (fn, args)")
    try:
        built: Any = builder(**keywords)
    except TypeError as error:
        raise TargetError(
            f"`{target}` cannot be called with {', '.join(keywords) or 'no arguments'}: {error}\n"
            "  a target is a function that returns (fn, args); --set key=value gives it arguments"
        ) from error
    if not (isinstance(built, tuple) and len(built) == 2 and callable(built[0]) and isinstance(built[1], tuple)):
        raise TargetError(f"`{target}` returned a {type(built).__name__}; a builder returns (fn, args), args a tuple")
    return built[0], built[1]


def mesh_axes(written: str) -> dict[str, int]:
    """`data=2,model=4` → axis sizes, major to minor.

    Raises:
      MeshError: it is written in another way.
    """
    axes: dict[str, int] = {}
    for part in written.split(","):
        name, _, size = part.strip().partition("=")
        if not name.isidentifier() or not size.isdigit() or name in axes:
            raise MeshError(f"cannot read `{part}` in --mesh {written}: write each axis once, as in data=2,model=4")
        axes[name] = int(size)
    return axes


def byte_count(written: str) -> int:
    """`64GB`, `60GiB`, `1.5e9` → bytes.

    Raises:
      SpecError: it is no number of bytes.
    """
    units = {"": 1, "B": 1} | {f"{p}B": 10 ** (3 * i) for i, p in enumerate("kMGT", 1)}
    units |= {f"{p}iB": 2 ** (10 * i) for i, p in enumerate("KMGT", 1)}
    match = re.fullmatch(r"(\d+(?:\.\d*)?(?:e\d+)?)\s*(\w*)", written.strip())
    unit = next((u for u in units if match is not None and u.lower() == match[2].lower()), None)
    if match is None or unit is None:
        raise SpecError(f"cannot read --memory {written}: write a number of bytes, as in 64GB or 60GiB")
    return int(float(match[1]) * units[unit])


def pin_of(written: str) -> tuple[str, PartitionSpec]:
    """`**.embed=model,-` → pattern and PartitionSpec; `-` whole, `?` open, `data+model` both, in that order.

    Raises:
      SpecError: there is no pattern or no `=`.
    """
    pattern, equals, spec = written.rpartition("=")
    if not pattern or not equals:
        raise SpecError(f"cannot read --pin {written}: write PATTERN=SPEC, as in '**.embed=model,-'")
    marks = {"-": None, "": None, "?": PartitionSpec.UNCONSTRAINED}
    entries: list[Any] = []
    for entry in (e.strip() for e in spec.split(",")):
        axes = tuple(re.split(r"[+·]", entry))
        entries.append(marks[entry] if entry in marks else axes if len(axes) > 1 else entry)
    return pattern, PartitionSpec(*entries)


def assignments(written: Sequence[str], option: str) -> dict[str, Any]:
    """`batch=16` → values as Python literals, or as text where they are none.

    Raises:
      TargetError: one of them is no assignment.
    """
    values: dict[str, Any] = {}
    for text_ in written:
        key, equals, value = text_.partition("=")
        if not equals or not key.isidentifier():
            raise TargetError(f"cannot read {option} {text_}: write key=value, as in batch=16")
        try:
            values[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            values[key] = value
    return values


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=1, ensure_ascii=False))


def _errors() -> Console:
    return Console(stderr=True, highlight=False)


def main() -> None:
    """Runs the command line: planning needs no device, so jax starts on the CPU alone."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # for subprocesses; this one's jax has read it
    jax.config.update("jax_platforms", "cpu")
    _quiet.devices()
    try:
        app()
    except (AutoshardError, cost_models.CostModelError) as error:
        _errors().print(Text(f"{type(error).__name__}: {error}", style="red"), soft_wrap=True)
        sys.exit(REFUSED)
