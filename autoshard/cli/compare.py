"""`autoshard compare`: ours beside the layouts that a hand writes, each on its own best mesh."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import jax
import typer
from jax.sharding import AbstractMesh

from autoshard.api import compare as standings
from autoshard.api.compare import Hand, Template
from autoshard.api.options import REL_GAP
from autoshard.cli import interrupt
from autoshard.cli.app import app, errors, print_json
from autoshard.cli.options import (
    Compiler,
    GapOption,
    HardwareOption,
    JsonOption,
    MemoryOption,
    MeshOption,
    SetOption,
    TargetArgument,
    TimeOption,
)
from autoshard.cli.written import assignments, byte_count, mesh_axes
from autoshard.errors import MeshError, TargetError
from autoshard.explore.builder import MODELS, load_builder, load_target
from autoshard.report import progress


@app.command()
def compare(
    target: TargetArgument,
    *,
    hardware: HardwareOption = None,
    mesh: MeshOption = None,
    layouts: Annotated[
        str | None,
        typer.Option("--layouts", help="package.module:builder of {name: Template}; those of `models:` are known"),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--layout", help="one of the layouts by name; may be repeated; default: all")
    ] = None,
    compiler: Annotated[
        Compiler | None, typer.Option("--compiler", help="compile each, without a device, and show its schedule, too")
    ] = None,
    memory: MemoryOption = None,
    donate: Annotated[
        list[int] | None, typer.Option("--donate", help="a donated argument, by position; may be repeated")
    ] = None,
    set_: SetOption = None,
    gap: GapOption = REL_GAP,
    time_limit: TimeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare TARGET's plan with hand-written layouts, each on its own best mesh: times, memory, bytes."""
    if hardware is None:
        raise MeshError("say what to compare for, as in --hardware h100:1x8")
    keywords = assignments(set_ or (), "--set")
    with progress.shown(errors(), f"build {target}"):
        fn, args = load_target(target, keywords)
        known = of_builder(layouts) if layouts is not None else of_models(target, fn, args)
    missing = [name for name in only or () if name not in known]
    if missing:
        raise TargetError(f"no layout named {', '.join(missing)} of `{target}`; there are: {', '.join(known)}")
    with progress.shown(errors(), progress.STAGES[0]), interrupt.kept():
        found = standings.compare(
            fn,
            *args,
            hardware=hardware,
            layouts={name: template for name, template in known.items() if not only or name in only},
            mesh=None if mesh is None else mesh_axes(mesh),
            compiler=None if compiler is None else compiler.value,
            memory=None if memory is None else byte_count(memory),
            donate_argnums=donate or None,
            time_limit_s=time_limit,
            rel_gap=gap,
        )
    if as_json:
        print_json(found.to_json())
    else:
        typer.echo(found)


def of_builder(written: str) -> Mapping[str, Template]:
    """The layouts that a user's builder returns.

    Raises:
      TargetError: there is no such builder, or it returns something else.
    """
    built = load_builder(written)()
    if not isinstance(built, Mapping) or not all(isinstance(value, Template) for value in built.values()):
        raise TargetError(f"`{written}` returned a {type(built).__name__}; write {{name: autoshard.Template}}")
    return {str(name): value for name, value in built.items()}


def of_models(target: str, fn: Callable[..., Any], args: Sequence[Any]) -> Mapping[str, Template]:
    """The layouts of a reference model; imported here alone, as the package is not installed with this one.

    Raises:
      TargetError: the target is no reference model.
    """
    module, _, name = target.partition(":")
    if module != MODELS:
        raise TargetError(f"no hand-written layouts of `{target}` are known: say --layouts package.module:builder")
    book: Any = importlib.import_module(f"{MODELS}.layouts")
    model = name.replace("_", "-")

    def write(recipe: str, mesh: AbstractMesh) -> Hand:
        layout = book.find(model, recipe)
        outputs = jax.eval_shape(fn, *args)
        several = isinstance(outputs, tuple) and not hasattr(outputs, "_fields")
        out_specs = layout.specs(*outputs) if several else layout.specs(outputs)[0]
        return Hand(
            in_specs=layout.specs(*args),
            out_specs=out_specs,
            fn=book.constrained(fn, layout.activation, mesh),
        )

    return {recipe: Template(axes=book.axes(recipe), write=partial(write, recipe)) for recipe in book.recipes(model)}
