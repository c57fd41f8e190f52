"""What is emitted on several devices gives one device's numbers where XLA, left alone, does not; it costs nothing."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard import _jax
from autoshard.ir import emission, rewrite
from autoshard.ir.constraints import Constraints
from tests.rules_oracle import COLLECTIVE

NOTHING = Constraints(made={}, taken={}, inputs={}, outputs={})


def decode(cache: Any, x: Any, w: Any, i: Any) -> Any:
    """A token's keys into a cache, and a score of every token in it."""
    keys = (x @ w)[None]
    cache = lax.dynamic_update_slice(cache, keys, (i, 0, 0))
    return cache, (cache * keys).sum((1, 2))


@pytest.mark.parametrize("i", [1024, 5000, -1, 7])
def test_a_cache_written_past_its_end(i: int) -> None:
    args = (jnp.zeros((1024, 8, 64)), jnp.ones((8, 64)), jnp.ones((64, 64)), i)
    cache, scores = autoshard.jit(decode, mesh={"a": 8})(*args)
    assert not cache.sharding.is_fully_replicated
    want = jax.jit(decode)(*args)
    np.testing.assert_array_equal(cache, want[0])
    np.testing.assert_array_equal(scores, want[1])


def test_windows_that_end_past_the_end() -> None:
    def windows(x: Any, starts: Any, w: Any) -> Any:
        return jnp.tanh(jax.vmap(lambda row, j: lax.dynamic_slice_in_dim(row, j, 2048))(x, starts)) * w

    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=(4, n)).astype(np.float32) for n in (4096, 2048))
    args = (x, np.array([5, 3000, -5000, 4090], np.int32), w)
    got = autoshard.jit(windows, mesh={"a": 2, "b": 4})(*args)
    assert not got.sharding.is_fully_replicated
    np.testing.assert_allclose(got, jax.jit(windows)(*args), rtol=1e-6)


@pytest.mark.parametrize("mode", ["set", "add", "max", "min", "multiply"])
def test_one_row_of_an_array_that_is_cut_before(mode: str) -> None:
    def update(x: Any) -> Any:
        return getattr(x.at[6], mode)(-3.0)

    x = jnp.arange(64.0).reshape(16, 4)
    got = autoshard.jit(update, mesh={"a": 8}, in_shardings=P(), out_shardings=P("a"), constraints="all")(x)
    np.testing.assert_array_equal(got, update(x))


def rows(table: Any, i: Any) -> Any:
    return (table.at[i].get(mode="clip") ** 2).sum()


def window(table: Any, i: Any) -> Any:
    return (lax.dynamic_slice(table, (i[0], 0), (8, 8)) ** 2).sum() + (
        lax.dynamic_slice(table, (0, i[1]), (16, 2))
    ).sum()


def picked(table: Any, i: Any) -> Any:
    return (lax.dynamic_slice(table, (i[2], 0), (1, 8)) ** 2).sum()


def overwritten(table: Any, i: Any) -> Any:
    return (lax.dynamic_update_slice(table, 2 * table[:1], (i[0], 0)) ** 3).sum()


def scattered(table: Any, i: Any) -> Any:
    return (table.at[i].add(table[: len(i)], mode="clip") ** 2).sum()


def looped(table: Any, i: Any) -> Any:
    def body(cache: Any, step: Any) -> tuple[Any, Any]:
        row = lax.dynamic_slice(cache, (step - 3, 0), (1, 8))
        return lax.dynamic_update_slice(cache, 0.5 * row, (step + i[0], 0)), row.sum()

    cache, sums = lax.scan(body, table, jnp.arange(6))
    return (cache**2).sum() + sums.sum()


def reduced(table: Any, i: Any) -> Any:
    return lax.reduce(table, np.float32(1), lambda a, b: jnp.where(a > b, a, b), (1,))[i[0]]


@pytest.mark.parametrize("fn", [rows, window, picked, overwritten, scattered, looped, reduced])
def test_gradients(fn: Callable[..., Any]) -> None:
    """Of the constrained forward function, and as part of the program."""
    table, i = jnp.arange(128.0).reshape(16, 8) / 64, np.array([14, -20, 99], np.int32)
    whole = jax.jit(jax.value_and_grad(fn))(table, i)
    mesh = {"a": 2, "b": 4}
    inputs, outputs = (P("b"), P()), (P(), P("b"))
    inside = autoshard.jit(jax.value_and_grad(fn), mesh=mesh, in_shardings=inputs, out_shardings=outputs)(table, i)
    outside = jax.value_and_grad(autoshard.jit(fn, mesh=mesh, in_shardings=inputs))(table, i)
    for got in (inside, outside):
        for one, want in zip(got, whole, strict=True):
            np.testing.assert_allclose(one, want, rtol=1e-5)


@jax.custom_vjp
def row_of(table: Any, i: Any) -> Any:
    return lax.dynamic_slice(table, (i, 0), (1, 8))


def _row_of_forward(table: Any, i: Any) -> Any:
    return row_of(table, i), (i, table.shape)


def _row_of_backward(kept: Any, g: Any) -> Any:
    i, shape = kept
    return lax.dynamic_update_slice(jnp.zeros(shape), g, (i, 0)), None


row_of.defvjp(_row_of_forward, _row_of_backward)


@pytest.mark.parametrize("i", [3, 16, -40])
def test_a_rule_of_a_custom_vjp(i: int) -> None:
    """It is emitted as the program is; what it keeps of the forward pass that is no array stays so."""

    def fn(table: Any) -> Any:
        return (row_of(2 * table, i) ** 2).sum()

    table = jnp.arange(128.0).reshape(16, 8)
    got = jax.grad(autoshard.jit(fn, mesh={"a": 8}, in_shardings=P("a")))(table)
    np.testing.assert_array_equal(got, jax.grad(fn)(table))


@jax.custom_jvp
def row_at(table: Any, i: Any) -> Any:
    return lax.dynamic_slice(table, (i, 0), (1, 8))


@row_at.defjvp
def _row_at_tangent(primals: Any, tangents: Any) -> Any:
    (table, i), (moved, _) = primals, tangents
    written = lax.dynamic_update_slice(table, jnp.ones((1, 8)), (i, 0))
    return row_at(table, i), lax.dynamic_slice(moved * (written + 1), (i, 0), (1, 8))


@pytest.mark.parametrize("transform", [jax.grad, jax.jacfwd])
@pytest.mark.parametrize("i", [3, 16, -40])
def test_a_rule_of_a_custom_jvp(i: int, transform: Callable[..., Any]) -> None:
    """It is emitted as the program is, for what is differentiated in it and for what is not."""

    def fn(table: Any) -> Any:
        return (row_at(2 * table, i) ** 2).sum()

    table = jnp.arange(128.0).reshape(16, 8)
    got = transform(autoshard.jit(fn, mesh={"a": 8}, in_shardings=P("a")))(table)
    np.testing.assert_array_equal(got, transform(fn)(table))


def compiled(fn: Callable[..., Any], args: Sequence[Any], specs: Sequence[P], out: P) -> str:
    mesh = Mesh(np.array(jax.devices()), ("a",))
    closed = jax.make_jaxpr(fn)(*args)
    jitted = jax.jit(
        lambda *xs: rewrite.constrained(closed, NOTHING, mesh, xs),
        in_shardings=tuple(NamedSharding(mesh, spec) for spec in specs),
        out_shardings=NamedSharding(mesh, out),
        donate_argnums=0 if out == specs[0] else (),
    )
    return jitted.lower(*args).compile().as_text() or ""


@pytest.mark.parametrize(
    ("fn", "shapes", "specs", "out"),
    [
        pytest.param(lambda t, i: t[i], [(512, 64), (32,)], [P("a"), P()], P(), id="embedding"),
        pytest.param(lambda t, i: t.at[i].get(mode="clip"), [(512, 64), (32,)], [P("a"), P()], P(), id="clip"),
        pytest.param(
            lambda c, i: lax.dynamic_update_slice(c, 2 * c[:1, :1], (0, i, 0)),
            [(8, 512, 64), ()],
            [P(None, "a"), P()],
            P(None, "a"),
            id="cache",
        ),
        pytest.param(
            lambda c, i: c.at[:, i].set(2.0), [(8, 512, 64), ()], [P(None, "a"), P()], P(None, "a"), id="row of a cache"
        ),
    ],
)
def test_it_neither_communicates_nor_copies(
    fn: Any, shapes: Any, specs: Any, out: P, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = (jax.ShapeDtypeStruct(shapes[0], jnp.float32), jax.ShapeDtypeStruct(shapes[1], jnp.int32))
    emitted = compiled(fn, args, specs, out)
    monkeypatch.setattr(emission, "bind", lambda eqn, operands, devices: _jax.bind(eqn, eqn.params, operands))
    plain = compiled(fn, args, specs, out)
    assert COLLECTIVE.findall(emitted) == COLLECTIVE.findall(plain)
    assert emitted.count(" copy(") == plain.count(" copy(")


def test_a_start_that_is_known_to_be_in_range_is_not_clamped() -> None:
    def primitives(fn: Callable[..., Any], *args: Any) -> set[str]:
        mesh = Mesh(np.array(jax.devices()), ("a",))
        closed = jax.make_jaxpr(fn)(*args)
        found = jax.make_jaxpr(lambda *xs: rewrite.constrained(closed, NOTHING, mesh, xs))(*args)
        return {eqn.primitive.name for eqn in _jax.open_jaxpr(found).eqns}

    x, i = jnp.zeros((8, 4)), jnp.int32(3)
    assert "clamp" not in primitives(lambda x: lax.dynamic_slice_p.bind(x, 3, 0, slice_sizes=(2, 4)), x)
    assert "clamp" in primitives(lambda x: lax.dynamic_slice_p.bind(x, 7, 0, slice_sizes=(2, 4)), x)
    assert "clamp" in primitives(lambda x, i: lax.dynamic_slice_p.bind(x, i, 0, slice_sizes=(2, 4)), x, i)
