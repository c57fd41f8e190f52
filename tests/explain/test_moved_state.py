"""Moved state: JAX's own index maps say which elements a device holds, and sets of them what it has to receive."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import lcm, prod
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
from autoshard.explain.diff import diff, text
from autoshard.ir.mesh import MeshAxes
from autoshard.planner.record import Leaf, PlanRecord

AXES = ("x", "y", "z")
MESHES = [sizes for n in (1, 2, 3) for sizes in product((1, 2, 3, 4, 8), repeat=n) if prod(sizes) <= 8]
SIZES = {"float32": 4, "bfloat16": 2, "int8": 1}


def some_plan() -> PlanRecord:
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    return autoshard.plan(lambda w: w + 1.0, x, mesh={"x": 8}, hardware="cpu:8", for_grad=False).record


RECORD = some_plan()


@dataclass(frozen=True, slots=True)
class Held:
    """A mesh, where its positions are, and the layout of every leaf."""

    sizes: tuple[int, ...]
    order: tuple[int, ...]
    specs: tuple[P, ...]

    def record(self, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[str, ...], donated: tuple[int, ...]) -> Any:
        leaves = zip(shapes, dtypes, self.specs, strict=True)
        return replace(
            RECORD,
            mesh=MeshAxes(AXES[: len(self.sizes)], self.sizes),
            device_order=self.order,
            inputs=tuple(Leaf(path=f"leaf{i}", shape=s, dtype=d, spec=p) for i, (s, d, p) in enumerate(leaves)),
            donated=donated,
        )

    def elements(self, leaf: int, shape: tuple[int, ...]) -> dict[int, set[int]]:
        """Device → the flat indices of what it holds, as JAX says."""
        devices = np.empty(len(self.order), object)
        devices[:] = [jax.devices()[i] for i in self.order]
        mesh = Mesh(devices.reshape(self.sizes), AXES[: len(self.sizes)])
        numbers = np.arange(prod(shape)).reshape(shape)
        index = NamedSharding(mesh, self.specs[leaf]).devices_indices_map(shape)
        return {jax.devices().index(device): {*numbers[at].ravel().tolist()} for device, at in index.items()}


@st.composite
def specs(draw: Any, sizes: tuple[int, ...], ndim: int) -> P:
    """A layout of so many dimensions; axes may be left out, and several may split one dimension."""
    dims: list[list[str]] = [[] for _ in range(ndim)]
    for axis in draw(st.permutations(AXES[: len(sizes)])):
        at = draw(st.integers(-1, ndim - 1))
        if at >= 0:
            dims[at].append(axis)
    return P(*(tuple(dim) or None for dim in dims))


@st.composite
def cases(draw: Any) -> tuple[Held, Held, tuple[tuple[int, ...], ...], tuple[str, ...]]:
    meshes = [draw(st.sampled_from(MESHES)) for _ in range(2)]
    orders = [tuple(draw(st.permutations(range(prod(sizes))))) for sizes in meshes]
    ndims = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    laid = [tuple(draw(specs(sizes, n)) for n in ndims) for sizes in meshes]
    shapes: list[tuple[int, ...]] = []
    for i, n in enumerate(ndims):
        parts = [
            [
                prod(dict(zip(AXES, sizes, strict=False))[a] for a in (layout[i][d] or ()))
                for sizes, layout in zip(meshes, laid, strict=True)
            ]
            for d in range(n)
        ]
        shapes.append(tuple(lcm(*each) * draw(st.integers(1, 2)) for each in parts))
    dtypes = tuple(draw(st.sampled_from([*SIZES])) for _ in ndims)
    first, then = (Held(*each) for each in zip(meshes, orders, laid, strict=True))
    return first, then, tuple(shapes), dtypes


@settings(max_examples=300, deadline=None)
@given(cases())
def test_what_is_received_is_what_the_indices_say(case: Any) -> None:
    first, then, shapes, dtypes = case
    every = tuple(range(len(shapes)))
    found = diff(first.record(shapes, dtypes, every), then.record(shapes, dtypes, ())).state
    total, lost = np.zeros(prod(then.sizes), np.int64), 0
    rows = {row.path: row for row in found.leaves}
    for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
        old, new = first.elements(i, shape), then.elements(i, shape)
        received = np.array([len(new[k] - old.get(k, set())) for k in range(len(new))]) * SIZES[dtype]
        staying: set[int] = set().union(*(old[k] for k in old if k in new))
        gone = (prod(shape) - len(staying)) * SIZES[dtype]
        total, lost = total + received, lost + gone
        assert (f"leaf{i}" in rows) == received.any()
        if (row := rows.get(f"leaf{i}")) is not None:
            assert (row.received_bytes, row.most_bytes, row.lost_bytes) == (received.sum(), received.max(), gone)
    assert found.device_bytes == tuple(total.tolist())
    assert (found.received_bytes, found.most_bytes) == (total.sum(), total.max())
    assert found.lost_bytes == lost
    assert found.state_bytes == sum(prod(s) * SIZES[d] for s, d in zip(shapes, dtypes, strict=True))
    assert list(found.leaves) == sorted(found.leaves, key=lambda row: -row.received_bytes)


SHAPE = ((8, 4),)


def of(
    sizes: tuple[int, ...], spec: P, order: tuple[int, ...] | None = None, *, donated: tuple[int, ...] = (0,)
) -> PlanRecord:
    return Held(sizes, order or tuple(range(prod(sizes))), (spec,)).record(SHAPE, ("float32",), donated)


def test_half_of_the_devices_take_over() -> None:
    """Each of the 4 that stay holds an eighth and needs a quarter; half of the value went away with the others."""
    found = diff(of((8,), P("x")), of((4,), P("x"))).state
    # rows that each needs: 0,1; 2,3; 4,5; 6,7. It holds 0; 1; 2; 3: only the first has one of its own
    assert found.device_bytes == (16, 32, 32, 32)
    assert found.lost_bytes == 64
    said = " ".join(str(diff(of((8,), P("x")), of((4,), P("x")))).split())
    assert "state 128 B (donated inputs); 8 devices become 4: they must receive 112 B beyond what they hold" in said
    assert "none more than device 1, 32 B; 64 B of the state lies on none of those that stay" in said
    assert "device i before is device i after; a new one holds nothing" in said


def test_copies_count_as_held_and_new_devices_hold_nothing() -> None:
    found = diff(of((4,), P()), of((8,), P("x"))).state
    assert found.device_bytes == (0, 0, 0, 0, 16, 16, 16, 16)
    assert found.lost_bytes == 0


def test_another_order_of_the_same_mesh_moves_all() -> None:
    before, after = of((2,), P("x")), of((2,), P("x"), (1, 0))
    assert not diff(before, after).leaves
    assert diff(before, after).state.device_bytes == (64, 64)
    assert "alike" not in str(diff(before, after))
    assert "each holds what it needs" in str(diff(before, before))


def test_the_state_is_what_one_of_the_plans_donates_or_all_inputs() -> None:
    def both(spec: P, donated: tuple[int, ...]) -> PlanRecord:
        return Held((8,), tuple(range(8)), (spec, spec)).record(SHAPE * 2, ("float32",) * 2, donated)

    one = diff(both(P("x"), (1,)), both(P(), ())).state
    assert (one.donated, [row.path for row in one.leaves]) == (True, ["leaf1"])
    every = diff(both(P("x"), ()), both(P(), ())).state
    assert (every.donated, [(row.path, row.count) for row in every.leaves]) == (False, [("leaf0", 1), ("leaf1", 1)])
    assert "all inputs: none is donated" in str(diff(both(P("x"), ()), both(P(), ())))


def test_another_shape_is_named_and_not_counted() -> None:
    before = of((8,), P("x"))
    after = replace(before, inputs=(replace(before.inputs[0], shape=(8, 5)),))
    found = diff(before, after)
    assert (found.state.others, found.state.received_bytes, found.state.state_bytes) == (("leaf0",), 0, 0)
    assert "1 of the state, of another shape or dtype in one plan" in " ".join(str(found).split())


def test_keys_have_their_bytes() -> None:
    before = of((8,), P("x"))
    keys = replace(before, inputs=(replace(before.inputs[0], dtype="key<fry>"),))
    spread = replace(keys, inputs=(replace(keys.inputs[0], spec=P()),))
    assert diff(keys, spread).state.received_bytes == 8 * 28 * 8  # of 32 keys of 8 bytes each device lacks 28


def rows(*, width: int) -> Iterator[str]:
    path = "state['params']['decoder']['attention']['kernel_of_the_layer']['{}']"
    before = of((8,), P("x"))

    def with_leaves(spec: P) -> PlanRecord:
        names = [path.format("abcdefghijk"[i]) for i in range(11)]
        leaves = tuple(replace(before.inputs[0], path=name, spec=spec) for name in names)
        return replace(before, inputs=leaves, donated=tuple(range(11)))

    yield from text(diff(with_leaves(P("x")), with_leaves(P())), width=width).splitlines()


@pytest.mark.parametrize("width", [60, 80])
def test_few_rows_are_shown_and_none_is_cut(width: int) -> None:
    lines = [*rows(width=width)]
    assert all(len(line) <= width for line in lines), [line for line in lines if len(line) > width]
    assert sum("f32[8,4]" in line and " B" in line for line in lines) == 8
    (more,) = [line for line in lines if "3 more rows" in line]
    assert more.split()[-2:] == ["2.69", "kB"]  # 3 leaves, of which each of 8 devices lacks 112 of 128 bytes
