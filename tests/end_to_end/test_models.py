"""The models compute what their papers say, and trace to a clean jaxpr."""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr

import models
from models import inference, linear, mlp, moe, transformer
from models.annotate import hooked

TINY = ("linear-tiny", "mlp-tiny", "tiny-gpt2", "tiny-llama", "tiny-mixtral")

# GPT-2, Llama 3, Mixtral: the sums of the published checkpoints; Gemma: table 2 of its
# report (7,751,248,896 + 786,825,216 - the latter counts a vocabulary of 256,128).
PARAMETERS = {
    "gpt2-small": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "gemma-7b": 7_751_248_896 + 256_000 * 3072,
}

# Everything that a train step of these models is made of, on every JAX supported.
ORDINARY = """
    add add_any and broadcast_in_dim concatenate convert_element_type cos cumsum custom_jvp_call div dot_general eq
    exp gather ge gt integer_pow iota jit log logistic lt max mul neg one_minus_square pad pow reduce_max reduce_sum
    reshape rsqrt scatter-add select_n sin slice split sqrt square stop_gradient sub tanh top_k transpose
"""

init_params = jax.jit(transformer.init_params, static_argnums=0)
forward = jax.jit(transformer.forward, static_argnums=0)
loss = jax.jit(transformer.loss, static_argnums=0)


def tiny(name: str, **overrides: Any) -> Any:
    """The configuration of a tiny model, in float32."""
    return models.find(name, compute_dtype="float32", **overrides)[1]


def equations(jaxpr: Jaxpr | ClosedJaxpr) -> Iterator[Any]:
    """Every equation, those of inner jaxprs too."""
    for eqn in (jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr).eqns:
        yield eqn
        for value in eqn.params.values():
            if isinstance(value, (Jaxpr, ClosedJaxpr)):
                yield from equations(value)


# --- Names, sizes and shapes -------------------------------------------------------


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    _, (state, _) = models.build(name)
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state.params)) == PARAMETERS[name]


@pytest.mark.parametrize("name", [name for name in models.names() if name not in inference.CONFIGS])
def test_example_args_are_abstract(name: str) -> None:
    _, args = models.build(name)
    assert all(type(leaf) is jax.ShapeDtypeStruct for leaf in jax.tree.leaves(args))
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(args)} <= {"float32", "int32"}


@pytest.mark.parametrize("name", ["linear-8k", "mlp-8k", "gpt2-xl", "llama3-405b", "gemma-7b", "mixtral-8x7b"])
def test_a_train_step_returns_the_state_that_it_took(name: str) -> None:
    train_step, (state, batch) = models.build(name, layers=2, batch=4)
    new_state, value = jax.eval_shape(train_step, state, batch)
    assert new_state == state
    assert (value.shape, value.dtype) == ((), jnp.float32)


@pytest.mark.parametrize("name", TINY)
def test_example_batch_has_the_shapes_of_example_args(name: str) -> None:
    module, config = models.find(name)
    _, abstract = module.example_args(config, batch=3)
    concrete = module.example_batch(config, batch=3)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), concrete) == jax.tree.map(lambda x: (x.shape, x.dtype), abstract)


def test_build_takes_sizes_and_any_field_of_the_configuration() -> None:
    _, (state, batch) = models.build("llama3-8b", batch=3, sequence=128, layers=5, vocab=1000)
    assert batch["tokens"].shape == batch["targets"].shape == (3, 128)
    assert len(state.params["layers"]) == 5
    assert state.params["embed"].shape == (1000, 4096)


def test_every_name_is_a_builder() -> None:
    train_step, (_, batch) = models.tiny_llama()
    assert callable(train_step)
    assert batch["tokens"].shape == (8, 32)
    assert {name.replace("-", "_") for name in models.names()} >= {"gpt2_small", "llama3_405b", "mlp_8k"}


def test_what_does_not_exist_is_an_error() -> None:
    with pytest.raises(KeyError, match="no model named 'gpt5'; there are: linear-tiny"):
        models.build("gpt5")
    with pytest.raises(TypeError, match="depth"):
        models.build("mlp-tiny", depth=3)
    with pytest.raises(TypeError, match="sequence"):
        models.build("mlp-tiny", sequence=3)
    with pytest.raises(ValueError, match="a sequence of 33 is longer than the context of 32"):
        models.build("tiny-llama", sequence=33)
    with pytest.raises(AttributeError, match="gpt5"):
        models.__getattr__("gpt5")


# --- The jaxpr ---------------------------------------------------------------------


@pytest.mark.parametrize("name", TINY)
def test_a_train_step_is_made_of_ordinary_primitives(name: str) -> None:
    train_step, args = models.build(name)
    used = {eqn.primitive.name for eqn in equations(jax.make_jaxpr(train_step)(*args))}
    assert used <= set(ORDINARY.split())


@pytest.mark.parametrize("name", TINY)
def test_matrix_multiplications_run_in_the_compute_dtype(name: str) -> None:
    train_step, args = models.build(name)
    products = [eqn for eqn in equations(jax.make_jaxpr(train_step)(*args)) if eqn.primitive.name == "dot_general"]
    assert {str(v.aval.dtype) for eqn in products for v in (*eqn.invars, *eqn.outvars)} == {"bfloat16"}


@pytest.mark.parametrize("name", TINY)
def test_float32_computes_without_conversions_of_floats(name: str) -> None:
    train_step, args = models.build(name, compute_dtype="float32")
    for eqn in equations(jax.make_jaxpr(train_step)(*args)):
        if eqn.primitive.name == "convert_element_type" and eqn.invars[0].aval.shape:
            assert not jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.floating)


def test_linear_has_the_flops_that_its_docstring_says() -> None:
    B, D, L = 32, 64, 4
    train_step, args = models.build("linear-tiny", batch=B)
    flops = 0
    for eqn in equations(jax.make_jaxpr(train_step)(*args)):
        if eqn.primitive.name == "dot_general":
            ((contracted, _), _) = eqn.params["dimension_numbers"]
            (out,), left = eqn.outvars, eqn.invars[0]
            flops += 2 * math.prod(out.aval.shape) * math.prod(left.aval.shape[d] for d in contracted)
    assert flops == 6 * B * D**2 * L - 2 * B * D**2


def test_models_say_no_word_of_sharding() -> None:
    rooms = sorted(Path(models.__file__).parent.glob("*.py"))
    assert {room.name for room in rooms} >= {"linear.py", "mlp.py", "transformer.py", "annotate.py", "training.py"}
    for room in rooms:
        assert not re.search(r"PartitionSpec|NamedSharding|sharding_constraint|[Mm]esh|pmap", room.read_text())


# --- Annotations -------------------------------------------------------------------


def test_names_of_activations_leave_no_trace() -> None:
    config = tiny("tiny-llama")
    state, batch = transformer.example_args(config)
    labels: list[str] = []

    def record(x: jax.Array, label: str) -> jax.Array:
        labels.append(label)
        return x

    def jaxpr() -> str:
        return str(jax.make_jaxpr(lambda p, b: transformer.loss(config, p, b))(state.params, batch))

    bare = jaxpr()
    with hooked(record):
        assert jaxpr() == bare
    attention = ["residual", "branch", "queries", "keys", "keys", "queries", "mixed", "residual"]
    layer = [*attention, "residual", "branch", "hidden", "contracted", "residual"]
    assert labels == ["residual", *layer, *layer, "logits"]


def test_a_hook_ends_with_its_scope_even_after_an_error() -> None:
    config = tiny("mlp-tiny", layers=1)
    params, x = mlp.init(config, jax.random.key(0)).params, jnp.ones((2, 64))
    expected = mlp.forward(config, params, x)

    def refuse(x: jax.Array, label: str) -> jax.Array:
        raise RuntimeError(label)

    with pytest.raises(RuntimeError, match="residual"), hooked(refuse):
        mlp.forward(config, params, x)
    np.testing.assert_array_equal(mlp.forward(config, params, x), expected)


# --- Numbers -----------------------------------------------------------------------


@pytest.mark.parametrize("name", TINY)
def test_training_on_one_batch_lowers_the_loss(name: str) -> None:
    module, config = models.find(name, layers=1, compute_dtype="float32", learning_rate=1e-2)
    train_step = jax.jit(module.train_step(config), donate_argnums=0)
    state, batch = module.init(config, jax.random.key(0)), module.example_batch(config, batch=4)
    losses: list[float] = []
    for _ in range(10):
        state, value = train_step(state, batch)
        losses.append(float(value))
    assert losses[-1] < 0.8 * losses[0]
    assert int(state.step) == int(state.opt_state[0].count) == 10


def test_linear_and_mlp_against_numpy() -> None:
    config = tiny("linear-tiny")
    params, batch = linear.init(config, jax.random.key(0)).params, linear.example_batch(config, batch=5)
    x = np.linalg.multi_dot([np.asarray(batch["x"]), *(np.asarray(layer["w"]) for layer in params["layers"])])
    np.testing.assert_allclose(linear.loss(config, params, batch), np.mean(x**2), rtol=1e-5)

    config = tiny("mlp-tiny", activation="relu", residual=False, layers=1)
    params, batch = mlp.init(config, jax.random.key(0)).params, mlp.example_batch(config, batch=5)
    (layer,), x = params["layers"], np.asarray(batch["x"])
    y = np.maximum(x @ np.asarray(layer["w_up"]), 0) @ np.asarray(layer["w_down"])
    np.testing.assert_allclose(mlp.loss(config, params, batch), np.mean((y - batch["y"]) ** 2), rtol=1e-5)
    residual = replace(config, residual=True)
    np.testing.assert_allclose(mlp.forward(residual, params, batch["x"]), x + y, rtol=1e-4, atol=1e-5)


def noisy(config: transformer.Config) -> Any:
    """Parameters in which every entry is random, biases and norm scales too."""
    random = np.random.default_rng(0)
    shapes = jax.eval_shape(partial(transformer.init_params, config), jax.random.key(0))
    return jax.tree.map(lambda leaf: jnp.asarray(random.normal(scale=0.3, size=leaf.shape), leaf.dtype), shapes)


def numpy_forward(config: transformer.Config, params: Any, tokens: np.ndarray) -> np.ndarray:
    """The logits of one sequence, position by position and head by head, in float64."""
    params = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
    S, G = len(tokens), config.heads // config.kv_heads

    def norm(p: Any, x: np.ndarray) -> np.ndarray:
        if config.norm == "layernorm":
            return (x - x.mean()) / np.sqrt(x.var() + config.norm_epsilon) * p["scale"] + p["bias"]
        return x / np.sqrt((x**2).mean() + config.norm_epsilon) * p["scale"]

    def gelu(x: np.ndarray) -> np.ndarray:
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    def turned(x: np.ndarray, position: int) -> np.ndarray:
        if config.positions == "learned":
            return x
        half = config.head_dim // 2
        angle = position * config.rotary_base ** (-np.arange(half) / half)
        z = (x[:half] + 1j * x[half:]) * np.exp(1j * angle)
        return np.concatenate([z.real, z.imag])

    x = params["embed"][tokens] * (config.width**0.5 if config.scale_embedding else 1)
    if config.positions == "learned":
        x = x + params["pos_embed"][:S]
    for p in params["layers"]:
        h = np.stack([norm(p["attention_norm"], row) for row in x])
        out = np.zeros_like(x)
        for n in range(config.heads):
            q, k, v = (h @ p[w][:, head] for w, head in (("wq", n), ("wk", n // G), ("wv", n // G)))
            if config.biases:
                q, k, v = q + p["bq"][n], k + p["bk"][n // G], v + p["bv"][n // G]
            q, k = (np.stack([turned(row, s) for s, row in enumerate(rows)]) for rows in (q, k))
            for s in range(S):
                weights = np.exp(q[s] @ k[: s + 1].T / np.sqrt(config.head_dim))
                out[s] += weights / weights.sum() @ v[: s + 1] @ p["wo"][n]
        x = x + out + (p["bo"] if config.biases else 0)
        h = np.stack([norm(p["mlp_norm"], row) for row in x])
        up = h @ p["w_up"] + (p["b_up"] if config.biases else 0)
        if config.activation == "gelu":
            hidden = gelu(up)
        else:
            gate = h @ p["w_gate"]
            hidden = up * (gelu(gate) if config.activation == "geglu" else gate / (1 + np.exp(-gate)))
        x = x + hidden @ p["w_down"] + (p["b_down"] if config.biases else 0)
    x = np.stack([norm(params["final_norm"], row) for row in x])
    return x @ (params["embed"].T if config.tied else params["lm_head"])


GEMMA_SIZES = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "hidden": 96, "vocab": 256}


@pytest.mark.parametrize(
    "config", [tiny("tiny-gpt2"), tiny("tiny-llama"), tiny("gemma-7b", **GEMMA_SIZES)], ids=["gpt2", "llama", "gemma"]
)
def test_transformers_against_numpy(config: transformer.Config) -> None:
    params, batch = noisy(config), transformer.example_batch(config, batch=2, sequence=12)
    expected = np.stack([numpy_forward(config, params, np.asarray(tokens)) for tokens in batch["tokens"]])
    logits = forward(config, params, batch["tokens"])
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())

    log_probs = expected - np.log(np.exp(expected).sum(-1, keepdims=True))
    targets = np.asarray(batch["targets"])
    nats = -np.mean([log_probs[b, s, targets[b, s]] for b in range(2) for s in range(12)])
    np.testing.assert_allclose(loss(config, params, batch), nats, rtol=1e-5)


def test_bfloat16_is_close_to_float32() -> None:
    exact = tiny("tiny-llama")
    params, batch = init_params(exact, jax.random.key(0)), transformer.example_batch(exact)
    in_bfloat16, in_float32 = (
        float(loss(replace(exact, compute_dtype=dtype), params, batch)) for dtype in ("bfloat16", "float32")
    )
    assert in_bfloat16 == pytest.approx(in_float32, rel=1e-3)
    assert in_bfloat16 != in_float32


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama"])
def test_a_new_transformer_knows_nothing(name: str) -> None:
    config = tiny(name)
    params = init_params(config, jax.random.key(0))
    nats = loss(config, params, transformer.example_batch(config))
    assert float(nats) == pytest.approx(math.log(config.vocab), rel=0.01)


# --- Features of GPT-2 and Llama, one by one ---------------------------------------


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama"])
def test_a_later_token_does_not_change_earlier_logits(name: str) -> None:
    config = tiny(name)
    params, tokens = noisy(config), transformer.example_batch(config, batch=1)["tokens"]
    changed = tokens.at[0, 20].set((tokens[0, 20] + 1) % config.vocab)
    before, after = (forward(config, params, t)[0] for t in (tokens, changed))
    np.testing.assert_array_equal(before[:20], after[:20])
    assert np.all(np.any(before[20:] != after[20:], axis=-1))


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    config = tiny("tiny-llama")
    q, k = jax.random.normal(jax.random.key(0), (2, config.head_dim))
    cos, sin = transformer.rotation(config, jnp.arange(32))
    everywhere = (jnp.broadcast_to(x, (1, 32, 1, config.head_dim)) for x in (q, k))
    qs, ks = (transformer.rotate(x, cos, sin)[0, :, 0] for x in everywhere)
    scores = np.asarray(qs @ ks.T)
    for distance in range(-31, 32):
        diagonal = np.diagonal(scores, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], atol=1e-5)
    assert abs(scores[0, 0] - scores[1, 0]) > 1e-2
    np.testing.assert_allclose(jnp.linalg.norm(qs, axis=-1), jnp.linalg.norm(q), rtol=1e-5)


def test_grouped_query_attention_is_multi_head_with_repeated_heads() -> None:
    grouped = tiny("tiny-llama")
    params, tokens = noisy(grouped), transformer.example_batch(grouped, batch=2)["tokens"]
    full = replace(grouped, kv_heads=grouped.heads)
    repeats = grouped.heads // grouped.kv_heads
    layers = [layer | {w: jnp.repeat(layer[w], repeats, axis=1) for w in ("wk", "wv")} for layer in params["layers"]]
    np.testing.assert_allclose(
        forward(grouped, params, tokens),
        forward(full, params | {"layers": layers}, tokens),
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama"])
def test_norms_ignore_scale_and_only_layernorm_ignores_shift(name: str) -> None:
    config = tiny(name)
    norm = noisy(config)["final_norm"]
    x = jax.random.normal(jax.random.key(2), (2, 3, config.width))
    y = transformer.normalize(config, norm, x)
    np.testing.assert_allclose(transformer.normalize(config, norm, 8 * x), y, rtol=1e-3, atol=1e-4)
    shifted = np.abs(transformer.normalize(config, norm, x + 1) - y).max()
    assert shifted < 1e-4 if config.norm == "layernorm" else shifted > 0.1


def test_tied_embeddings_are_one_parameter_with_two_uses() -> None:
    tied = tiny("tiny-gpt2")
    params, tokens = noisy(tied), transformer.example_batch(tied, batch=2)["tokens"]
    assert "lm_head" not in params
    untied = replace(tied, tied=False)
    np.testing.assert_allclose(
        forward(tied, params, tokens),
        forward(untied, params | {"lm_head": params["embed"].T}, tokens),
        rtol=1e-5,
        atol=1e-5,
    )


def test_a_bias_on_the_keys_has_no_gradient() -> None:
    """It shifts all the scores of a query alike, and softmax does not see that."""
    config = tiny("tiny-gpt2")
    params, batch = noisy(config), transformer.example_batch(config)
    gradient = jax.jit(jax.grad(transformer.loss, argnums=1), static_argnums=0)(config, params, batch)["layers"][0]
    assert np.abs(gradient["bk"]).max() < 1e-5 * np.abs(gradient["bq"]).max()


# --- Layers: stacked and scanned, rematerialised -----------------------------------


def gradients(name: str, **overrides: Any) -> tuple[float, Any]:
    """Loss and gradients of three layers, those of stacked layers as a list of layers."""
    module, config = models.find(name, layers=3, compute_dtype="float32", **overrides)
    params, batch = module.init(config, jax.random.key(0)).params, module.example_batch(config, batch=2)
    value, gradient = jax.jit(jax.value_and_grad(partial(module.loss, config)))(params, batch)
    layers = gradient["layers"]
    if config.scan:
        layers = [jax.tree.map(lambda leaf, i=i: leaf[i], layers) for i in range(config.layers)]
    return float(value), gradient | {"layers": layers}


@pytest.mark.parametrize("name", ["tiny-llama", pytest.param("tiny-mixtral", marks=pytest.mark.slow)])
def test_scan_and_remat_keep_every_number(name: str) -> None:
    value, gradient = gradients(name)
    for scan, remat in ((True, "none"), (True, "dots"), (False, "full"), (True, "context")):
        other_value, other = gradients(name, scan=scan, remat=remat)
        assert other_value == pytest.approx(value, rel=1e-6)
        assert jax.tree.structure(other) == jax.tree.structure(gradient)
        for leaf, want in zip(jax.tree.leaves(other), jax.tree.leaves(gradient), strict=True):
            assert np.linalg.norm(leaf - want) <= 1e-5 * np.linalg.norm(want)


def products(**overrides: Any) -> int:
    """Equations that multiply matrices, in a scanned train step."""
    train_step, args = models.build("tiny-llama", scan=True, **overrides)
    names = [eqn.primitive.name for eqn in equations(jax.make_jaxpr(train_step)(*args))]
    return names.count("dot_general")


def test_a_scanned_program_does_not_grow_with_its_layers() -> None:
    assert products(layers=2) == products(layers=7) == 3 * (9 + 1)  # forward, and two in the backward pass


def test_remat_recomputes_what_it_says() -> None:
    """Of the 9 products of a layer: scores and mix; all but the last; none; scores; scores, out, up and gate."""
    none = products()
    repeated = {remat: products(remat=remat) - none for remat in ("dots", "full", "all_dots", "attention", "context")}
    assert repeated == {"dots": 2, "full": 8, "all_dots": 0, "attention": 1, "context": 4}


@pytest.mark.parametrize("scan", [False, True])
def test_each_layer_of_a_rematerialised_model_is_a_checkpoint(*, scan: bool) -> None:
    step, args = models.build("tiny-mixtral", layers=3, scan=scan, remat="full")
    loss = jax.make_jaxpr(lambda state, batch: step(state, batch)[1])(*args)
    checkpoints = [eqn for eqn in equations(loss) if eqn.primitive.name in ("checkpoint", "remat2", "remat")]
    assert len(checkpoints) >= (1 if scan else 3)
    assert {eqn.params["prevent_cse"] for eqn in checkpoints} == {not scan}


# --- The mixture of experts --------------------------------------------------------


def mixture(config: moe.Config) -> tuple[Any, jax.Array]:
    """One layer's experts with random weights, and activations to send them."""
    layer = jax.tree.map(lambda w: 20 * w, moe.new_experts(config, jax.random.key(0)))
    return layer, jax.random.normal(jax.random.key(1), (2, 16, config.width))


@pytest.mark.parametrize("fields", [{"capacity_factor": 4.0}, {"dispatch": "ragged"}], ids=["one_hot", "ragged"])
def test_each_token_is_mixed_from_its_best_experts(fields: dict[str, Any]) -> None:
    config = tiny("tiny-mixtral", **fields)
    layer, xs = mixture(config)
    y = jax.jit(moe.mixture, static_argnums=0)(config, layer, xs)
    w = jax.tree.map(lambda p: np.asarray(p, np.float64), layer)
    for out, x in zip(np.asarray(y).reshape(-1, 64), np.asarray(xs, np.float64).reshape(-1, 64), strict=True):
        scores = x @ w["w_router"]
        best = np.argsort(scores)[-2:]
        weights = np.exp(scores[best]) / np.exp(scores[best]).sum()
        expected = np.zeros(64)
        for weight, e in zip(weights, best, strict=True):
            gate = x @ w["w_gate"][e]
            expected += weight * (x @ w["w_up"][e] * gate / (1 + np.exp(-gate)) @ w["w_down"][e])
        np.testing.assert_allclose(out, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())


def test_equal_experts_are_one_mlp() -> None:
    config = tiny("tiny-mixtral", capacity_factor=4.0)
    layer, x = mixture(config)
    one = {w: layer[w][0] for w in ("w_gate", "w_up", "w_down")}
    equal = {w: jnp.broadcast_to(one[w], layer[w].shape) for w in one} | {"w_router": layer["w_router"]}
    np.testing.assert_allclose(moe.mixture(config, equal, x), transformer.mlp(config, one, x), rtol=1e-3, atol=1e-3)


def test_both_dispatches_agree_where_none_drops_a_token() -> None:
    config = tiny("tiny-mixtral", capacity_factor=4.0)
    layer, x = mixture(config)
    random = jax.random.normal(jax.random.key(2), x.shape)

    def value_and_grad(config: moe.Config) -> Any:
        def value(layer: Any, x: jax.Array) -> jax.Array:
            return jnp.sum(random * moe.mixture(config, layer, x))

        return jax.jit(jax.value_and_grad(value, argnums=(0, 1)))(layer, x)

    one_hot, ragged = value_and_grad(config), value_and_grad(replace(config, dispatch="ragged"))
    for leaf, want in zip(jax.tree.leaves(ragged), jax.tree.leaves(one_hot), strict=True):
        assert np.linalg.norm(want) > 0
        assert np.linalg.norm(leaf - want) < 1e-5 * np.linalg.norm(want)


def test_only_the_one_hot_dispatch_drops_tokens() -> None:
    few = tiny("tiny-mixtral", capacity_factor=0.5)
    layer, x = mixture(few)
    all_kept = moe.mixture(replace(few, capacity_factor=4.0), layer, x)
    np.testing.assert_allclose(
        moe.mixture(replace(few, dispatch="ragged"), layer, x), all_kept, rtol=1e-3, atol=1e-4 * np.abs(all_kept).max()
    )
    assert np.linalg.norm(moe.mixture(few, layer, x) - all_kept) > 0.1 * np.linalg.norm(all_kept)


def test_an_expert_takes_its_capacity_first_come_first_served() -> None:
    config = tiny("tiny-mixtral", top_k=1, capacity_factor=1.0)
    assert config.capacity(16) == 2
    scores = jnp.zeros((1, 16, 8)).at[0, :, 3].set(1.0)  # everyone asks for expert 3
    dispatch, combine = moe.route(config, scores)
    assert dispatch.shape == combine.shape == (1, 16, 8, 2)
    assert [tuple(int(i) for i in index) for index in np.argwhere(dispatch)] == [(0, 0, 3, 0), (0, 1, 3, 1)]
    np.testing.assert_array_equal(combine, dispatch)


def test_capacity_is_never_more_than_the_sequence() -> None:
    config = tiny("tiny-mixtral")
    assert config.capacity(32) == 10  # 1.25 · 2 · 32 / 8
    assert replace(config, capacity_factor=100.0).capacity(32) == 32
