"""A Llama train step without a word about sharding: planned, run on 8 devices, and shown to a GPU's compiler.

python -m examples.train_llama
"""

from dataclasses import replace
from functools import partial

import autoshard  # isort: skip  (before jax: then the GPU plugin does not report a missing driver)
import jax
import numpy as np

from models import transformer

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)  # virtual ones: this runs on a laptop


def run_a_small_one() -> None:
    """Three steps of a tiny Llama on 8 devices, beside the same steps under `jax.jit`."""
    config = replace(transformer.CONFIGS["tiny-llama"], compute_dtype="float32")
    train_step, init = transformer.train_step(config), partial(transformer.init, config)
    batches = partial(transformer.example_batch, config)

    step = autoshard.jit(train_step, donate_argnums=0)
    plan = step.plan(jax.eval_shape(lambda: init(jax.random.key(0))), jax.eval_shape(batches))
    print(plan.summary(), end="\n\n")

    state = plan.init(init, jax.random.key(0), arg="state")  # born sharded
    expected = init(jax.random.key(0))
    for i in range(3):
        state, loss = step(state, plan.put(batches(seed=i), arg="batch"))
        expected, expected_loss = jax.jit(train_step)(expected, batches(seed=i))
        print(f"step {i}: loss {loss:.6f}, unsharded {expected_loss:.6f}")
    norm = lambda x: np.linalg.norm(np.ravel(x))
    errors = jax.tree.map(lambda x, y: norm(x - y) / norm(y), jax.device_get(state), jax.device_get(expected))
    print(f"every leaf of the state is within {max(jax.tree.leaves(errors)):.1e} of the unsharded one, relatively\n")


def plan_a_large_one() -> None:
    """Four layers of Llama 3 8B for 8 H100, compiled by XLA's GPU compiler; no GPU is needed."""
    config = replace(transformer.CONFIGS["llama3-8b"], layers=4)
    arguments = transformer.example_args(config, batch=16, sequence=2048)
    mesh = {"data": 2, "model": 4}
    plan = autoshard.plan(transformer.train_step(config), *arguments, mesh=mesh, hardware="h100:1x8", donate_argnums=0)
    print(plan.summary(), end="\n\n")
    print(plan.verify(compiler="gpu"))


if __name__ == "__main__":
    run_a_small_one()
    plan_a_large_one()
