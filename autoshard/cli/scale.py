"""`autoshard scale`: tensor, context, expert, pipeline and data parallelism of a stack of equal layers."""

from dataclasses import MISSING, fields
from difflib import get_close_matches
from typing import Annotated, Any

import typer

from autoshard.cli import interrupt
from autoshard.cli.app import app, errors, print_json
from autoshard.cli.options import JsonOption, MemoryOption, SetOption
from autoshard.cli.written import assignments, byte_count
from autoshard.errors import InfeasibleError, TargetError
from autoshard.explore import pipeline_parallel_report
from autoshard.explore.builder import load_builder
from autoshard.explore.candidates import slices
from autoshard.explore.pipeline_parallel import Builder, Staged, pipelined
from autoshard.report import hardware as hardware_report
from autoshard.report import progress
from cost_models import Hardware, Transformer, model_limits
from cost_models.closed_forms.layout_search import LayoutRanking, best_layouts


@app.command()
def scale(
    shape: Annotated[str, typer.Argument(help="layers=126,d_model=16384,… or package.module:function")],
    *,
    hardware: Annotated[str, typer.Option("--hardware", help="h100, or with topology: h100:2048x8")],
    batch: Annotated[int, typer.Option("--batch", help="sequences a step, all devices together")],
    sequence: Annotated[int, typer.Option("--sequence", help="tokens per sequence")] = 8192,
    chips: Annotated[int | None, typer.Option("--chips", help="how many, if the topology is not given")] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="of the matmuls: bfloat16, float8_e4m3fn")] = "bfloat16",
    memory: MemoryOption = None,
    rows: Annotated[int, typer.Option("--rows", help="of the ranking")] = 10,
    plan: Annotated[str | None, typer.Option("--plan", help="also plan its stages: models:llama3_405b")] = None,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Rank TP × CP × EP × PP × FSDP × DP for a stack of equal layers: scales that nobody compiles.

    In closed form; with --plan the stages of the rows are planned, too.
    """
    model = transformer(shape)
    found: list[tuple[LayoutRanking, Hardware]] = []
    for place in slices(hardware, [] if chips is None else [chips]):
        with progress.shown(errors(), f"layouts on {place.name}"):
            ranking = best_layouts(
                model,
                place,
                sequences=batch,
                sequence=sequence,
                dtype=dtype,
                memory_bytes=None if memory is None else byte_count(memory),
                keep=rows,
            )
        found.append((ranking, place))
    fitting = [(ranking, place) for ranking, place in found if ranking.ranked]
    if not fitting:
        smallest = min((ranking.smallest_bytes for ranking, _ in found), default=float("inf"))
        raise InfeasibleError(
            f"no layout of {model.parameters / 1e9:.0f}e9 parameters fits: the smallest takes {smallest / 1e9:.1f} GB "
            "per device\n  take more chips (--chips), or a --batch that they divide"
        )
    best, place = min(fitting, key=lambda pair: pair[0].ranked[0].step.seconds)
    staged: tuple[Staged, ...] = ()
    if plan is not None:
        keywords = assignments(set_ or (), "--set")
        builder = Builder(target=plan, keywords=keywords, layers=model.layers, sequences=batch, sequence=sequence)
        limit = None if memory is None else byte_count(memory)
        with progress.shown(errors(), "plan stages"), interrupt.kept():
            staged = pipelined(builder, best.ranked, place, memory_bytes=limit)
    sizes = {"layers": model.layers, "sequences": batch, "sequence": sequence}
    if as_json:
        print_json(pipeline_parallel_report.to_json(best, staged, **sizes))
    else:
        typer.echo(pipeline_parallel_report.text(best, staged, **sizes))
        typer.echo("\n" + hardware_report.limits(model_limits(model, place, batch * sequence)))


def transformer(written: str) -> Transformer:
    """`layers=2,d_model=64,…`, or `package.module:function` of a Transformer.

    Raises:
      TargetError: it is neither.
    """
    if "=" in written:
        given = assignments(written.split(","), "SHAPE")
        known = fields(Transformer)
        if strange := sorted(set(given) - {size.name for size in known}):
            near = get_close_matches(strange[0], [size.name for size in known], n=2) or [size.name for size in known]
            raise TargetError(f"cannot read the shape: there is no {strange[0]}; there is {', '.join(near)}")
        if missing := [size.name for size in known if size.default is MISSING and size.name not in given]:
            raise TargetError(f"cannot read the shape: add {','.join(f'{name}=…' for name in missing)}")
        return Transformer(**given)
    made: Any = load_builder(written)()
    if not isinstance(made, Transformer):
        raise TargetError(
            f"`{written}` returned a {type(made).__name__}, not a cost_models.Transformer\n"
            "  write the shape, layers=32,d_model=4096,…; builders of programs go after it: "
            "scale SHAPE --plan BUILDER, serve PREFILL DECODE"
        )
    return made
