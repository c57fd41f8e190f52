"""Costs of one equation: the FLOPs of contractions against XLA's own count."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from numpy.typing import ArrayLike, NDArray

from autoshard import costs, graph
from autoshard.mesh import MeshAxes
from autoshard.rules import rule_of
from autoshard.strategies import enumerate_strategies

ONE = MeshAxes(("one",), (1,))


class Free:
    """A machine of which nothing is asked but FLOPs."""

    overlap = 0.0

    def matmul_s(self, batch: ArrayLike, m: ArrayLike, n: ArrayLike, k: ArrayLike, dtype: str) -> NDArray[np.float64]:
        return np.zeros(())

    def hbm_s(self, nbytes: ArrayLike) -> NDArray[np.float64]:
        raise AssertionError(nbytes)

    def collective_s(self, kind: str, axes: tuple[str, ...], nbytes: ArrayLike) -> NDArray[np.float64]:
        raise AssertionError(kind)


def flops(fn: Callable[..., Any], *args: Any) -> float:
    """FLOPs of a program's contractions."""
    eqns = [eqn for eqn in graph.build(jax.make_jaxpr(fn)(*args)).eqns if costs.is_contraction(eqn)]
    assert eqns
    total = 0.0
    for eqn in eqns:
        rule = rule_of(eqn)
        total += costs.contraction_s(eqn, rule, enumerate_strategies(rule, ONE), ONE, Free())[1][0]
    return total


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize(("stride", "dilation"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("taps", [1, 3, 7])
def test_convolutions_and_their_gradients_are_counted_as_xla_does(
    taps: int, stride: int, dilation: int, groups: int
) -> None:
    def gradients(image: jax.Array, kernel: jax.Array, cotangent: jax.Array) -> Any:
        out, back = jax.vjp(convolved, image, kernel)
        return out, back(cotangent)

    def convolved(image: jax.Array, kernel: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            image, kernel, (stride,) * 2, "SAME", rhs_dilation=(dilation,) * 2, feature_group_count=groups
        )

    image = jax.ShapeDtypeStruct((2, 4, 12, 8), jnp.float32)
    kernel = jax.ShapeDtypeStruct((8, 4 // groups, taps, taps), jnp.float32)
    cotangent = jax.eval_shape(convolved, image, kernel)
    found: Any = jax.jit(gradients).lower(image, kernel, cotangent).cost_analysis()
    assert flops(gradients, image, kernel, cotangent) == pytest.approx(found["flops"])


def test_a_row_of_a_ragged_dot_meets_one_group() -> None:
    rows, groups = jax.ShapeDtypeStruct((32, 8), jnp.float32), jax.ShapeDtypeStruct((4, 8, 16), jnp.float32)
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)

    def both(x: jax.Array, w: jax.Array, sizes: jax.Array) -> Any:
        return jax.vjp(lambda x, w: lax.ragged_dot(x, w, sizes), x, w)[1](jnp.ones((32, 16)))

    assert flops(lax.ragged_dot, rows, groups, sizes) == 2 * 32 * 8 * 16
    assert flops(both, rows, groups, sizes) == 2 * 2 * 32 * 8 * 16
