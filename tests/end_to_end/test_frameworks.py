"""What other people's models do that plain ones do not, each found by running `benchmarks.model_zoo`."""

import jax
import jax.numpy as jnp
import numpy as np

import autoshard
from tests.programs import GPUS, MESH


def test_a_typed_constant_meets_a_key_that_lies_on_devices() -> None:
    """As Flax folds a module's name into a key: the constant remembered the mesh of the trace."""

    def dropped(x: jax.Array, key: jax.Array) -> jax.Array:
        return x * jax.random.bernoulli(jax.random.fold_in(key, jnp.uint32(77)), 0.5, x.shape)

    x, key = jnp.arange(64.0).reshape(8, 8), jax.random.key(3)
    plan = autoshard.plan(dropped, x, key, mesh=MESH, hardware=GPUS, for_grad=False)
    got = plan.jit()(plan.put(x, "x"), plan.put(key, "key"))
    np.testing.assert_array_equal(got, dropped(x, key))
