"""What crosses from forward to backward, and programs that keep other values for it."""

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import jaxpr_as_fun

import autoshard
from autoshard import _jax
from autoshard.ir.recompute import rewritten
from autoshard.ir.saved_values import Remat, SavedValues, ValueId, saved_values
from autoshard.ir.trace import Traced, trace

Program = tuple[Callable[..., Any], tuple[Any, ...]]


def key(i: int) -> Any:
    return jax.random.key(i)


def weights(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).normal(0, 0.3, shape).astype(np.float32)


def layer(w: Any, x: Any) -> Any:
    h = jnp.tanh(x @ w["up"])
    return x + jax.nn.silu(h) * h @ w["down"]


def stack(layers: int) -> Any:
    return {"up": weights(layers, 6, 10), "down": weights(layers, 10, 6)}


def step(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A train step with a little of an optimizer behind the gradient."""

    def train_step(params: Any, *rest: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, *rest)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return train_step


def scanned() -> Program:
    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(jax.lax.scan(lambda x, w: (layer(w, x), None), x, params)[0] ** 2)

    return step(loss), (stack(3), weights(4, 6))


def unrolled() -> Program:
    def loss(params: Any, x: Any) -> Any:
        for i in range(3):
            x = layer({name: w[i] for name, w in params.items()}, x)
        return jnp.mean(x**2)

    return step(loss), (stack(3), weights(4, 6))


def dropout() -> Program:
    def loss(params: Any, x: Any, key: Any) -> Any:
        def body(x: Any, given: Any) -> Any:
            w, key = given
            return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), layer(w, x), x), None

        keep = jax.random.bernoulli(jax.random.fold_in(key, 7), 0.5, x.shape)
        return jnp.mean(jax.lax.scan(body, jnp.where(keep, x, x * x), (params, jax.random.split(key, 3)))[0] ** 2)

    return step(loss), (stack(3), weights(4, 6), key(0))


def mixture() -> Program:
    def loss(params: Any, x: Any) -> Any:
        for i in range(2):
            scores = jax.nn.softmax(x @ params["router"][i])
            top, expert = jax.lax.top_k(scores, 2)
            sent = jnp.einsum("se,sd->esd", jax.nn.one_hot(expert, 4).sum(1), x)
            mixed = jnp.einsum("esd,edf->esf", sent, params["up"][i])
            x = x + jnp.einsum("esf,efd,s->sd", jnp.tanh(mixed), params["down"][i], top[:, 0])
        return jnp.mean(x**2)

    params = {"router": weights(2, 6, 4), "up": weights(2, 4, 6, 5), "down": weights(2, 4, 5, 6)}
    return step(loss), (params, weights(8, 6))


def accumulated() -> Program:
    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(jax.lax.scan(lambda x, w: (layer(w, x), None), x, params)[0] ** 2)

    def train_step(params: Any, batch: Any) -> Any:
        value, gradients = autoshard.accumulate(loss, steps=2, parts=2)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return train_step, (stack(2), weights(8, 6))


def nested() -> Program:
    """Layers in a scan, each with a scan of its own."""

    def loss(params: Any, x: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            def inner(h: Any, part: Any) -> Any:
                h = jnp.sin(h * part) + jnp.cos(h) @ w["up"] @ w["down"]
                return h, h * 2

            h, parts = jax.lax.scan(inner, x, jnp.linspace(0.1, 0.5, 4))
            return x + h + parts.sum(0) * 0.1, None

        return jnp.mean(jax.lax.scan(body, x, params)[0] ** 2)

    return step(loss), (stack(3), weights(4, 6))


def checkpointed() -> Program:
    def loss(params: Any, x: Any) -> Any:
        own = jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
        x = jax.lax.scan(lambda x, w: (own(w, x), None), x, params)[0]
        for i in range(2):
            x = jax.checkpoint(layer)({name: w[i] for name, w in params.items()}, jnp.sin(x))
        return jnp.mean(x**2)

    return step(loss), (stack(3), weights(4, 6))


def custom_rules() -> Program:
    @jax.custom_vjp
    def squash(x: Any) -> Any:
        return jnp.tanh(x) * x

    def forward(x: Any) -> Any:
        y = jnp.tanh(x)
        return y * x, (x, y)

    def backward(saved: Any, g: Any) -> Any:
        x, y = saved
        return (g * (y + x * (1 - y * y)),)

    squash.defvjp(forward, backward)

    def loss(params: Any, x: Any) -> Any:
        for i in range(2):
            x = squash(checkpoint_name(x @ params["up"][i], "hidden")) @ params["down"][i]
        return jnp.mean(x**2)

    return step(loss), (stack(2), weights(4, 6))


def shared_towers() -> Program:
    """Two loops over the same body; what the first stacks is a result, too."""

    def loss(params: Any, x: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            x = layer(w, x)
            return x, x * 3

        a, seen = jax.lax.scan(body, x, params)
        b, _ = jax.lax.scan(body, jnp.cos(x), params, reverse=True)
        return jnp.mean(a * b) + jnp.mean(seen**2), seen

    def train_step(params: Any, x: Any) -> Any:
        (value, seen), gradients = jax.value_and_grad(loss, has_aux=True)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value, seen

    return train_step, (stack(3), weights(4, 6))


PROGRAMS = {
    builder.__name__: builder
    for builder in (
        *(scanned, unrolled, dropout, mixture, accumulated),
        *(nested, checkpointed, custom_rules, shared_towers),
    )
}


def traced(program: Program) -> Traced:
    fn, args = program
    return trace(fn, args, [f"a{i}" for i in range(len(args))])


def run(closed: Any, args: Any) -> list[np.ndarray[Any, Any]]:
    options = {"xla_backend_optimization_level": "0", "xla_llvm_disable_expensive_passes": True}
    fn = jax.jit(jaxpr_as_fun(closed))
    return [np.asarray(x) for x in fn.lower(*jax.tree.leaves(args)).compile(options)(*jax.tree.leaves(args))]


def enough(values: SavedValues, kept: Any) -> frozenset[ValueId]:
    """What is kept with what else must be, throughout."""
    found = frozenset(kept)
    while missing := values.missing(found):
        found |= set(missing)
    return found


def drawn(values: SavedValues, rng: random.Random) -> frozenset[ValueId]:
    share = rng.random() ** 2
    every = [value.id for one in values.passes for value in one.values]
    chosen = {at for at in every if rng.random() < share}
    return enough(values, values.stacks(enough(values, chosen)) if rng.random() < 0.7 else chosen)


@pytest.mark.parametrize("name", PROGRAMS)
def test_any_choice_computes_the_same(name: str) -> None:
    program = PROGRAMS[name]()
    closed = traced(program).jaxpr
    expected = run(closed, program[1])
    rng = random.Random(name)
    remats: tuple[Remat, ...] = ("add", "free") if name == "checkpointed" else ("add",)
    for remat in remats:
        values = saved_values(closed, remat=remat)
        choices = [values.saved, enough(values, values.stacks(enough(values, []))), drawn(values, rng)]
        for kept in choices:
            got = run(rewritten(values, kept), program[1])
            for a, b in zip(expected, got, strict=True):
                np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


MODES: tuple[Remat, ...] = ("add", "free")


@pytest.mark.parametrize("remat", MODES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_choice_is_a_program(name: str, remat: Remat) -> None:
    """Well-typed, with the same inputs and results, and with no stack of what is not kept."""
    closed = traced(PROGRAMS[name]()).jaxpr
    values = saved_values(closed, remat=remat)
    rng = random.Random(name)
    for _ in range(10):
        kept = drawn(values, rng)
        new = _jax.open_jaxpr(rewritten(values, kept))
        _jax.check(new)
        old = _jax.open_jaxpr(closed)
        assert [v.aval for v in new.invars] == [v.aval for v in old.invars]
        assert [v.aval for v in new.outvars] == [v.aval for v in old.outvars]
