"""`autoshard.accumulate` computes what `jax.value_and_grad` does, and reduces once, in float32, after the loop."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import autoshard
import cost_models
from autoshard import SpecError, accumulate
from autoshard.ir import accumulation, trace
from autoshard.ir.mesh import MeshAxes
from autoshard.planner import view
from tests.programs import GPUS, MESH, relative_error

P = PartitionSpec
STEPS = 4
BATCH = np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)


def params(dtype: Any = np.float32) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    return {"up": rng.normal(size=(16, 32)).astype(dtype), "down": rng.normal(size=(32, 16)).astype(dtype)}


def loss(p: Any, x: Any, shift: Any = 0.0) -> Any:
    y = jnp.tanh(x @ p["up"].astype(x.dtype)) @ p["down"].astype(x.dtype) + shift
    return jnp.mean(jnp.square(y.astype(jnp.float32)))


def descent(value_and_grad: Any) -> Any:
    def train_step(state: Any, batch: Any) -> Any:
        value, gradients = value_and_grad(state, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), value

    return train_step


def same(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert relative_error(a, b) <= tolerance


@pytest.mark.parametrize(("steps", "parts"), [(1, None), (4, None), (4, 1), (4, 8), (16, 4), (1, 64)])
@pytest.mark.parametrize("around", [lambda f: f, jax.jit])
def test_it_is_value_and_grad(steps: int, parts: int | None, around: Any) -> None:
    got = around(accumulate(loss, steps=steps, parts=parts))(params(), BATCH)
    same(got, jax.value_and_grad(loss)(params(), BATCH))


def test_gradients_come_in_the_dtype_of_the_parameters_and_are_summed_in_float32() -> None:
    program = accumulate(loss, steps=STEPS, parts=2)
    half = jax.tree.map(jnp.asarray, params(jnp.bfloat16))
    _, gradients = program(half, BATCH)
    assert {g.dtype for g in jax.tree.leaves(gradients)} == {jnp.dtype(jnp.bfloat16)}
    (scan,) = [e for e in jax.make_jaxpr(program)(half, BATCH).eqns if e.primitive.name == "scan"]
    assert {(v.aval.shape, str(v.aval.dtype)) for v in scan.outvars[:2]} == {
        ((2, 16, 32), "float32"),
        ((2, 32, 16), "float32"),
    }
    same(gradients, jax.grad(loss)(half, BATCH), tolerance=2e-2)


def test_auxiliary_results_are_stacked_and_other_arguments_are_passed_whole() -> None:
    def with_aux(p: Any, x: Any, shift: Any) -> Any:
        return loss(p, x["x"], shift), {"rows": x["id"], "shift": shift}

    batch = {"x": BATCH, "id": np.arange(64)}
    (value, aux), gradients = accumulate(with_aux, steps=STEPS, parts=2, has_aux=True)(params(), batch, 0.5)
    want, want_gradients = jax.value_and_grad(loss)(params(), BATCH, 0.5)
    same((value, gradients), (want, want_gradients))
    assert aux["rows"].shape == (8, 8)
    assert sorted(np.asarray(aux["rows"]).ravel()) == list(range(64))
    assert aux["rows"][0].tolist() == list(range(0, 32, 4))  # micro-batch 0 of part 0: every fourth of its half
    assert aux["shift"].shape == (8,)


def test_what_does_not_divide_is_an_error() -> None:
    with pytest.raises(SpecError, match="steps=0"):
        accumulate(loss, steps=0)
    with pytest.raises(SpecError, match="a batch of 64 does not split into 3 micro-batches of 1 parts"):
        accumulate(loss, steps=3)(params(), BATCH)
    with pytest.raises(SpecError, match="24 must divide it"):
        accumulate(loss, steps=3, parts=8)(params(), BATCH)
    with (
        jax.set_mesh(jax.make_mesh((2, 4), ("data", "model"))),
        pytest.raises(SpecError, match="no axis 'batch'; it has data, model"),
    ):
        accumulate(loss, steps=4, parts="batch")(params(), BATCH)


def test_parts_by_name_are_the_sizes_of_the_mesh_in_context() -> None:
    def parts(names: Any) -> int:
        text = str(jax.make_jaxpr(accumulate(loss, steps=STEPS, parts=names))(params(), BATCH))
        return next(n for n in (1, 2, 4, 8) if f"f32[{n},16,32]" in text)

    assert parts(("data", "model")) == 1
    with jax.set_mesh(jax.make_mesh((2, 4), ("data", "model"))):
        assert [parts(names) for names in ("data", "model", ("data", "model"))] == [2, 4, 8]


def test_choices_are_the_products_of_mesh_axes() -> None:
    assert accumulation.choices(MeshAxes.of({"a": 2, "b": 4, "c": 3})) == [1, 2, 3, 4, 6, 8, 12, 24]


def test_only_accumulations_without_parts_are_open_while_planning() -> None:
    def is_open(parts: Any) -> bool:
        with accumulation.tried_parts(1):
            program = jax.jit(descent(accumulate(loss, steps=STEPS, parts=parts)))
            return accumulation.is_open(trace.trace(program, (params(), BATCH), ("p", "x")).jaxpr)

    assert is_open(None)
    assert not is_open(2)


def test_the_planner_chooses_the_parts(tmp_path: Any) -> None:
    """Large matrices on few examples: apart, each of eight devices keeps its own gradients until the end."""
    wide = {
        "up": jax.ShapeDtypeStruct((1024, 4096), jnp.float32),
        "down": jax.ShapeDtypeStruct((4096, 1024), jnp.float32),
    }
    batch = jax.ShapeDtypeStruct((32768, 1024), jnp.bfloat16)
    ask = partial(autoshard.plan, mesh={"data": 8}, hardware=GPUS, donate_argnums=0, pins={"state.**": P()})
    step = descent(accumulate(loss, steps=8))
    chosen = ask(step, wide, batch)
    apart, together = (ask(descent(accumulate(loss, steps=8, parts=n)), wide, batch) for n in (8, 1))
    assert chosen.cost == min(apart.cost, together.cost)
    path = tmp_path / "plan.json"
    chosen.save(path)
    assert autoshard.load(path).bind(step, wide, batch).record == chosen.record


@pytest.mark.parametrize("parts", [None, "data", 8])
def test_planned_steps_are_those_of_one_device(parts: Any) -> None:
    step = descent(accumulate(loss, steps=STEPS, parts=parts))
    planned = autoshard.jit(step, mesh=MESH, hardware=GPUS, donate_argnums=0)
    got, want = (jax.tree.map(jnp.asarray, params()) for _ in range(2))
    value = expected = jnp.zeros(())
    for _ in range(3):
        got, value = planned(got, BATCH)
        want, expected = jax.jit(descent(jax.value_and_grad(loss)))(want, BATCH)
    same((got, value), (want, expected))


# --- Scans that users write themselves ----------------------------------------------------


def plain(loss: Any, steps: int, spec: PartitionSpec) -> Any:
    """An accumulation scan whose accumulator is pinned in the loop and behind it."""

    def pin(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, spec), tree)

    def value_and_grad(p: Any, batch: Any) -> Any:
        def add(total: Any, chunk: Any) -> Any:
            value, gradients = jax.value_and_grad(loss)(p, chunk)
            return pin(jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, gradients)), value

        chunks = jnp.moveaxis(batch.reshape(-1, steps, *batch.shape[1:]), 1, 0)
        total, values = jax.lax.scan(add, pin(jax.tree.map(jnp.zeros_like, p)), chunks)
        return values.mean(), jax.tree.map(lambda t: t / steps, pin(total))

    return value_and_grad


def plain_step(hardware: str, *, spec: PartitionSpec) -> autoshard.SolvedPlan:
    wide = {
        "up": jax.ShapeDtypeStruct((1024, 4096), jnp.float32),
        "down": jax.ShapeDtypeStruct((4096, 1024), jnp.float32),
    }
    return autoshard.plan(
        descent(plain(loss, 8, spec)),
        wide,
        jax.ShapeDtypeStruct((32768, 1024), jnp.bfloat16),
        mesh={"data": 8},
        hardware=hardware,
        donate_argnums=0,
        pins={"state.**": spec, "batch": P("data")},
    )


# Accumulator → its layout, and what reduces it how often in eight micro-batches: XLA moves an
# all-reduce behind the loop, never a reduce-scatter.
PLAIN = {"split": (P(None, "data"), "reduce-scatter", 8), "whole": (P(), "all-reduce", 1)}


@pytest.mark.parametrize("accumulator", sorted(PLAIN))
def test_the_page_shows_reductions_as_often_as_they_run(accumulator: str) -> None:
    spec, kind, trips = PLAIN[accumulator]
    plan = plain_step(GPUS, spec=spec)
    shown = view.of_plan(plan.planned, cost_models.hardware(GPUS))["timeline"]
    bars = [bar for bar in shown if bar["name"].startswith(kind)]
    promised = [row for row in plan.record.collectives if row.kind == kind]
    assert trips in {bar["trips"] for bar in bars}
    assert sum(bar["duration_s"] for bar in bars) == pytest.approx(sum(row.seconds * row.trips for row in promised))
