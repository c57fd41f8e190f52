"""Serving in hand-written layouts says what one device says; explicit programs agree with annotated ones."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import models
from models import inference, layouts, mlp
from models.layouts import explicit

ALL_AXES = ("data", "model")
STEPS = 2
INT8 = {"int8_weights": True, "int8_cache": True}


def mesh() -> Mesh:
    """Eight devices, 2 × 4."""
    return Mesh(np.array(jax.devices()).reshape(2, 4), ALL_AXES)


def layout_of(model: str, recipe: str) -> layouts.HandLayout:
    names = layouts.axes(recipe)
    over: Any = [ALL_AXES] if len(names) == 1 else ALL_AXES
    return layouts.find(model, recipe, **dict(zip(names, over, strict=True)))


def served(task: str, fields: tuple[tuple[str, Any], ...]) -> tuple[inference.Config, Any]:
    config = models.find(f"tiny-llama-{task}", compute_dtype="float32", length=16, **dict(fields))[1]
    return config, inference.init(config, jax.random.key(0))


def run(prefill: Any, decode: Any, params: Any, prompt: Any) -> list[np.ndarray]:
    """Logits of the prompt's last token and of `STEPS` more, and what the cache holds at the end."""
    state, logits = prefill(params, prompt)
    out = [logits]
    for _ in range(STEPS):
        state, logits = decode(params, state)
        out.append(logits)
    return [np.asarray(x) for x in (*out, *jax.tree.leaves(state))]


@cache
def one_device(fields: tuple[tuple[str, Any], ...]) -> list[np.ndarray]:
    config, params = served("decode", fields)
    prompt = inference.example_prompt(config, batch=8, sequence=8)
    prefill, decode = (jax.jit(inference.step(served(task, fields)[0])) for task in ("prefill", "decode"))
    return run(prefill, decode, params, prompt)


def case(recipe: str, *, quick: bool = False, **fields: Any) -> Any:
    name = "-".join((recipe, *fields))
    return pytest.param(recipe, tuple(fields.items()), id=name, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(
    ("recipe", "fields"),
    [
        case("tp", scan=True),
        case("tp", scan=True, **INT8),
        case("tp", aligned=True),
        case("tp_cached_positions", quick=True, scan=True, **INT8),
        case("tp_cached_positions"),
        case("tp_cached_positions", scan=True, aligned=True),
        case("weight_gathered", scan=True),
        case("weight_gathered", **INT8),
        case("weight_stationary_2d", scan=True),
        case("weight_stationary_2d", **INT8),
    ],
)
def test_serving_in_a_layout_keeps_every_number(recipe: str, fields: tuple[tuple[str, Any], ...]) -> None:
    config, params = served("decode", fields)
    layout = layout_of("tiny-llama-decode", recipe)
    prompt = inference.example_prompt(config, batch=8, sequence=8)
    state = inference.example_decoding(config, batch=8)
    prefill, decode = (inference.step(served(task, fields)[0]) for task in ("prefill", "decode"))
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh(), spec), layout.specs(params, prompt, state))
    params, prompt, state = jax.device_put((params, prompt, state), shardings)

    got = run(
        layout.jit(prefill, params, prompt, mesh=mesh()),
        layout.jit(decode, params, state, mesh=mesh()),
        params,
        prompt,
    )
    for x, want in zip(got, one_device(fields), strict=True):
        if np.issubdtype(want.dtype, np.integer):  # int8 rounds either way where the sum order differs
            assert np.max(np.abs(x.astype(np.int64) - want.astype(np.int64))) <= (1 if want.dtype == np.int8 else 0)
        else:
            assert np.linalg.norm(x - want) <= (1e-2 if dict(fields).get("int8_cache") else 1e-5) * np.linalg.norm(want)


def test_the_cache_lies_by_sequences_and_heads_or_positions() -> None:
    _, (params, state) = models.build("llama3-8b-decode", layers=2, batch=8, scan=True, int8_cache=True)
    by_heads = layouts.find("llama3-8b-decode", "tp").specs(params, state)[1]
    assert by_heads.cache["k"] == P(None, "data", None, "model", None)
    assert by_heads.cache["k_scale"] == P(None, "data", None, "model")
    assert by_heads.tokens == by_heads.positions == P("data")
    by_position = layouts.find("llama3-8b-decode", "tp_cached_positions").specs(params, state)[1]
    assert by_position.cache["v"] == P(None, "data", "model", None, None)


def test_one_token_moves_activations_alone() -> None:
    """Decoding by `tp` moves no weight and no cache: two all-reduces per layer, one for the embedding, the logits."""
    config, params = served("decode", (("scan", False), ("aligned", True)))
    state = inference.example_decoding(config, batch=8)
    decode = layout_of("tiny-llama-decode", "tp").jit(inference.step(config), params, state, mesh=mesh())
    text = decode.lower(params, state).compile().as_text()
    largest = max(
        int(np.prod([int(n) for n in shape.split(",")]))
        for kind in ("all-gather", "all-reduce", "all-to-all", "collective-permute")
        for line in text.splitlines()
        if f" {kind}(" in line
        for shape in [line.split("[")[1].split("]")[0]]
        if shape
    )
    assert largest <= 4 * config.vocab  # the logits of a device's sequences; a cache is 16 · 4 · 8 · 8


# --- Explicit programs -------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["megatron", "weight_stationary_2d"])
def test_an_explicit_program_agrees_with_the_annotated_one(recipe: str) -> None:
    config = models.find("mlp-tiny", compute_dtype="float32")[1]
    params, batch = mlp.init(config, jax.random.key(0)).params, mlp.example_batch(config, batch=16)
    on = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y") if recipe == "weight_stationary_2d" else ALL_AXES)
    layout = layouts.find("mlp-tiny", recipe)

    def value(forward: Any) -> Any:
        return jax.jit(
            jax.value_and_grad(lambda params, x: jnp.mean(jnp.square(forward(params, x) - batch["y"])), argnums=(0, 1))
        )(params, batch["x"])

    def plain(params: Any, x: jax.Array) -> jax.Array:
        return mlp.forward(config, params, x)

    annotated = value(layouts.constrained(plain, layout.activation, on))
    program = value(getattr(explicit, recipe)(config, on))
    expected = value(plain)
    for got in (annotated, program):
        for leaf, want in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            assert np.linalg.norm(leaf - want) < 1e-5 * np.linalg.norm(want)


def test_an_explicit_program_moves_what_the_annotated_one_does() -> None:
    """By JAX's own count: per perceptron two gathers and two reduce-scatters, none of a weight."""
    config = models.find("mlp-tiny", compute_dtype="float32")[1]
    _, args = models.build("mlp-tiny", batch=16)
    on = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
    jaxpr = str(jax.make_jaxpr(explicit.weight_stationary_2d(config, on))(args[0].params, args[1]["x"]))
    assert (jaxpr.count("= all_gather"), jaxpr.count("reduce_scatter[")) == (4, 4)
