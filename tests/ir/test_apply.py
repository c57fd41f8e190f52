"""Programs evaluated again with constraints are the programs that they were."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autoshard

X = np.ones((4, 8), np.float32)
SCALE = jnp.arange(8.0)


@jax.checkpoint
def computed_again(x: Any) -> Any:
    return jax.jit(lambda x: jnp.sin(x) * SCALE)(x)


@pytest.mark.parametrize("constraints", ["all", "needed"])
def test_what_is_computed_again_holds_the_constants_of_calls_in_it(constraints: Any) -> None:
    def both(x: Any) -> Any:
        return computed_again(x), jax.grad(lambda x: computed_again(x).sum())(x)

    got = autoshard.jit(both, mesh={"a": 4}, constraints=constraints)(X)
    jax.tree.map(np.testing.assert_array_equal, got, jax.jit(both)(X))
    loss = autoshard.jit(lambda x: computed_again(x).sum(), mesh={"a": 4}, constraints=constraints, for_grad=True)
    np.testing.assert_array_equal(jax.grad(loss)(X), got[1])


def test_loops_may_have_no_equations() -> None:
    def rows(x: Any) -> Any:
        _, constant = jax.lax.scan(lambda carry, row: (carry, jax.lax.optimization_barrier((row, SCALE))[1]), 0.0, x)
        _, number = jax.lax.scan(lambda carry, row: (carry, np.float32(-2)), 0.0, x)
        return constant, number, jax.lax.fori_loop(0, 3, lambda i, x: np.float32(2), np.float32(1))

    for hardware in ("cpu:4", "h100:1x4", "tpu-v5e:2x2"):
        got = autoshard.jit(rows, mesh={"a": 4}, hardware=hardware)(X)
        jax.tree.map(np.testing.assert_array_equal, got, jax.jit(rows)(X))


@pytest.mark.parametrize("hardware", ["cpu:1", "h100:1x1", "tpu-v5e:1x1"])
def test_one_device_is_planned_for(hardware: str) -> None:
    got = autoshard.jit(lambda x: (x @ x.T).sum(0), mesh={"a": 1}, hardware=hardware)(X)
    np.testing.assert_array_equal(got, (X @ X.T).sum(0))


def test_what_jax_keeps_in_one_piece_is_spelled_out() -> None:
    """JAX 0.12 has primitives of its own for these, which no rule would know."""

    def found(x: Any) -> Any:
        rows = jax.lax.scan(lambda count, row: (count + jnp.searchsorted(SCALE, row).sum(), count), 0, x)
        return jnp.searchsorted(SCALE, x), rows, jnp.frexp(x), jnp.ldexp(x, 2)

    got = autoshard.jit(found, mesh={"a": 4})(X)
    jax.tree.map(np.testing.assert_array_equal, got, jax.jit(found)(X))


def first_by_slice(x: Any, i: Any) -> Any:
    return x[i] + x[0]


def first_by_start(x: Any, i: Any) -> Any:
    return x[i] + jax.lax.dynamic_slice(x, (0,), (1,))


def all_but_the_last(x: Any, i: Any) -> Any:
    return x[i] + (x[:-1] * jnp.arange(1.0, x.size)).sum()


@pytest.mark.parametrize("fn", [first_by_slice, first_by_start, all_but_the_last])
@pytest.mark.parametrize("size", [3, 6])
def test_a_part_of_what_is_split_is_not_taken_for_the_whole(fn: Any, size: int) -> None:
    """XLA takes the gathered part for the gathered value where both have the same shard."""
    x, i = np.arange(1.0, size + 1, dtype=np.float32), np.array([[0, 1, 2, 1, 0, 2]] * 2, np.int32)
    shardings: dict[str, Any] = {"in_shardings": (P("b"), P("a", "b")), "out_shardings": P("a", "b")}
    got = autoshard.jit(fn, mesh={"a": 2, "b": 3}, hardware="cpu:6", **shardings)(x, i)
    np.testing.assert_array_equal(got, jax.jit(fn)(x, i))
