"""The cost of a call of a decorated function beside `jax.jit` at the same shardings.

python -m benchmarks.decorated_call
"""

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8").strip()

import jax
import jax.numpy as jnp
import numpy as np

import autoshard

MESH = {"data": 2, "model": 4}
LEAVES = 300


def product(a: Any, b: Any) -> Any:
    """A matmul."""
    return a @ b


def step(state: Any, x: Any) -> Any:
    """Something of every leaf."""
    return jax.tree.map(lambda leaf: leaf + x, state)


def scaled(x: Any, *, scale: Any, shift: Any, mode: str, n: int) -> Any:
    """Keywords, some of them static."""
    return x * scale + shift if mode == "up" else x / n


def timed(calls: tuple[Callable[[], Any], ...], count: int, rounds: int = 25) -> list[float]:
    """The least over rounds of each one's time per call, in turns, in seconds: others use the machine, too."""
    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, times in zip(calls, taken, strict=True):
            begin = time.perf_counter()
            for _ in range(count - 1):
                call()
            jax.block_until_ready(call())
            times.append((time.perf_counter() - begin) / count)
    return [min(times) for times in taken]


def going_round(fn: Callable[..., Any], state: Any, x: Any) -> Callable[[], Any]:
    """Calls whose argument is the result of the call before."""
    held = [state]

    def call() -> Any:
        held[0] = fn(held[0], x)
        return held[0]

    return call


def cases() -> dict[str, tuple[tuple[Callable[[], Any], ...], int]]:
    """Name → calls of (`autoshard.jit`, `jax.jit`), and how many to time together."""
    ours = partial(autoshard.jit, mesh=MESH, hardware="cpu:8", for_grad=False)
    a = np.ones((64, 64), np.float32)
    found: dict[str, tuple[tuple[Callable[[], Any], ...], int]] = {}

    f = ours(product)
    plan = f.plan(a, a)
    given = plan.put(a, "a"), plan.put(a, "b")
    g = jax.jit(product, in_shardings=plan.in_shardings(), out_shardings=plan.out_shardings())
    found["one matmul, 64 × 64"] = ((lambda: f(*given), lambda: g(*given)), 100)

    f2 = ours(step, donate_argnums=0)
    state = {f"leaf{i}": np.ones((64, 64), np.float32) for i in range(LEAVES)}
    plan2 = f2.plan(state, 1.0)
    g2 = jax.jit(step, in_shardings=plan2.in_shardings(), out_shardings=plan2.out_shardings(), donate_argnums=0)
    one = plan2.put(jnp.float32(1.0), "x")
    f2.plan(state, one)
    calls = tuple(going_round(fn, plan2.put(state, "state"), one) for fn in (f2, g2))
    found[f"a donated state of {LEAVES} leaves"] = (calls, 5)

    f3 = ours(scaled, static_argnames=("mode", "n"))
    plan3 = f3.plan(a, scale=a, shift=a, mode="up", n=2)
    x, scale, shift = plan3.put(a, "x"), plan3.put(a, "scale"), plan3.put(a, "shift")
    g3 = jax.jit(scaled, static_argnames=("mode", "n"), out_shardings=plan3.out_shardings())
    named: dict[str, Any] = {"scale": scale, "shift": shift, "mode": "up", "n": 2}
    found["keywords and statics"] = ((lambda: f3(x, **named), lambda: g3(x, **named)), 100)
    return found


def main() -> None:
    """Prints microseconds per call."""
    print(f"{'µs per call':32}{'autoshard.jit':>15}{'jax.jit':>10}{'ratio':>8}")
    for name, (calls, count) in cases().items():
        timed(calls, 3, rounds=2)
        ours, theirs = timed(calls, count)
        print(f"{name:32}{ours * 1e6:15.0f}{theirs * 1e6:10.0f}{ours / theirs:8.2f}")


if __name__ == "__main__":
    main()
