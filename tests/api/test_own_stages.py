"""Stages of their own devices compute what `jax.value_and_grad` does, and hold what their schedule says."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

import autoshard
import models
from autoshard import SpecError, StageError, in_own_stages
from autoshard.errors import ArgumentError, MeshError, StageRunError
from autoshard.pipeline_parallel.own_stages import run as runs
from autoshard.pipeline_parallel.own_stages.tasks import TOTAL
from autoshard.rules.rule import unregister
from benchmarks.own_stages import planned
from models.training import adamw
from tests.end_to_end.test_numerics import ROUNDING, STEPS, TOLERANCE, WITHOUT_GRADIENT, errors, wrong
from tests.float64 import exact
from tests.pipeline_parallel.test_in_stages import REFUSED, SMALL, weights
from tests.pipeline_parallel.test_in_stages import batch as examples
from tests.pipeline_parallel.test_planned import arguments, loss
from tests.programs import GPUS, relative_error

BATCH = len(examples()["keep"])
LEARNING_RATE = 3e-4  # Adam divides by a gradient's size: where that is nearly zero, rounding moves a weight as far
TWO: dict[str, Any] = {"mesh": {"stage": 2, "data": 2}, "hardware": "h100:1x4", "stages": "stage", "steps": 4}
ALONE = {"mesh": {"stage": 2}, "hardware": "cpu:2"}  # two stages of one device each


def not_bk(leaf: str) -> bool:
    return WITHOUT_GRADIENT not in leaf


def staged(loss: Any, **how: Any) -> Any:
    options: dict[str, Any] = {**TWO, **how}
    return in_own_stages(loss, **options)


def steps_of(value_and_grad: Any, params: Any, batch: Any) -> tuple[Any, list[Any]]:
    """Three AdamW steps, the optimizer an ordinary program of all devices."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), adamw(LEARNING_RATE))

    @jax.jit
    def update(params: Any, state: Any, gradients: Any) -> Any:
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    state, values = tx.init(params), []
    for _ in range(STEPS):
        value, gradients = value_and_grad(params, batch)
        params, state = update(params, state, gradients)
        values.append(value)
    return params, values


def check_steps(value_and_grad: Any, loss: Any, params: Any, batch: Any) -> None:
    got, values = steps_of(value_and_grad, params, batch)
    want, expected = steps_of(jax.jit(jax.value_and_grad(loss)), params, batch)
    assert max(relative_error(a, b) for a, b in zip(values, expected, strict=True)) <= TOLERANCE
    assert not {leaf: error for leaf, error in wrong(got, want).items() if not_bk(leaf)}
    assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, params)


def test_three_adamw_steps_are_those_of_one_device_and_weights_stay_where_they_are(monkeypatch: Any) -> None:
    made: list[runs.Run] = []
    of = runs.Run.of

    def noted(*args: Any) -> runs.Run:
        made.append(of(*args))
        return made[-1]

    monkeypatch.setattr(runs.Run, "of", noted)
    params, batch = (jax.tree.map(jnp.asarray, x) for x in arguments())
    value_and_grad = staged(loss)
    check_steps(value_and_grad, loss, params, batch)
    plan = value_and_grad.plan(params, batch)
    assert {spec[0] for spec in jax.tree.leaves(plan.specs["layers"], is_leaf=lambda x: isinstance(x, tuple))} <= {
        "stage",
        ("stage",),
        ("stage", "data"),
    }
    assert [run.most for run in made] == [[2, 2]] * STEPS  # stages' worth, of 4 micro-batches
    assert all(not run.states and not run.cotangents for run in made)
    assert 0 < plan.bubble < 1
    assert plan.cost == plan.timeline.step_s > 0
    assert "1F1B: 2 stages of data=2, 4 micro-batches" in plan.summary()


CASES: dict[str, dict[str, Any]] = {
    "zero-bubble": {"mesh": {"stage": 4}, "schedule": "zero-bubble"},
    "zero-bubble that repeats": {"schedule": "zero-bubble", "keep": "states"},
    "states, of one device each": {"mesh": {"stage": 4}, "keep": "states"},
    "interleaved": {"mesh": {"stage": 2, "data": 2}, "schedule": "interleaved", "repeats": 2},
    "uneven": {"mesh": {"stage": 2, "model": 2}, "layers": (1, 3)},
    "GPipe of one device each": {"mesh": {"stage": 4}, "schedule": "GPipe"},
    "in parts": {"parts": "data"},
    "in parts, zero-bubble": {"parts": "data", "schedule": "zero-bubble"},
    "in parts, interleaved": {"parts": 2, "schedule": "interleaved", "repeats": 2},
    "in parts, uneven": {"parts": 4, "layers": (1, 3), "keep": "states"},
    "ends without layers": {"mesh": {"stage": 4, "data": 2}, "hardware": "h100:1x8", "layers": (0, 2, 2, 0)},
    "a first chunk without layers": {"schedule": "interleaved", "repeats": 2, "layers": (0, 2, 1, 1), "parts": 2},
    "a last stage without layers": {"schedule": "zero-bubble", "layers": (4, 0), "keep": "states"},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_schedules_and_divisions_have_the_same_steps(case: str) -> None:
    params, batch = (jax.tree.map(jnp.asarray, x) for x in arguments())
    check_steps(staged(loss, **CASES[case]), loss, params, batch)


MESHES: dict[str, dict[str, int]] = {
    "2": {"stage": 2, "data": 2, "model": 2},
    "4": {"stage": 4, "data": 2},
}
# Llama 3 405B, a 128th as wide: its numbers of heads, 16 to a pair of keys and values, and stages of unequal depth, as
# 126 layers over 16 stages are (arXiv:2407.21783, table 4: [TP, CP, PP, DP]).
TWIN: dict[str, Any] = {
    "scan": True,
    "remat": "full",
    "compute_dtype": "float32",
    "context": 16,
    "vocab": 64,
    "layers": 6,
    "width": 128,
    "heads": 16,
    "kv_heads": 1,
    "head_dim": 8,
    "hidden": 416,
}
TWINS: dict[str, dict[str, int]] = {
    "TP, CP and PP": {"stage": 2, "context": 2, "model": 2},
    "TP and PP, uneven": {"stage": 4, "model": 2},
    "DP, CP and PP": {"stage": 2, "data": 2, "context": 2},
}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    **{f"{n}, {m}": (n, SMALL, MESHES[m]) for n in ("tiny-gpt2", "tiny-llama", "tiny-mixtral") for m in MESHES},
    **{f"twin of 405B: {name}": ("llama3-405b", TWIN, mesh) for name, mesh in TWINS.items()},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", MODELS)
def test_models_have_the_same_steps(case: str) -> None:
    name, sizes, mesh = MODELS[case]
    module, config = models.find(name, **sizes)
    state = jax.jit(partial(module.init, config))(jax.random.key(1))
    batch = module.example_batch(config, batch=16)
    of_model = partial(module.loss, config)
    program = staged(of_model, mesh=mesh, hardware=GPUS, rel_gap=1e-2)
    value, gradients = program(state.params, batch)
    expected, exact_gradients = exact(jax.value_and_grad(of_model), state.params, batch)
    assert relative_error(value, expected) <= TOLERANCE
    assert not wrong(gradients, exact_gradients)
    plain = partial(steps_of, jax.value_and_grad(of_model))
    want, _ = exact(plain, state.params, batch)
    off = max(error for leaf, error in errors(jax.jit(plain)(state.params, batch)[0], want).items() if not_bk(leaf))
    got, _ = steps_of(program, state.params, batch)
    tolerance = max(TOLERANCE, ROUNDING * off)  # AdamW makes whole steps of gradients that are nearly zero
    assert not {leaf: error for leaf, error in wrong(got, want, tolerance).items() if not_bk(leaf)}


@pytest.mark.parametrize("parts", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_other_results_are_stacked_and_other_arguments_are_passed_whole(parts: int) -> None:
    def with_aux(p: Any, b: Any, shift: Any) -> Any:
        x, _ = jax.lax.scan(lambda x, own: (x + jnp.tanh(x @ own["w"]), None), b["x"] @ p["in"], p["layers"])
        return jnp.mean(x @ p["out"]) + shift, {"keep": b["keep"], "size": jnp.abs(b["x"]).mean()}

    program = staged(with_aux, has_aux=True, schedule="zero-bubble", parts=parts, **ALONE)
    (value, aux), gradients = program(weights(), examples(), np.float32(0.5))
    (want, _), want_gradients = jax.value_and_grad(with_aux, has_aux=True)(weights(), examples(), 0.5)
    assert relative_error(value, want) <= TOLERANCE
    assert not wrong(gradients, want_gradients)
    taken = [np.arange(BATCH)[m::4][part] for m in range(4) for part in np.split(np.arange(BATCH // 4), parts)]
    assert np.asarray(aux["keep"]).tolist() == [examples()["keep"][own].tolist() for own in taken]
    sizes = [np.abs(examples()["x"][own]).mean() for own in taken]
    assert relative_error(aux["size"], np.asarray(sizes)) <= TOLERANCE


def test_a_stage_that_fails_says_which_and_with_which_microbatch() -> None:
    params, batch = arguments()
    program = staged(loss, **ALONE)
    program(params, batch)
    entry: Any = program._entry(params, batch, ())
    working = entry.hand_overs

    handed: list[int] = []

    def failing(source: int, target: int, work: Any, values: Any) -> Any:
        handed.append(target)
        if handed.count(1) == 3:
            raise RuntimeError("the link is down")
        return working(source, target, work, values)

    entry.hand_overs = failing
    with pytest.raises(
        StageRunError, match=r"stage 0 failed in the forward pass of micro-batch 2 .*: the link is down"
    ) as caught:
        program(params, batch)
    error = caught.value
    assert (error.stage, error.microbatch, error.work) == (0, 2, "forward")
    assert str(type(error)(0, 0, 2, "forward", "the link is down")) == str(error)


def test_what_changes_numbers_or_is_inside_of_a_program_is_refused() -> None:
    changing, why = REFUSED["statistics of the batch"]
    with pytest.raises(StageError, match=why):
        staged(changing)(weights(), examples())
    with pytest.raises(ArgumentError, match=r"cannot be part of one: call it outside of jax.jit"):
        jax.jit(staged(loss))(*arguments())
    with pytest.raises(SpecError, match="stages='pipe': the mesh has no such axis; it has stage, data"):
        staged(loss, stages="pipe")(*arguments())
    with pytest.raises(ArgumentError, match="in_own_stages has no option 'memroy': did you mean memory"):
        staged(loss, memroy=1)


def test_held_microbatches_have_to_fit() -> None:
    """The programs fit; what 1F1B holds of four micro-batches fits, what GPipe holds does not."""
    params, batch = (jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), x) for x in arguments())
    how = {**ALONE, "steps": 16}
    peaks = [staged(loss, **how, schedule=name).plan(params, batch).peaks[1] for name in ("1F1B", "GPipe")]
    state = 64 // 16 * 64 * 4  # examples of a micro-batch, their width, bytes
    assert peaks[1] - peaks[0] == (16 - 1) * state  # the last stage holds one of them, or all
    between = sum(peaks) // 2
    assert staged(loss, **how, memory=between).plan(params, batch).peaks[1] == peaks[0]
    with pytest.raises(autoshard.InfeasibleError, match=r"stage 1 needs .* with the 16 micro-batches that GPipe holds"):
        staged(loss, **how, memory=between, schedule="GPipe").plan(params, batch)


def wide_loss(params: Any, batch: Any) -> Any:
    def layer(x: Any, own: Any) -> tuple[Any, None]:
        return x + jnp.tanh(x @ own["up"]) @ own["down"], None

    x, _ = jax.lax.scan(layer, batch, params)
    return jnp.mean(jnp.square(x))


WIDE = {
    "up": jax.ShapeDtypeStruct((4, 1024, 4096), jnp.float32),
    "down": jax.ShapeDtypeStruct((4, 4096, 1024), jnp.float32),
}


def test_gradients_are_reduced_once_where_that_is_faster() -> None:
    """Between nodes, a sum of all weights' gradients per micro-batch takes longer than its products."""
    batch = jax.ShapeDtypeStruct((32, 512, 1024), jnp.float32)
    how = {"hardware": "h100:4x1", "steps": 16}
    found, every = (staged(wide_loss, parts=parts, **how).plan(WIDE, batch) for parts in (None, 1))
    assert found.loss.parts == 2
    assert {spec[0] for spec in found.plans[0].specs(TOTAL)["weights"]} == {"data"}  # nothing is reduced in a task
    assert found.cost < 0.6 * every.cost
    homes = jax.tree.leaves(found.specs, is_leaf=lambda x: isinstance(x, tuple))
    assert {spec[0] for spec in homes} == {"stage"}
    assert all("data" in spec for spec in homes)  # each device keeps its share of what is reduced


def kernel_loss(bwd: Any) -> Any:
    """A loss with a kernel that `jax.vmap` does not know, whose derivative is `bwd`."""
    kernel = Primitive("kernel_of_own_stages")
    kernel.def_abstract_eval(lambda x: x)
    mlir.register_lowering(kernel, mlir.lower_fun(lambda x: 2 * x, multiple_results=False))
    autoshard.register_rule(kernel, "... -> ...", replace=True)
    doubled = jax.custom_vjp(kernel.bind)
    doubled.defvjp(lambda x: (kernel.bind(x), None), bwd)

    def loss(params: Any, batch: Any) -> Any:
        x, _ = jax.lax.scan(lambda x, own: (jnp.tanh(doubled(x @ own["up"]) @ own["down"]), None), batch, params)
        return jnp.mean(x)

    return loss


def test_kernels_without_a_rule_for_vmap_run_in_one_part() -> None:
    batch = jax.ShapeDtypeStruct((32, 8), jnp.float32)
    params = {"up": jax.ShapeDtypeStruct((2, 8, 8), jnp.float32), "down": jax.ShapeDtypeStruct((2, 8, 8), jnp.float32)}
    known = kernel_loss(lambda _, g: (2 * g,))
    try:
        assert staged(known).plan(params, batch).loss.parts == 1
        with pytest.raises(StageError, match="JAX cannot run parts of a micro-batch side by side") as caught:
            staged(known, parts=2).plan(params, batch)
        assert "test_own_stages.py" in caught.value.where

        def without(_: Any, g: Any) -> Any:
            raise NotImplementedError("no derivative of the kernel")

        for parts in (None, 2):
            with pytest.raises(NotImplementedError, match="no derivative of the kernel"):
                staged(kernel_loss(without), parts=parts).plan(params, batch)
    finally:
        unregister("kernel_of_own_stages")


@pytest.mark.parametrize(("layers", "steps"), [((4, 0), 256), pytest.param((2, 2), 64, marks=pytest.mark.slow)])
def test_states_are_split_where_those_that_a_stage_holds_do_not_fit_otherwise(
    layers: tuple[int, ...], steps: int
) -> None:
    batch = jax.ShapeDtypeStruct((steps, 512, 1024), jnp.float32)
    how = {"mesh": {"stage": 2, "model": 4}, "hardware": "h100:1x8", "steps": steps, "layers": layers}
    how |= {"schedule": "GPipe", "keep": "states"}
    loose = staged(wide_loss, **how).plan(WIDE, batch)
    tight = staged(wide_loss, **how, memory=loose.peaks[1] // 2 + 20_000_000).plan(WIDE, batch)
    assert [loose.plans[1].held_bytes, tight.plans[1].held_bytes] == [512 * 1024 * 4, 512 * 1024]
    assert loose.cost < tight.cost


@pytest.mark.slow
def test_a_chunk_repeats_values_only_where_it_does_not_fit_otherwise() -> None:
    batch = jax.ShapeDtypeStruct((64, 512, 1024), jnp.float32)
    how = {"hardware": "h100:1x4", "keep": "states", "parts": 1}
    loose = staged(wide_loss, **how).plan(WIDE, batch)
    limit = int(0.8 * min(loose.peaks))
    tight = staged(wide_loss, **how, memory=limit).plan(WIDE, batch)
    assert all(plan.whole.record.recomputation is None for plan in loose.plans)
    assert all(plan.whole.record.recomputation is not None for plan in tight.plans)
    assert max(tight.peaks) <= limit


@pytest.mark.slow
def test_llama_405b_on_16384_gpus_is_as_fast_as_published() -> None:
    """TP 8 · CP 2 · PP 16 · DP 64. A step takes 6.2 s of 16,384 GPUs at 41% (arXiv:2407.21783, table 4)."""
    pipeline = planned()
    assert pipeline.layers == (0, *[1] * 126, 0)
    assert pipeline.cost < 6.2
    assert pipeline.bubble < 0.1
    assert max(pipeline.peaks) < pipeline.plans[0].whole.record.memory.limit_bytes


def test_a_process_without_devices_of_the_stages_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    params, batch = arguments()
    program = staged(loss, schedule="GPipe", **ALONE)
    assert program.plan(params, batch).table.stages == 2  # it is planned wherever its devices are
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with pytest.raises(MeshError, match="process 1 has none of the 2 devices of the stages"):
        program(params, batch)


def test_the_plan_of_a_stage_is_a_plan_file(tmp_path: Path) -> None:
    """It has the devices of a stage, in the order of the first one's."""
    params, batch = arguments()
    pipeline = staged(loss, mesh={"data": 2, "stage": 2}, hardware="h100:2x2").plan(params, batch)
    for chunk in pipeline.plans:
        chunk.whole.save(tmp_path / "stage.json")
        assert autoshard.load(tmp_path / "stage.json").record == chunk.whole.record
        assert chunk.whole.record.device_order == (0, 1)
