"""What loops take that is computed of constants: which of it lies in memory, by compiler."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.backends.known_compilers import XLA_CPU, XLA_GPU, XLA_TPU
from autoshard.backends.model import CompilerModel
from autoshard.costs.fusion import fusion_traits
from autoshard.ir.graph import build
from autoshard.ir.op_traits import LOOP_CONST
from autoshard.rules import rules_of

F32 = jax.ShapeDtypeStruct((16, 32, 64), jnp.float32)
WEIGHTS = jax.ShapeDtypeStruct((3, 64, 64), jnp.float32)


def places(dim: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.float32, F32.shape, dim)


def scanned(added: Callable[[], jax.Array]) -> Callable[..., jax.Array]:
    def program(x: jax.Array, weights: jax.Array) -> jax.Array:
        constant = added()
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w + constant), None), x, weights)[0]

    return program


def random() -> jax.Array:
    return jax.random.normal(jax.random.key(0), F32.shape)


NUMBER, SMALLER, WHOLE = range(3)


@pytest.mark.parametrize(
    ("added", "varies"),
    [
        pytest.param(lambda: jnp.full(F32.shape, -1e9), NUMBER, id="a number"),
        pytest.param(lambda: 2 * jnp.full(F32.shape, 3.0) + 1, NUMBER, id="computed of numbers"),
        pytest.param(lambda: 2 * places(2), SMALLER, id="a row"),
        pytest.param(lambda: jnp.where(places(1) < places(2), 0.0, -1e9), SMALLER, id="a mask"),
        pytest.param(lambda: jnp.swapaxes(jnp.broadcast_to(places(0).T, (64, 32, 16)), 0, 2), SMALLER, id="turned"),
        pytest.param(lambda: places(0) * places(1) + places(2), WHOLE, id="along all dimensions"),
        pytest.param(lambda: jnp.cumsum(jnp.ones(F32.shape), 1), WHOLE, id="a running sum"),
        pytest.param(random, WHOLE, id="drawn"),
    ],
)
@pytest.mark.parametrize("compiler", [XLA_TPU, XLA_GPU, XLA_CPU], ids=lambda compiler: compiler.name)
def test_what_a_loop_repeats_itself_lies_nowhere(
    compiler: CompilerModel, added: Callable[[], jax.Array], varies: int
) -> None:
    """Of a number nowhere, and of what is repeated along a dimension where compilers hand it in as it is."""
    graph = build(jax.make_jaxpr(scanned(added))(F32, WEIGHTS), "tpu")
    free = fusion_traits(graph, rules_of(graph.eqns), (), compiler).free
    ((taken, inside),) = (
        (*graph.operands[e], *graph.results[e])
        for e, eqn in enumerate(graph.eqns)
        if eqn.primitive == LOOP_CONST and eqn.operands[0].shape == F32.shape
    )
    repeated = varies == NUMBER or (varies == SMALLER and compiler is XLA_TPU)
    assert (taken in free) == (inside in free) == repeated


@pytest.mark.parametrize("hardware", ["tpu-v5e:2x2", "h100:1x4"])
def test_a_number_that_a_loop_repeats_takes_no_memory_and_no_time(hardware: str) -> None:
    def peak_and_cost(fn: Any) -> tuple[int, float]:
        plan = autoshard.plan(fn, F32, WEIGHTS, mesh={"x": 4}, hardware=hardware, for_grad=False)
        return plan.record.memory.peak_bytes, plan.cost

    def written_there(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w + 2.0), None), x, weights)[0]

    assert peak_and_cost(scanned(lambda: jnp.full(F32.shape, 2.0))) == peak_and_cost(written_there)
