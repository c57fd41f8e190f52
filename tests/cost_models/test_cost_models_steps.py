"""Whole training steps: published runs within their targets, and the laws that a step obeys."""

import json
from collections import defaultdict

import numpy as np
import pytest

import cost_models
from benchmarks.fit_steps import NAMES, fit, fit_half
from benchmarks.published_steps import ROWS, Run, read, spearman
from cost_models.closed_forms.block import Block
from cost_models.closed_forms.training_layout import Remat, TrainingLayout
from cost_models.closed_forms.training_step import StepTime, step_time
from cost_models.closed_forms.transformer import Transformer
from cost_models.errors import CostModelError, MeshFitError

LLAMA_8B = Transformer(layers=32, d_model=4096, d_ff=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256)
MIXTRAL = Transformer(
    layers=32, d_model=4096, d_ff=14336, heads=32, kv_heads=8, head_dim=128, vocab=32000, experts=8, active_experts=2
)


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    return [run for run in map(read, json.loads(ROWS.read_text())) if isinstance(run, Run)]


@pytest.fixture(scope="module")
def steps(runs: list[Run]) -> list[StepTime]:
    return [run.predict() for run in runs]


def step(
    layout: TrainingLayout, spec: str = "h100:1x8", model: Transformer = LLAMA_8B, sequences: int = 64
) -> StepTime:
    return step_time(model, layout, cost_models.hardware(spec), sequences=sequences, sequence=4096)


def bytes_by_kind(found: StepTime) -> dict[str, float]:
    """Logical bytes per device and step."""
    by_kind: dict[str, float] = defaultdict(float)
    for t in found.traffic:
        by_kind[t.kind] += t.nbytes * t.times
    return dict(by_kind)


def test_published_runs_are_predicted_within_their_targets(runs: list[Run], steps: list[StepTime]):
    errors = np.abs([s.seconds / r.measured_s - 1 for r, s in zip(runs, steps, strict=True)])
    assert len(errors) >= 150
    assert np.median(errors) <= 0.10
    assert np.quantile(errors, 0.9) <= 0.30


def test_so_are_those_that_nothing_was_fitted_on(runs: list[Run], steps: list[StepTime]):
    by_chip: dict[str, list[float]] = defaultdict(list)
    for run, found in zip(runs, steps, strict=True):
        by_chip[run.chip].append(abs(found.seconds / run.measured_s - 1))
    unseen = [error for errors in by_chip.values() for error in errors[::2]]
    assert np.median(unseen) <= 0.10
    assert np.quantile(unseen, 0.9) <= 0.30


def test_faster_runs_are_predicted_faster(runs: list[Run], steps: list[StepTime]):
    families: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for run, found in zip(runs, steps, strict=True):
        families[run.family].append((found.mfu * found.seconds / run.measured_s, found.mfu))
    large = {name: pairs for name, pairs in families.items() if len(pairs) >= 8}
    assert len(large) >= 6
    for name, pairs in large.items():
        measured, predicted = zip(*pairs, strict=True)
        assert spearman(measured, predicted) >= 0.7, name


def test_every_second_has_a_reason():
    found = step(TrainingLayout(fsdp=8, microbatch=8, remat="full"))
    assert found.seconds == pytest.approx(sum(part.seconds for part in found.parts))
    assert all(part.reason for part in found.parts)
    assert "weight gathers" in str(found)
    assert f"{100 * found.mfu:.1f}% MFU" in str(found)


def test_every_part_can_be_asked_why():
    found = step(TrainingLayout(data=2, fsdp=4, microbatch=8), "h100:2x4")
    assert {t for part in found.parts for t in part.traffic} == set(found.traffic)
    for part in found.parts:
        assert found.why(part.name).startswith(f"{part.name}: {part.seconds:.6f} s, ")
        assert part.hidden_s == pytest.approx(max(0.0, sum(t.seconds for t in part.traffic) - part.seconds))
    why = found.why("fsdp").splitlines()
    assert len(why) == 1 + len(next(p.traffic for p in found.parts if p.name == "fsdp")) + 1
    assert "all-gather over fsdp·expert" in why[1]
    assert why[-1].startswith("  of them hidden behind compute: ")
    bubble = step(TrainingLayout(pipeline=8), sequences=32).why("pipeline bubble")
    assert "17.9% of the time, (p-1)/(p+k-1); roughly p/(p+k), 20.0%" in bubble
    with pytest.raises(CostModelError, match="no part `magic` of a step; there are matmuls, attention"):
        found.why("magic")


def test_flops_by_hand():
    """Without remat a device does 6 FLOPs per multiplied parameter and token, and half of full attention."""
    found = step(TrainingLayout(fsdp=8, microbatch=8))
    assert found.flops * 8 == pytest.approx(LLAMA_8B.train_flops(4096) * 64 * 4096, rel=1e-9)
    assert found.model_flops == pytest.approx(found.flops * 8)
    again = step(TrainingLayout(fsdp=8, microbatch=8, remat="full"))
    assert 1.2 < again.flops / found.flops < 4 / 3
    assert again.model_flops == found.model_flops


@pytest.mark.parametrize(
    "layout",
    [
        TrainingLayout(data=8, microbatch=8),
        TrainingLayout(tensor=8, microbatch=64),
        TrainingLayout(fsdp=2, tensor=4, microbatch=32),
        TrainingLayout(fsdp=4, context=2, microbatch=16),
        TrainingLayout(pipeline=8, microbatch=1),
    ],
)
def test_layouts_share_the_same_work(layout: TrainingLayout):
    """Every layout of 8 devices does the same FLOPs in total; pipelines charge the last stage's logits to all."""
    found = step(layout)
    logits = 6.0 * 4096 * 128256 * 64 * 4096 * (layout.pipeline - 1)
    assert found.flops * 8 == pytest.approx(LLAMA_8B.train_flops(4096) * 64 * 4096 + logits, rel=1e-6)


def test_collective_bytes_by_hand():
    block, ends = 3 * 4096 * 14336 + 2 * 4096 * 40 * 128, 2 * 128256 * 4096
    fsdp = bytes_by_kind(step(TrainingLayout(fsdp=8, microbatch=8)))
    assert fsdp == {"all-gather": 2 * (2 * 32 * block + ends), "reduce-scatter": 2 * (32 * block + ends)}
    tensor = bytes_by_kind(step(TrainingLayout(tensor=8, microbatch=64)))
    stream = 64 * 4096 * 4096 * 2
    assert tensor == {"all-gather": (4 * 32 + 2) * stream, "reduce-scatter": (4 * 32 + 2) * stream}
    whole = bytes_by_kind(step(TrainingLayout(tensor=8, microbatch=64, sequence_parallel=False)))
    assert whole == {"all-reduce": (4 * 32 + 2) * stream}


def test_recomputation_repeats_exchanges_but_for_the_last_of_an_mlp():
    def times(remat: Remat, *, sequence_parallel: bool) -> dict[str, float]:
        layout = TrainingLayout(tensor=8, microbatch=64, remat=remat, sequence_parallel=sequence_parallel)
        return {kind: nbytes / (64 * 4096 * 4096 * 2) for kind, nbytes in bytes_by_kind(step(layout)).items()}

    ends = 2
    assert times("full", sequence_parallel=True) == {"all-gather": 6 * 32 + ends, "reduce-scatter": 5 * 32 + ends}
    assert times("mlp", sequence_parallel=True) == {"all-gather": 5 * 32 + ends, "reduce-scatter": 4 * 32 + ends}
    assert times("full", sequence_parallel=False) == {"all-reduce": 5 * 32 + ends}


def test_replicas_split_or_repeat_the_optimizer():
    split, whole = (step(TrainingLayout(data=8, microbatch=8, shard_optimizer=shard)) for shard in (True, False))
    assert whole.memory_bytes["optimizer"] == pytest.approx(8 * split.memory_bytes["optimizer"])
    assert {t.kind for t in split.traffic} == {"reduce-scatter", "all-gather"}
    assert {t.kind for t in whole.traffic} == {"all-reduce"}


def test_memory_by_hand():
    """Adam with float32 master and moments, 16 bytes per parameter over 8 shards."""
    memory = step(TrainingLayout(fsdp=8, microbatch=1, remat="full")).memory_bytes
    state = memory["parameters"] + memory["gradients"] + memory["optimizer"]
    assert state == pytest.approx(16 * LLAMA_8B.parameters / 8)
    assert memory["activations"] == pytest.approx(4096 * 4096 * 2 * 32)


def test_remat_trades_time_for_memory():
    found = [step(TrainingLayout(fsdp=8, microbatch=4, remat=remat)) for remat in ("none", "minimal", "mlp", "full")]
    assert [f.peak_bytes for f in found] == sorted((f.peak_bytes for f in found), reverse=True)
    assert found[0].seconds < found[1].seconds < found[3].seconds


def test_bubbles_are_the_idle_share_and_shrink_with_microbatches_and_chunks():
    def bubble(sequences: int, virtual_stages: int = 1) -> float:
        layout = TrainingLayout(pipeline=8, virtual_stages=virtual_stages)
        found = {part.name: part.seconds for part in step(layout, sequences=sequences).parts}
        after = found["gradient sums"] + found["optimizer"]
        return found["pipeline bubble"] / (sum(found.values()) - after)

    assert bubble(16) == pytest.approx(7 / (7 + 16))
    assert bubble(32) == pytest.approx(7 / (7 + 32))
    assert bubble(32, virtual_stages=4) == pytest.approx(7 / (7 + 4 * 32))


def test_experts_over_nodes_wait_for_the_network():
    layout = TrainingLayout(data=2, expert=8, microbatch=1)
    inside, across = (step(layout, spec, MIXTRAL) for spec in ("h100:2x8", "h100:8x2"))
    waits = [next(p.seconds for p in found.parts if p.name == "expert-parallel") for found in (inside, across)]
    assert waits[1] > 3 * waits[0] > 0


def test_a_token_goes_once_to_each_device_that_holds_one_of_its_experts():
    """Two of 8 experts on 8 devices: on average 8·(1 - (7/8)²) devices, dispatched and combined, there and back."""
    (exchange,) = [t for t in step(TrainingLayout(expert=8), "h100:1x8", MIXTRAL).traffic if t.kind == "all-to-all"]
    assert exchange.nbytes == pytest.approx(4096 * 4096 * 2 * 8 * (1 - (7 / 8) ** 2))
    assert exchange.times == 4 * 32 * 8


@pytest.mark.parametrize(
    ("remat", "matmuls", "scores", "streams"),
    [("none", 0, 0, 0), ("minimal", 0, 1, 0), ("mlp", 1, 0, 1), ("full", 1, 1, 1)],
)
def test_backward_is_twice_forward_and_a_flash_kernel_more(remat: Remat, matmuls: int, scores: int, streams: int):
    layout = TrainingLayout(fsdp=8, remat=remat)
    machine = cost_models.hardware("h100:1x8").place(layout.mesh(slices_outermost=False))
    block = Block(model=LLAMA_8B, layout=layout, machine=machine, sequence=4096, dtype="bfloat16")
    twice = 2 * block.matmul_s() + 2.5 * block.score_s() + 2 * block.stream_s()
    again = matmuls * block.matmul_s("recomputed") + scores * block.score_s() + streams * block.stream_s()
    assert block.backward_s() == pytest.approx(twice + again)
    assert block.forward_s() == pytest.approx(block.matmul_s() + block.score_s() + block.stream_s())


def test_slower_networks_never_make_a_step_faster():
    layout = TrainingLayout(data=2, fsdp=8, microbatch=2)
    fast = cost_models.hardware("h100:2x8")
    slow = fast.replaced("slow", scale_out__one_way_bytes_per_s=1e9)
    seconds = [step_time(LLAMA_8B, layout, hw, sequences=32, sequence=4096).seconds for hw in (fast, slow)]
    assert seconds[1] > seconds[0]


def test_layouts_that_do_not_fit():
    with pytest.raises(MeshFitError, match="has 4 devices, topology 1x8 has 8"):
        step(TrainingLayout(fsdp=4))
    with pytest.raises(MeshFitError, match="4 sequences are less than one microbatch of 2 for each of 8 data shards"):
        step(TrainingLayout(fsdp=8, microbatch=2), sequences=4)


@pytest.mark.slow
def test_the_constants_in_the_file_are_those_that_the_fit_finds(runs: list[Run]):
    chosen = [run for run in fit_half(runs) if run.chip == "tpu-v5e"]
    assert len(chosen) == 8
    stated = tuple(cost_models.hardware("tpu-v5e:4x4").number(name) for name in NAMES)
    assert fit(chosen) == pytest.approx(stated)
