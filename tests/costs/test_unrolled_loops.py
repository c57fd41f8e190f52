"""Unrolled loops that take one array apart run in step: their collectives are merged."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.costs.unrolled_loops import MERGED_BYTES, merged_bytes
from autoshard.ir import graph as graphs
from autoshard.ir.graph import Graph
from tests.installed import needs_gpu_compiler

TRIPS, SIZE = 4, 256


def iterated(x: Any, coefficients: Any, *, unroll: bool = True) -> Any:
    """Newton and Schulz's iterations, which sum over what is split."""

    def body(_: int, x: Any) -> Any:
        gram = x @ x.T
        return coefficients[0] * x + (coefficients[1] * gram) @ x

    return jax.lax.fori_loop(0, TRIPS, body, x, unroll=unroll)


def graph_of(step: Any, *args: Any) -> Graph:
    return graphs.build(jax.make_jaxpr(step)(*args), "cuda")


def shapes(*columns: int) -> list[Any]:
    return [jax.ShapeDtypeStruct((SIZE, n), jnp.float32) for n in columns]


COEFFICIENTS = jax.ShapeDtypeStruct((2,), jnp.float32)


def grams(graph: Graph) -> list[int]:
    return [r[0] for r, eqn in zip(graph.results, graph.eqns, strict=True) if eqn.results[0].shape == (SIZE, SIZE)]


def test_what_loops_in_step_sum_is_merged_with_what_the_others_do() -> None:
    graph = graph_of(lambda xs, c: [iterated(x, c) for x in xs], shapes(512, 1024, 768), COEFFICIENTS)
    merged = merged_bytes(graph)
    assert {merged[v] for v in grams(graph)} == {3 * 4 * SIZE * SIZE}
    assert {v for v, loop in enumerate(graph.value_loop) if loop} == merged.keys()


def test_no_more_is_merged_than_the_compiler_combines() -> None:
    graph = graph_of(lambda xs, c: [iterated(x, c) for x in xs], shapes(*[1 << 15] * 3), COEFFICIENTS)
    assert max(merged_bytes(graph).values()) == MERGED_BYTES


def apart(xs: Sequence[Any], c: Any) -> Any:
    return [iterated(x, c * (i + 1)) for i, x in enumerate(xs)]


def rolled(xs: Sequence[Any], c: Any) -> Any:
    return [iterated(x, c, unroll=False) for x in xs]


def in_turn(xs: Sequence[Any], c: Any) -> Any:
    first = iterated(xs[0], c)
    return iterated(xs[1] + first.sum(), c)


@pytest.mark.parametrize("step", [apart, rolled, in_turn])
def test_others_are_not(step: Any) -> None:
    assert not merged_bytes(graph_of(step, shapes(512, 1024), COEFFICIENTS))


@needs_gpu_compiler
@pytest.mark.parametrize("shared", [True, False])
def test_the_gpu_compiler_merges_what_runs_in_step(shared: bool) -> None:  # noqa: FBT001
    """Of six weights' sums a few per trip are left, and almost all where each has coefficients of its own."""

    def step(xs: Sequence[Any], cs: Sequence[Any]) -> Any:
        return [iterated(x, cs[0] if shared else c) for x, c in zip(xs, cs, strict=True)]

    columns = [1 << 13, 1 << 14, 1 << 15] * 2
    split = P(None, "m")
    plan = autoshard.plan(
        step,
        shapes(*columns),
        [COEFFICIENTS] * len(columns),
        mesh={"m": 8},
        hardware="h100:1x8",
        in_shardings=(split, P()),
        out_shardings=split,
    )
    (row,) = [row for row in plan.verify("gpu").rows if row.kind == "all-reduce"]
    sums, launches = row.emitted_count, row.emitted_launches
    assert launches <= sums / 3 if shared else launches >= sums / 2
