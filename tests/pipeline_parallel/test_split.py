"""A program in two halves computes the same, and nothing twice."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from autoshard import _jax
from autoshard.pipeline_parallel.own_stages.split import split
from tests.pipeline_parallel.test_in_stages import same

LAYERS, WIDTH = 3, 8


def plain(x: Any, own: Any) -> tuple[Any, None]:
    return x + jnp.tanh(x @ own["up"]) @ own["down"], None


def with_constant(x: Any, own: Any) -> tuple[Any, None]:
    """A carry that the gradient of the weights reads as it is."""
    return jnp.sin(x) @ own["up"] @ own["down"] * jnp.cos(0.5), None


LAYERS_OF: dict[str, Callable[..., Any]] = {
    "plain": plain,
    "checkpointed": jax.checkpoint(plain),
    "another": with_constant,
}


def backward(layer: Callable[..., Any]) -> Callable[..., Any]:
    def program(weights: Any, x: Any, cotangent: Any) -> Any:
        _, transposed = jax.vjp(lambda weights, x: jax.lax.scan(layer, x, weights)[0], weights, x)
        return transposed(cotangent)

    return program


def arguments() -> Any:
    rng = np.random.default_rng(0)
    up, down, x, cotangent = (
        rng.normal(size=shape).astype(np.float32) / 2
        for shape in ((LAYERS, WIDTH, 16), (LAYERS, 16, WIDTH), (4, WIDTH), (4, WIDTH))
    )
    return {"up": up, "down": down}, x, cotangent


def products(closed: Any) -> int:
    """Matrix products of a step: those in scans count once per trip."""
    count = 0
    for eqn in _jax.open_jaxpr(closed).eqns:
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        count += eqn.primitive.name == "dot_general"
        count += times * sum(products(body) for body in _jax.sub_jaxprs(eqn.params))
    return count


@pytest.mark.parametrize("name", LAYERS_OF)
def test_both_halves_compute_the_program_and_nothing_twice(name: str) -> None:
    given = arguments()
    closed = jax.make_jaxpr(backward(LAYERS_OF[name]))(*given)
    made = split(closed, [False, False, True])  # the weights' gradients come later
    flat = jax.tree.leaves(given)
    results = jax.jit(jaxpr_as_fun(made.first))(*flat)
    gradient, stash = results[: made.results], results[made.results :]
    of_weights = jax.jit(jaxpr_as_fun(made.second))(*(flat[i] for i in made.inputs), *stash)
    same([*of_weights, *gradient], jaxpr_as_fun(closed)(*flat))
    counts = [products(one) for one in (closed, made.first, made.second)]
    assert counts[1] + counts[2] == counts[0]
    assert counts[2] == 2 * LAYERS  # one per weight and layer
    scans = [eqn for eqn in _jax.open_jaxpr(made.second).eqns if eqn.primitive.name == "scan"]
    assert [_jax.scan_arity(eqn)[1] for eqn in scans] == [0]  # nothing waits for anything there


def test_a_program_whose_results_are_all_wanted_is_not_split() -> None:
    closed = jax.make_jaxpr(backward(plain))(*arguments())
    made = split(closed, [True, True, True])
    assert not made.stash
    assert not _jax.open_jaxpr(made.second).eqns
