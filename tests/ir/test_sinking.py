"""Sinking: what loops are given of constants is made in them, and the numbers stay."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from autoshard import _jax
from autoshard.ir.sinking import sunk

ROWS = 8
X = np.linspace(-1, 1, ROWS * ROWS, dtype=np.float32).reshape(ROWS, ROWS)


def given(closed: Any) -> list[tuple[int, ...]]:
    """The shapes that the program's one scan is given in every trip."""
    (scan,) = [eqn for eqn in _jax.equations(closed) if eqn.primitive.name == "scan"]
    return [x.aval.shape for x in scan.invars[: _jax.scan_arity(scan)[0]] if x.aval.shape]


def masked(x: Any) -> Any:
    mask = jnp.arange(ROWS)[:, None] >= jnp.arange(ROWS)[None, :]
    return jax.lax.scan(lambda c, _: (jnp.where(mask, jnp.sin(c), c), None), x, None, length=3)[0]


def test_masks_are_made_in_the_loop() -> None:
    closed = jax.make_jaxpr(masked)(X)
    assert (ROWS, ROWS) in given(closed)
    assert given(sunk(closed)) == []
    (got,) = jaxpr_as_fun(sunk(closed))(X)
    np.testing.assert_array_equal(got, masked(X))


def test_what_is_made_of_inputs_or_costs_more_stays() -> None:
    def step(x: Any, y: Any) -> Any:
        positive, table = y > 0, jnp.sin(jnp.ones((ROWS, ROWS)))
        return jax.lax.scan(lambda c, _: (jnp.where(positive, c + table, c), None), x, None, length=3)[0]

    closed = jax.make_jaxpr(step)(X, X)
    assert given(sunk(closed)) == given(closed) == [(ROWS, ROWS)] * 2


def test_gradients_of_loops_are_the_same() -> None:
    closed = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(masked(x) ** 2)))(X)
    got, expected = jaxpr_as_fun(sunk(closed))(X), jaxpr_as_fun(closed)(X)
    np.testing.assert_array_equal(got[0], expected[0])
