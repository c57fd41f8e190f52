"""Options are typed: a misspelt one is an error for the type checker, and refused by name at run time.

The functions in `Checked` are never called: a strict pyright reads them, and reports an ignored error that is none.
"""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, assert_type

import jax
import numpy as np
import pytest

import autoshard
from autoshard import LoadedPlan, SolvedPlan
from autoshard.api.options import Options, PlanOptions
from autoshard.errors import ArgumentError

ON: dict[str, Any] = {"mesh": {"data": 8}, "hardware": "cpu:8"}
X = np.ones((8, 8), np.float32)


def product(x: jax.Array) -> jax.Array:
    return x @ x


class Checked:
    def options_that_exist(self) -> None:
        autoshard.jit(product, donate_argnums=0, memory="64GB", strict=True)
        autoshard.evaluate(product, X, mesh={"data": 8}, donate_argnames=("x",), unknown="replicate")
        autoshard.search(product, X, hardware="h100", chips=8, pins={"x": jax.P()}, rel_gap=1e-2)
        autoshard.compare(product, X, hardware="h100:1x8", layouts={}, memory="64GB")
        autoshard.plan_many({"f": (product, (X,), {"donate_argnums": 0}), "g": (product, (X,))}, time_limit_s=1.0)

    def misspelt_options(self) -> None:
        autoshard.jit(product, donate_argnum=0)  # pyright: ignore[reportCallIssue]
        autoshard.evaluate(product, X, in_spec=None)  # pyright: ignore[reportCallIssue]
        autoshard.search(product, X, hardware="h100", chip=8)  # pyright: ignore[reportCallIssue]
        autoshard.compare(product, X, hardware="h100:1x8", layouts={}, memry=1)  # pyright: ignore[reportCallIssue]
        autoshard.plan_many({"f": (product, (X,))}, weight={})  # pyright: ignore[reportCallIssue]

    def values_of_other_types(self) -> None:
        autoshard.jit(product, candidates="three")  # pyright: ignore[reportArgumentType, reportCallIssue]
        autoshard.evaluate(product, X, rel_gap="tight")  # pyright: ignore[reportArgumentType]
        autoshard.search(product, X, hardware="h100", for_grad="x")  # pyright: ignore[reportArgumentType]

    def kinds_of_plans(self) -> None:
        found = assert_type(autoshard.plan(product, X), SolvedPlan)
        found.explain("x")
        loaded = assert_type(autoshard.load("plan.json"), LoadedPlan)
        loaded.explain("x")  # pyright: ignore[reportAttributeAccessIssue]
        loaded.bind(product, X).verify("cpu")
        loaded.bind(product, X).explain("x")  # pyright: ignore[reportAttributeAccessIssue]


def test_the_typed_options_are_those_of_plan_with_its_types_and_defaults() -> None:
    spelled = {p.name: p for p in inspect.signature(autoshard.plan).parameters.values() if p.kind is p.KEYWORD_ONLY}
    value = {one.name: one for one in fields(Options)}
    typed = PlanOptions.__annotations__
    assert {*spelled} == {*value} == {*typed}
    for name, parameter in spelled.items():
        assert parameter.annotation == typed[name]
        if value[name].default is not MISSING:
            assert (value[name].default, value[name].type) == (parameter.default, parameter.annotation)


@pytest.mark.parametrize(
    "verb", [autoshard.jit, autoshard.evaluate, autoshard.search, autoshard.compare, autoshard.plan_many]
)
def test_help_lists_every_option_with_its_default(verb: Callable[..., Any]) -> None:
    spelled = inspect.signature(verb).parameters
    for name, limit in (("memory", None), ("unknown", "error"), ("time_limit_s", None)):
        assert spelled[name].default == limit
        assert spelled[name].kind is inspect.Parameter.KEYWORD_ONLY
    assert spelled["rel_gap"].default == (2e-3 if verb is autoshard.search else 1e-3)


@pytest.mark.parametrize(
    ("call", "near"),
    [
        (lambda wrong: autoshard.jit(product, **wrong), "donate_argnums"),
        (lambda wrong: autoshard.evaluate(product, X, **wrong, **ON), "donate_argnums"),
        (lambda wrong: autoshard.search(product, X, hardware="cpu:8", **wrong), "donate_argnums"),
        (lambda wrong: autoshard.compare(product, X, hardware="cpu:8", layouts={}, **wrong), "donate_argnums"),
        (lambda wrong: autoshard.plan(product, X, **wrong, **ON), "donate_argnums"),
    ],
)
def test_a_misspelt_option_is_refused_with_the_nearest(call: Callable[[dict[str, Any]], Any], near: str) -> None:
    with pytest.raises(ArgumentError, match=rf"did you mean (the option )?{near}\?"):
        call({"donate_argnms": 0})


def test_other_keywords_of_evaluate_are_the_functions_own() -> None:
    def scaled(x: jax.Array, *, scale: jax.Array) -> jax.Array:
        return x * scale

    passed: Any = {"scale": X, **ON}
    made = autoshard.evaluate(scaled, X, memory="1GB", **passed)
    assert [leaf.path for leaf in made.record.inputs] == ["x", "scale"]
    assert made.record.memory.limit_bytes == 10**9
