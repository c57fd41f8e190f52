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
