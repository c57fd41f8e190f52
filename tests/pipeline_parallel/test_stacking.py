"""Equal layers, one after the other, are stacked; `autoshard.in_stages` has the numbers of `jax.value_and_grad`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import models
from autoshard import StageError, in_stages
from autoshard._jax import scan_arity
from autoshard.pipeline_parallel.stacking import stacked
from tests.end_to_end.test_numerics import TOLERANCE, errors
from tests.pipeline_parallel.test_in_stages import MODELS, SMALL, batch, same, weights
from tests.programs import relative_error

LAYERS, WIDTH, BATCH = 4, 8, 12
Layer = dict[str, Any]


def listed(width: int = WIDTH) -> dict[str, Any]:
    """Weights of layers as a list of dictionaries."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return rng.normal(size=shape).astype(np.float32)

    layers = [{"w": normal(width, width), "scale": normal(width)} for _ in range(LAYERS)]
    return {"in": normal(WIDTH, width), "layers": layers, "out": normal(width, WIDTH)}


def layer(x: Any, own: Layer) -> Any:
    return x + jnp.tanh(x @ own["w"]) * own["scale"]


def through(p: Any, b: Any, apply: Callable[..., Any] = layer) -> Any:
    x = b["x"] @ p["in"]
    for own in p["layers"]:
        x = apply(x, own)
    return jnp.mean(jnp.square(x @ p["out"] - b["x"]))


def of_rows(p: Any, b: Any) -> Any:
    """Weights are rows of arrays."""
    rows = [jax.tree.map(lambda w, i=i: w[i], p["layers"]) for i in range(LAYERS)]
    return through({**p, "layers": rows}, b)


def one_by_one(p: Any, b: Any) -> Any:
    """No loop; layers know their number, and cast their weights."""
    first, second, third, fourth = p["layers"]

    def numbered(x: Any, own: Layer, number: float) -> Any:
        half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), own)
        return layer(x, jax.tree.map(lambda w: w.astype(jnp.float32), half)) / number

    x = numbered(b["x"] @ p["in"], first, 1.0)
    x = numbered(x, second, 2.0)
    x = numbered(x, third, 3.0)
    x = numbered(x, fourth, 4.0)
    return jnp.mean(jnp.square(x @ p["out"]))


def with_masks(p: Any, b: Any) -> Any:
    """Every layer makes the same mask, reads the examples' own, and hands on two values."""

    def masked(carry: Any, own: Layer) -> Any:
        x, total = carry
        causal = jnp.tril(jnp.ones((WIDTH, WIDTH)))
        y = jnp.where(b["mask"], layer(x, {**own, "w": own["w"] * causal}), x)
        return y, total + jnp.abs(y).mean(-1)

    carry = b["x"] @ p["in"], jnp.zeros(b["x"].shape[0])
    for own in p["layers"]:
        carry = masked(carry, own)
    return jnp.mean(jnp.square(carry[0] @ p["out"])) + 0.1 * jnp.mean(carry[1])


def alternating(p: Any, b: Any) -> Any:
    """Two kinds of layers in turns are layers of both."""
    x = b["x"] @ p["in"]
    for i, own in enumerate(p["layers"]):
        x = layer(x, own) if i % 2 else x + jax.nn.relu(x @ own["w"])
    return jnp.mean(x @ p["out"])


def deep_supervision(p: Any, b: Any) -> Any:
    """The head reads every layer."""
    x, total = b["x"] @ p["in"], 0.0
    for own in p["layers"]:
        x = layer(x, own)
        total = total + jnp.mean(x @ p["out"])
    return total


LOSSES: dict[str, tuple[Callable[..., Any], Any]] = {
    "a loop over a list": (through, listed()),
    "rows of arrays": (of_rows, weights()),
    "one by one": (one_by_one, listed()),
    "masks": (with_masks, listed()),
    "layers in turns": (alternating, listed()),
    "checkpoints": (partial(through, apply=jax.checkpoint(layer)), listed()),
    "a loss of every layer": (deep_supervision, listed()),
    "compiled layers": (partial(through, apply=jax.jit(layer)), listed()),
}


def scans(closed: Any) -> list[Any]:
    return [eqn for eqn in closed.eqns if eqn.primitive.name == "scan"]


def as_scan(loss: Callable[..., Any], params: Any) -> Any:
    closed = jax.make_jaxpr(loss)(params, batch())
    return stacked(closed, [False] * len(jax.tree.leaves(params)) + [True] * len(batch()))


@pytest.mark.parametrize("name", LOSSES)
def test_layers_are_one_scan_of_the_same_numbers(name: str) -> None:
    loss, params = LOSSES[name]
    (scan,) = scans(as_scan(loss, params))
    assert scan.params["length"] == (LAYERS // 2 if name == "layers in turns" else LAYERS)
    got = jax.jit(in_stages(loss, stages=2, steps=3))(params, batch())
    rounded = loss is one_by_one  # gradients of weights that are cast to bfloat16 are summed in float32
    same(got, jax.value_and_grad(loss)(params, batch()), 1e-2 if rounded else 1e-5)


def test_rows_in_order_are_the_array_they_are_of() -> None:
    closed = as_scan(of_rows, weights())
    (scan,) = scans(closed)
    assert not {eqn.primitive.name for eqn in closed.eqns} & {"concatenate", "slice"}
    assert sorted(v.aval.size for v in scan.invars[-2:]) == [LAYERS * WIDTH, LAYERS * WIDTH * WIDTH]


def test_a_mask_that_every_layer_makes_is_made_once_and_casts_stay_in_the_layers() -> None:
    closed = as_scan(with_masks, listed())
    assert "iota" not in str(scans(closed)[0].params["jaxpr"])
    (scan,) = scans(as_scan(one_by_one, listed()))
    assert {str(v.aval.dtype) for v in scan.invars} == {"float32"}
    assert "bf16" in str(scan.params["jaxpr"])


def test_checkpoints_stay() -> None:
    (scan,) = scans(as_scan(*LOSSES["checkpoints"]))
    assert [eqn.primitive.name for eqn in scan.params["jaxpr"].eqns] == [
        jax.make_jaxpr(jax.checkpoint(layer))(np.ones((2, WIDTH), np.float32), listed()["layers"][0])
        .eqns[0]
        .primitive.name
    ]


def test_a_scan_over_more_weights_is_the_stack() -> None:
    def loss(p: Any, b: Any) -> Any:
        x, _ = jax.lax.scan(lambda x, own: (layer(x, own), None), b["x"] @ p["in"], p["layers"])
        for scale in p["scales"]:
            x = x * scale
        return jnp.mean(x @ p["out"])

    closed = as_scan(loss, {**weights(), "scales": [np.ones(WIDTH, np.float32)] * 3})
    assert [eqn.params["length"] for eqn in scans(closed)] == [LAYERS]
    assert closed.eqns[-1].primitive.name == "div"


def unrolled(name: str) -> tuple[Callable[..., Any], Any, Any]:
    module, config = models.find(name, **{**SMALL, "scan": False})
    state = jax.jit(partial(module.init, config))(jax.random.key(1))
    return partial(module.loss, config), state.params, module.example_batch(config, batch=16)


@pytest.mark.parametrize("name", MODELS)
def test_layers_of_models_are_recognised(name: str) -> None:
    module, config = models.find(name, **{**SMALL, "scan": False})
    params = jax.eval_shape(partial(module.init, config), jax.random.key(1)).params
    examples = jax.eval_shape(lambda: module.example_batch(config, batch=16))
    closed = jax.make_jaxpr(partial(module.loss, config))(params, examples)
    of_batch = [False] * len(jax.tree.leaves(params)) + [True] * len(jax.tree.leaves(examples))
    (scan,) = scans(stacked(closed, of_batch))
    consts, carries = scan_arity(scan)
    assert (scan.params["length"], carries) == (SMALL["layers"], 1 if name != "tiny-mixtral" else carries)
    assert len(scan.invars) - consts - carries == len(jax.tree.leaves(params["layers"][0]))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_unrolled_models_have_the_same_gradients(name: str) -> None:
    loss, params, examples = unrolled(name)
    value, gradients = jax.jit(in_stages(loss, stages=2, steps=4, repeats=2))(params, examples)
    want, want_gradients = jax.jit(jax.value_and_grad(loss))(params, examples)
    assert relative_error(value, want) <= TOLERANCE
    assert max(errors(gradients, want_gradients).values()) <= TOLERANCE


def test_layers_of_a_flax_module_are_recognised() -> None:
    linen = pytest.importorskip("flax.linen")

    class Block(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            y = linen.gelu(linen.Dense(2 * WIDTH)(linen.LayerNorm()(x)))
            return x + linen.Dense(WIDTH)(y)

    class Decoder(linen.Module):
        @linen.compact
        def __call__(self, tokens: Any) -> Any:
            x = linen.Embed(16, WIDTH)(tokens)
            for _ in range(LAYERS):
                x = Block()(x)
            return linen.Dense(16)(linen.LayerNorm()(x))

    model, tokens = Decoder(), np.arange(BATCH * 6).reshape(BATCH, 6) % 16
    params = jax.jit(model.init)(jax.random.key(0), tokens)

    def loss(params: Any, tokens: Any) -> Any:
        logits = jax.nn.log_softmax(model.apply(params, tokens))
        return -jnp.take_along_axis(logits, tokens[..., None], -1).mean()

    closed = stacked(jax.make_jaxpr(loss)(params, tokens), [False] * len(jax.tree.leaves(params)) + [True])
    assert [scan.params["length"] for scan in scans(closed)] == [LAYERS]
    (got,) = jaxpr_as_fun(closed)(*jax.tree.leaves(params), tokens)
    assert relative_error(got, loss(params, tokens)) <= 1e-5


# --- Layers that differ ---------------------------------------------------------------------------


def other_activation(p: Any, b: Any) -> Any:
    x = b["x"] @ p["in"]
    for i, own in enumerate(p["layers"]):
        y = x @ own["w"]
        x = x + (jnp.sin(y) if i == 3 else jnp.tanh(y)) * own["scale"]
    return jnp.mean(x @ p["out"])


def first_differs(p: Any, b: Any) -> Any:
    x = b["x"] @ p["in"]
    for i, own in enumerate(p["layers"]):
        y = jnp.tanh(x @ own["w"]) * own["scale"]
        x = x + (y if i else jnp.sin(y))
    return jnp.mean(x @ p["out"])


def all_differ(p: Any, b: Any) -> Any:
    x = b["x"] @ p["in"]
    for i, own in enumerate(p["layers"]):
        w = own["w"][:, : WIDTH - i] if i == 0 else own["w"][: WIDTH - i + 1, : WIDTH - i]
        x = jnp.tanh(x @ w)
    return jnp.mean(x)


DIFFERENT: dict[str, tuple[Callable[..., Any], str]] = {
    "another activation": (
        other_activation,
        "of its layers only 3, one after the other, are equal: here another has `sin`",
    ),
    "the first": (first_differs, "of its layers only 3, one after the other, are equal: here another has `sin`"),
    "all": (all_differ, "no two of its layers, one after the other, are equal: here another has `dot_general`"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_layers_that_differ_are_refused_at_their_line(name: str) -> None:
    loss, message = DIFFERENT[name]
    with pytest.raises(StageError) as caught:
        in_stages(loss, stages=2, steps=3)(listed(), batch())
    assert message in str(caught.value)
    assert "test_stacking.py" in caught.value.where
