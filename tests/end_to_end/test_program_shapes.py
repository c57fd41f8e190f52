"""Other shapes of program than a transformer's step: message passing, rollouts, narrow types, loops, caches."""

from typing import Any

import jax
import numpy as np
import pytest

from benchmarks.zoo import shapes
from benchmarks.zoo.program import TINY
from tests.assignments import random_choice, run
from tests.programs import Program, space_of

# Of a leaf's largest entry; float8 rounds either way where the order of a sum is another.
TOLERANCE = {"fp8": 1e-1}

QUICK = ("gnn", "int8", "reinforce")
SLOW = ("fp8", "prefill", "decode", "generate", "two_losses", "ensemble", "lora", "ssm", "lstm", "ragged_moe")


def numbers(tree: Any) -> list[Any]:
    """Leaves as float64; keys as their words."""
    found = jax.tree.leaves(tree)
    keys = [jax.random.key_data(x) if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in found]
    return [np.asarray(x).astype(np.float64) for x in keys]


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_program_computes_under_a_random_plan_what_it_does_unsharded(name: str) -> None:
    made = getattr(shapes, name)(TINY)
    arguments = jax.jit(made.arguments)()
    setting, _ = space_of(Program(fn=made.step, args=arguments, names=tuple(f"a{i}" for i in range(len(arguments)))))
    choice = random_choice(setting.decisions, setting.resharder, np.random.default_rng(0))
    got = run(setting, choice, jax.tree.leaves(arguments))
    want = numbers(jax.jit(made.step)(*arguments))
    for one, expected in zip(numbers(got), want, strict=True):
        tolerance = TOLERANCE.get(name, 1e-4) * max(np.abs(expected).max(initial=0.0), 1e-6)
        np.testing.assert_allclose(one, expected, atol=tolerance, rtol=0)
