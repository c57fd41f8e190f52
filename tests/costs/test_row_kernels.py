"""The slices of stacks that XLA:GPU copies for its kernels of rows."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard.backends.known_compilers import XLA_GPU
from autoshard.costs.fusion import fusion_traits
from autoshard.costs.liveness import SHORT_ROW
from autoshard.costs.row_kernels import sliced_rows
from autoshard.ir.graph import build
from autoshard.ir.op_traits import LOOP_SLICE
from autoshard.rules import rules_of

TRIPS, ROWS, COLUMNS = 3, 8, 64


def norm(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True))).astype(x.dtype)


def copied(body: Callable[..., Any], *, columns: int = COLUMNS, stacks: int = 2) -> list[int]:
    """Which of a loop's stacks are copied slice by slice."""

    def loop(*xs: jax.Array) -> Any:
        return jax.lax.scan(lambda carry, xs: (carry + 1, body(*xs)), 0.0, xs)

    args = [jax.ShapeDtypeStruct((TRIPS, ROWS, columns), jnp.bfloat16)] * stacks
    graph = build(jax.make_jaxpr(loop)(*args), "cuda")
    traits = fusion_traits(graph, rules_of(graph.eqns), (), XLA_GPU)
    found = sliced_rows(graph, traits.fuses, SHORT_ROW)
    slices = [graph.results[e][0] for e, eqn in enumerate(graph.eqns) if eqn.primitive == LOOP_SLICE]
    return [i for i, v in enumerate(slices) if v in found]


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        pytest.param(lambda x, y: (jax.nn.softmax(x.astype(jnp.float32)), y * 2), [0], id="softmax"),
        pytest.param(lambda x, y: jax.nn.softmax(jnp.where(jnp.arange(COLUMNS) < 9, x, -1e9)) + y, [0], id="masked"),
        pytest.param(lambda x, y: norm(x) * norm(y), [0, 1], id="norms"),
        pytest.param(lambda x, y: norm(x + y), [], id="norm of a sum"),
        pytest.param(lambda x, y: (jax.nn.silu(x) * y, x - y), [], id="element by element"),
        pytest.param(lambda x, y: (jnp.sum(x, -1), y), [], id="a sum alone"),
        pytest.param(lambda x, y: norm(x @ y.T), [], id="norm of a product"),
    ],
)
def test_slices_that_kernels_of_rows_take(body: Callable[..., Any], wanted: list[int]) -> None:
    assert copied(body) == wanted


def test_long_rows_have_no_such_kernel() -> None:
    assert copied(norm, columns=SHORT_ROW, stacks=1) == [0]
    assert copied(norm, columns=2 * SHORT_ROW, stacks=1) == []
