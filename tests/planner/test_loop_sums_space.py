"""Sums over loops' trips are finished once, after the loop, where that is faster: the compiled loop sums nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.backends.hlo import collectives, read
from autoshard.ir.mesh import MeshAxes
from autoshard.planner import record as records
from tests.programs import GPUS, relative_error

MESH = {"data": 8}
LAYERS, WIDTH, MICRO, ROWS, STEPS = 2, 16, 4, 4096, 6
RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32) / 4


def own_accumulation(weights: Any, batch: Any) -> Any:
    """A user's loop over micro-batches, around one over layers; the loss is summed, too."""

    def loss(weights: Any, x: Any) -> Any:
        x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, weights)
        return jnp.mean(x * x)

    def add(total: Any, x: Any) -> Any:
        return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(weights, x)), None

    return jax.lax.scan(add, (jnp.zeros(()), jnp.zeros_like(weights)), batch)[0]


def state_space(weights: Any, x: Any) -> Any:
    """Steps of time that share two weights; their gradients."""

    def loss(weights: Any, x: Any) -> Any:
        decay, out = weights

        def step(h: Any, u: Any) -> Any:
            h = jnp.exp(-jnp.exp(decay)) * h + jnp.tanh(u)
            return h, jnp.sum(jnp.square(h @ out), -1)

        return jnp.mean(jax.lax.scan(step, jnp.zeros((ROWS, WIDTH)), x)[1])

    return jax.value_and_grad(loss)(weights, x)


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "accumulation": (own_accumulation, (normal(LAYERS, WIDTH, WIDTH), normal(MICRO, ROWS, WIDTH))),
    "state space": (state_space, ((normal(WIDTH), normal(WIDTH, WIDTH)), normal(STEPS, ROWS, WIDTH))),
}


@pytest.fixture(scope="module", params=PROGRAMS)
def planned(request: pytest.FixtureRequest) -> tuple[Any, Callable[..., Any], tuple[Any, ...]]:
    fn, args = PROGRAMS[request.param]
    batch = "batch" if fn is own_accumulation else "x"
    return autoshard.plan(fn, *args, mesh=MESH, hardware=GPUS, pins={batch: P(None, "data")}), fn, args


def test_the_compiled_loops_sum_nothing(planned: Any) -> None:
    plan, _, args = planned
    assert plan.loop_sums
    found = collectives(read(plan.jit().lower(*args).compile().as_text()), MeshAxes.of(MESH))
    assert [str(c) for c in found if c.trips > 1 and c.kind in ("all-reduce", "reduce-scatter")] == []
    assert any(c.kind in ("all-reduce", "reduce-scatter") for c in found)


def test_the_numbers_are_the_same_as_without_a_plan(planned: Any, tmp_path: Path) -> None:
    plan, fn, args = planned
    want = fn(*args)
    path = tmp_path / "plan.json"
    plan.save(path)
    loaded = autoshard.load(path)
    assert loaded.record == plan.record
    for made in (plan.jit(), loaded.jit(fn)):
        for a, b in zip(jax.tree.leaves(made(*args)), jax.tree.leaves(want), strict=True):
            assert relative_error(a, b) < 1e-5


def test_the_summary_says_which_sums_wait(planned: Any) -> None:
    plan, _, _ = planned
    assert f"{records.AFTER_LOOPS} {len(plan.record.loop_sums)} sums over loops' trips" in " ".join(
        plan.summary().split()
    )


def test_a_loop_that_sums_in_every_trip_says_so() -> None:
    """The carried value is clipped, so it has to be whole in every trip."""

    def clipped(w: Any, x: Any) -> Any:
        def add(total: Any, rows: Any) -> Any:
            return jnp.clip(total + rows.T @ jnp.tanh(rows @ w), -1, 1), None

        return jax.lax.scan(add, jnp.zeros_like(w), x)[0]

    w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 64), (MICRO, 2**18, 64)))
    plan = autoshard.plan(clipped, w, x, mesh=MESH, hardware=GPUS, pins={"x": P(None, "data")})
    assert plan.record.loop_sums == ()
    assert "finish sums in every trip" in " ".join(plan.summary().split())


def test_a_file_of_a_program_without_such_loops_is_as_it_was() -> None:
    w, x = normal(WIDTH, WIDTH), normal(ROWS, WIDTH)
    plan = autoshard.plan(lambda w, x: jnp.sum(x @ w), w, x, mesh=MESH, hardware=GPUS)
    assert '"schema": 1' in plan.record.dumps()
    assert '"loop_sums"' not in plan.record.dumps()
