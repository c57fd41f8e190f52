"""How long autoshard takes to start: its import, and a plan that is in the cache, in processes of their own.

    python -m benchmarks.start_up [--runs 5]

Seconds of the processor beyond importing JAX and finding its devices, the median of so many runs. The program is a
step of four layers; the first process plans it and writes the bytecode, the others find both, as after an install.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile

STEP = """
import sys, time
import jax, jax.numpy as jnp
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.devices()

def loss(params, x):
    for up, down in params:
        x = x + jax.nn.gelu(x @ up) @ down
    return jnp.mean(jnp.square(x))

def step(params, x):
    return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params, x))

shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
args = [(shape(1024, 4096), shape(4096, 1024))] * 4, shape(512, 1024)
jax.eval_shape(step, *args)
before, begin = set(sys.modules), time.process_time()
import autoshard
jitted = autoshard.jit(step, donate_argnums=0, cache=sys.argv[1])
imported = time.process_time()
jitted.plan(*args)
ours = [name for name in set(sys.modules) - before if name.partition(".")[0] in ("autoshard", "cost_models")]
print(imported - begin, time.process_time() - begin, len(ours), len(set(sys.modules) - before))
"""


def run(cache: str) -> list[float]:
    """Seconds of the import, and of import and plan, and how many modules were imported, of autoshard and of all."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = cache
    done = subprocess.run(
        [sys.executable, "-c", STEP, cache], env=environment, capture_output=True, text=True, check=True
    )
    return [float(x) for x in done.stdout.split()]


def main() -> None:
    """Prints the seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        first = run(cache)
        later = [run(cache) for _ in range(asked.runs)]
    imported, planned, ours, every = (statistics.median(column) for column in zip(*later, strict=True))
    print(f"import              {imported:.2f} s")
    print(f"import, first plan  {first[1]:.2f} s")
    print(f"import, cached plan {planned:.2f} s, {ours:.0f} modules of autoshard's, {every:.0f} in all")


if __name__ == "__main__":
    main()
