"""The ways in which people write training steps, each beside the same step on one device; the guides show them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autoshard

STEPS, WIDTH = 3, 32
X = jax.random.normal(jax.random.key(1), (16, WIDTH))
Y = jnp.sin(X)


def jitted(step: Any, **options: Any) -> Any:
    return autoshard.jit(step, mesh={"data": 2, "model": 4}, hardware="cpu:8", **options)


def same(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def is_split(tree: Any) -> bool:
    return any(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(tree))


def nnx_model() -> tuple[Any, Any, Any]:
    """Flax NNX, a model with batch statistics, and its optimizer."""
    nnx: Any = pytest.importorskip("flax.nnx", reason="flax is one of the dev extras")

    class Model(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.up, self.norm = nnx.Linear(WIDTH, 128, rngs=rngs), nnx.BatchNorm(128, rngs=rngs)
            self.down = nnx.Linear(128, WIDTH, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.down(jnp.tanh(self.norm(self.up(x))))

    model = Model(nnx.Rngs(0))
    return nnx, model, nnx.Optimizer(model, optax.sgd(1e-1, momentum=0.9), wrt=nnx.Param)


def nnx_update(nnx: Any, model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    """A step that changes its arguments in place."""
    value, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
    optimizer.update(model, gradients)
    return value


def test_nnx_is_changed_in_place_around_a_pure_step() -> None:
    """As `nnx.jit` of the step: the caller's own model and optimizer move on, batch statistics and moments, too."""
    nnx, model, optimizer = nnx_model()
    graphdef = nnx.graphdef((model, optimizer))

    def step(state: Any, x: Any, y: Any) -> Any:
        both = nnx.merge(graphdef, state)
        value = nnx_update(nnx, both[0], both[1], x, y)
        return nnx.state(both), value

    planned = jitted(step, donate_argnums=0)
    kernel = model.up.kernel
    losses: list[Any] = []
    for _ in range(STEPS):
        state, value = planned(nnx.state((model, optimizer)), X, Y)
        nnx.update((model, optimizer), state)
        losses.append(value)
    assert model.up.kernel is kernel  # the same variable, which others may hold
    assert is_split(nnx.state(model))
    _, plain, moments = nnx_model()
    want = [nnx.jit(nnx_update, static_argnums=0)(nnx, plain, moments, X, Y) for _ in range(STEPS)]
    same(losses, want)
    same(nnx.to_pure_dict(nnx.state((model, optimizer))), nnx.to_pure_dict(nnx.state((plain, moments))))


def test_a_train_state_of_linen() -> None:
    nn: Any = pytest.importorskip("flax.linen", reason="flax is one of the dev extras")
    train_state: Any = pytest.importorskip("flax.training.train_state", reason="flax is one of the dev extras")
    model = nn.Sequential([nn.Dense(128), nn.LayerNorm(), jnp.tanh, nn.Dense(WIDTH)])

    tx = optax.sgd(optax.cosine_decay_schedule(1e-1, 10), momentum=0.9)

    def init() -> Any:
        params = model.init(jax.random.key(0), X)["params"]
        return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def step(state: Any, x: Any, y: Any) -> Any:
        value, gradients = jax.value_and_grad(lambda p: jnp.mean((state.apply_fn({"params": p}, x) - y) ** 2))(
            state.params
        )
        return state.apply_gradients(grads=gradients), value

    planned = jitted(step, donate_argnums=0)
    state = planned.plan(jax.eval_shape(init), X, Y).init(init, arg="state")
    other = init()
    for _ in range(STEPS):
        state, value = planned(state, X, Y)
        other, want = jax.jit(step)(other, X, Y)
        same(value, want)
    assert is_split(state.params)
    same(state, other)  # a TrainState again, with its function and its optimizer


def test_an_equinox_model_goes_in_and_comes_out() -> None:
    """As under `eqx.filter_jit`: fields that are static, functions and numbers stay what they are."""
    eqx: Any = pytest.importorskip("equinox", reason="equinox is one of the dev extras")

    class Model(eqx.Module):
        up: Any
        down: Any
        activation: Any
        scale: float
        name: str = eqx.field(static=True)

        def __call__(self, x: Any) -> Any:
            return self.scale * self.down(self.activation(self.up(x)))

    def create() -> Any:
        keys = jax.random.split(jax.random.key(0))
        up, down = eqx.nn.Linear(WIDTH, 128, key=keys[0]), eqx.nn.Linear(128, WIDTH, key=keys[1])
        return Model(up, down, jnp.tanh, 0.5, name="a model")

    optimizer = optax.sgd(1e-1, momentum=0.9)

    def update(model: Any, moments: Any, x: Any, y: Any) -> Any:
        value, gradients = eqx.filter_value_and_grad(lambda m: jnp.mean((jax.vmap(m)(x) - y) ** 2))(model)
        updates, moments = optimizer.update(gradients, moments, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), moments, value

    static = eqx.partition(create(), eqx.is_array)[1]

    def step(arrays: Any, moments: Any, x: Any, y: Any) -> Any:
        model, moments, value = update(eqx.combine(arrays, static), moments, x, y)
        return eqx.filter(model, eqx.is_array), moments, value

    planned = jitted(step, donate_argnums=(0, 1))
    model, other = create(), create()
    moments, of_other = (optimizer.init(eqx.filter(m, eqx.is_inexact_array)) for m in (model, other))
    for _ in range(STEPS):
        arrays, moments, value = planned(eqx.filter(model, eqx.is_array), moments, X, Y)
        model = eqx.combine(arrays, static)
        other, of_other, want = eqx.filter_jit(update)(other, of_other, X, Y)
        same(value, want)
    assert (model.name, model.scale, model.activation) == ("a model", 0.5, jnp.tanh)
    assert is_split(eqx.filter(model, eqx.is_array))
    same(eqx.filter(model, eqx.is_array), eqx.filter(other, eqx.is_array))
