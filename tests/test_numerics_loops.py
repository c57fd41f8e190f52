"""Programs with loops compute the same under random plans as on one device, and under the optimum."""

import jax
import numpy as np
import pytest

import autoshard
from tests.loop_programs import LOOPED_MODELS, LOOPS
from tests.programs import GPUS, MESH
from tests.test_numerics import SLOW_SEEDS, check_random, wrong

SEEDS = 3


@pytest.mark.parametrize("name", LOOPS)
def test_random_plans_compute_the_same(name: str) -> None:
    check_random(LOOPS[name](), range(SEEDS))


@pytest.mark.parametrize("name", LOOPS)
def test_the_optimum_computes_the_same(name: str) -> None:
    program = LOOPS[name]()
    got = autoshard.jit(program.fn, mesh=MESH, hardware=GPUS, rel_gap=1e-2)(*program.args)
    assert not wrong(jax.tree.map(np.asarray, got), jax.jit(program.fn)(*program.args))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(SEEDS, SEEDS + SLOW_SEEDS, 20))
@pytest.mark.parametrize("name", [*LOOPS, *LOOPED_MODELS])
def test_many_random_plans_compute_the_same(name: str, first: int) -> None:
    check_random({**LOOPS, **LOOPED_MODELS}[name](), range(first, first + 20))
