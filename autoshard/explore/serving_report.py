"""Serving: latency, throughput and price, in closed form or planned, for terminals and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType

from autoshard.explore import serving_result
from autoshard.explore.serving_result import Drafted, Served
from autoshard.planner.view import collectives
from autoshard.report.tables import bytes_text, columns, count_text, fields, paragraph, render, table, time_text
from cost_models.closed_forms.serving_search import Disaggregated, Server, Speculative, front

SHOWN = 24
_WORDS = ("", "devices", "mesh", "way", "waits\nfor")  # columns that hold no numbers


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
    head = (
        "",
        "devices",
        "batch",
        "per\ntoken",
        "first\ntoken",
        "tokens/s",
        "tokens/s\na device",
        "waits\nfor",
        "$/million",
    )
    if all(s.dollars_per_million is None for s in found):
        head, rows = head[:-1], [row[:-1] for row in rows]
    first = found[0]
    notes = [
        ("*", "on the Pareto front of latency and tokens per second and device"),
        ("weights", f"{bytes_text(first.time.parameter_bytes)}; cache {bytes_text(first.time.cache_bytes)} a sequence"),
        (
            "links",
            f"decoding waits for memory rather than links up to {count_text(first.time.useful_ways)} ways; its "
            f"exchanges take {time_text(first.time.exchange_s)} a step, and with weights split both ways at best "
            f"{time_text(first.time.exchange_2d_s)}",
        ),
        ("compute", f"weights multiply for longer than they stream from {first.crossover_batch:,.0f} sequences on"),
    ]
    if len(found) > SHOWN:
        notes.append(_more(found))
    if apart is not None:
        price = "" if apart.dollars_per_million is None else f", ${apart.dollars_per_million:.3g} per million tokens"
        notes.append(
            (
                "apart",
                f"prefill on devices of its own, {apart.server.hardware} with a batch of {apart.server.batch}: "
                f"{apart.prefill_per_decode:.2g} sets of prefill per set of decode, cache sent in "
                f"{time_text(apart.transfer_s)}, {apart.requests_per_s:.3g} requests/s per set of decode, "
                f"first token after {time_text(apart.ttft_s)}, "
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
        _table(head, rows, spare=("$/million", "first\ntoken")),
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


def planned_text(found: Sequence[Served], drafts: Drafted | None = None, *, width: int | None = None) -> str:
    """Every planned batch by latency; the Pareto front of latency and throughput is starred."""
    width = columns() if width is None else width
    best = set(map(id, serving_result.front(found)))
    rows = [
        (
            "*" if id(s) in best else "",
            s.candidate.hardware,
            "×".join(str(n) for _, n in s.candidate.mesh),
            f"{s.batch:,}",
            s.way,
            time_text(s.token_s),
            time_text(s.ttft_s),
            f"{s.tokens_per_s_per_device:,.0f}",
            s.bound,
            bytes_text(s.peak_bytes),
            "" if s.dollars_per_million is None else f"{s.dollars_per_million:.3g}",
        )
        for s in found[:SHOWN]
    ]
    head = (
        "",
        "devices",
        "mesh",
        "batch",
        "way",
        "per\ntoken",
        "first\ntoken",
        "tokens/s\na device",
        "waits\nfor",
        "memory",
        "$/million",
    )
    if all(s.dollars_per_million is None for s in found):
        head, rows = head[:-1], [row[:-1] for row in rows]
    cheap = max(found, key=lambda s: s.tokens_per_s_per_device)
    notes = [
        ("*", "on the Pareto front of latency and tokens per second and device"),
        ("together", "prefill and decode in one layout of the weights"),
        ("moved", f"each in its own, the weights moving in between: {_moved(found)}"),
        ("apart", f"on devices of their own: {_apart(found)}"),
        ("cache", f"{cheap.cache_layout} on {cheap.candidate}; from a prefill to there in {time_text(cheap.insert_s)}"),
        ("compute", f"weights multiply for longer than they stream from {cheap.crossover_batch:,.0f} sequences on"),
    ]
    if len(found) > SHOWN:
        notes.append(_more(found))
    if drafts is not None:
        notes.append(
            (
                "draft",
                f"{drafts.length} drafted tokens a round, {drafts.accepted:.3g} kept: {time_text(drafts.token_s)} "
                f"per token, {drafts.speedup:.3g}× as fast",
            )
        )
    return render(
        paragraph(planned_verdict(found), width),
        _table(head, rows, spare=("$/million", "memory")),
        fields(notes, width),
        width=width,
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, spare: Sequence[str]) -> RenderableType:
    """Servers, a row each: words are not broken, and columns that there is no room for are left out."""
    numbers = tuple(name for name in head if name not in _WORDS)
    return table("", head, rows, right=numbers, whole=_WORDS, spare=[name for name in spare if name in head])


def _more(found: Sequence[object]) -> tuple[str, str]:
    """How many rows are not shown, and where they are."""
    return "more", f"{len(found) - SHOWN} rows: --json shows all"


def planned_verdict(found: Sequence[Served]) -> str:
    """The fastest and the cheapest in one sentence."""
    fast, cheap = found[0], max(found, key=lambda s: s.tokens_per_s_per_device)
    price = "" if cheap.dollars_per_million is None else f", ${cheap.dollars_per_million:.3g} per million"
    return (
        f"Fastest per token: {fast.candidate}, {fast.way}, {time_text(fast.token_s)}. Most per device: "
        f"{cheap.candidate}, {cheap.way}, {cheap.tokens_per_s_per_device:,.0f} tokens/s{price}."
    )


def _moved(found: Sequence[Served]) -> str:
    longest = max((s for s in found if s.way == "moved"), key=lambda s: s.move_s)
    if not longest.move_s:
        return "nothing, the layouts are the same"
    return f"up to {time_text(longest.move_s)} each time, on {longest.candidate}"


def _apart(found: Sequence[Served]) -> str:
    best = max((s for s in found if s.way == "apart"), key=lambda s: s.tokens_per_s_per_device)
    return (
        f"{best.prefill_per_decode:.2g} sets of prefill per set of decode, a prompt's cache sent in "
        f"{time_text(best.send_s)}, on {best.candidate}"
    )


def planned_json(found: Sequence[Served], drafts: Drafted | None = None) -> dict[str, Any]:
    """The same in SI units."""
    best = set(map(id, serving_result.front(found)))
    return {
        "verdict": planned_verdict(found),
        "planned": [
            {
                "hardware": s.candidate.hardware,
                "mesh": s.candidate.shape,
                "batch": s.batch,
                "way": s.way,
                "devices": s.devices,
                "prefill_s": s.prefill_s,
                "token_s": s.token_s,
                "ttft_s": s.ttft_s,
                "insert_s": s.insert_s,
                "move_s": s.move_s,
                "send_s": s.send_s,
                "prefill_per_decode": s.prefill_per_decode,
                "tokens_per_s_per_device": s.tokens_per_s_per_device,
                "bound": s.bound,
                "crossover_batch": s.crossover_batch,
                "cache_layout": s.cache_layout,
                "cache_bytes": s.cache_bytes,
                "peak_bytes": s.peak_bytes,
                "dollars_per_million": s.dollars_per_million,
                "pareto": id(s) in best,
                "collectives": {"prefill": collectives(s.prefill), "decode": collectives(s.decode)},
            }
            for s in found
        ],
        "speculative": None if drafts is None else asdict(drafts),
    }
