"""A plan found now, one read from a file, and that one bound to its function: what each can do."""

import pickle
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard import LoadedPlan, Plan, SolvedPlan
from autoshard.api.loaded_plan import BoundPlan
from autoshard.api.plan import ProgramPlan
from autoshard.errors import PlanMismatchError

MESH = {"data": 2, "model": 4}
W, X = np.ones((16, 32), np.float32), np.ones((32, 16), np.float32)
FOR_DECORATED = {"emitting", "flat_jit", "named_jit", "noted", "pinned", "took"}  # of plans found now alone


def product(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(w @ x)


@cache
def solved() -> SolvedPlan:
    return autoshard.plan(product, W, X, mesh=MESH, hardware="cpu:8")


@pytest.fixture
def loaded(tmp_path: Path) -> Any:
    """As a checker does not see it."""
    solved().save(tmp_path / "plan.json")
    return autoshard.load(tmp_path / "plan.json")


def names(of: type) -> set[str]:
    return {name for name in dir(of) if not name.startswith("_")}


def test_every_kind_is_a_plan_and_none_of_the_kinds_above_can_be_made(loaded: Any) -> None:
    bound = loaded.bind(product, W, X)
    assert (type(solved()), type(loaded), type(bound)) == (SolvedPlan, LoadedPlan, BoundPlan)
    assert isinstance(loaded, Plan)
    assert isinstance(bound, ProgramPlan)
    for abstract in (Plan, ProgramPlan):
        with pytest.raises(TypeError, match="abstract"):
            abstract(solved().record)  # pyright: ignore[reportAbstractUsage, reportCallIssue]


@pytest.mark.parametrize("kind", [LoadedPlan, BoundPlan])
def test_what_a_file_does_not_hold_is_refused_with_the_way_out(loaded: Any, kind: type) -> None:
    plan = loaded if kind is LoadedPlan else loaded.bind(product, W, X)
    lacks = (names(SolvedPlan) | {"traced"}) - names(kind) - FOR_DECORATED - vars(plan).keys()
    assert lacks >= {"explain", "honoured", "planned", "problem", "to_html"}
    for name in lacks:
        with pytest.raises(PlanMismatchError, match=r"plan again|bind the loaded plan to its function first"):
            getattr(plan, name)()
    for name in (*FOR_DECORATED - names(kind), "cots"):
        with pytest.raises(AttributeError, match=f"{kind.__name__}.*{name}"):
            getattr(plan, name)


def test_methods_are_refused_when_they_are_called(loaded: Any) -> None:
    refused = loaded.explain, loaded.verify
    for method in refused:
        with pytest.raises(PlanMismatchError):
            method("w", compiler="cpu")


def test_all_say_the_same_of_what_is_in_the_file(loaded: Any) -> None:
    bound = loaded.bind(product, W, X)
    for plan in (loaded, bound):
        assert (plan.cost, plan.compiler_options, repr(plan)) == (
            solved().cost,
            solved().compiler_options,
            repr(solved()),
        )
        assert plan.mesh() == solved().mesh()
        assert (plan.own_mesh, plan.seconds) == (None, {})
    assert bound.specs == solved().specs == tuple(loaded.specs.values())
    assert solved().seconds


def test_a_plan_is_bound_to_its_own_function_alone(loaded: Any) -> None:
    bound = loaded.bind(product, W, X)
    assert bound.bind(product, W, X) is bound
    assert solved().bind(product, W, X) is solved()
    for plan in (loaded, bound, solved()):
        with pytest.raises(PlanMismatchError, match="made for another program"):
            plan.bind(lambda w, x: w @ x, W, X)


def test_a_pickled_plan_is_as_one_from_a_file(loaded: Any) -> None:
    for plan in (solved(), loaded, loaded.bind(product, W, X)):
        read = pickle.loads(pickle.dumps(plan))
        assert type(read) is LoadedPlan
        assert read.record == plan.record
