"""Layouts of whole models, and servers: the best is the best, and published answers come out."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from typer.testing import CliRunner

import cost_models
from autoshard import cli
from autoshard.cli.scale import transformer
from autoshard.errors import TargetError
from benchmarks.published_answers import serving
from benchmarks.published_models import NAMED
from cost_models import Hardware, Transformer, step_time
from cost_models.closed_forms.layout_search import best_layouts, describe, layouts
from cost_models.closed_forms.serving_search import Workload, disaggregated, front, servers, speculative
from cost_models.closed_forms.training_layout import TrainingLayout
from cost_models.machines.machine import Machine

SMALL = Transformer(layers=8, d_model=1024, d_ff=4096, heads=8, kv_heads=8, head_dim=128, vocab=32_000)
NODE = cost_models.hardware("h100:2x8")
MEMORY = 80e9


@pytest.mark.slow
def test_the_best_layout_is_the_fastest_of_all_that_fit() -> None:
    found = best_layouts(SMALL, NODE, sequences=32, sequence=2048)
    every = [
        step_time(SMALL, layout, NODE, sequences=32, sequence=2048)
        for layout in layouts(SMALL, NODE, sequences=32, sequence=2048)
    ]
    fitting = [step for step in every if step.peak_bytes <= NODE.usable_memory_bytes]
    assert found.ranked[0].step.seconds == min(step.seconds for step in fitting)
    assert (found.tried, found.too_large) == (len(every), len(every) - len(fitting))


def test_every_layout_uses_every_device_and_whole_microbatches() -> None:
    for layout in layouts(SMALL, NODE, sequences=32, sequence=2048):
        assert layout.devices == 16
        assert layout.microbatches(32) >= max(1, layout.pipeline)
        assert layout.microbatches(32) % 1 == 0


def test_what_a_parallelism_is_worth_is_never_negative() -> None:
    found = best_layouts(SMALL, NODE, sequences=32, sequence=2048)
    for worth in found.worth:
        assert worth.ways > 1
        if worth.without is not None:
            assert getattr(worth.without.layout, worth.parallelism) == 1
            assert worth.without.step.seconds >= found.ranked[0].step.seconds


def test_nothing_fits_in_no_memory() -> None:
    found = best_layouts(SMALL, NODE, sequences=32, sequence=2048, memory_bytes=1e6)
    assert not found.ranked
    assert found.smallest_bytes > 1e6


def test_a_layout_reads_as_people_write_it() -> None:
    layout = TrainingLayout(tensor=8, pipeline=16, data=128, virtual_stages=4, remat="full")
    assert describe(layout) == "TP 8 · PP 16 · DP 128, interleaved in 4 chunks, microbatches of 1, full recomputation"


@pytest.mark.slow
def test_llama3_405b_on_16384_h100_is_of_the_published_family_or_better() -> None:
    # Grattafiori et al. 2024 (arXiv:2407.21783), table 4: TP 8, CP 1, PP 16, DP 128, 16M tokens
    place = cost_models.hardware("h100:2048x8")
    model = NAMED["llama3-405b"]
    best = best_layouts(model, place, sequences=2048, sequence=8192, memory_bytes=MEMORY).ranked[0]
    published = [
        step_time(model, replace(base, remat=remat, virtual_stages=virtual), place, sequences=2048, sequence=8192)
        for base in (TrainingLayout(tensor=8, pipeline=16, data=128),)
        for remat in ("none", "minimal", "full")
        for virtual in (1, 2, 4)
    ]
    fits = [step.seconds for step in published if step.peak_bytes <= MEMORY]
    assert best.step.seconds <= min(fits)
    assert best.layout.tensor in (8, 16)
    assert best.layout.pipeline > 1


def test_shapes_are_written_or_imported() -> None:
    assert transformer("layers=2,d_model=8,d_ff=16,heads=2,kv_heads=1,head_dim=4,vocab=32").layers == 2
    with pytest.raises(TargetError, match="add d_model=…,d_ff=…"):
        transformer("layers=2")


def test_commands_print_what_they_found() -> None:
    shape = "layers=8,d_model=1024,d_ff=4096,heads=8,kv_heads=8,head_dim=128,vocab=32000"
    runner = CliRunner()
    scaled = runner.invoke(cli.app, ["scale", shape, "--hardware", "h100:1x4", "--batch", "8", "--sequence", "1024"])
    assert scaled.exit_code == 0, scaled.output
    assert "where the best step goes" in scaled.output
    served = runner.invoke(cli.app, ["serve", shape, "--hardware", "h100:1x1", "--context", "1024", "--price", "2"])
    assert served.exit_code == 0, served.output
    assert "$/million" in served.output


# --- serving -------------------------------------------------------------------------


def test_only_batches_that_fit_are_served_and_the_largest_is() -> None:
    place = cost_models.hardware("h100:1x1")
    work = Workload(context=4096, generated=256)
    found = servers(SMALL, [place], work, (1, 16, 10**6))
    batches = sorted(s.batch for s in found)
    assert batches[:2] == [1, 16]
    assert batches[-1] == found[0].time.largest_batch < 10**6


def test_the_front_is_of_latency_against_throughput() -> None:
    found = servers(SMALL, [cost_models.hardware("h100:1x1")], Workload(context=4096, generated=256), (1, 8, 64))
    best = front(found)
    assert min(found, key=lambda s: s.token_s) in best
    assert max(found, key=lambda s: s.tokens_per_s) in best


def test_int8_halves_what_is_read_and_the_crossover() -> None:
    place = [cost_models.hardware("h100:1x1")]
    whole, half = (
        servers(SMALL, place, Workload(context=1024, generated=64, weight_dtype=t, cache_dtype=t), (1,))[0]
        for t in ("bfloat16", "int8")
    )
    assert half.time.parameter_bytes * 2 == whole.time.parameter_bytes
    assert half.time.cache_bytes * 2 == whole.time.cache_bytes
    assert half.crossover_batch * 2 == pytest.approx(whole.crossover_batch)


def test_price_per_million_tokens_is_that_of_the_devices() -> None:
    place = [cost_models.hardware("h100:1x2")]
    (one,) = (
        s for s in servers(SMALL, place, Workload(context=1024, generated=64), (1,), price_per_hour=3.6) if s.batch == 1
    )
    assert one.dollars_per_million == pytest.approx(1e6 / one.tokens_per_s * 2 * 0.001)


def test_disaggregation_sends_the_cache_over_every_way_out() -> None:
    place = cost_models.hardware("h100:1x8")
    work = Workload(context=8192, generated=512)
    server = servers(NAMED["llama3-70b"], [place], work, (16,))[0]
    apart = disaggregated(server, place, work, price_per_hour=None)
    # inference.md: 2·L·K·H·2 bytes a token; 50 GB/s of InfiniBand for each of the eight
    sent = 2 * 80 * 8 * 128 * 2 * 8192 / (8 * place.number("scale_out.one_way_bytes_per_s"))
    assert apart.transfer_s == pytest.approx(sent)
    assert apart.ttft_s > server.ttft_s


@pytest.mark.parametrize("acceptance", [0.0, 0.8])
def test_speculation_pays_if_drafts_are_kept(acceptance: float) -> None:
    place = cost_models.hardware("h100:1x8")
    found = speculative(
        NAMED["llama3-70b"], SMALL, place, Workload(context=2048, generated=64), batch=1, acceptance=acceptance
    )
    assert (found.speedup > 1) == (acceptance > 0)
    # Leviathan et al. 2023, equation 1
    expected = 1.0 if not acceptance else (1 - acceptance ** (found.length + 1)) / (1 - acceptance)
    assert found.accepted == pytest.approx(expected)


def test_published_batches_come_out_of_the_same_forms() -> None:
    found = list(serving())
    for row, batch in zip(found, (43, 43, 140), strict=False):
        assert row.published.startswith(f"{batch} sequences")
        assert f"the form gives {batch};" in row.why
    assert found[-1].found.startswith("121 with 7e9 parameters")
    assert "117 GB" in found[-1].found


def test_a_mesh_is_laid_once_and_a_block_s_matmuls_are_priced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Counter[str] = Counter()

    def counted(kind: type, name: str) -> None:
        inner = getattr(kind, name)

        def ask(*args: Any, **keywords: Any) -> Any:
            asked[name] += 1
            return inner(*args, **keywords)

        monkeypatch.setattr(kind, name, ask)

    counted(Hardware, "place")
    counted(Machine, "matmul_s")
    found = best_layouts(SMALL, NODE, sequences=32, sequence=2048)
    every = list(layouts(SMALL, NODE, sequences=32, sequence=2048))
    meshes = [tuple(one.mesh(slices_outermost=False).items()) for one in every]
    assert asked["place"] <= sum(a != b for a, b in pairwise([None, *meshes]))
    assert asked["matmul_s"] <= 2 * len(every)  # the block's, and the logits
    best = found.ranked[0]
    assert best.step == step_time(SMALL, best.layout, NODE, sequences=32, sequence=2048)
