"""Spaces that are too large to search, programs too deep to walk, patterns of many stars: refused, or done, in time."""

import time
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autoshard
from autoshard.costs.strategies import MOST_LAYOUTS, enumerate_strategies, layout_count, layouts, strategy_count
from autoshard.errors import DepthError, MeshError
from autoshard.ir import graph
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


@pytest.mark.parametrize("axes", [6, 7, 10])
def test_a_mesh_of_too_many_axes_is_refused_before_anything_is_enumerated(axes: int) -> None:
    with pytest.raises(MeshError, match=r"dot_general at .*test_spaces.py:\d+ \(mlp\).*layouts on a0=2") as said:
        autoshard.plan(mlp, *MLP, mesh=mesh_of(axes), hardware=GPUS[axes], for_grad=False, cache=False)
    assert "mesh={'a0_a1': 4" in str(said.value)
    merged = {"a0_a1": 4, "a2_a3": 4, "a4_a5": 4}
    if axes == 6:  # the way out
        assert autoshard.plan(mlp, *MLP, mesh=merged, hardware=GPUS[6], for_grad=False, cache=False).cost > 0


def test_values_of_many_dimensions_are_refused_before_anything_is_enumerated() -> None:
    def many(x: Any) -> Any:
        for rank in range(1, 21):
            x = jnp.tanh(x.reshape((2,) * (rank - 1) + (2 ** (20 - rank + 1),)))
        return x

    with pytest.raises(MeshError, match="layouts"):
        autoshard.plan(many, shaped(2**20), mesh=mesh_of(3), hardware="h100:1x8", for_grad=False, cache=False)

    def einsum(a: Any, b: Any) -> Any:
        return jnp.einsum("abcd,cdef->abef", a, b)

    with pytest.raises(MeshError, match="layouts"):
        autoshard.plan(
            einsum, *[shaped(*[1024] * 4)] * 2, mesh=mesh_of(10), hardware=GPUS[10], for_grad=False, cache=False
        )


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
    """Nobody knows how often they run: a guess to the twelfth power is no better one."""
    x = shaped(64, 64)
    found = autoshard.plan(nested(depth), x, mesh={"a": 8}, hardware="h100:1x8", for_grad=False, cache=False)
    assert found.cost == pytest.approx(
        autoshard.plan(nested(3), x, mesh={"a": 8}, hardware="h100:1x8", for_grad=False, cache=False).cost
    )
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
