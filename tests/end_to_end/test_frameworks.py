"""What other people's models do that plain ones do not, each found by running `benchmarks.model_zoo`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard import _jax
from autoshard.ir import trace
from tests.programs import GPUS, MESH


def test_a_typed_constant_meets_a_key_that_lies_on_devices() -> None:
    """As Flax folds a module's name into a key: the constant remembered the mesh of the trace."""

    def dropped(x: jax.Array, key: jax.Array) -> jax.Array:
        return x * jax.random.bernoulli(jax.random.fold_in(key, jnp.uint32(77)), 0.5, x.shape)

    x, key = jnp.arange(64.0).reshape(8, 8), jax.random.key(3)
    plan = autoshard.plan(dropped, x, key, mesh=MESH, hardware=GPUS, for_grad=False)
    got = plan.jit()(plan.put(x, "x"), plan.put(key, "key"))
    np.testing.assert_array_equal(got, dropped(x, key))


def layer(framework: str) -> tuple[Any, Any]:
    """A function that calls a framework's dense layer in this file, and its parameters' shapes."""
    x = jnp.ones((8, 8))
    if framework == "flax.linen":
        linen: Any = pytest.importorskip("flax.linen", reason="flax is one of the dev extras")
        model = linen.Dense(16)
        return lambda params, x: model.apply(params, x), jax.eval_shape(model.init, jax.random.key(0), x)
    if framework == "flax.nnx":
        nnx: Any = pytest.importorskip("flax.nnx", reason="flax is one of the dev extras")
        graph, state = nnx.split(nnx.eval_shape(lambda: nnx.Linear(8, 16, rngs=nnx.Rngs(0))))
        return lambda params, x: nnx.merge(graph, params)(x), state
    equinox: Any = pytest.importorskip("equinox", reason="equinox is one of the dev extras")
    shapes = equinox.filter_eval_shape(equinox.nn.Linear, 8, 16, key=jax.random.key(0))
    arrays, static = equinox.partition(shapes, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    return lambda params, x: jax.vmap(equinox.combine(params, static))(x), arrays


@pytest.mark.parametrize("framework", ["flax.linen", "flax.nnx", "equinox"])
def test_a_layer_s_line_is_where_the_user_calls_it(framework: str) -> None:
    fn, params = layer(framework)
    traced = trace.trace(fn, (params, jax.ShapeDtypeStruct((8, 8), jnp.float32)), ("params", "x"))
    where = _jax.SourceLines()
    lines = {where(eqn) for eqn in traced.jaxpr.eqns if eqn.primitive.name == "dot_general"}
    assert [line.partition(":")[0] for line in lines] == [__file__]
