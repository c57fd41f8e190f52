"""Which copies a dense product of ragged rows makes, how often, and until when they lie in memory."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard.costs.ragged_products import DenseProduct, dense_products
from autoshard.ir.graph import build

X, W = jax.ShapeDtypeStruct((64, 32), jnp.bfloat16), jax.ShapeDtypeStruct((4, 32, 16), jnp.bfloat16)
SIZES = jax.ShapeDtypeStruct((4,), jnp.int32)


def made(program: Callable[..., Any], *arguments: Any) -> list[DenseProduct]:
    """Of every ragged product, where each value is made when the equation that makes it runs."""
    graph = build(jax.make_jaxpr(program)(*arguments), "cuda")
    when = [0] * len(graph.avals)
    for e, results in enumerate(graph.results):
        for v in results:
            when[v] = e
    return [one for _, one in sorted(dense_products(graph, when).items())]


def test_rows_of_several_matrices_are_copied_once() -> None:
    gate, up = made(lambda x, g, u, s: (jax.lax.ragged_dot(x, g, s), jax.lax.ragged_dot(x, u, s)), X, W, W, SIZES)
    (copies,) = gate.masked
    assert (copies.times, copies.end - copies.begin, gate.groups, gate.turned) == (1, 1, 4, None)
    assert not up.masked


def test_gradients_contract_rows_of_both_operands_and_turn_matrices() -> None:
    def gradients(x: Any, w: Any, s: Any) -> Any:
        return jax.grad(lambda x, w: (jax.lax.ragged_dot(x, w, s) ** 2).sum(), (0, 1))(x, w)

    found = made(gradients, X, W, SIZES)
    forward = next(one for one in found if one.turned is None and len(one.masked) == 1)
    of_rows = next(one for one in found if one.turned is not None)
    of_matrices = next(one for one in found if len(one.masked) == 2)
    assert [one.times for one in (*forward.masked, *of_rows.masked, *of_matrices.masked)] == [2, 2, 1, 1]
    x, cotangent = of_matrices.masked
    assert x.begin == forward.masked[0].begin < cotangent.begin <= x.end == cotangent.end


def test_each_group_has_its_copies_and_matrices_are_read_and_written() -> None:
    (of_rows,) = made(_transposed, X, W, SIZES)
    nbytes = [np.full(1, 100), np.full(1, 7)]
    assert int(of_rows.touched_bytes(nbytes)[0]) == 4 * 100 + 2 * 7
    assert sorted(int(held[0]) for _, held in of_rows.held(nbytes)) == [7, 400]


def _transposed(y: Any, w: Any, s: Any) -> Any:
    return jax.linear_transpose(lambda x: jax.lax.ragged_dot(x, w, s), X)(jnp.zeros((64, 16), jnp.bfloat16) + y[:, :16])
