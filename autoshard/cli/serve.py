"""`autoshard serve`: latency, throughput and price of serving a transformer, in closed form."""

from typing import Annotated

import typer

from autoshard.candidates import slices
from autoshard.cli.app import app, print_json
from autoshard.cli.options import JsonOption
from autoshard.cli.scale import transformer
from autoshard.cli.search import chip_counts
from autoshard.errors import InfeasibleError
from autoshard.report import serving
from cost_models.serving_search import Workload, disaggregated, servers, speculative


@app.command()
def serve(
    shape: Annotated[str, typer.Argument(help="layers=80,d_model=8192,… or package.module:function")],
    *,
    hardware: Annotated[str, typer.Option("--hardware", help="chip, or chip and topology: tpu-v5e, h100:1x8")],
    chips: Annotated[str | None, typer.Option("--chips", help="how many share the weights: 8, or 8,16,32")] = None,
    context: Annotated[int, typer.Option("--context", help="tokens of a prompt and its cache")] = 8192,
    generate: Annotated[int, typer.Option("--generate", help="tokens of an answer")] = 512,
    batches: Annotated[str, typer.Option("--batches", help="to try, with the largest that fits")] = "1,4,16,64,256",
    weights: Annotated[str, typer.Option("--weights", help="type of the weights in memory")] = "bfloat16",
    cache: Annotated[str, typer.Option("--cache", help="type of the cache in memory")] = "bfloat16",
    price: Annotated[float | None, typer.Option("--price", help="dollars per device and hour")] = None,
    draft: Annotated[str | None, typer.Option("--draft", help="shape of a draft model, for speculation")] = None,
    acceptance: Annotated[float, typer.Option("--acceptance", help="chance that a drafted token is kept")] = 0.7,
    as_json: JsonOption = False,
) -> None:
    """Price prefill and decode of SHAPE: latency per token, first token, throughput, $ per million."""
    model = transformer(shape)
    places = slices(hardware, chip_counts(chips))
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
    drafted = None
    if draft is not None:
        drafted = speculative(model, transformer(draft), place, work, batch=found[0].batch, acceptance=acceptance)
    if as_json:
        print_json(serving.to_json(found, apart, drafted))
    else:
        typer.echo(serving.text(found, apart, drafted))
