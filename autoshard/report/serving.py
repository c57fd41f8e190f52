"""Serving: latency, throughput and price of serving a transformer, for terminals and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from autoshard.tables import bytes_text, columns, fields, render, table, time_text
from cost_models.serving_search import Disaggregated, Server, Speculative, front

SHOWN = 24


def text(
    found: Sequence[Server],
    apart: Disaggregated | None = None,
    drafted: Speculative | None = None,
    *,
    width: int | None = None,
) -> str:
    """Every server by latency; the Pareto front of latency and throughput is starred."""
    width = columns() if width is None else width
    best = set(map(id, front(found)))
    rows = [
        (
            "*" if id(s) in best else "",
            s.hardware,
            f"{s.batch:,}",
            time_text(s.token_s),
            time_text(s.ttft_s),
            f"{s.tokens_per_s:,.0f}",
            f"{s.tokens_per_s / s.devices:,.0f}",
            s.bound,
            "" if s.dollars_per_million is None else f"{s.dollars_per_million:.3g}",
        )
        for s in found[:SHOWN]
    ]
    head = ("", "devices", "batch", "per token", "TTFT", "tokens/s", "per device", "waits for", "$/million")
    if all(s.dollars_per_million is None for s in found):
        head, rows = head[:-1], [row[:-1] for row in rows]
    first = found[0]
    notes = [
        ("*", "on the Pareto front of latency and tokens per second and device"),
        ("weights", f"{bytes_text(first.time.parameter_bytes)}; cache {bytes_text(first.time.cache_bytes)} a sequence"),
        ("compute", f"weights multiply for longer than they stream from {first.crossover_batch:,.0f} sequences on"),
    ]
    if apart is not None:
        price = "" if apart.dollars_per_million is None else f", ${apart.dollars_per_million:.3g} per million tokens"
        notes.append(
            (
                "apart",
                f"prefill on devices of its own, {apart.server.hardware} with a batch of {apart.server.batch}: "
                f"{apart.prefill_per_decode:.2g} sets of prefill per set of decode, cache sent in "
                f"{time_text(apart.transfer_s)}, first token after {time_text(apart.ttft_s)}, "
                f"{apart.tokens_per_s_per_device:,.0f} tokens/s per device{price}",
            )
        )
    if drafted is not None:
        notes.append(
            (
                "draft",
                f"{drafted.length} drafted tokens a round, {drafted.accepted:.3g} kept: {time_text(drafted.token_s)} "
                f"per token, {drafted.speedup:.3g}× as fast",
            )
        )
    return render(
        table("", head, rows, right=("batch", "per token", "TTFT", "tokens/s", "per device", "$/million")),
        fields(notes, width),
        width=width,
    )


def to_json(
    found: Sequence[Server], apart: Disaggregated | None = None, drafted: Speculative | None = None
) -> dict[str, Any]:
    """The same in SI units."""
    best = set(map(id, front(found)))
    return {
        "servers": [asdict(s) | {"pareto": id(s) in best} for s in found],
        "disaggregated": None if apart is None else asdict(apart),
        "speculative": None if drafted is None else asdict(drafted),
    }
