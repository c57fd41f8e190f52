"""Calls of decorated functions run what `jax.jit` would run: keywords, statics, settings, donated buffers."""

import itertools
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


def test_random_calls_beside_jax_jit() -> None:
    found = [one for seed in range(12) for one in sequence(seed, 25)]
    assert [(one.text, one.differ) for one in found if one.differ] == []
    assert sum(one.planned for one in found) > 50
