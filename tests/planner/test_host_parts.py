"""Inputs of which each host loads its part: JAX's own index maps are the oracle of which layouts leave it there."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.costs.strategies import layout_of, layouts
from autoshard.errors import InfeasibleError, MeshError, PlanMismatchError, SpecError
from autoshard.ir.mesh import MeshAxes
from autoshard.planner.host_parts import HostParts

BATCH, WIDTH = 64, 512


def step(w: Any, batch: Any) -> Any:
    slope = jax.grad(lambda w: jnp.mean((jnp.tanh(batch["x"] @ w) - batch["y"]) ** 2))(w)
    return w - 0.1 * slope


W = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
ROWS = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)


def plan(mesh: Any, hardware: str = "h100:2x4", **options: Any) -> autoshard.SolvedPlan:
    return autoshard.plan(step, W, {"x": ROWS, "y": ROWS}, mesh=mesh, hardware=hardware, **options)


@settings(max_examples=60, deadline=None)
@given(
    st.permutations(range(8)), st.sampled_from([(8,), (2, 4), (4, 2), (2, 2, 2)]), st.sampled_from([2, 4]), st.data()
)
def test_layouts_leave_parts_where_they_are_loaded(order: Any, sizes: Any, count: int, data: Any) -> None:
    """A layout is kept if every device's rows, as JAX says them, are its host's."""
    devices = np.empty(8, object)
    devices[:] = [jax.devices()[i] for i in (order if data.draw(st.booleans()) else range(8))]
    axes = MeshAxes(("a", "b", "c")[: len(sizes)], sizes)
    grid = devices.reshape(sizes)
    mesh, host = Mesh(grid, axes.names), {device: device.id // (8 // count) for device in jax.devices()}
    hosts = np.array([host[device] for device in grid.flat]).reshape(sizes)
    shape, dimension = (8, 16), data.draw(st.sampled_from([0, 1]))
    parts = HostParts(dimensions={0: dimension}, mesh=axes, hosts=hosts)
    rows = shape[dimension] // count
    kept = 0
    for code in layouts(shape, axes, unreduced=False).tolist():
        layout = layout_of(code, 2, axes)
        index = NamedSharding(mesh, layout.spec()).devices_indices_map(shape)
        own = all(
            host[d] * rows <= low and high <= (host[d] + 1) * rows
            for d, at in index.items()
            for low, high, _ in [at[dimension].indices(shape[dimension])]
        )
        assert parts.keeps(layout, dimension) == own, layout
        kept += own
    if kept:
        assert parts.keeps(parts.least(0, shape, "x"), dimension)
    else:
        with pytest.raises(InfeasibleError, match="not one after the other"):
            parts.least(0, shape, "x")


@pytest.mark.parametrize(
    ("mesh", "hardware", "options", "across"),
    [
        ({"data": 2, "model": 4}, "h100:2x4", {}, "data"),
        ({"model": 4, "data": 2}, "h100:2x4", {}, "model"),
        ({"data": 2, "model": 4}, "h100:1x8", {"hosts": 2}, "data"),
        ({"a": 2, "b": 4}, "h100:4x2", {}, ("a", "b")),
    ],
)
def test_a_plan_splits_the_batch_over_hosts(mesh: Any, hardware: str, options: Any, across: Any) -> None:
    made = plan(mesh, hardware, host_local="batch", **options)
    for name in ("x", "y"):
        entry = made.specs[1][name][0]
        axes = (entry,) if isinstance(entry, str) else entry
        assert set(axes) >= ({across} if isinstance(across, str) else {*across}), made.specs


def test_another_dimension_is_split_where_it_is_asked_for() -> None:
    made = plan({"data": 2, "model": 4}, host_local={"batch.x": 1})
    assert "data" in np.ravel(made.specs[1]["x"][1])


def test_the_mesh_is_chosen_among_those_that_split_it() -> None:
    rows = jax.ShapeDtypeStruct((4, WIDTH), jnp.float32)
    made = autoshard.plan(step, W, {"x": rows, "y": rows}, hardware="h100:2x4", host_local="batch")
    assert made.record.mesh.shape != {"data": 8}  # a batch of 4 does not divide into 8
    assert made.specs[1]["x"][0] is not None


def test_what_cannot_be_split_is_refused_by_name() -> None:
    with pytest.raises(SpecError, match=r"batch.x: asked for in P\(None, 'data'\), but each host loads its part of"):
        plan({"data": 2, "model": 4}, host_local="batch", pins={"batch.x": P(None, "data")})
    with pytest.raises(InfeasibleError, match="2 hosts along data, and dimension 0 of 3 does not divide into 2"):
        autoshard.plan(jnp.sin, jnp.ones((3, 8)), mesh={"data": 2, "model": 4}, hardware="h100:2x4", host_local="**")
    with pytest.raises(MeshError, match="which chips of tpu-v5p:2x2x2 belong to one host is not known"):
        plan({"data": 2, "model": 4}, "tpu-v5p:2x2x2", host_local="batch")
    with pytest.raises(MeshError, match="8 devices of h100:2x4 are not those of 3 hosts"):
        plan({"data": 2, "model": 4}, host_local="batch", hosts=3)


def test_a_locked_plan_that_splits_it_otherwise_does_not_fit(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, lock = {"data": 2, "model": 4}, tmp_path / "plan.json"
    whole = plan(mesh, lock=lock)
    kept = plan(mesh, lock=lock, host_local="batch")  # planned again
    assert kept.record.asked != whole.record.asked
    monkeypatch.setenv("CI", "1")
    assert plan(mesh, lock=lock, host_local="batch").record == kept.record
    with pytest.raises(PlanMismatchError, match="pins and donations"):
        plan(mesh, lock=lock)
