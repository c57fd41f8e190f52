"""Rows of gathers and scatters in whole lanes: bytes by hand."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.backends.known_compilers import XLA_GPU, XLA_TPU
from autoshard.costs.lanes import bytes_in_lanes, table_in_lanes
from autoshard.costs.strategies import WHOLE, decode, split
from autoshard.problem.decisions import Equation
from tests.programs import Program, space_of

ROWS, PLACES = 256, jax.ShapeDtypeStruct((64, 32), jnp.int32)


def looked_up(table: jax.Array, places: jax.Array) -> jax.Array:
    return table[places]


def added(table: jax.Array, places: jax.Array) -> jax.Array:
    return table.at[places].add(jnp.ones((*places.shape, *table.shape[1:]), table.dtype))


def one(table: jax.Array, places: jax.Array) -> jax.Array:
    return table[places[0, :1]]


def found(fn: Callable[..., Any], *row: int, compiler: Any = XLA_TPU) -> tuple[Any, Equation]:
    """The decisions of a program on a table of such rows, and its gather or scatter."""
    program = Program(fn=fn, args=(jax.ShapeDtypeStruct((ROWS, *row), jnp.float32), PLACES), names=("table", "places"))
    decisions = space_of(program, compiler=compiler)[0].decisions
    eqns = decisions.graph.eqns
    (node,) = (
        n
        for n in decisions.nodes
        if isinstance(n, Equation) and (eqns[n.equations[0]].traits.scatters or n.name == "gather")
    )
    return decisions, node


def beyond(fn: Callable[..., Any], *row: int) -> dict[int, int]:
    """Parts that a row's last dimension is split into → the bytes of a device's rows beyond their own, times devices.

    Of rows that are split no further.
    """
    decisions, node = found(fn, *row)
    eqn = decisions.graph.eqns[node.equations[0]]
    aval, codes = (
        (eqn.operands[2], node.strategies.operands[2])
        if eqn.traits.scatters
        else (eqn.results[0], node.strategies.results[0])
    )
    ways = [split(codes, d, aval.ndim, decisions.mesh) for d in range(aval.ndim)]
    more = bytes_in_lanes(eqn, node.strategies, decisions.mesh)
    whole = sum(ways[:-1]) == aval.ndim - 1
    return {int(w): int(n) for w, n, alone in zip(ways[-1], more, whole, strict=True) if alone}


@pytest.mark.parametrize("fn", [looked_up, added])
def test_a_row_takes_whole_lanes(fn: Callable[..., Any]) -> None:
    places = 64 * 32
    assert beyond(fn, 8) == {
        1: places * 120 * 4,
        2: places * 124 * 4,
        4: places * 126 * 4,
        8: 0,
    }  # of one element, none
    assert beyond(fn, 200)[1] == places * 56 * 4
    assert beyond(fn, 256) == {1: 0, 2: 0, 4: places * 64 * 4, 8: places * 96 * 4}


@pytest.mark.parametrize("fn", [looked_up, added])
@pytest.mark.parametrize(("columns", "lanes"), [(8, 128), (200, 256), (256, 256)])
def test_a_table_takes_whole_lanes(fn: Callable[..., Any], columns: int, lanes: int) -> None:
    """Its own bytes, and those of its copy; nothing is copied of one that fills them."""
    decisions, node = found(fn, columns)
    eqn = decisions.graph.eqns[node.equations[0]]
    own, filled = table_in_lanes(eqn, node.strategies, decisions.mesh)
    codes = node.strategies.results[0] if eqn.traits.scatters else node.strategies.operands[0]
    whole = (decode(codes, 2, decisions.mesh.ndim) == WHOLE).all(axis=1)
    copied = columns < lanes
    assert set(own[whole]) == {ROWS * columns * 4 * copied}
    assert set(filled[whole]) == {ROWS * lanes * 4 * copied}


def test_slices_take_whole_tiles() -> None:
    places = 64 * 32
    assert beyond(looked_up, 3, 128)[1] == places * 128 * 4
    assert beyond(looked_up, 12, 128)[1] == places * 4 * 128 * 4
    assert beyond(looked_up, 16, 100)[1] == places * 16 * 28 * 4


def test_one_row_is_a_slice() -> None:
    assert set(beyond(one, 8).values()) == {0}


@pytest.mark.parametrize("program", [lambda x, i: jnp.take(x, i) + x, lambda x, i: x.at[i].add(1.0)])
def test_one_number_is_no_row(program: Callable[..., Any]) -> None:
    """It is gathered or scattered without a dimension of its own, on a TPU, too."""
    args = jax.ShapeDtypeStruct((1024,), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    plan = autoshard.plan(program, *args, mesh={"data": 8}, hardware="tpu-v5e:2x4")
    assert plan.record.memory.peak_bytes < 3 * 4 * 1024


def test_the_program_holds_them_while_the_equation_runs() -> None:
    for compiler, count in ((XLA_TPU, 1), (XLA_GPU, 0)):
        decisions, node = found(looked_up, 8, compiler=compiler)
        (e,) = node.equations
        eqn = decisions.graph.eqns[e]
        _, table = table_in_lanes(eqn, node.strategies, decisions.mesh)
        more = bytes_in_lanes(eqn, node.strategies, decisions.mesh) + table
        at = decisions.nodes.index(node)
        there = [u for u in decisions.usages if u.node == at and (u.start, u.end) == (e, e + 1)]
        assert len([u for u in there if u.nbytes.tolist() == more.tolist()]) == count
