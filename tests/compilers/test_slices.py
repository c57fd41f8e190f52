"""Programs for several TPU slices, which no device here joins: planned, compiled and compared."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
import models
from autoshard.verification.collective_match import agrees
from tests.installed import TPU

pytestmark = TPU


def step(params: Any, x: Any) -> tuple[Any, Any]:
    def loss(params: Any) -> Any:
        h = jax.nn.relu(x @ params["up"]) @ params["down"]
        return jnp.mean(jnp.square(h.astype(jnp.float32)))

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads), value


@pytest.mark.parametrize(
    "mesh", [pytest.param({"slice": 2, "data": 8}, marks=pytest.mark.slow), {"slice": 2, "data": 4, "model": 2}]
)
def test_a_step_over_two_slices_moves_what_is_planned(mesh: dict[str, int]) -> None:
    """Between slices, too, to the byte; of the loss, a number, libtpu reduces a row of lanes."""
    half = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    params = {"up": half((2048, 8192)), "down": half((8192, 2048))}
    plan = autoshard.plan(
        step,
        params,
        half((32768, 2048)),
        mesh=mesh,
        hardware="tpu-v5e:2*2x4",
        donate_argnums=0,
        pins={"x": P(("slice", "data"))},
    )
    checked = plan.verify()
    assert checked.ok
    planned, emitted = (
        sorted((c.kind, c.nbytes, c.trips) for c in found if c.axes == ("slice",) and c.nbytes > 512)
        for found in (plan.record.collectives, checked.emitted)
    )
    assert planned
    assert emitted == planned


def test_an_axis_that_lies_partly_between_slices_is_said_to() -> None:
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    for mesh, told in (({"data": 16}, 1), ({"slice": 2, "data": 8}, 0)):
        plan = autoshard.plan(lambda x: jnp.sin(x).sum(), x, mesh=mesh, hardware="tpu-v5e:2*2x4")
        assert sum("lies inside of slices and between them" in note for note in plan.record.notes) == told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hardware", "mesh", "batch"),
    [("v5e:2*4x4", {"slice": 2, "data": 4, "model": 4}, 64), ("v5e:4*2x4", {"slice": 4, "data": 8}, 64)],
    ids=["two-slices", "four-slices"],
)
def test_llama_over_slices_moves_what_is_planned(hardware: str, mesh: dict[str, int], batch: int) -> None:
    """Four layers: bytes within 5 %, the step within 10 %."""
    step, args = models.build("llama3-8b", layers=4, scan=True, remat="full", batch=batch, sequence=2048)
    plan = autoshard.plan(step, *args, mesh=mesh, hardware=hardware, donate_argnums=0, remat="written")
    checked = plan.verify()
    assert agrees(checked.rows, checked.tolerance)
    assert checked.timeline is not None
    assert plan.cost == pytest.approx(checked.timeline.step_s, rel=0.1)
