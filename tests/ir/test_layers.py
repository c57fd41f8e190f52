"""Equal layers are found in every pass; without some of them, the program is one of fewer layers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import _jax
from autoshard.ir import rewrite
from autoshard.ir.layers import Layers, find_layers, without
from autoshard.ir.rewrite import Hooks

WIDTH, LAYERS = 8, 12  # more than ten: names are sorted as text
Params = dict[str, Any]


def parameters(layers: range, width: int = WIDTH) -> Params:
    rng = np.random.default_rng(0)

    def some(*shape: int) -> Any:
        return jnp.asarray(0.3 * rng.normal(size=shape), jnp.float32)

    every = {str(k): {"up": some(width, 2 * width), "down": some(2 * width, width)} for k in range(LAYERS)}
    return {"embed": jnp.eye(width), "head": some(width, 4), "layers": {str(k): every[str(k)] for k in layers}}


def loss(params: Params, x: Any) -> Any:
    x = x @ params["embed"]
    for _, layer in sorted(params["layers"].items(), key=lambda item: int(item[0])):
        x = x + jax.nn.silu(x @ layer["up"]) @ layer["down"]
    return jnp.mean((x @ params["head"]) ** 2)


def step(params: Params, x: Any) -> tuple[Any, Params]:
    """With gradients clipped by their norm: a sum that visits the layers in the order of their names."""
    value, gradients = jax.value_and_grad(loss)(params, x)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradients)))
    return value, jax.tree.map(lambda p, g: p - 0.1 * g / jnp.maximum(norm, 1.0), params, gradients)


def stacks(fn: Any, *args: Any) -> list[Layers]:
    return list(find_layers(jax.make_jaxpr(fn)(*args)))


X = jnp.asarray(np.random.default_rng(1).normal(size=(4, WIDTH)), jnp.float32)


def test_a_layer_is_its_steps_in_every_pass_and_its_inputs_and_results() -> None:
    params = parameters(range(LAYERS))
    (layers,) = stacks(step, params, X)
    assert layers.count == LAYERS
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    of_layer: dict[int, set[str]] = {}
    for i, (*_, layer) in layers.inputs.items():
        of_layer.setdefault(layer, set()).add(names[i].split("'")[3])
    assert all(len(found) == 1 for found in of_layer.values())
    assert len(layers.inputs) == len(layers.outputs) == 2 * LAYERS
    assert len(layers.place) > 0.9 * len(layers.body.steps)


def test_without_some_layers_it_is_the_program_of_the_others() -> None:
    """The order of a chain of sums, too: it gives the same numbers."""
    params = parameters(range(LAYERS))
    (layers,) = stacks(step, params, X)
    first = jax.tree.leaves(params["layers"]["0"])
    backward = layers.inputs[2][3] != 0  # the backward pass numbers them from the last one
    assert len(first) == 2
    gone = range(2, LAYERS - 1)
    shorter = without(layers, gone, 1)
    assert shorter is not None
    _jax.check(_jax.open_jaxpr(shorter.closed))
    kept = [LAYERS - 1 - k if backward else k for k in range(LAYERS) if k not in gone]
    few = {**params, "layers": {str(k): params["layers"][str(k)] for k in kept}}
    flat = [*jax.tree.leaves(params), X]
    found = jax.jit(lambda *given: rewrite.evaluate(shorter.closed, given, Hooks()))(*[flat[i] for i in shorter.inputs])
    expected = jax.tree.leaves(jax.jit(step)(few, X))
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    assert len(shorter.steps) < 0.4 * len(layers.body.steps)
    assert len(shorter.input_like) == 2 * len(gone)


def test_what_reads_every_layer_at_once_keeps_them_all() -> None:
    def halves(x: Any, ws: Any) -> Any:
        found: list[Any] = []
        for w in ws:
            found.append(w / 2)
            x = jnp.tanh(x @ found[-1])
        return jnp.concatenate([x, *found])

    (layers,) = stacks(halves, X, [jnp.eye(WIDTH)] * 6)
    assert layers.count == 6
    assert without(layers, range(2, 5), 1) is None


@pytest.mark.parametrize("count", [2, 3])
def test_few_layers_are_no_stack(count: int) -> None:
    assert not stacks(step, parameters(range(count)), X)


def test_equations_that_depend_on_none_before_them_are_no_stack() -> None:
    assert not stacks(lambda xs: [jnp.sin(x) for x in xs], [X] * 8)
