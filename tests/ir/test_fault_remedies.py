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
from autoshard.ir import fault_remedies, rewrite
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
        lambda *xs: rewrite.emit_constraints(closed, NOTHING, mesh, xs),
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
    monkeypatch.setattr(fault_remedies, "bind", lambda eqn, operands, devices: _jax.bind(eqn, eqn.params, operands))
    plain = compiled(fn, args, specs, out)
    assert COLLECTIVE.findall(emitted) == COLLECTIVE.findall(plain)
    assert emitted.count(" copy(") == plain.count(" copy(")


def test_a_start_that_is_known_to_be_in_range_is_not_clamped() -> None:
    def primitives(fn: Callable[..., Any], *args: Any) -> set[str]:
        mesh = Mesh(np.array(jax.devices()), ("a",))
        closed = jax.make_jaxpr(fn)(*args)
        found = jax.make_jaxpr(lambda *xs: rewrite.emit_constraints(closed, NOTHING, mesh, xs))(*args)
        return {eqn.primitive.name for eqn in _jax.open_jaxpr(found).eqns}

    x, i = jnp.zeros((8, 4)), jnp.int32(3)
    assert "clamp" not in primitives(lambda x: lax.dynamic_slice_p.bind(x, 3, 0, slice_sizes=(2, 4)), x)
    assert "clamp" in primitives(lambda x: lax.dynamic_slice_p.bind(x, 7, 0, slice_sizes=(2, 4)), x)
    assert "clamp" in primitives(lambda x, i: lax.dynamic_slice_p.bind(x, i, 0, slice_sizes=(2, 4)), x, i)


NAN = np.array([1.0, np.nan, 3.0, -4.0, 5.0, 6.0, 7.0, 8.0], np.float32)


def largest(x: Any) -> Any:
    return x.max()


def smallest_of_segments(x: Any) -> Any:
    return jax.ops.segment_min(x, jnp.arange(8) % 4, 4)


@pytest.mark.parametrize("fn", [largest, smallest_of_segments])
@pytest.mark.parametrize("nan", [np.nan, np.uint32(0xFFC00000).view(np.float32)], ids=["nan", "negative nan"])
def test_a_nan_of_one_part_is_the_largest_of_all(fn: Callable[..., Any], nan: Any) -> None:
    x = np.where(np.isnan(NAN), nan, NAN).astype(np.float32)
    split = autoshard.jit(fn, mesh={"a": 4}, in_shardings=P("a"), pins={}, constraints="all")
    np.testing.assert_array_equal(split(x), jax.jit(fn)(x))


def test_maxima_are_reduced_as_so_many_bytes() -> None:
    x = jax.ShapeDtypeStruct((8192, 512), "float32")
    plan = autoshard.plan(
        lambda x: x.max(0), x, mesh={"a": 4}, in_shardings=P("a"), out_shardings=P(), hardware="cpu:4"
    )
    verified = plan.verify()
    assert verified.ok, str(verified)
    assert "all-reduce" in str(verified)


def bind_all(fn: Callable[..., Any], *args: Any) -> Any:
    """The results of a function, emitted for four devices."""
    closed = jax.make_jaxpr(fn)(*args)
    mesh = Mesh(np.array(jax.devices()[:4]), ("a",))
    return rewrite.emit_constraints(closed, NOTHING, mesh, args)


DERIVED: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "maxima": (lambda x: x.max(0), (np.array([[1.0, 2, 2], [3, 2, 0]], np.float32),)),
    "a row set": (lambda x, u: x.at[1].set(u, mode="clip"), (np.ones((4, 3), np.float32), np.ones(3, np.float32))),
    "a row of largest": (lambda x, u: x.at[1].max(u), (np.ones((4, 3), np.float32), np.full(3, 2, np.float32))),
    "a row added": (lambda x, u: x.at[7].add(u, mode="drop"), (np.ones((4, 3), np.float32), np.ones(3, np.float32))),
}


@pytest.mark.parametrize("what", DERIVED)
def test_what_is_emitted_otherwise_has_the_derivatives_of_the_original(what: str) -> None:
    fn, args = DERIVED[what]

    def ours(*args: Any) -> Any:
        return bind_all(fn, *args)[0]

    tangents = tuple(np.arange(x.size, dtype=np.float32).reshape(x.shape) for x in args)
    for got, want in zip(jax.jvp(ours, args, tangents), jax.jvp(fn, args, tangents), strict=True):
        np.testing.assert_array_equal(got, want)
    cotangent = np.arange(fn(*map(jnp.asarray, args)).size, dtype=np.float32).reshape(fn(*map(jnp.asarray, args)).shape)
    for got, want in zip(jax.vjp(ours, *args)[1](cotangent), jax.vjp(fn, *args)[1](cotangent), strict=True):
        np.testing.assert_array_equal(got, want)
    twice = [np.stack([x, x + 1]) for x in args]
    np.testing.assert_array_equal(jax.vmap(ours)(*twice), jax.vmap(fn)(*twice))


@pytest.mark.parametrize(("stride", "dilation", "taps"), [(2, 1, 8), (4, 1, 8), (1, 3, 1), (2, 2, 4)])
def test_gradients_of_a_convolution_that_steps_to_one_place(stride: int, dilation: int, taps: int) -> None:
    """XLA's partitioner ends the process where the gradient's one tap is dilated by a stride that takes no step."""

    def convolved(x: Any, w: Any) -> Any:
        numbers = ("NCH", "OIH", "NCH")
        made = lax.conv_general_dilated(x, w, (stride,), [(0, 0)], rhs_dilation=(dilation,), dimension_numbers=numbers)
        return (made**2).sum()

    x, w = np.arange(128.0, dtype=np.float32).reshape(4, 4, 8) % 5, np.ones((4, 4, taps), np.float32)
    split = autoshard.jit(convolved, mesh={"a": 2, "b": 2}, in_shardings=(P("a", None, "b"), P()))
    for got, want in zip(jax.grad(split, (0, 1))(x, w), jax.grad(convolved, (0, 1))(x, w), strict=True):
        np.testing.assert_array_equal(got, want)


def test_what_derivatives_bind_is_emitted_otherwise_too() -> None:
    def update(x: Any, u: Any) -> Any:
        return x.at[1].set(u, mode="clip")

    x, u = np.ones((8, 3), np.float32), np.ones(3, np.float32)
    closed = jax.make_jaxpr(lambda *args: jax.jvp(lambda *a: bind_all(update, *a)[0], args, args))(x, u)
    scatters = [eqn for eqn in _jax.equations(closed) if eqn.primitive.name.startswith("scatter")]
    assert scatters == []
    text = jax.jit(lambda *args: jax.jvp(lambda *a: bind_all(update, *a)[0], args, args)).lower(x, u).as_text()
    assert text.count('"stablehlo.scatter"(') == text.count("optimization_barrier") >= 2
