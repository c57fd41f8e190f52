"""`autoshard.in_stages` computes what `jax.value_and_grad` does, and refuses what it cannot."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from autoshard import SpecError, StageError, in_stages
from tests.end_to_end.test_numerics import TOLERANCE, errors
from tests.programs import relative_error

SMALL: dict[str, Any] = {
    "scan": True,
    "compute_dtype": "float32",
    "context": 8,
    **dict.fromkeys(("layers", "heads", "kv_heads", "head_dim"), 4),
    "width": 16,
    "hidden": 32,
    "vocab": 32,
}
LAYERS, WIDTH, BATCH = 4, 8, 12


def model(name: str) -> tuple[Callable[..., Any], Any, Any]:
    """The loss of a model, its state and a batch."""
    module, config = models.find(name, **SMALL)
    state = jax.jit(partial(module.init, config))(jax.random.key(1))
    return partial(module.loss, config), state, module.example_batch(config, batch=16)


def weights(dtype: Any = np.float32) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "in": rng.normal(size=(WIDTH, WIDTH)).astype(dtype),
        "layers": {
            "w": rng.normal(size=(LAYERS, WIDTH, WIDTH)).astype(dtype),
            "scale": rng.normal(size=(LAYERS, WIDTH)).astype(dtype),
        },
        "out": rng.normal(size=(WIDTH, WIDTH)).astype(dtype),
    }


def batch() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    return {
        "x": rng.normal(size=(BATCH, WIDTH)).astype(np.float32),
        "mask": rng.integers(0, 2, (BATCH, WIDTH)).astype(bool),
        "keep": np.arange(BATCH) % 3 > 0,
    }


def layer(x: Any, own: Any) -> tuple[Any, None]:
    return x + jnp.tanh(x @ own["w"]) * own["scale"], None


def outputs(p: Any, b: Any, layer: Callable[..., Any] = layer) -> Any:
    x, _ = jax.lax.scan(layer, b["x"] @ p["in"], p["layers"])
    return jnp.square(x @ p["out"] - b["x"])


def same(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert relative_error(a, b) <= tolerance


MODELS = ("tiny-gpt2", "tiny-llama", "tiny-mixtral")
CASES = [(name, *case) for name in MODELS for case in ((2, 4, 2, 2), (4, 8, 1, 1), (2, 1, 1, 1))]
FAST = ("tiny-llama", 2, 4, 2, 2)


@pytest.mark.parametrize(
    ("name", "stages", "steps", "repeats", "parts"),
    [case if case == FAST else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
def test_models_have_the_same_gradients(name: str, stages: int, steps: int, repeats: int, parts: int) -> None:
    loss, state, batch = model(name)
    program = in_stages(loss, stages=stages, steps=steps, repeats=repeats, parts=parts)
    value, gradients = jax.jit(program)(state.params, batch)
    want, want_gradients = jax.jit(jax.value_and_grad(loss))(state.params, batch)
    assert relative_error(value, want) <= TOLERANCE
    assert max(errors(gradients, want_gradients).values()) <= TOLERANCE


@pytest.mark.parametrize(("repeats", "transposed"), [(1, False), (2, True)])
def test_stacked_weights_are_put_in_order_for_several_times_round_alone(repeats: int, *, transposed: bool) -> None:
    """One time round they lie in the order of the stages."""
    program = in_stages(lambda p, b: outputs(p, b).mean(), stages=2, steps=4, repeats=repeats, parts=1)
    eqns = jax.make_jaxpr(program)(weights(), batch()).eqns
    shape = (repeats, 2, LAYERS // (2 * repeats), WIDTH, WIDTH)
    moved = [e for e in eqns if e.primitive.name == "transpose" and e.invars[0].aval.shape == shape]
    assert bool(moved) == transposed


# --- What a loss may look like --------------------------------------------------------------


def with_mask(p: Any, b: Any) -> Any:
    """The layers take a constant of each example."""

    def masked(x: Any, own: Any) -> tuple[Any, None]:
        return jnp.where(b["mask"], layer(x, own)[0], x), None

    return jnp.mean(outputs(p, b, masked))


def with_counter(p: Any, b: Any) -> Any:
    """The carry knows the layer, and adds up a loss of its own, linear in the examples."""

    def counting(carry: Any, own: Any) -> tuple[Any, None]:
        x, i, extra = carry
        x, _ = layer(x, own)
        return (x, i + 1, extra + jnp.mean(jnp.abs(x)) / (1 + i)), None

    x, _, extra = jax.lax.scan(counting, (b["x"] @ p["in"], 0, jnp.zeros(())), p["layers"])[0]
    return jnp.mean(jnp.square(x @ p["out"])) + 0.1 * extra + 1e-3 * jnp.sum(jnp.square(p["in"]))


def with_remat_and_cast(p: Any, b: Any) -> Any:
    p = {**p, "layers": jax.tree.map(lambda w: 2.0 * w, p["layers"])}
    return jnp.mean(outputs(p, b, jax.checkpoint(layer)))


def with_arrays(p: Any, b: Any) -> Any:
    """Layers, embedding and head close over arrays: one for all layers, one of each layer, the first carry of one."""
    table, of_each = jnp.linspace(0.5, 1.5, WIDTH), np.linspace(0.1, 0.9, LAYERS, dtype=np.float32)

    def scaled(carry: Any, own: Any) -> tuple[Any, None]:
        x, scales = carry
        return (layer(x, own[0])[0] * table + own[1], scales * 0.5), None

    x, _ = jax.lax.scan(scaled, (b["x"] @ p["in"] + table, np.ones(3, np.float32)), (p["layers"], of_each))[0]
    return jnp.mean(jnp.square(x @ p["out"] - table))


LOSSES: dict[str, Callable[..., Any]] = {
    "arrays": with_arrays,
    "mean": lambda p, b: jnp.mean(outputs(p, b)),
    "sum": lambda p, b: jnp.sum(outputs(p, b)),
    "mean of each, then of all": lambda p, b: jnp.mean(jnp.where(b["keep"], jnp.sum(outputs(p, b), 1), 0.0)) * 3.0,
    "a mask in the layers": with_mask,
    "a counter in the carry": with_counter,
    "remat, weights made of others": with_remat_and_cast,
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("stages", "steps", "repeats"), [pytest.param(4, 3, 1, marks=pytest.mark.slow), (2, 6, 2)])
def test_losses_have_the_same_gradients(name: str, stages: int, steps: int, repeats: int) -> None:
    got = jax.jit(in_stages(LOSSES[name], stages=stages, steps=steps, repeats=repeats))(weights(), batch())
    same(got, jax.value_and_grad(LOSSES[name])(weights(), batch()))


def test_auxiliary_results_are_stacked_and_other_arguments_are_passed_whole() -> None:
    def with_aux(p: Any, b: Any, shift: Any) -> Any:
        return jnp.mean(outputs(p, b)) + shift, {"x": b["x"], "perplexity": jnp.exp(jnp.mean(b["x"]))}

    program = in_stages(with_aux, stages=2, steps=3, parts=2, has_aux=True)
    (value, aux), gradients = program(weights(), batch(), 0.5)
    (want, _), want_gradients = jax.value_and_grad(with_aux, has_aux=True)(weights(), batch(), 0.5)
    same((value, gradients), (want, want_gradients))
    assert aux["perplexity"].shape == (6,)
    assert sorted(np.asarray(aux["x"]).reshape(BATCH, WIDTH)[:, 0]) == sorted(batch()["x"][:, 0])


def test_gradients_are_summed_in_float32() -> None:
    program = in_stages(LOSSES["mean"], stages=2, steps=6)
    half = jax.tree.map(jnp.asarray, weights(jnp.bfloat16))
    _, gradients = program(half, batch())
    assert {g.dtype for g in jax.tree.leaves(gradients)} == {jnp.dtype(jnp.bfloat16)}
    closed = jax.make_jaxpr(program)(half, batch())
    summed = [
        v.aval for e in closed.eqns if e.primitive.name == "scan" for v in e.outvars if v.aval.shape == (2, 1, 2, 8, 8)
    ]
    assert summed
    assert {str(aval.dtype) for aval in summed} == {"float32"}


def test_the_program_runs_as_many_trips_as_the_schedule_says() -> None:
    closed = jax.make_jaxpr(in_stages(LOSSES["mean"], stages=4, steps=6))(weights(), batch())
    assert [e.params["length"] for e in closed.eqns if e.primitive.name == "scan"][-3:] == [9, 6, 9]


# --- What is refused ----------------------------------------------------------------------------


def normalized(x: Any, own: Any) -> tuple[Any, None]:
    x = (x - x.mean(0)) / x.std(0)
    return layer(x, own)


def with_dropout(p: Any, b: Any) -> Any:
    keep = jax.random.bernoulli(jax.random.key(0), 0.9, b["x"].shape)
    return jnp.mean(jnp.where(keep, outputs(p, b), 0.0))


def with_capacity(p: Any, b: Any) -> Any:
    """As a mixture of experts that fills its places in the order of the batch."""
    place = jnp.cumsum(b["mask"].astype(jnp.int32), axis=0)
    return jnp.mean(jnp.where(place < 4, outputs(p, b), 0.0))


def with_balance(p: Any, b: Any) -> Any:
    share = jax.nn.softmax(b["x"] @ p["in"])
    return jnp.mean(outputs(p, b)) + jnp.sum(share.mean(0) * b["mask"].mean(0))


def with_outputs_of_layers(p: Any, b: Any) -> Any:
    x, all_of_them = jax.lax.scan(lambda x, own: (layer(x, own)[0], x.mean()), b["x"] @ p["in"], p["layers"])
    return jnp.mean(x @ p["out"]) + all_of_them.mean()


def alone(p: Any, b: Any) -> Any:
    return jnp.mean(layer(b["x"] @ p["in"], {"w": p["out"], "scale": p["layers"]["scale"][0]})[0])


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "statistics of the batch": (
        lambda p, b: jnp.mean(outputs(p, b, normalized)),
        "brings a sum over the batch to its examples",
    ),
    "the quotient of two sums": (
        lambda p, b: jnp.sum(jnp.where(b["mask"], outputs(p, b), 0.0)) / jnp.sum(b["mask"]),
        "divides by a sum over the batch",
    ),
    "the root of a mean": (lambda p, b: jnp.sqrt(jnp.mean(outputs(p, b))), "`sqrt` makes of a sum over the batch"),
    "a maximum": (lambda p, b: jnp.max(outputs(p, b)), "`reduce_max` takes a maximum or the like over examples"),
    "a sum and a penalty": (
        lambda p, b: jnp.sum(outputs(p, b)) + jnp.sum(jnp.square(p["in"])),
        "`add` makes of a sum over the batch what is no multiple",
    ),
    "a quotient of integers": (
        lambda p, b: jnp.sum(outputs(p, b)) + jax.lax.div(jnp.sum(b["mask"].astype(jnp.int32)), 5),
        "makes of a sum over the batch what is no multiple",
    ),
    "a rounded sum": (
        lambda p, b: jnp.mean(outputs(p, b)).astype(jnp.int32).astype(jnp.float32),
        "`convert_element_type` makes of a sum over the batch",
    ),
    "a whole share of each example": (
        lambda p, b: jnp.sum(outputs(p, b) * jax.lax.div(b["mask"].astype(jnp.int32), len(b["mask"]))),
        "what is no multiple of it, but rounded",
    ),
    "dropout": (with_dropout, "`random_bits` draws random numbers for the whole batch"),
    "capacity over the batch": (with_capacity, "`cumsum` mixes examples of the batch"),
    "a loss of balance": (with_balance, "`mul` makes of a sum over the batch"),
    "other examples": (lambda p, b: jnp.mean(outputs(p, b)[:, None] * b["x"]), "brings examples together with other"),
    "positions in the batch": (
        lambda p, b: jnp.mean(outputs(p, b) * jnp.arange(b["x"].shape[0])[:, None]),
        "depends on an example's place in the batch",
    ),
    "outputs of layers": (with_outputs_of_layers, "its layers return values beside the carry"),
    "one layer": (alone, "the loss has no `jax.lax.scan` over stacked layers, and no equal layers one after the other"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_numbers_is_refused(name: str) -> None:
    loss, message = REFUSED[name]
    with pytest.raises(StageError) as caught:
        in_stages(loss, stages=2, steps=3)(weights(), batch())
    assert message in str(caught.value)
    assert name == "one layer" or "test_in_stages.py" in caught.value.where


def test_layers_that_vmap_does_not_know_are_refused() -> None:
    """Stages run side by side; of what has no derivative JAX tells, as it does without stages."""

    def grouped(p: Any, b: Any) -> Any:
        def layer(x: Any, w: Any) -> tuple[Any, None]:
            return jnp.tanh(x @ jax.lax.ragged_dot(w[0], w, jnp.array([4, 4], jnp.int32))), None

        return jnp.mean(jax.lax.scan(layer, b, p)[0])

    def without_derivative(p: Any, b: Any) -> Any:
        return jnp.mean(
            jax.lax.scan(lambda x, w: (jax.lax.igamma_grad_a(jnp.exp(x), jnp.exp(x @ w[0])), None), b, p)[0]
        )

    p, b = np.ones((LAYERS, 2, 8, 8), np.float32), np.ones((4, 8), np.float32)
    with pytest.raises(StageError, match="JAX cannot run its layers side by side") as caught:
        in_stages(grouped, stages=2, steps=2)(p, b)
    assert "test_in_stages.py" in caught.value.where
    for program in (jax.value_and_grad(without_derivative), in_stages(without_derivative, stages=2, steps=2)):
        with pytest.raises(NotImplementedError, match="Differentiation rule for 'igamma_grad_a'"):
            program(p, b)


def test_what_does_not_divide_is_an_error() -> None:
    with pytest.raises(StageError, match="its 4 layers do not divide into 3 equal chunks"):
        in_stages(LOSSES["mean"], stages=3, steps=3)(weights(), batch())
    with pytest.raises(SpecError, match="a batch of 12 does not split into 5 micro-batches"):
        in_stages(LOSSES["mean"], stages=2, steps=5)(weights(), batch())
    with pytest.raises(SpecError, match="'stage' is an axis of the mesh in context, and there is none"):
        in_stages(LOSSES["mean"], stages="stage", steps=3)(weights(), batch())
    with pytest.raises(SpecError, match="steps='many': write a number of micro-batches, or \"auto\""):
        in_stages(LOSSES["mean"], stages=2, steps=cast(Any, "many"))
    of_mesh = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((2,), ("stage",)))
    with of_mesh, pytest.raises(SpecError, match="stages='stages': the mesh has no axis 'stages'; it has stage"):
        in_stages(LOSSES["mean"], stages="stages", steps=3)(weights(), batch())
    uneven = {**batch(), "keep": batch()["keep"][:6]}
    with pytest.raises(SpecError, match=r"leading dimensions of \[6, 12\]"):
        in_stages(LOSSES["mean"], stages=2, steps=3)(weights(), uneven)
