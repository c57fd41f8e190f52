"""Where mesh axes lie: device order, rings and lines, shared links, levels."""

from itertools import product
from math import prod

import jax
import numpy as np
import pytest
from hypothesis import given, settings

import autoshard
import cost_models
from cost_models.errors import MeshFitError
from cost_models.machines.alpha_beta import Ring
from cost_models.machines.model import Exchanged
from tests.random_machines import placed


def test_device_order_of_the_4d_mesh_of_llama_3():
    """GPU0 shares TP with GPU1, CP with GPU2, PP with GPU4, DP with GPU8 (arXiv:2407.21783, section 3.3.2)."""
    hardware = cost_models.hardware("h100:2x8")
    inner_last = hardware.place({"dp": 2, "pp": 2, "cp": 2, "tp": 2}).device_order
    assert [inner_last[0, 0, 0, 1], inner_last[0, 0, 1, 0], inner_last[0, 1, 0, 0], inner_last[1, 0, 0, 0]] == [
        1,
        2,
        4,
        8,
    ]
    inner_first = hardware.place({"tp": 2, "cp": 2, "pp": 2, "dp": 2}, ("dp", "pp", "cp", "tp")).device_order
    assert [inner_first[1, 0, 0, 0], inner_first[0, 1, 0, 0], inner_first[0, 0, 1, 0], inner_first[0, 0, 0, 1]] == [
        1,
        2,
        4,
        8,
    ]


@settings(deadline=None)
@given(placed())
def test_device_order_is_a_permutation_of_the_mesh(machine: cost_models.Machine):
    order = machine.device_order
    assert order.shape == machine.placement.sizes
    assert sorted(order.ravel().tolist()) == list(range(order.size))


@settings(deadline=None)
@given(placed())
def test_crossings_follow_from_the_device_order(machine: cost_models.Machine):
    """Groups of every axis set, read off the device ids: how many members at each level and dimension."""
    placement, dims = machine.placement, machine.placement.topology.dimensions
    coordinates = np.stack(np.unravel_index(machine.device_order, placement.topology.shape), axis=-1)
    for chosen in product((False, True), repeat=len(placement.axes)):
        axes = tuple(a for a, use in zip(placement.axes, chosen, strict=True) if use)
        group = coordinates[tuple(slice(None) if use else 0 for use in chosen)].reshape(-1, len(dims))
        distinct = [len(set(group[:, d].tolist())) for d in range(len(dims))]
        assert machine.group_size(axes) == prod(distinct)
        for crossing in machine.crossings(axes):
            members = [n for n, dim in zip(distinct, dims, strict=True) if dim.level == crossing.level]
            assert crossing.n == prod(members)
            if crossing.medium == "torus":
                assert [r.n for r in crossing.rings] == [n for n in members if n > 1]


def test_tensor_parallelism_stays_in_the_node():
    machine = cost_models.hardware("h100:4x8").place({"data": 4, "model": 8})
    assert [c.level for c in machine.crossings(("model",))] == ["domain"]
    assert [c.level for c in machine.crossings(("data",))] == ["scale_out"]
    both = machine.crossings(("data", "model"))
    assert [(c.level, c.n, c.inner) for c in both] == [("domain", 8, 1), ("scale_out", 4, 8)]


def test_an_axis_may_span_a_node_and_others():
    machine = cost_models.hardware("h100:4x8").place({"data": 2, "model": 16})
    assert [(c.level, c.n) for c in machine.crossings(("model",))] == [("domain", 8), ("scale_out", 2)]


def test_torus_axes_prefer_whole_rings():
    machine = cost_models.hardware("tpu-v5p:4x4x8").place({"data": 16, "model": 8})
    (model,), (data,) = machine.crossings(("model",)), machine.crossings(("data",))
    assert model.rings == (Ring(8, wraps=True),)
    assert data.rings == (Ring(4, wraps=True), Ring(4, wraps=True))


def test_inner_axes_stay_in_the_slice():
    machine = cost_models.hardware("tpu-v5e:2*8x16").place({"data": 128, "model": 2})
    assert [c.level for c in machine.crossings(("model",))] == ["domain"]
    assert [c.level for c in machine.crossings(("data",))] == ["domain", "scale_out"]


def test_a_part_of_a_torus_axis_is_a_line_and_what_is_left_shares_links():
    machine = cost_models.hardware("tpu-v5e:16x16").place({"data": 64, "model": 4})
    (model,), (data,) = machine.crossings(("model",)), machine.crossings(("data",))
    assert model.rings == (Ring(4, wraps=False),)
    assert data.rings == (Ring(16, wraps=True), Ring(4, wraps=True, sharers=4))


@pytest.mark.parametrize(
    ("spec", "wraps"),
    [
        ("tpu-v5e:8x16", [False, True]),
        ("tpu-v5e:8x8", [False, False]),
        ("tpu-v6e:16x16", [True, True]),
        ("tpu-v5p:2x4x4", [False, False, False]),
        ("tpu-v5p:4x4x4", [True, True, True]),
        ("tpu-v4:4x4x12", [True, True, True]),
    ],
)
def test_which_slices_wrap_around(spec: str, wraps: list[bool]):
    """Google Cloud's v5p page and MaxText's accelerator_to_spec_map.py."""
    assert [d.wraps for d in cost_models.hardware(spec).topology.dimensions] == wraps


def test_meshes_that_do_not_fit():
    hardware = cost_models.hardware("h100:2x4")
    with pytest.raises(MeshFitError, match="mesh data=3 × model=4 has 12 devices, topology 2x4 has 8"):
        hardware.place({"data": 3, "model": 4})
    with pytest.raises(MeshFitError, match="size cannot be -2"):
        hardware.place({"data": -2, "model": -4})
    with pytest.raises(MeshFitError, match="is no permutation of the mesh axes"):
        hardware.place({"data": 2, "model": 4}, ("data", "data"))
    with pytest.raises(MeshFitError, match="the mesh has no axis `expert`; it has data, model"):
        hardware.place({"data": 2, "model": 4}).collective_s("all-gather", ("expert",), 1)


def test_placements_are_distinct_and_start_with_the_default():
    hardware = cost_models.hardware("h100:2x8")
    mesh = {"data": 2, "pipe": 2, "model": 4}
    orders = [tuple(m.device_order.ravel().tolist()) for m in hardware.placements(mesh)]
    assert orders[0] == tuple(hardware.place(mesh).device_order.ravel().tolist())
    assert len(orders) == len(set(orders)) == 6
    best = min(hardware.placements(mesh), key=lambda m: float(m.collective_s("all-reduce", ("pipe",), 2**26)))
    assert [c.level for c in best.crossings(("pipe",))] == ["domain"]


def test_the_best_order_is_searched_and_kept():
    hardware = cost_models.hardware("h100:2x8")
    mesh = {"data": 2, "pipe": 2, "model": 4}
    busy: list[Exchanged] = [("all-reduce", (axis,), 2.0**26, 100.0) for axis in ("data", "model")]
    order = hardware.best_order(mesh, [*busy, ("collective-permute", ("pipe",), 2.0**10, 1.0)])
    assert order[0] == "pipe"
    nested = hardware.nested(order)
    assert [c.level for c in nested.place(mesh).crossings(("data",))] == ["domain"]
    assert nested.digest != hardware.digest
    assert hardware.nested(("data", "pipe", "model")).place(mesh).device_order.tolist() == (
        hardware.place(mesh).device_order.tolist()
    )


def test_a_plan_has_the_device_order_that_was_priced():
    """[TP2, CP2, PP2, DP2], major to minor, nested as in Llama 3: GPU0 meets GPUs 1, 2, 4 and 8."""

    def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w

    hardware = cost_models.hardware("h100:2x8").nested(("dp", "pp", "cp", "tp"))
    square = jax.ShapeDtypeStruct((64, 64), "float32")
    plan = autoshard.plan(
        matmul, square, square, mesh={"tp": 2, "cp": 2, "pp": 2, "dp": 2}, hardware=hardware, for_grad=False
    )
    order = np.reshape(plan.record.device_order, (2, 2, 2, 2))
    assert [order[1, 0, 0, 0], order[0, 1, 0, 0], order[0, 0, 1, 0], order[0, 0, 0, 1]] == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("spec", "quotients", "gradients"),
    [
        ("tpu-v5e:2x2", False, False),
        ("tpu-v5p:2x2x1", True, True),
        ("tpu-v4:2x2x1", True, True),
        ("tpu-v6e:2x2", False, True),
    ],
)
def test_what_chips_store_of_a_softmax(spec: str, *, quotients: bool, gradients: bool):
    """What libtpu 0.0.52 keeps of attention with its gradient, compiled for each."""
    found = cost_models.hardware(spec)
    machine = found.place({"x": found.devices})
    assert (machine.stores_quotients, machine.stores_score_gradients) == (quotients, gradients)
