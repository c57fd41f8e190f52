"""Random programs under random emittable plans give the numbers of one device, exactly.

Many small programs are compiled as one, so that thousands take a minute.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import random_programs
from tests.assignments import QUICK_COMPILE, random_choice, run
from tests.programs import Program, space_of

BATCH = 100  # programs compiled together
BATCHES = 2
SLOW_BATCHES = 200


def batch_of(first: int) -> Program:
    """`BATCH` programs with seeds from `first` on, as one function of the list of their arguments."""
    arguments = [random_programs.inputs(first + i) for i in range(BATCH)]

    def together(arguments: list[list[jax.Array]]) -> list[list[jax.Array]]:
        return [random_programs.program(first + i, given) for i, given in enumerate(arguments)]

    return Program(fn=together, args=(arguments,), names=("arguments",))


def check(batch: int) -> None:
    program = batch_of(batch * BATCH)
    setting, _ = space_of(program)
    choice = random_choice(setting.decisions, setting.resharder, np.random.default_rng(batch))
    want: Any = jax.jit(program.fn, compiler_options=QUICK_COMPILE)(*program.args)
    got = jax.tree.unflatten(jax.tree.structure(want), run(setting, choice, jax.tree.leaves(program.args)))
    wrong = [
        batch * BATCH + i
        for i, pair in enumerate(zip(got, want, strict=True))
        if not equal(*pair) and not equal(pair[0], op_by_op(batch * BATCH + i))
    ]
    assert not wrong, f"programs {wrong} (batch {batch})"


def equal(one: Sequence[jax.Array], other: Sequence[jax.Array]) -> bool:
    return all(np.array_equal(a, b, equal_nan=True) for a, b in zip(one, other, strict=True))


def op_by_op(seed: int) -> list[jax.Array]:
    """A program's values without a compiler: on one device, too, XLA may merge the slices of a slice wrongly."""
    with jax.disable_jit():
        return random_programs.program(seed, [jnp.asarray(x) for x in random_programs.inputs(seed)])


@pytest.mark.parametrize("batch", range(BATCHES))
def test_random_programs_under_random_plans(batch: int) -> None:
    check(batch)


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(BATCHES, BATCHES + SLOW_BATCHES))
def test_many_random_programs_under_random_plans(batch: int) -> None:
    check(batch)
