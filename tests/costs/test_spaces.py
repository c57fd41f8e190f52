"""Spaces too large to search, programs too deep to walk, patterns of many stars: refused, thinned, or done, in time."""

import re
import time
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import autoshard
import cost_models
from autoshard.costs import search_mesh
from autoshard.costs.prices import INF_PS
from autoshard.costs.resharding import Resharder
from autoshard.costs.strategies import (
    MOST_LAYOUTS,
    assignments,
    enumerate_strategies,
    groups_of,
    layout_count,
    layouts,
    strategy_count,
)
from autoshard.errors import DepthError, MeshError
from autoshard.ir import graph
from autoshard.ir.graph import Aval
from autoshard.ir.mesh import MeshAxes
from autoshard.ir.paths import matches
from autoshard.rules import rule_of

GPUS = {6: "h100:8x8", 7: "h100:16x8", 10: "h100:128x8"}


def shaped(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def mesh_of(axes: int) -> dict[str, int]:
    return {f"a{i}": 2 for i in range(axes)}


def mlp(up: Any, down: Any, x: Any) -> Any:
    return jnp.tanh(x @ up) @ down


MLP = (shaped(1024, 4096), shaped(4096, 1024), shaped(2048, 1024))


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less is counted, so that these tests are short."""
    monkeypatch.setattr(search_mesh, "MOST_CELLS", 10**8)


@pytest.mark.parametrize("axes", [6, pytest.param(7, marks=pytest.mark.slow), pytest.param(10, marks=pytest.mark.slow)])
def test_a_mesh_of_many_axes_is_planned_in_groups_of_neighbours(axes: int, request: pytest.FixtureRequest) -> None:
    """No worse than where the user makes one axis of neighbours, and the proof says what it is of."""
    if axes == 6:
        request.getfixturevalue("little")
    found = autoshard.plan(mlp, *MLP, mesh=mesh_of(axes), hardware=GPUS[axes], for_grad=False, cache=False)
    assert re.search(rf"use the {axes} axes in [2-5] groups of neighbours at most", found.record.certificate.space)
    merged = {"x": 2 ** (axes // 2), "y": 2 ** (axes - axes // 2)}
    coarse = autoshard.plan(mlp, *MLP, mesh=merged, hardware=GPUS[axes], for_grad=False, cache=False)
    assert found.cost <= coarse.cost * (1 + 1e-6)
    assert "every evenly dividing layout" in coarse.record.certificate.space


@pytest.mark.usefixtures("little")
def test_what_is_asked_for_is_among_the_layouts() -> None:
    asked = P(None, ("a0", "a1", "a5"))
    options: Any = {"mesh": mesh_of(6), "hardware": GPUS[6], "for_grad": False, "cache": False}
    found = autoshard.plan(mlp, *MLP, in_shardings=(asked, None, None), **options)
    assert found.record.inputs[0].spec == asked
    with pytest.raises(MeshError, match=r"mesh=\{'a0_a1': 4"):  # six groups are too many to search
        autoshard.plan(mlp, *MLP, in_shardings=(P(None, ("a0", "a2", "a4")), None, None), **options)


def test_values_of_many_dimensions_are_planned() -> None:
    def many(x: Any) -> Any:
        for rank in range(1, 12):
            x = jnp.tanh(x.reshape((2,) * (rank - 1) + (2 ** (12 - rank + 1),)))
        return x

    found = autoshard.plan(many, shaped(2**12), mesh=mesh_of(3), hardware="h100:1x8", for_grad=False, cache=False)
    assert "3 axes in 2 groups" in found.record.certificate.space


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("axes", [0, 1, 4])
def test_assignments_in_groups_are_those_of_the_full_product(groups: int, axes: int) -> None:
    choices = [[-1, 0, 1, -2], [-1, -2], [-1, 0, -2], [-1, 0, 1, -2]][:axes]
    every = [list(row) for row in product(*choices) if groups_of(row) <= groups]
    assert assignments(choices, groups).tolist() == every


@pytest.mark.parametrize("hardware", ["h100:2x8", "tpu-v5p:2x2x4"])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_paths_among_fewer_layouts_lead_wherever_those_among_all_do(groups: int, hardware: str) -> None:
    """At hardly other prices."""
    full, aval = MeshAxes.of(mesh_of(4)), Aval((64, 64), np.dtype("float32"))
    few = replace(full, groups=groups)
    codes = layouts(aval.shape, few, unreduced=True)
    assert len(codes) <= layout_count(aval.shape, few) < layout_count(aval.shape, full)
    machine = cost_models.hardware(hardware).place(full.shape)
    ps, among_all = (Resharder(mesh, machine).cost_ps(aval, codes, codes, bucket=0) for mesh in (few, full))
    np.testing.assert_array_equal(ps < INF_PS, among_all < INF_PS)
    assert (ps >= 0.999 * among_all).all()
    assert (ps == among_all).mean() > 0.9


def test_counts_bound_what_is_enumerated_and_nothing_is_left_out() -> None:
    """Of every shape, all assignments that divide, in the order of the full product."""
    for mesh in (MeshAxes.of(mesh_of(3)), MeshAxes.of({"x": 2, "y": 3}), MeshAxes.of({})):
        for shape in ((4, 6), (12, 8, 3), (), (5, 7), (0, 4), (24,)):
            found = layouts(shape, mesh, unreduced=True)
            assert len(found) <= layout_count(shape, mesh) <= MOST_LAYOUTS
            base = len(shape) + 2
            every = 0
            for row in product(range(-2, 0 if 0 in shape else len(shape)), repeat=mesh.ndim):
                pieces = [
                    np.prod([s for s, d in zip(mesh.sizes, row, strict=True) if d == dim]) for dim in range(len(shape))
                ]
                if all(size % piece == 0 for size, piece in zip(shape, pieces, strict=True)):
                    every += 1
                    assert sum((d + 2) * base**i for i, d in enumerate(row)) in found
            assert len(found) == every
    (eqn,) = graph.build(jax.make_jaxpr(jnp.dot)(shaped(12, 8), shaped(8, 6)), "cpu").eqns
    mesh, rule = MeshAxes.of({"x": 2, "y": 3}), rule_of(eqn)
    strategies = enumerate_strategies(rule, mesh)
    assert len(strategies) <= strategy_count(rule, mesh)
    assert len(strategies) + strategies.pruned == 4**2


def nested(depth: int) -> Any:
    def body(k: int, c: Any) -> Any:
        if k == 0:
            return jnp.tanh(c @ c)
        return lax.while_loop(lambda c: (c**2).sum() < 1e4, lambda c: body(k - 1, c), c)

    return lambda x: body(depth, x)


@pytest.mark.parametrize("depth", [3, 12, 25])
def test_loops_inside_loops_are_planned(depth: int) -> None:
    """Nobody knows how often they run: a guess to the twelfth power is no better one.

    A deeper loop adds what its condition takes, once in every trip of those around it.
    """
    x = shaped(64, 64)
    found = autoshard.plan(nested(depth), x, mesh={"a": 8}, hardware="h100:1x8", for_grad=False, cache=False)
    three = autoshard.plan(nested(3), x, mesh={"a": 8}, hardware="h100:1x8", for_grad=False, cache=False)
    assert three.cost * (1 - 1e-6) <= found.cost < 1.1 * three.cost
    assert max(graph.build(jax.make_jaxpr(nested(depth))(x), "cpu").trips) == graph.WHILE_TRIPS**3


def test_a_scan_of_too_many_trips_is_told_so() -> None:
    def long(x: Any) -> Any:
        return lax.scan(lambda c, _: (jnp.tanh(c @ c), None), x, None, length=2**40)[0]

    with pytest.raises(autoshard.AutoshardError, match="trips"):
        autoshard.plan(long, shaped(64, 64), mesh={"a": 8}, hardware="h100:1x8", for_grad=False, cache=False)


def test_calls_too_deep_for_python_are_told_so() -> None:
    def deep(x: Any) -> Any:
        def call(x: Any, k: int) -> Any:
            return jnp.tanh(x @ x) if k == 0 else jnp.sin(jax.checkpoint(lambda x: call(x, k - 1))(x))

        return call(x, 100)

    try:
        autoshard.plan(deep, shaped(64, 64), mesh={"a": 8}, hardware="h100:1x8", for_grad=False, cache=False)
    except DepthError as error:
        assert "recursion limit" in str(error)  # noqa: PT017  (where Python's frames are fewer, it is planned)


def naive(pattern: list[str], path: list[str]) -> bool:
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(naive(pattern[1:], path[i:]) for i in range(len(path) + 1))
    return bool(path) and fnmatchcase(path[0], pattern[0]) and naive(pattern[1:], path[1:])


def test_patterns_match_as_they_are_defined_and_in_time() -> None:
    draw = np.random.default_rng(0)
    hits = 0
    for _ in range(2000):
        pattern = draw.choice(["**", "*", "a", "b", "a*"], draw.integers(1, 6)).tolist()
        path = draw.choice(["a", "b", "ab"], draw.integers(1, 7)).tolist()
        assert matches(".".join(pattern), ".".join(path)) == naive(pattern, path)
        hits += naive(pattern, path)
    assert 200 < hits < 1800
    begin = time.process_time()
    assert not matches(".".join(["**", "a"] * 30), ".".join(["a"] * 200 + ["b"]))
    assert time.process_time() - begin < 10  # the definition takes longer than the universe
