"""Calls of decorated functions run what `jax.jit` would run: keywords, statics, settings, donated buffers."""

import itertools
import logging
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard import SpecError
from tests.random_calls import sequence

jit = partial(autoshard.jit, mesh={"a": 2}, hardware="cpu:2", for_grad=False)
S = jax.ShapeDtypeStruct
A, B = (np.full((8, 4), value, np.float32) for value in (5.0, 3.0))


def either(x: Any, y: Any = None, z: Any = None) -> Any:
    return x - y if y is not None else x + z


@pytest.mark.parametrize("decorate", [jit, jax.jit], ids=["ours", "jax"])
def test_a_keyword_is_told_from_another(decorate: Any) -> None:
    f = decorate(either)
    np.testing.assert_array_equal(f(A, y=B), A - B)
    np.testing.assert_array_equal(f(A, z=B), A + B)
    np.testing.assert_array_equal(f(A, B), A - B)
    np.testing.assert_array_equal(f(A, None, B), A + B)
    np.testing.assert_array_equal(f(A, y=None, z=B), A + B)


def test_the_order_of_keywords_means_nothing() -> None:
    traced: list[int] = []

    def minus(**given: Any) -> Any:
        traced.append(1)
        return given["x"] - given["y"]

    f = jit(minus)
    np.testing.assert_array_equal(f(x=A, y=B), A - B)
    np.testing.assert_array_equal(f(y=B, x=A), A - B)
    np.testing.assert_array_equal(f(x=B, y=A), B - A)
    assert f.plan(x=S(A.shape, A.dtype), y=S(A.shape, A.dtype)) is f.plan(y=B, x=A)
    count = len(traced)
    f(y=A, x=B)
    assert len(traced) == count
    assert [leaf.path for leaf in f.plan(y=A, x=B).record.inputs] == ["x", "y"]


@pytest.mark.parametrize("names", list(itertools.permutations("xyz")))
def test_the_donated_keyword_is_the_one_that_is_consumed(names: tuple[str, ...]) -> None:
    def f(*, x: Any, y: Any, z: Any) -> Any:
        return x + 2 * y + 3 * z

    values = {name: jnp.full((8, 4), i + 1.0) for i, name in enumerate("xyz")}
    taking = jit(f, donate_argnames="y")
    for order in (names, names[::-1]):
        given = {name: jnp.array(values[name]) for name in order}
        np.testing.assert_array_equal(taking(**given), np.full((8, 4), 14.0))
        assert {name: x.is_deleted() for name, x in given.items()} == {"x": False, "y": True, "z": False}


def test_plans_and_lowerings_are_of_the_keywords_that_are_given() -> None:
    f = jit(either)
    assert f.plan(A, y=B) is not f.plan(A, z=B)
    np.testing.assert_array_equal(f.lower(A, z=B).compile()(A, z=B), A + B)
    np.testing.assert_array_equal(f.lower(A, y=B).compile()(A, y=B), A - B)
    np.testing.assert_array_equal(f.trace(x=A, y=B).lower().compile()(y=B, x=A), A - B)


STATICS: list[Any] = [2, 2.0, True, 1, 1.0, 0, 0.0, False, None, "a", (2, "a")]


@pytest.mark.parametrize("by", ["position", "name"])
def test_statics_are_told_apart_by_type_and_value(by: str) -> None:
    def f(x: Any, n: Any) -> Any:
        return x + sum(map(ord, f"{type(n).__name__} {n!r}"))

    ours, theirs = jit(f, static_argnums=1), jax.jit(f, static_argnums=1)
    for n in (*STATICS, *STATICS[::-1]):
        given: tuple[Any, dict[str, Any]] = ((A, n), {}) if by == "position" else ((A,), {"n": n})
        np.testing.assert_array_equal(ours(*given[0], **given[1]), theirs(*given[0], **given[1]))
        np.testing.assert_array_equal(ours(*given[0], **given[1]), A + sum(map(ord, f"{type(n).__name__} {n!r}")))


def test_a_static_default_that_is_left_out() -> None:
    def f(x: Any, n: Any = 3) -> Any:
        return x * n

    ways: list[dict[str, Any]] = [{"static_argnums": 1}, {"static_argnames": "n"}, {"static_argnums": -1}]
    for options in ways:
        np.testing.assert_array_equal(jit(f, **options)(A), 3 * A)
        np.testing.assert_array_equal(jit(f, **options)(A, 2), 2 * A)
        np.testing.assert_array_equal(jit(f, **options)(A, n=2), 2 * A)
    assert autoshard.plan(f, A, mesh={"a": 2}, hardware="cpu:2", static_argnums=1).record.inputs[0].path == "x"
    with pytest.raises(SpecError, match=r"static_argnums=2: f takes 2 positional arguments \(x, n\)"):
        jit(f, static_argnums=2)
    with pytest.raises(SpecError, match="f: a static argument has to be hashable"):
        jit(f, static_argnums=1)(A, [1])


def test_a_call_follows_jaxs_settings() -> None:
    key = jax.random.key(0)

    def f(x: Any, key: Any) -> Any:
        return x @ x.T * 3, jax.random.uniform(key, (8,))

    ours, theirs = jit(f), jax.jit(f)

    def check() -> None:
        got, want = ours(A.astype(np.float64), key), theirs(A.astype(np.float64), key)
        for a, b in zip(got, want, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=1e-6)
        assert ours.trace(A, key).jaxpr.pretty_print().count("HIGHEST") == theirs.trace(
            A, key
        ).jaxpr.pretty_print().count("HIGHEST")

    for _ in range(2):
        check()
        with jax.threefry_partitionable(False):
            check()
        with jax.default_matmul_precision("float32"):
            check()
        with jax.enable_x64(True):
            check()


def test_weak_types_and_the_values_in_structures_are_told_apart() -> None:
    f = jit(lambda x: x * jnp.ones((4,), jnp.bfloat16))
    assert f(2.0).dtype == jnp.bfloat16
    assert f(np.float32(2)).dtype == jnp.float32
    assert f(2.0).dtype == jnp.bfloat16


@pytest.mark.parametrize("seeds", [range(5), pytest.param(range(5, 12), marks=pytest.mark.slow)], ids=str)
def test_random_calls_beside_jax_jit(seeds: range) -> None:
    found = [one for seed in seeds for one in sequence(seed, 25)]
    assert [(one.text, one.differ) for one in found if one.differ] == []
    assert sum(one.planned for one in found) > 4 * len(seeds)


def lying(spec: Any, *, over: int = 2) -> Any:
    """64 × 64 ones that another plan has laid out."""
    mesh = jax.make_mesh((over,), ("b",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:over])
    return jax.device_put(jnp.ones((64, 64)), jax.sharding.NamedSharding(mesh, spec))


@pytest.mark.parametrize("where", ["nowhere", "one device", "another layout", "as planned"])
def test_a_donated_argument_is_gone_wherever_it_lay(where: str) -> None:
    spec = jax.sharding.PartitionSpec
    f = jit(lambda w, x: w + x, donate_argnums=0, pins={"w": spec("a")})
    w: Any = {
        "nowhere": lambda: jnp.ones((64, 64)),
        "one device": lambda: jax.device_put(jnp.ones((64, 64)), jax.devices()[1]),
        "another layout": lambda: lying(spec(None, "b")),
        "as planned": lambda: f.plan(S((64, 64), jnp.float32), 1.0).put(jnp.ones((64, 64)), "w"),
    }[where]()
    x = jnp.float32(1)
    np.testing.assert_array_equal(f(w, x), np.full((64, 64), 2.0))
    assert w.is_deleted()
    assert not x.is_deleted()


def test_parameters_that_move_at_every_call_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    spec = jax.sharding.PartitionSpec
    f = jit(lambda w, x: (w * x).sum(), pins={"w": spec("a")})
    w = lying(spec(None, "b"))

    def told(level: int) -> list[str]:
        return [r.getMessage() for r in caplog.records if r.levelno == level and "another sharding" in r.getMessage()]

    with caplog.at_level(logging.INFO, "autoshard"):
        f(np.ones((64, 64), np.float32), 1.0)
        f(jax.device_put(jnp.ones((64, 64)), jax.devices()[1]), 1.0)
        assert told(logging.WARNING) == []  # what lies on one device has no layout to keep
        for _ in range(3):
            f(w, 1.0)
    (text,) = told(logging.WARNING)
    assert "1 arguments (16.4 kB) arrive in another sharding: w: " in text
    assert "moved at every such call" in text
    for way in ("like=", "in_shardings=", "plan.put"):
        assert way in text
    caplog.clear()
    kept = jit(lambda w, x: (w * x).sum(), in_shardings=(spec(None, "a"), autoshard.AUTO))
    with caplog.at_level(logging.INFO, "autoshard"):
        kept(jax.device_put(w, kept.plan(w, 1.0).in_shardings()[0]), 1.0)
    assert told(logging.WARNING) == []


def test_the_same_call_again_binds_and_places_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def f(x: Any, y: Any, *, n: int) -> Any:
        return x + n * y

    g = jit(f, static_argnames="n")
    plan = g.plan(A, y=B, n=2)
    x, y = plan.put(A, "x"), plan.put(B, "y")
    np.testing.assert_array_equal(g(x, n=2, y=y), A + 2 * B)
    for name in ("_bind", "_entry", "plan"):
        monkeypatch.delattr(type(g), name)
    monkeypatch.setattr(jax, "device_put", None)
    np.testing.assert_array_equal(g(x, y=y, n=2), A + 2 * B)
    np.testing.assert_array_equal(g(x, n=2, y=np.asarray(B)), A + 2 * B)


@pytest.mark.parametrize(
    "around", [jax.jit, lambda f: jax.jit(jax.grad(lambda x, w: f(x, w).sum()))], ids=["jit", "grad"]
)
def test_arguments_on_other_devices_than_a_plan_in_a_jit_are_named_with_the_way_out(around: Any) -> None:
    """JAX says which argument lies elsewhere, and our words stand beside the line of the call."""

    def product(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w)

    called = around(autoshard.jit(product, mesh={"a": 8}))
    alone, free = jax.device_put(jnp.ones((64, 64)), jax.devices()[0]), jnp.ones((64, 64))
    mesh = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    here = r"test_calls\.py:\d+:\d+ \(.*; autoshard planned product over the devices of a=8: .*device_put"
    with pytest.raises(ValueError, match=rf"argument x of .*{here}"):
        called(alone, free)
    moved = jax.device_put(alone, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    for x in (moved, free):
        np.testing.assert_allclose(called(x, free), around(product)(free, free), rtol=1e-6)
