"""Mesh axes have names that everything which reads them reads alike."""

from typing import Any

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import autoshard
from autoshard.ir.mesh import MeshAxes


@pytest.mark.parametrize(
    "name", ["", "?", "*", "...", "größe", "Σ", 'a"b', "a'b", "a\\b", "model:(1)2", "a\nb", "·", 1]
)
def test_an_axis_that_compilers_or_files_misread_is_refused(name: Any) -> None:
    """XLA ends the process at the first character that is not ASCII; `?` is no axis in a plan file."""
    with pytest.raises(autoshard.MeshError, match="printable ASCII with a letter or a digit"):
        MeshAxes.of({"data": 2, name: 2})
    with pytest.raises(autoshard.MeshError, match="rename the axis"):
        autoshard.plan(jnp.sin, jnp.ones(8), mesh={name: 2}, hardware="cpu:2")


@pytest.mark.parametrize("name", ["data", "a b", "1", "<b>", "a.b-c/d", "_x", "a,b", "[a]"])
def test_any_other_axis_survives_a_plan_file_and_runs(name: str, tmp_path: Any) -> None:
    x = jnp.ones((8, 4))
    spec = PartitionSpec(name)
    plan = autoshard.plan(jnp.sin, x, mesh={name: 2}, hardware="cpu:2", for_grad=False, in_shardings=spec)
    plan.save(tmp_path / "plan.json")
    assert autoshard.load(tmp_path / "plan.json").record == plan.record
    assert plan.jit()(x).shape == x.shape
