"""A Llama train step without a word about sharding: planned, run on 8 devices, and checked by a GPU's compiler.

    python -m examples.train_llama
"""

import autoshard  # isort: skip  (before jax: it keeps the GPU plugin's notices of a missing driver back)

from dataclasses import replace
from functools import partial

import jax

from models import transformer

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)  # virtual ones: this runs on a laptop


def run_small() -> None:
    """Three steps of a tiny Llama on 8 devices, beside the same steps under `jax.jit`."""
    config = replace(transformer.CONFIGS["tiny-llama"], compute_dtype="float32")
    init, train_step = partial(transformer.init, config), transformer.train_step(config)
    make_batch = partial(transformer.example_batch, config)

    step = autoshard.jit(train_step, donate_argnums=0)
    plan = step.plan(jax.eval_shape(lambda: init(jax.random.key(0))), jax.eval_shape(make_batch))
    print(plan.summary())

    state = plan.init(init, jax.random.key(0), arg="state")  # born sharded
    expected = init(jax.random.key(0))
    for i in range(3):
        batch = make_batch(seed=i)
        state, loss = step(state, plan.put(batch, arg="batch"))
        expected, expected_loss = jax.jit(train_step)(expected, batch)
        print(f"step {i}: loss {loss:.6f}, unsharded {expected_loss:.6f}")
    errors = jax.tree.map(lambda x, y: abs(x - y).max() / abs(y).max(), jax.device_get(state), jax.device_get(expected))
    print(f"state after 3 steps: at most {max(jax.tree.leaves(errors)):.1e} from the unsharded one\n")


def plan_large() -> None:
    """Two layers of Llama 3 8B for 8 H100, and what XLA's GPU compiler makes of the plan; no GPU is needed."""
    config = replace(transformer.CONFIGS["llama3-8b"], layers=2)
    arguments = transformer.example_args(config, batch=16, sequence=2048)
    plan = autoshard.plan(
        transformer.train_step(config),
        *arguments,
        mesh={"data": 2, "model": 4},
        hardware="h100:1x8",
        donate_argnums=0,
    )
    print(plan.summary())
    print(plan.verify(compiler="gpu"))


if __name__ == "__main__":
    run_small()
    plan_large()
