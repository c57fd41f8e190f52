"""`in_stages(loss, stages="auto")`: over which axis the layers are in stages, if any, is chosen from costs."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard import in_stages
from autoshard.explore.candidates import Candidate
from autoshard.explore.ranking import RankedPlan
from autoshard.explore.search import Search
from autoshard.explore.trial import Task, Trials
from autoshard.ir import accumulation
from autoshard.ir.mesh import MeshAxes
from autoshard.planner.program import Call, bind
from tests.installed import GPU, TPU
from tests.pipeline_parallel.test_in_stages import LOSSES, batch, normalized, outputs, same, weights
from tests.pipeline_parallel.test_planned import arguments, descent, loss

ETHERNET = {
    "schema": "hardware/1",
    "kind": "chip",
    "name": "h100-ethernet",
    "based_on": "h100",
    "description": "H100 behind an eighth of 100 Gbit/s Ethernet each",
    "numbers": {"scale_out.one_way_bytes_per_s": {"value": 1562500000.0, "source": "100 Gbit/s for 8 GPUs"}},
}


def large(stages: Any = "auto") -> tuple[Any, Any, Any]:
    """A step whose weights and gradients do not fit one device."""
    layers, width, hidden, rows = 32, 8192, 32768, 2048

    def value(p: Any, x: Any) -> Any:
        def layer(x: Any, own: Any) -> tuple[Any, None]:
            return x + jax.nn.gelu(x @ own["up"]) @ own["down"], None

        x, _ = jax.lax.scan(layer, x, p["layers"])
        return jnp.mean(jnp.square((x @ p["head"]).astype(jnp.float32)))

    def half(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    params = {"layers": {"up": half(layers, width, hidden), "down": half(layers, hidden, width)}}
    step = descent(in_stages(value, stages=stages, steps=4, parts=1))
    return step, {**params, "head": half(width, width)}, half(rows, width)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hardware", "mesh"),
    [
        pytest.param("h100-ethernet", {"node": 4}, marks=GPU, id="nodes"),
        pytest.param("v5p:4*2x2x1", {"slice": 4, "x": 4}, marks=TPU, id="slices"),
    ],
)
def test_compiled_stages_over_slow_links_are_faster_than_none(hardware: str, mesh: Any, tmp_path: Path) -> None:
    """By the compiled schedules of both: 5.2 times over the nodes, 11 over the slices, when this was written."""
    if hardware in ETHERNET.values():
        path = tmp_path / "h100-ethernet.json"
        path.write_text(json.dumps(ETHERNET))
        hardware = f"{path}:4x1"

    def compiled(stages: Any) -> tuple[autoshard.SolvedPlan, Any]:
        step, *args = large(stages)
        plan = autoshard.plan(step, *args, mesh=mesh, hardware=hardware, donate_argnums=0, remat="written")
        return plan, plan.verify()

    (plan, staged), (_, whole) = compiled("auto"), compiled(1)
    assert any(note.startswith("layers in 4 stages over") for note in plan.record.notes)
    assert staged.ok
    assert staged.timeline is not None
    assert whole.timeline is not None
    assert whole.timeline.step_s > 1.1 * staged.timeline.step_s


def test_slow_links_carry_stages(tmp_path: Path) -> None:
    path = tmp_path / "h100-ethernet.json"
    path.write_text(json.dumps(ETHERNET))
    step, *args = large()
    plan = autoshard.plan(step, *args, mesh={"node": 4}, hardware=f"{path}:4x1", donate_argnums=0, remat="written")
    (note,) = (note for note in plan.record.notes if note.startswith("layers in"))
    assert note.startswith("layers in 4 stages over node (1 stage, without a pipeline, the step would take ")
    assert float(note.split("take ")[1].split()[0]) > 1.5
    assert "  stages   layers in 4 stages over node" in plan.summary()


def test_a_search_finds_stages_and_makes_its_plan_again(tmp_path: Path) -> None:
    path = tmp_path / "h100-ethernet.json"
    path.write_text(json.dumps(ETHERNET))
    step, *args = large()
    task = Task(fn=step, args=tuple(args), donate=(0,), remat="written")
    candidate = Candidate(hardware=f"{path}:4x1", chips=4, mesh=(("data", 4),))
    tried = Trials(task).run(candidate)
    row = tried.answer
    assert isinstance(row, RankedPlan)
    assert row.stages == "data"
    assert tried.chosen is not None
    found = Search(
        name="train_step",
        rows=(row,),
        left_out=(),
        twins=0,
        missing=0,
        budget_tokens=0,
        prices={},
        wall_s=1.0,
        notes=(),
        task=task,
        chosen={candidate: tried.chosen},
    )
    assert found.to_json()["rows"][0]["stages"] == "data"
    assert "4 over data" in str(found)
    assert row.flops == 6 * 2048 * (2 * 32 * 8192 * 32768 + 8192 * 8192)  # those of the loss, none of a bubble
    again = found.planned()
    assert again.space.request.program.stages == "data"
    assert {row.trips for row in again.record.collectives if row.kind == "collective-permute"} == {4 + 4 - 1}


@pytest.mark.slow
def test_fast_links_carry_other_things() -> None:
    step, *args = large()
    plan = autoshard.plan(step, *args, mesh={"node": 4}, hardware="h100:1x4", donate_argnums=0, remat="written")
    assert any(note.startswith("layers in 1 stage, without a pipeline,") for note in plan.record.notes)


@pytest.mark.slow
def test_small_programs_have_no_stages_and_say_what_those_would_take() -> None:
    step = descent(in_stages(loss, stages="auto", steps="auto", parts=1))
    plan = autoshard.plan(step, *arguments(), mesh={"data": 2, "other": 3}, hardware="cpu:6", donate_argnums=0)
    (note,) = (note for note in plan.record.notes if note.startswith("layers in"))
    assert note.startswith("layers in 1 stage, without a pipeline, (2 stages over data the step would take ")
    assert (
        "over other refused: its 4 layers do not divide into 3 equal chunks (stages · repeats) at test_planned.py"
        in note
    )
    assert plan.microbatches == 1


@pytest.mark.parametrize("name", ["mean", pytest.param("sum", marks=pytest.mark.slow)])
def test_without_a_planner_there_is_one_stage(name: str) -> None:
    value_and_grad = in_stages(LOSSES[name], stages="auto", steps=3, parts=1)
    same(jax.jit(value_and_grad)(weights(), batch()), jax.value_and_grad(LOSSES[name])(weights(), batch()))
    for steps in (1, 3):
        with accumulation.tried_stages(""), accumulation.tried_steps(steps):
            got = jax.jit(value_and_grad)(weights(), batch())
        same(got, jax.value_and_grad(LOSSES[name])(weights(), batch()))


def test_variants_are_one_stage_and_stages_over_each_axis_that_divides_the_layers() -> None:
    step = descent(in_stages(loss, stages="auto", steps=4, repeats=2, parts=1))
    call = bind(step, arguments(), {})
    programs = list(call.variants(MeshAxes.of({"data": 1, "stage": 2, "model": 8})))
    assert [program.stages for program in programs] == ["", "stage"]
    assert programs[0].open_count is not None
    assert programs[1].open_count is None
    assert list(programs[0].not_staged) == ["model=8"]
    assert len({program.traced.digest for program in programs}) == 2


def test_losses_that_cannot_be_in_stages_are_planned_without() -> None:
    step = descent(in_stages(lambda p, b: jnp.mean(outputs(p, b, normalized)), stages="auto", steps=3, parts=1))
    plan = autoshard.plan(step, weights(), batch(), mesh={"data": 2}, hardware="cpu:2")
    assert any("over data refused: `sub` brings a sum over the batch to its examples" in n for n in plan.record.notes)


def test_a_chosen_pipeline_is_applied_from_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its program is found again by its digest, whichever is the fastest now."""
    step, (params, x) = descent(in_stages(loss, stages="auto", steps="auto", parts=1)), arguments()
    every = Call.variants
    monkeypatch.setattr(Call, "variants", lambda call, axes, **how: (p for p in every(call, axes, **how) if p.stages))
    made = autoshard.plan(step, params, x, mesh={"stage": 2}, hardware="cpu:2")
    assert made.microbatches is not None
    assert made.microbatches >= 2
    monkeypatch.undo()
    made.save(tmp_path / "plan.json")
    loaded = autoshard.load(tmp_path / "plan.json")
    got = loaded.bind(step, params, x).jit()(params, x)
    want = jax.jit(descent(jax.value_and_grad(loss)))(params, x)
    same(jax.tree.map(np.asarray, got), jax.tree.map(np.asarray, want))
