"""Planned layouts read back: kept by the partitioner, or listed."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
import models
from autoshard import SolvedPlan
from autoshard.errors import PlanMismatchError, VerifyError
from autoshard.ir.constraints import Constraints
from autoshard.ir.layout import Layout
from autoshard.verification.layouts import honoured

MESH = {"data": 2, "model": 4}


def planned(name: str, **fields: Any) -> SolvedPlan:
    step, (state, batch) = models.build(name, **fields)
    return autoshard.plan(step, state, batch, mesh=MESH, hardware="h100:1x8", donate_argnums=0, rel_gap=1e-2)


@pytest.fixture(scope="module")
def plan() -> SolvedPlan:
    """Weights gathered, gradients scattered."""
    return planned("mlp-1k", batch=65536)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("mlp-1k", {}),
        pytest.param("tiny-llama", {"batch": 16, "scan": True, "remat": "full"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_layout_is_kept(name: str, fields: dict[str, Any]) -> None:
    found = planned(name, **fields).honoured()
    assert found.ok, str(found)
    assert found.checked > 50


def test_without_constraints_layouts_are_lost() -> None:
    def split(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(jnp.tanh(x @ w), P("data", "model")) * 2

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 32), (32, 64))]
    options: dict[str, Any] = {"in_shardings": (P(), P()), "out_shardings": P(), "for_grad": False}
    plan = autoshard.plan(split, *shapes, mesh=MESH, hardware="h100:1x8", **options)
    assert plan.honoured().ok
    bare = replace(plan.record, pins=Constraints(made={}, taken={}, inputs={}, outputs={}))
    by_shardy, by_compiler = (honoured(replace(plan.planned, record=bare), compiler=c) for c in (None, "cpu"))
    assert not by_shardy.ok
    assert not by_compiler.ok
    lost = by_shardy.unkept[0]
    assert lost.found is not None
    assert lost.planned != lost.found
    assert lost.where.partition(":")[0].endswith("test_honoured.py")
    assert f"{by_shardy.checked - len(by_shardy.unkept):,} of {by_shardy.checked:,} are kept" in str(by_shardy)


def test_an_input_that_arrives_elsewhere_is_listed(plan: SolvedPlan) -> None:
    record = replace(plan.record, donated=())
    split = next(i for i, leaf in enumerate(record.inputs) if any(leaf.spec))
    inputs = list(record.inputs)
    inputs[split] = replace(inputs[split], spec=P())
    found = honoured(replace(plan.planned, record=replace(record, inputs=tuple(inputs))))
    assert [(x.role, x.where) for x in found.unkept if x.found == Layout.replicated(2)] == [
        ("input", inputs[split].path)
    ]


def test_a_loaded_plan_and_a_gradient_are_refused(plan: SolvedPlan, tmp_path: Any) -> None:
    plan.save(tmp_path / "plan.json")
    with pytest.raises(PlanMismatchError, match="plan again"):
        autoshard.load(tmp_path / "plan.json").honoured()  # pyright: ignore[reportAttributeAccessIssue]
    aval = jax.ShapeDtypeStruct((64, 64), "float32")
    forward = autoshard.plan(lambda w, x: (x @ w).sum(), aval, aval, mesh=MESH, hardware="h100:1x8", for_grad=True)
    with pytest.raises(VerifyError, match="for_grad=False"):
        forward.honoured()
