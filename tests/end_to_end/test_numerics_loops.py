"""Programs with loops compute the same under random plans as on one device, and under the optimum."""

from typing import Any

import jax
import numpy as np
import pytest

import autoshard
from autoshard import _jax
from autoshard.ir import rewrite
from tests.end_to_end.test_numerics import SLOW_SEEDS, check_random, truth, wrong
from tests.loop_programs import LOOPED_MODELS, LOOPS
from tests.programs import GPUS, MESH

SEEDS = 2
PRODUCTS = ("dot_general", "ragged_dot_general")


@pytest.mark.parametrize("name", LOOPS)
def test_random_plans_compute_the_same(name: str) -> None:
    check_random(LOOPS[name](), range(SEEDS))


@pytest.mark.parametrize("name", LOOPS)
def test_the_optimum_computes_the_same(name: str) -> None:
    program = LOOPS[name]()
    got = autoshard.jit(program.fn, mesh=MESH, hardware=GPUS, rel_gap=1e-2)(*program.args)
    assert not wrong(got, *truth(program))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(SEEDS, SEEDS + SLOW_SEEDS, 20))
@pytest.mark.parametrize("name", [*LOOPS, *LOOPED_MODELS])
def test_many_random_plans_compute_the_same(name: str, first: int) -> None:
    check_random({**LOOPS, **LOOPED_MODELS}[name](), range(first, first + 20))


# Not those in which a product may be of any size: branches not taken, and iterations that normalise.
MUTABLE = [name for name in [*LOOPS, *LOOPED_MODELS] if name not in ("cond", "while")]


@pytest.mark.parametrize("name", [MUTABLE[0], *(pytest.param(name, marks=pytest.mark.slow) for name in MUTABLE[1:])])
def test_any_product_that_is_a_thousandth_too_large_is_found_wrong(name: str) -> None:
    """What the tolerance catches: no plan, but the program with one of its products off."""
    program = {**LOOPS, **LOOPED_MODELS}[name]()
    want, tolerance = truth(program)
    closed, flat = jax.make_jaxpr(program.fn)(*program.args), jax.tree.leaves(program.args)

    def evaluated(off: rewrite.Path | None, found: list[rewrite.Path]) -> Any:
        def bind(eqn: Any, operands: list[Any], path: rewrite.Path) -> list[Any]:
            if eqn.primitive.name in PRODUCTS:
                found.append(path)
            results = _jax.bind(eqn, eqn.params, operands)
            return [x * np.float32(1.001) for x in results] if path == off else results

        results = jax.jit(lambda *xs: rewrite.evaluate(closed, xs, rewrite.Hooks(bind=bind)))(*flat)
        return jax.tree.unflatten(jax.tree.structure(want), results)

    products: list[rewrite.Path] = []
    assert not wrong(evaluated(None, products), want, tolerance)
    for path in dict.fromkeys(products):
        assert wrong(evaluated(path, []), want, tolerance), path
