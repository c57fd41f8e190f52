"""A time limit holds in every stage of a call, and changes nothing where it does not end."""

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard import deadline
from autoshard.planner.stages import Stage, observed

S = jax.ShapeDtypeStruct
ARGS = (S((512, 1024), "float32"), S((1024, 4096), "float32"), S((4096, 1024), "float32"))
MESH = {"data": 2, "model": 4}


def loss(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return (jnp.maximum(x @ up, 0) @ down).sum()


def plan_until(stage: str) -> autoshard.SolvedPlan:
    """The plan of a call whose time ends when a stage is done."""
    now = [0.0]

    def watch(done: Stage) -> None:
        now[0] += 2.0 * (done.name == stage)

    with deadline.within(1.0, clock=lambda: now[0]), observed(watch):
        return autoshard.plan(loss, *ARGS, mesh=MESH, hardware="h100:1x8")


STAGES = {
    "trace": "reading the program",
    "graph": "listing and pricing its splits",
    "strategies": "pricing its moves",
}


@pytest.mark.parametrize("stage", STAGES)
def test_time_ends_before_there_is_a_plan(stage: str) -> None:
    with pytest.raises(autoshard.TimeLimitError, match=STAGES[stage]) as caught:
        plan_until(stage)
    assert caught.value.limit_s == 1.0


def test_time_that_ends_behind_the_solver_leaves_all_constraints() -> None:
    late, usual = plan_until("solve"), plan_until("none")
    assert late.cost == usual.cost
    assert any("all constraints are emitted" in note for note in late.record.notes)
    assert len(late.record.pins.made) > len(usual.record.pins.made)


def test_a_limit_that_does_not_end_changes_nothing() -> None:
    made = [autoshard.plan(loss, *ARGS, mesh=MESH, hardware="h100:1x8", time_limit_s=t) for t in (None, 20.0, 10_000.0)]
    assert len({plan.record.dumps() for plan in made[:2]}) == 1
    assert made[2].record.pins == made[0].record.pins


def test_a_mesh_of_many_axes_is_given_up_in_time() -> None:
    with pytest.raises(autoshard.TimeLimitError, match="raise time_limit_s"):
        autoshard.plan(loss, *ARGS, mesh={f"a{i}": 2 for i in range(5)}, hardware="h100:4x8", time_limit_s=0.3)
