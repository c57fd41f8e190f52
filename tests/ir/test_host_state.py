"""State in the host's memory: which leaves may lie there, and that the program computes the same."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autoshard import _jax
from autoshard.errors import SpecError
from autoshard.ir.host_state import HOST_MEMORY, state_groups, with_host_state
from autoshard.ir.ties import ties
from autoshard.ir.trace import Traced, trace

WIDTH, LAYERS, ROWS = 16, 3, 8

State = dict[str, Any]


def loss(params: State, x: jax.Array) -> jax.Array:
    for w in params["layers"]:
        x = x + jnp.tanh(x @ w)
    return jnp.mean((x @ params["head"] + params["bias"]) ** 2)


def scanned(params: State, x: jax.Array) -> jax.Array:
    x = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, jnp.stack(params["layers"]))[0]
    return jnp.mean((x @ params["head"] + params["bias"]) ** 2)


def step_of(optimizer: Any, of: Callable[..., Any] = loss) -> Callable[..., Any]:
    def step(state: State, x: jax.Array) -> tuple[State, jax.Array]:
        value, gradients = jax.value_and_grad(of)(state["params"], x)
        updates, opt = optimizer.update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    return step


def arguments(optimizer: Any) -> tuple[State, jax.Array]:
    keys = jax.random.split(jax.random.key(0), LAYERS + 2)
    params = {
        "layers": [jax.random.normal(k, (WIDTH, WIDTH)) for k in keys[:LAYERS]],
        "head": jax.random.normal(keys[-1], (WIDTH, WIDTH)),
        "bias": jnp.zeros(WIDTH),
    }
    return {"params": params, "opt": optimizer.init(params)}, jax.random.normal(keys[-2], (ROWS, WIDTH))


def traced_of(step: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Traced, dict[int, int]]:
    traced = trace(step, args, ("state", "x"))
    state = frozenset(i for i, path in enumerate(traced.in_paths) if path.startswith("state"))
    return traced, ties(traced, state)


OPTIMIZERS: dict[str, Any] = {
    "adamw": optax.adamw(1e-2),
    "adamw after a clip": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "lamb": optax.lamb(1e-2),
    "momentum": optax.sgd(1e-2, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_a_weight_s_update_reads_alone_goes_together(name: str) -> None:
    """A group per weight, the largest first; weights, which the forward pass reads, and counts are in none."""
    traced, tied = traced_of(step_of(OPTIMIZERS[name]), arguments(OPTIMIZERS[name]))
    groups = state_groups(traced, tied)
    assert len(groups) == LAYERS + 2
    kinds = 1 if name == "momentum" else 2
    assert [group.nbytes for group in groups] == [kinds * WIDTH * WIDTH * 4] * (LAYERS + 1) + [kinds * WIDTH * 4]
    for group in groups:
        assert [tied[o] for o in group.outputs] == list(group.inputs)
        assert all("opt" in traced.in_paths[i] for i in group.inputs)


def test_what_updates_read_of_all_leaves_puts_them_into_one_group() -> None:
    optimizer = optax.chain(optax.adamw(1e-2), optax.clip_by_global_norm(0.1))
    traced, tied = traced_of(step_of(optimizer), arguments(optimizer))
    assert [len(group.inputs) for group in state_groups(traced, tied)] == [2 * (LAYERS + 2)]


def test_the_first_group_waits_for_every_gradient() -> None:
    """XLA:GPU makes a weight's gradient as late as it can, and holds what it is made of until then."""
    traced, tied = traced_of(step_of(OPTIMIZERS["adamw"]), arguments(OPTIMIZERS["adamw"]))
    chosen = [i for group in state_groups(traced, tied) for i in group.inputs]
    eqns = _jax.open_jaxpr(with_host_state(traced, tied, chosen).jaxpr).eqns
    barrier = next(eqn for eqn in eqns if eqn.primitive.name == "optimization_barrier")
    waited = [x.aval.shape for x in barrier.invars if not _jax.is_on_host(x.aval)]
    assert waited.count((WIDTH, WIDTH)) >= LAYERS + 1
    assert (WIDTH,) in waited


def test_a_number_for_the_log_puts_nothing_together() -> None:
    optimizer = OPTIMIZERS["adamw"]
    plain = step_of(optimizer)

    def step(state: State, x: jax.Array) -> tuple[State, Any]:
        new, value = plain(state, x)
        return new, (value, optax.tree.norm(new["opt"][0].mu))

    traced, tied = traced_of(step, arguments(optimizer))
    assert len(state_groups(traced, tied)) == LAYERS + 2


def test_state_that_is_multiplied_or_read_early_stays() -> None:
    def step(state: State, x: jax.Array) -> tuple[State, jax.Array]:
        value, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"] + 0.1 * state["early"])
        multiplied = 0.9 * state["multiplied"] + gradient
        late = 0.9 * state["late"] + gradient
        early = 0.9 * state["early"] + gradient
        w = state["w"] - late - (multiplied @ multiplied.T) @ multiplied
        return {"w": w, "early": early, "late": late, "multiplied": multiplied}, value

    state = {name: jnp.ones((WIDTH, WIDTH)) for name in ("w", "early", "late", "multiplied")}
    traced, tied = traced_of(step, (state, jnp.ones((ROWS, WIDTH))))
    assert [[traced.in_paths[i] for i in group.inputs] for group in state_groups(traced, tied)] == [["state['late']"]]


@pytest.mark.parametrize(
    ("name", "of", "some"),
    [
        ("adamw after a clip", loss, slice(1, 3)),
        ("adamw", scanned, slice(None)),
        ("lamb", loss, slice(None)),
        ("momentum", loss, slice(0, 1)),
    ],
)
def test_the_program_computes_the_same(name: str, of: Callable[..., Any], some: slice) -> None:
    """Whichever groups lie there; on the CPU, which has the kind of memory."""
    optimizer = OPTIMIZERS[name]
    args = arguments(optimizer)
    step = step_of(optimizer, of)
    traced, tied = traced_of(step, args)
    chosen = sorted(i for group in state_groups(traced, tied)[some] for i in group.inputs)
    made = with_host_state(traced, tied, chosen)
    assert made.digest == traced.digest
    jaxpr = _jax.open_jaxpr(made.jaxpr)
    _jax.check(jaxpr)
    assert [i for i, x in enumerate(jaxpr.invars) if _jax.is_on_host(x.aval)] == chosen
    there = sorted(o for o, i in tied.items() if i in chosen)
    assert [o for o, x in enumerate(jaxpr.outvars) if _jax.is_on_host(x.aval)] == there
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=HOST_MEMORY)
    flat, want = jax.tree.leaves(args), jax.tree.leaves(jax.jit(step)(*args))
    given = [jax.device_put(x, host) if i in chosen else x for i, x in enumerate(flat)]
    got = jax.jit(jax.extend.core.jaxpr_as_fun(made.jaxpr))(*given)
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(mine), np.asarray(theirs), rtol=1e-5, atol=1e-6)


def test_every_copy_to_the_device_waits_for_the_group_before() -> None:
    """And the first one for all gradients: what a barrier holds back, its readers read behind it."""
    optimizer = OPTIMIZERS["adamw after a clip"]
    traced, tied = traced_of(step_of(optimizer), arguments(optimizer))
    groups = state_groups(traced, tied)
    made = with_host_state(traced, tied, sorted(i for group in groups for i in group.inputs))
    eqns = _jax.open_jaxpr(made.jaxpr).eqns
    barriers = [eqn for eqn in eqns if eqn.primitive.name == "optimization_barrier"]
    assert len(barriers) == len(groups)
    position = {x: k for k, eqn in enumerate(eqns) for x in eqn.outvars}
    products = [k for k, eqn in enumerate(eqns) if eqn.primitive.name == "dot_general"]
    assert max(products) < position[barriers[0].outvars[0]]
    read = {x for eqn in eqns for x in eqn.invars if not _jax.is_literal(x)} | {*_jax.open_jaxpr(made.jaxpr).outvars}
    for before, after in pairwise(barriers):
        back = [x for x in after.invars if x in position and _jax.is_on_host(x.aval)]
        assert len(back) == 2
        assert all(position[before.outvars[0]] < position[x] < position[after.outvars[0]] for x in back)
        assert read.issuperset(after.outvars)
        assert read.isdisjoint(x for x in back if x not in after.invars)


def test_other_inputs_are_refused_by_name() -> None:
    optimizer = OPTIMIZERS["adamw"]
    traced, tied = traced_of(step_of(optimizer), arguments(optimizer))
    weight = next(i for i, path in enumerate(traced.in_paths) if "params" in path)
    with pytest.raises(SpecError, match="params"):
        with_host_state(traced, tied, [weight])
