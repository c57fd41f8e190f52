"""Candidates: the slices that exist, every mesh once, twins left out."""

from math import prod

import pytest

import cost_models
from autoshard.errors import MeshError
from autoshard.explore.candidates import candidates, slices
from cost_models.machines import catalogue
from cost_models.machines.topology import topologies


def test_slices_of_256_v5p_are_the_boxes_of_whole_cubes() -> None:
    # 256 = 4·4·16 = 4·8·8; no other product of multiples of 4 up to 16x16x24 gives it
    assert [s.name for s in slices("tpu-v5p", [256])] == ["tpu-v5p:4x8x8", "tpu-v5p:4x4x16"]


@pytest.mark.parametrize(("chip", "devices"), [("h100", 16), ("tpu-v5e", 16), ("tpu-v5e", 512), ("tpu-v7x", 16)])
def test_every_topology_has_the_devices_asked_for(chip: str, devices: int) -> None:
    names = topologies(catalogue.chip(chip), devices)
    assert names
    assert all(cost_models.hardware(f"{chip}:{name}").devices == devices for name in names)


def test_chips_that_have_two_devices_count_as_chips() -> None:
    (place,) = slices("tpu-v7x", [4])
    assert place.devices == 8
    (first, *_) = candidates([place], axes=1, choices=[{}], twins=False)
    assert (first.chips, first.shape) == (4, {"data": 8})


def test_a_number_of_chips_that_no_slice_has_names_those_next_to_it() -> None:
    with pytest.raises(MeshError, match=r"no slice of tpu-v5p has 100 chips; write --chips 64 or --chips 128"):
        slices("tpu-v5p", [100])


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_with_twins_every_ordered_factorization_is_there_once(axes: int) -> None:
    found = candidates(slices("tpu-v5e", [16]), axes=axes, choices=[{}], twins=True)
    # compositions of 4 (the exponent of 2) into 1, 2 and 3 positive parts: 1, 3, 3
    assert len(found) == sum([1, 3, 3][:axes])
    assert len({c.mesh for c in found}) == len(found)
    assert all(prod(c.shape.values()) == 16 for c in found)


def test_meshes_of_one_switch_differ_in_order_alone() -> None:
    # in one NVLink domain 4×2 and 2×4 cross the same links
    found = candidates(slices("h100", [8]), axes=2, choices=[{}], twins=False)
    assert [tuple(c.shape.values()) for c in found] == [(8,), (4, 2)]
    assert found.twins == 1


def test_meshes_over_nodes_are_no_twins() -> None:
    # over two nodes of eight, an inner axis of 8 stays in a node and one of 2 does, too, but the outer ones differ
    found = candidates(slices("h100", [16]), axes=2, choices=[{}], twins=False)
    assert [tuple(c.shape.values()) for c in found] == [(16,), (8, 2), (4, 4), (2, 8)]


def test_choices_multiply_candidates() -> None:
    found = candidates(slices("cpu:8", []), axes=1, choices=[{"batch": 8}, {"batch": 16}], twins=False)
    assert [str(c) for c in found] == ["data=8 on cpu:8, batch=8", "data=8 on cpu:8, batch=16"]


def test_more_axes_than_three_are_refused() -> None:
    with pytest.raises(MeshError, match="write 1, 2 or 3"):
        candidates(slices("cpu:8", []), axes=4, choices=[{}], twins=False)
