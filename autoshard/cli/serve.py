"""`autoshard serve`: latency, throughput and price of serving a transformer, planned or in closed form."""

from dataclasses import replace
from typing import Annotated

import typer

from autoshard.cli import interrupt
from autoshard.cli.app import app, errors, print_json
from autoshard.cli.options import JsonOption, SetOption
from autoshard.cli.scale import transformer
from autoshard.cli.written import assignments, chip_counts
from autoshard.errors import InfeasibleError, SpecError
from autoshard.explore import serving_report
from autoshard.explore.candidates import slices
from autoshard.explore.serving import MOST_AXES, Model, drafted
from autoshard.explore.serving import serve as serve_planned
from autoshard.report import progress
from cost_models.closed_forms.serving_search import Workload, disaggregated, servers, speculative


@app.command()
def serve(
    shape: Annotated[
        str, typer.Argument(help="layers=80,d_model=8192,… for closed forms; or the builder of a prefill, to plan it")
    ],
    decode: Annotated[str | None, typer.Argument(help="the builder of a decoding step, planned with it")] = None,
    *,
    hardware: Annotated[str, typer.Option("--hardware", help="tpu-v5e, or with topology: h100:1x8")],
    chips: Annotated[str | None, typer.Option("--chips", help="sharing the weights: 8, or 8,16,32")] = None,
    context: Annotated[int, typer.Option("--context", help="tokens of a prompt and its cache")] = 8192,
    generate: Annotated[int, typer.Option("--generate", help="tokens of an answer")] = 512,
    batches: Annotated[str, typer.Option("--batches", help="to try, with the largest that fits")] = "1,4,16,64,256",
    weights: Annotated[
        str, typer.Option("--weights", help="type of the weights in memory (closed forms)")
    ] = "bfloat16",
    cache: Annotated[str, typer.Option("--cache", help="type of the cache in memory (closed forms)")] = "bfloat16",
    price: Annotated[float | None, typer.Option("--price", help="dollars per device and hour")] = None,
    draft: Annotated[str | None, typer.Option("--draft", help="shape, or decoding builder, of a draft model")] = None,
    acceptance: Annotated[float, typer.Option("--acceptance", help="chance that a drafted token is kept")] = 0.7,
    axes: Annotated[int, typer.Option("--axes", help="the most mesh axes of a plan, 1 or 2")] = MOST_AXES,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Price prefill and decode: latency per token, first token, throughput, $ per million."""
    places = slices(hardware, chip_counts(chips))
    if decode is not None:
        if weights != "bfloat16" or cache != "bfloat16":
            raise SpecError("builders say how they hold things: write --set int8_weights=True --set int8_cache=True")
        keywords = assignments(set_ or (), "--set")
        built = Model(prefill=shape, decode=decode, context=context, generated=generate, keywords=keywords)
        with progress.shown(errors(), "plan prefill and decode"), interrupt.kept():
            plans = serve_planned(built, places, chip_counts(batches), axes=axes, price_per_hour=price)
            drafts = None
            if draft is not None:
                drafts = drafted(built, replace(built, decode=draft), plans[0], acceptance=acceptance)
        if as_json:
            print_json(serving_report.planned_json(plans, drafts))
        else:
            typer.echo(serving_report.planned_text(plans, drafts))
        return
    model = transformer(shape)
    work = Workload(context=context, generated=generate, weight_dtype=weights, cache_dtype=cache)
    found = servers(model, places, work, chip_counts(batches), price_per_hour=price)
    if not found:
        raise InfeasibleError(
            f"{model.parameters / 1e9:.1f}e9 parameters in {weights} and one cache of {context:,} tokens do not fit on "
            f"{', '.join(place.name for place in places)}\n  take more --chips, --weights int8, or --cache int8"
        )
    cheapest = max(found, key=lambda s: s.tokens_per_s / s.devices)
    place = next(p for p in places if p.name == cheapest.hardware)
    apart = disaggregated(cheapest, place, work, price_per_hour=price)
    spoken = None
    if draft is not None:
        spoken = speculative(model, transformer(draft), place, work, batch=found[0].batch, acceptance=acceptance)
    if as_json:
        print_json(serving_report.to_json(found, apart, spoken))
    else:
        typer.echo(serving_report.text(found, apart, spoken))
