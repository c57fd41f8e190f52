"""Serving says what the forward pass says, token by token."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from models import inference, transformer

LENGTHS = (5, 9, 12)


def tiny(name: str, **overrides: Any) -> inference.Config:
    return models.find(name, compute_dtype="float32", length=16, **overrides)[1]


def served(config: inference.Config) -> tuple[Any, dict[str, jax.Array]]:
    """Parameters, and three prompts of different lengths."""
    params = inference.init(config, jax.random.key(0))
    prompt = inference.example_prompt(config, batch=3, sequence=12)
    return params, prompt if config.aligned else prompt | {"lengths": jnp.array(LENGTHS)}


def said(config: inference.Config, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [B, 1 + steps] said greedily after the prompts, and the logits of each."""
    params, prompt = served(config)
    state, logits = jax.jit(partial(inference.prefill, config))(params, prompt)
    decode = jax.jit(partial(inference.decode, config), donate_argnums=1)
    tokens, all_logits = [np.asarray(state.tokens)], [np.asarray(logits)]
    for _ in range(steps):
        state, logits = decode(params, state)
        tokens.append(np.asarray(state.tokens))
        all_logits.append(np.asarray(logits))
    return np.stack(tokens, 1), np.stack(all_logits, 1)


def recomputed(config: inference.Config, tokens: np.ndarray) -> np.ndarray:
    """Logits [B, steps, V] by the forward pass over each prompt and what was said after it."""
    params, prompt = served(config)
    forward = jax.jit(transformer.forward, static_argnums=0)
    rows: list[np.ndarray] = []
    lengths = np.broadcast_to(prompt["lengths"], 3)
    for row, length, more in zip(np.asarray(prompt["tokens"]), lengths, tokens, strict=True):
        whole = np.zeros((1, 16), np.int32)  # what follows a position does not change its logits
        whole[0, : length + len(more) - 1] = np.concatenate([row[:length], more[:-1]])
        rows.append(np.asarray(forward(config, params, jnp.asarray(whole))[0, length - 1 : length + len(more) - 1]))
    return np.stack(rows)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("tiny-llama-decode", {"scan": True}),
        pytest.param("tiny-gpt2-decode", {}, marks=pytest.mark.slow),
        pytest.param("tiny-llama-decode", {"aligned": True}, marks=pytest.mark.slow),
        pytest.param("tiny-llama-decode", {"scan": True, "int8_weights": True}, marks=pytest.mark.slow),
    ],
)
def test_decoding_with_a_cache_is_the_forward_pass(name: str, fields: dict[str, Any]) -> None:
    config = tiny(name, **fields)
    tokens, logits = said(config, steps=4)
    np.testing.assert_allclose(logits, recomputed(config, tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_int8_is_close() -> None:
    config = tiny("tiny-llama-decode", scan=True)
    _, exact = said(config, steps=2)
    scale = np.abs(exact).max()
    for fields in ({"int8_weights": True}, {"int8_cache": True}):
        _, logits = said(replace(config, **fields), steps=2)
        error = np.abs(logits[:, 0] - exact[:, 0]).max()
        assert error < 0.05 * scale
        assert (error > 0) == ("int8_weights" in fields)  # the prompt is read before it is in the cache
    assert np.abs(logits[:, 1:] - exact[:, 1:]).max() > 0


def test_a_quantized_value_is_within_half_a_step() -> None:
    x = jax.random.normal(jax.random.key(0), (7, 5, 3))
    whole, scale = inference.quantized(x, (0, 1))
    assert (whole.dtype, scale.shape) == (jnp.int8, (3,))
    assert np.abs(whole * scale - x).max() <= 0.5001 * np.max(scale)
    assert np.abs(whole).max() == 127
    assert not np.any(inference.quantized(jnp.zeros((2, 2)), (1,))[0])


def test_the_generator_says_what_decoding_says_until_all_have_ended() -> None:
    config = tiny("tiny-llama-generate", scan=True)
    params, prompt = served(config)
    tokens, _ = said(config, steps=3)
    state, _ = inference.prefill(config, params, prompt)
    generate = jax.jit(partial(inference.generate, config))

    full, out = generate(params, state, -1)  # nobody ends: until the longest fills the cache
    assert list(full.positions) == [9, 13, 16]
    for row, length, expected in zip(np.asarray(out), LENGTHS, tokens, strict=True):
        np.testing.assert_array_equal(row[length : length + 4], expected)
        assert not row[:length].any()

    end = tokens[0, 0]  # the first sequence ends at once; the others go on to the end, unless they say it too
    stopped, out = generate(params, state._replace(tokens=jnp.full(3, end)), int(end))
    assert list(stopped.positions) == [6, 10, 13]
    assert [int(row[length]) for row, length in zip(out, LENGTHS, strict=True)] == [end] * 3


@pytest.mark.parametrize("task", ["prefill", "decode", "generate"])
def test_builders(task: str) -> None:
    program, args = models.build(f"llama3-8b-{task}", layers=2, batch=4, length=1024, scan=True, int8_cache=True)
    assert all(type(leaf) is jax.ShapeDtypeStruct for leaf in jax.tree.leaves(args))
    state, _ = jax.eval_shape(program, *args)
    assert state.cache["k"].shape == (2, 4, 1024, 8, 128)
    assert (state.cache["k"].dtype, state.cache["k_scale"].dtype) == (jnp.int8, jnp.float32)
    if task != "prefill":
        assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(lambda x: (x.shape, x.dtype), args[1])


def test_int8_weights_are_a_quarter_of_float32() -> None:
    _, (params, _) = models.build("llama3-8b-decode", batch=1, int8_weights=True)
    layer = params["layers"][0]
    assert {str(layer[w].dtype) for w in inference.CONTRACTED} == {"int8"}
    assert (layer["wq_scale"].shape, layer["wo_scale"].shape) == ((32, 128), (4096,))
    assert str(params["embed"].dtype) == str(layer["mlp_norm"]["scale"].dtype) == "bfloat16"


def test_what_does_not_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match="a prompt of 33 is longer than the cache of 32"):
        models.build("tiny-llama-prefill", sequence=33)
    with pytest.raises(TypeError, match="decode takes no sequence"):
        models.build("tiny-llama-decode", sequence=3)
