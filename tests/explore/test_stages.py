"""Stages: planned shares of the layers, combined to pipelines."""

import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from typer.testing import CliRunner

import autoshard
import cost_models
import models
from autoshard import cli
from autoshard.errors import SpecError
from autoshard.explore import pipeline_parallel
from autoshard.explore.pipeline_parallel import Builder, Shares, Staged, pipelined
from autoshard.explore.pipeline_parallel_report import runs_by
from cost_models import Transformer, step_time
from cost_models.closed_forms.layout_search import Priced
from cost_models.closed_forms.training_layout import TrainingLayout

SEQUENCES, SEQUENCE, LAYERS = 16, 32, 4
SHAPE = Transformer(layers=LAYERS, d_model=64, d_ff=128, heads=8, kv_heads=4, head_dim=8, vocab=256)
BUILDER = Builder(
    target="models:tiny_llama", keywords={"scan": True}, layers=LAYERS, sequences=SEQUENCES, sequence=SEQUENCE
)
NODE = cost_models.hardware("h100:1x8")
MACHINE = NODE.place({"pipeline": 2, "data": 2, "tensor": 2})
SHARES = Shares(layers_s=8.0, ends_s=1.0, once_s=0.5, saved_bytes=1000, in_flight=2.0, handed_bytes=10)


def proposal(layout: TrainingLayout) -> Priced:
    return Priced(layout, step_time(SHAPE, layout, NODE, sequences=SEQUENCES, sequence=SEQUENCE))


def flat(**options: Any) -> tuple[Any, ...]:
    fn, args = models.build("tiny-llama", layers=LAYERS, batch=SEQUENCES, sequence=SEQUENCE, scan=True, **options)
    return fn, *args


def staged(layout: TrainingLayout, **options: Any) -> Staged:
    (one,) = pipelined(BUILDER, [proposal(layout)], NODE, **options)
    return one


@pytest.fixture(scope="module")
def pipeline() -> Staged:
    return staged(TrainingLayout(data=2, tensor=2, pipeline=2, microbatch=2))


@pytest.mark.slow
def test_one_stage_is_the_plan_of_the_whole_program() -> None:
    one = staged(TrainingLayout(data=8, microbatch=1), rel_gap=1e-3)
    plans = [
        autoshard.plan(
            *flat(value_and_grad=partial(autoshard.accumulate, steps=2, parts=parts)),
            mesh={"data": 8},
            hardware="h100:1x8",
            donate_argnums=0,
            constraints="all",
        )
        for parts in (1, 8)
    ]
    assert one.schedule == "no pipeline"
    assert one.parts["bubble"] == one.parts["hand-over"] == 0
    assert one.step_s == pytest.approx(min(plan.cost for plan in plans), rel=2e-3)


def test_a_pipeline_waits_as_its_schedule_says(pipeline: Staged) -> None:
    assert pipeline.stages == 2
    assert pipeline.microbatches == 4
    busy_s = pipeline.parts["layers"] + pipeline.parts["ends"]
    assert pipeline.parts["bubble"] == pytest.approx(busy_s / 4 / pipeline.chunks)
    assert pipeline.step_s == pytest.approx(sum(pipeline.parts.values()))
    # the program of a stage has half of the layers, on half of the devices
    assert pipeline.record.mesh.shape == {"data": 2, "tensor": 2}
    (wq,) = (leaf for leaf in pipeline.record.inputs if leaf.path.endswith("params['layers']['wq']"))
    assert wq.shape[0] == LAYERS // 2
    assert busy_s + pipeline.parts["once"] == pytest.approx(pipeline.record.cost.step_s, rel=1e-6)


def test_the_first_stage_holds_what_is_in_flight() -> None:
    assert pipeline_parallel.in_flight(8, 1, 32) == 8
    assert pipeline_parallel.in_flight(8, 1, 4) == 4
    assert pipeline_parallel.in_flight(8, 4, 32) == 8 + 7 / 4  # Korthikanti et al. 2022, section 4.2.3


def test_memory_counts_what_is_in_flight(pipeline: Staged) -> None:
    every = list(pipeline_parallel.schedules(pipeline.priced, pipeline.record, SHARES, MACHINE, LAYERS, 4, "none"))
    peaks = {(one.schedule, one.chunks): one.peak_bytes for one in every}
    planned = pipeline.record.memory.peak_bytes
    assert peaks["1F1B", 1] == planned  # two micro-batches, as planned
    assert peaks["GPipe", 1] == planned + 2 * SHARES.saved_bytes
    assert peaks["interleaved", 2] == planned + SHARES.saved_bytes // 2


def test_the_busiest_stage_is_of_layers_or_has_the_ends(pipeline: Staged) -> None:
    def parts(layers: int, ends_s: float) -> Any:
        shares = replace(SHARES, ends_s=ends_s)
        return next(
            pipeline_parallel.schedules(pipeline.priced, pipeline.record, shares, MACHINE, layers, 4, "none")
        ).parts

    # four layers fill two stages: the last has the ends besides; three leave it one less
    assert (parts(4, 1.0)["layers"], parts(4, 1.0)["ends"]) == (8.0, 1.0)
    assert (parts(3, 1.0)["layers"], parts(3, 1.0)["ends"]) == (8.0, 0.0)
    assert (parts(3, 5.0)["layers"], parts(3, 5.0)["ends"]) == (4.0, 5.0)


def test_layers_that_are_in_no_loop_are_refused() -> None:
    unrolled = replace(BUILDER, keywords={"scan": False})
    with pytest.raises(SpecError, match="--set scan=True"):
        pipelined(unrolled, [proposal(TrainingLayout(data=4, pipeline=2, microbatch=1))], NODE)


def test_scale_plans_the_stages_of_its_rows() -> None:
    shape = "layers=4,d_model=64,d_ff=128,heads=8,kv_heads=4,head_dim=8,vocab=256"
    common = ["--hardware", "h100:1x2", "--batch", "8", "--sequence", "32", "--rows", "1"]
    arguments = ["scale", shape, *common, "--plan", "models:tiny_llama", "--set", "scan=True"]
    found = CliRunner().invoke(cli.app, arguments)
    assert found.exit_code == 0, found.output
    assert "with planned stages" in found.output
    written = json.loads(CliRunner().invoke(cli.app, [*arguments, "--json"]).output)
    (row,) = written["planned"]
    assert row["step_s"] == pytest.approx(sum(row["parts"].values()))
    assert written["verdict"].startswith(row["described"])
    assert written["rows"][0]["runs_by"] in found.output


@pytest.mark.parametrize(
    ("layout", "call"),
    [
        (TrainingLayout(data=8, microbatch=2), "plan"),
        (TrainingLayout(data=4, microbatch=1), "accumulate(steps=4)"),
        (TrainingLayout(data=2, pipeline=2), 'in_own_stages(stages="pipeline", steps=8)'),
        (
            TrainingLayout(data=2, pipeline=2, virtual_stages=2),
            'in_own_stages(stages="pipeline", steps=8, schedule="interleaved", repeats=2)',
        ),
        (TrainingLayout(data=2, pipeline=3), 'in_own_stages(stages="pipeline", steps=8)'),
        (TrainingLayout(data=2, pipeline=5), "none: 4 layers in 5 chunks"),
        (TrainingLayout(data=16, pipeline=2, virtual_stages=2), "none: 1 microbatches in groups of 2"),
    ],
)
def test_every_row_says_which_call_runs_it(layout: TrainingLayout, call: str) -> None:
    assert runs_by(layout, layers=LAYERS, sequences=SEQUENCES) == call


@pytest.mark.slow
def test_planned_stages_of_llama3_405b_on_16384_h100_beat_the_published_layout() -> None:
    # Grattafiori et al. 2024 (arXiv:2407.21783), table 4: TP 8, CP 1, PP 16, DP 128, 16M tokens
    place = cost_models.hardware("h100:2048x8")
    shape = Transformer(layers=126, d_model=16_384, d_ff=53_248, heads=128, kv_heads=8, head_dim=128, vocab=128_256)
    builder = Builder(
        target="models:llama3_405b",
        keywords={"scan": True, "attention": "cudnn"},
        layers=126,
        sequences=2048,
        sequence=8192,
    )
    published = TrainingLayout(tensor=8, pipeline=16, data=128, virtual_stages=8)
    ours = TrainingLayout(tensor=8, context=2, pipeline=16, data=64, virtual_stages=4)
    priced = [
        Priced(layout, step_time(shape, layout, place, sequences=2048, sequence=8192)) for layout in (published, ours)
    ]
    best, second = pipelined(builder, priced, place)
    assert best.priced.layout == ours
    assert second.priced.layout == published
    # why: half the replicas are twice the micro-batches, which shorten the bubble, and half the
    # sums of gradients
    assert best.microbatches == 2 * second.microbatches
    assert best.parts["bubble"] < second.parts["bubble"]
    assert best.parts["once"] < second.parts["once"]
    assert 0.35 < best.mfu < 0.55
