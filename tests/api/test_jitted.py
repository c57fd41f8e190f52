"""State keeps its layout when shapes change, and moves by choice alone."""

import logging
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import autoshard
from autoshard import InfeasibleError, SpecError
from tests.programs import GPUS

P = PartitionSpec
MESH = {"data": 8}
S = jax.ShapeDtypeStruct

# Alone, much data over small weights is split by its rows; little data over large weights goes to the weights.
STATE = {"up": S((2048, 8192), jnp.float32), "down": S((8192, 2048), jnp.float32)}
MUCH, LITTLE = S((16384, 2048), jnp.bfloat16), S((8, 2048), jnp.bfloat16)


def train(state: Any, x: Any) -> Any:
    def loss(p: Any) -> Any:
        y = jax.nn.silu(x @ p["up"].astype(x.dtype)) @ p["down"].astype(x.dtype)
        return jnp.mean(jnp.square(y.astype(jnp.float32)))

    value, g = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, d: p - 0.1 * d, state, g), value


jitted = partial(autoshard.jit, train, mesh=MESH, hardware=GPUS, donate_argnums=0)


def test_state_keeps_its_layout_when_the_batch_changes_its_shape() -> None:
    free = {size: jitted().plan(STATE, x) for size, x in (("much", MUCH), ("little", LITTLE))}
    assert free["much"].specs[0] != free["little"].specs[0]  # else there is nothing to keep
    f = jitted()
    first, second = f.plan(STATE, MUCH), f.plan(STATE, LITTLE)
    assert second.specs[0] == first.specs[0] == free["much"].specs[0]
    assert second.out_specs[0] == first.out_specs[0]
    assert second.cost >= free["little"].cost
    assert jitted().plan(STATE, LITTLE).specs == free["little"].specs


def test_state_moves_by_choice_and_it_is_said_how_much(caplog: pytest.LogCaptureFixture) -> None:
    f = jitted(move=True)
    with caplog.at_level(logging.INFO, "autoshard"):
        first, second = f.plan(STATE, MUCH), f.plan(STATE, LITTLE)
    assert first.specs[0] != second.specs[0]
    (line,) = [r.getMessage() for r in caplog.records if "move between" in r.getMessage()]
    changed = [
        a
        for a, b in zip(first.record.inputs, second.record.inputs, strict=True)
        if a.shape == b.shape and a.spec != b.spec
    ]
    assert line.startswith(f"train: {len(changed)} arguments ({67.1 * len(changed):.3g} MB) move between these shapes")


def test_shapes_that_fit_in_no_kept_layout_say_what_would_move() -> None:
    def scale(w: Any, x: Any) -> Any:
        return w, jnp.sum(x @ w)

    options: dict[str, Any] = {"mesh": MESH, "hardware": GPUS, "donate_argnums": 0}
    w = S((8192, 8192), jnp.float32)
    whole = autoshard.plan(scale, w, S((8192, 8192), jnp.float32), pins={"w": P()}, **options)
    f = autoshard.jit(scale, memory=200_000_000, like=None, **options)
    f._first[None, ()] = whole  # as if an earlier shape had wanted it whole
    with pytest.raises(InfeasibleError) as raised:
        f.plan(w, S((1024, 8192), jnp.float32))
    assert "with the layouts of earlier shapes kept: no plan fits 200 MB" in str(raised.value)
    assert "with move=True 1 arguments (268 MB) move between these shapes and the first: w: P" in str(
        raised.value
    ).replace("PartitionSpec", "P")
    f = autoshard.jit(scale, memory=1000, **options)
    f._first[None, ()] = whole
    with pytest.raises(InfeasibleError) as raised:
        f.plan(w, S((1024, 8192), jnp.float32))
    assert "move=True" not in str(raised.value)  # would not help


def test_a_run_in_two_shapes_moves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    rng = np.random.default_rng(0)
    state = {k: jnp.asarray(rng.normal(size=(16, 16)).astype(np.float32)) for k in ("up", "down")}
    want = jax.tree.map(jnp.array, state)
    f = autoshard.jit(train, mesh=MESH, hardware=GPUS, donate_argnums=0, strict=True)
    with caplog.at_level(logging.INFO, "autoshard"):
        for rows in (32, 8, 32):
            x = rng.normal(size=(rows, 16)).astype(np.float32)
            state, value = f(state, x)
            want, expected = train(want, x)
            np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert not [r for r in caplog.records if "another sharding" in r.getMessage()]


def test_a_plan_like_another_keeps_its_layouts() -> None:
    first = autoshard.plan(train, STATE, MUCH, mesh=MESH, hardware=GPUS, donate_argnums=0)

    def evaluate(state: Any, x: Any) -> Any:
        return train(state, x)[1]

    second = autoshard.plan(evaluate, STATE, LITTLE, mesh=MESH, hardware=GPUS, for_grad=False, like=first)
    assert second.specs[0] == first.specs[0]
    pinned = autoshard.plan(
        evaluate, STATE, LITTLE, mesh=MESH, hardware=GPUS, for_grad=False, like=first, pins={"state.up": P("data")}
    )
    assert pinned.specs[0]["up"] == P("data")
    assert pinned.specs[0]["down"] == first.specs[0]["down"]
    other = {name: S(leaf.shape, jnp.bfloat16) for name, leaf in STATE.items()}
    with pytest.raises(SpecError, match="no argument of evaluate has the paths, shapes and dtypes"):
        autoshard.plan(evaluate, other, LITTLE, mesh=MESH, hardware=GPUS, like=first)


def test_options_are_checked_when_they_are_given() -> None:
    wrong: dict[str, Any] = {"pin": {}}
    with pytest.raises(TypeError, match=r"jit has no option 'pin': did you mean pins\?"):
        autoshard.jit(train, **wrong)
