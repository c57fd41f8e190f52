"""Serving: prefill and decode planned together, moved between, and apart."""

import json
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

import autoshard
import cost_models
import models
from autoshard import cli
from autoshard.errors import InfeasibleError
from autoshard.explore import serving_report
from autoshard.explore.serving import Model, drafted, serve
from autoshard.explore.serving_result import Served, front

MODEL = Model(
    prefill="models:tiny_llama_prefill",
    decode="models:tiny_llama_decode",
    context=24,
    generated=8,
    keywords={"scan": True, "width": 256, "hidden": 512},
)
PLACE = cost_models.hardware("h100:1x2")


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, int], Served]:
    every = serve(MODEL, [PLACE], (1, 4), axes=1, price_per_hour=3.6)
    return {(s.way, s.batch): s for s in every}


def test_every_batch_is_served_in_three_ways(found: dict[tuple[str, int], Served]) -> None:
    assert set(found) == {(way, batch) for way in ("together", "moved", "apart") for batch in (1, 4)}
    fn, args = models.build("tiny-llama-decode", batch=4, length=32, **MODEL.keywords)
    alone = autoshard.plan(fn, *args, mesh={"data": 2}, hardware="h100:1x2", for_grad=False, donate_argnums=1)
    assert found["apart", 4].token_s == pytest.approx(alone.cost, rel=2e-3)


def test_together_the_weights_have_one_layout(found: dict[tuple[str, int], Served]) -> None:
    both = found["together", 4]
    prefill, decode = (
        {leaf.path: str(leaf.spec) for leaf in record.inputs if leaf.path.startswith("params")}
        for record in (both.prefill, both.decode)
    )
    assert prefill == decode
    assert both.move_s == 0
    # a prefill for each sequence, then its tokens
    request_s = MODEL.generated * both.token_s + 4 * (both.prefill_s + both.insert_s)
    assert both.tokens_per_s_per_device == pytest.approx(4 * MODEL.generated / request_s / 2)


def test_no_way_is_slower_for_having_its_own_layouts(found: dict[tuple[str, int], Served]) -> None:
    for batch in (1, 4):
        together, moved = found["together", batch], found["moved", batch]
        assert moved.prefill_s <= together.prefill_s * (1 + 2e-3)
        assert moved.token_s <= together.token_s * (1 + 2e-3)


def test_apart_the_cache_is_sent_and_prefill_keeps_pace(found: dict[tuple[str, int], Served]) -> None:
    apart = found["apart", 4]
    # keys and values of 2 layers, 32 positions, 4 heads of 8, in bfloat16, over two ways out
    sent = 2 * 2 * 32 * 4 * 8 * 2 / (2 * PLACE.number("scale_out.one_way_bytes_per_s"))
    assert apart.send_s == pytest.approx(sent)
    assert apart.prefill_per_decode == pytest.approx(4 * apart.prefill_s / (MODEL.generated * apart.token_s))
    assert apart.dollars_per_million == pytest.approx(1e6 * 0.001 / apart.tokens_per_s_per_device)


def test_the_crossover_is_that_of_the_roofline_and_int8_halves_it() -> None:
    crossovers: list[float] = []
    for int8 in (False, True):
        model = replace(MODEL, keywords={**MODEL.keywords, "int8_weights": int8})
        crossovers.append(serve(model, [PLACE], (1,), axes=1)[0].crossover_batch)
    unit = PLACE.place({"data": 2}).matmul_unit("bfloat16")
    rate = unit.peak_flops_per_s * unit.achieved_fraction
    streamed = float(PLACE.place({"data": 2}).hbm_s(1.0))
    # two FLOPs per parameter and sequence, two bytes per parameter
    assert crossovers[0] == pytest.approx(rate * streamed, rel=0.02)
    assert 0.5 <= crossovers[1] / crossovers[0] < 0.65  # the output projection stays whole


def test_the_front_is_of_latency_against_throughput(found: dict[tuple[str, int], Served]) -> None:
    every = list(found.values())
    best = front(every)
    assert min(s.token_s for s in every) in {s.token_s for s in best}
    assert max(s.tokens_per_s_per_device for s in every) in {s.tokens_per_s_per_device for s in best}


def test_drafts_that_are_never_kept_cost(found: dict[tuple[str, int], Served]) -> None:
    draft = replace(MODEL, decode="models:tiny_llama_decode", keywords={"scan": True, "width": 256, "layers": 1})
    none, some = (drafted(MODEL, draft, found["apart", 1], acceptance=a, lengths=(2,)) for a in (0.0, 0.9))
    assert none.accepted == 1
    assert none.speedup < 1
    assert some.accepted == pytest.approx(1 + 0.9 + 0.81)
    assert some.token_s == pytest.approx((2 * some.draft_s + some.read_s) / some.accepted)


def test_what_does_not_fit_says_so() -> None:
    large = replace(MODEL, context=2**24 - 8, keywords={"scan": True, "context": 2**24})
    with pytest.raises(InfeasibleError, match="no plan fits"):
        serve(large, [PLACE], (512,), axes=1)


def test_the_command_plans_builders(found: dict[tuple[str, int], Served]) -> None:
    arguments = ["serve", MODEL.prefill, MODEL.decode, "--hardware", "h100:1x2", "--context", "24", "--generate", "8"]
    sets = [x for key, value in MODEL.keywords.items() for x in ("--set", f"{key}={value}")]
    result: Any = CliRunner().invoke(cli.app, [*arguments, *sets, "--batches", "4", "--axes", "1", "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.output)["planned"]
    assert {row["way"] for row in rows} == {"together", "moved", "apart"}
    assert rows[0]["token_s"] == pytest.approx(min(s.token_s for s in found.values() if s.batch == 4), rel=2e-3)


def test_the_table_breaks_no_word_and_says_what_it_leaves_out(found: dict[tuple[str, int], Served]) -> None:
    one = replace(next(iter(found.values())), dollars_per_million=12.3)
    narrow, wide = (serving_report.planned_text([one, *found.values()] * 5, width=width) for width in (80, 120))
    assert "11 rows: --json shows all" in " ".join(narrow.split())
    assert max(map(len, narrow.splitlines())) <= 80
    assert "no room for $/million, memory: a wider terminal, or --json, shows them" in narrow
    assert "no room" not in wide
    assert "12.3" not in narrow
    assert "12.3" in wide
    for text in (narrow, wide):
        assert {"together", "weights", "h100:1x2"} <= set(text.split())
