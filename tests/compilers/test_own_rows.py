"""Lookups and scatters of every row's own places are split along the rows, and nothing is sent for them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from tests.installed import GPU, TPU

ROWS, PLACES, WIDTH, TAKEN = 64, 1024, 512, 128


def last(x: Any, at: Any, new: Any) -> Any:
    return x[jnp.arange(ROWS), at[:, 0]] + new[:, 0]


def gradient(x: Any, at: Any, new: Any) -> Any:
    return jax.grad(lambda x: jnp.sum(last(jnp.tanh(x), at, new) ** 2))(x)


def taken_back(x: Any, at: Any, new: Any) -> Any:
    return jax.grad(lambda new: jnp.sum(jnp.tanh(added(x, at, jnp.tanh(new)).astype(jnp.float32)) ** 2))(new)


def cached(x: Any, at: Any, new: Any) -> Any:
    return x.at[jnp.arange(ROWS), at[:, 0]].set(new[:, 0])


def added(x: Any, at: Any, new: Any) -> Any:
    return x.at[jnp.arange(ROWS)[:, None], at].add(new)


def every_trip(x: Any, at: Any, new: Any) -> Any:
    return jax.lax.scan(lambda x, _: (cached(x, at, new) * 1.5, None), x, length=3)[0]


@pytest.mark.parametrize("of", [last, gradient, taken_back, cached, added, every_trip])
@pytest.mark.parametrize(
    ("compiler", "hardware"),
    [pytest.param("gpu", "h100:1x8", marks=GPU), pytest.param("tpu", "v5e:2x4", marks=TPU)],
)
def test_own_rows_are_split(of: Callable[..., Any], compiler: str, hardware: str) -> None:
    x = jax.ShapeDtypeStruct((ROWS, PLACES, WIDTH), jnp.bfloat16)
    at = jax.ShapeDtypeStruct((ROWS, TAKEN), jnp.int32)
    new = jax.ShapeDtypeStruct((ROWS, TAKEN, WIDTH), jnp.bfloat16)
    rows = (P("data"),) * 3
    plan = autoshard.plan(of, x, at, new, mesh={"data": 8}, hardware=hardware, in_shardings=rows, out_shardings=rows[0])
    assert not plan.record.collectives
    assert not plan.verify(compiler).rows
