"""Uses that are far apart: libtpu gathers for each of them, and the plan knows."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.backends import devices
from autoshard.backends.known_compilers import XLA_TPU
from autoshard.costs.shared_gathers import NEAR, SURE, doubtful, groups
from autoshard.errors import PlanFileError, SpecError
from autoshard.ir.constraints import Constraints
from autoshard.ir.graph import build
from autoshard.ir.mesh import MeshAxes
from autoshard.ir.rewrite import check, emit_constraints
from autoshard.planner.minimal_constraints import chosen
from autoshard.problem.assignment import Assignment
from autoshard.problem.routes import regathered
from tests.assignments import random_choice
from tests.programs import Program, space_of

W = jax.ShapeDtypeStruct((16, 16), jnp.float32)
ARGS = tuple(jax.ShapeDtypeStruct((rows, 1024), jnp.bfloat16) for rows in (1024, 65_536))  # a weight, activations
SPLIT = P("data")


def used_twice(between: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Two products with one weight, and so many equations in between."""

    def program(w: jax.Array, x: jax.Array) -> jax.Array:
        x = x @ w
        for _ in range(between):
            x = jnp.sin(x)
        return x @ w

    return program


def used_thrice(between: int) -> Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """The same, and a third product near the second."""

    def program(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = used_twice(between)(w, x)
        return y, jnp.sin(y) @ w

    return program


def test_a_use_that_a_plan_may_leave_out_brings_no_others_together() -> None:
    def program(w: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(3):
            for _ in range(NEAR - 20):
                x = jnp.sin(x)
            x = x @ w
        return x

    graph = build(jax.make_jaxpr(program)(W, W), "tpu")
    _, middle, last = (e for e, eqn in enumerate(graph.eqns) if eqn.traits.contraction)
    assert not groups(graph, far=True)
    (parts,) = groups(replace(graph, optional=frozenset({middle})), far=True).values()
    assert [last in part for part in parts] == [False, True]


@pytest.mark.parametrize(("between", "parts"), [(SURE - 10, 1), (NEAR - 10, 1), (NEAR + 10, 2)])
def test_uses_are_grouped_by_what_lies_between(between: int, parts: int) -> None:
    """Where it is doubtful what libtpu makes of them, they are one group, and pinned as one."""

    graph = build(jax.make_jaxpr(used_twice(between))(W, W), "cpu")
    found = groups(graph, far=True).get(graph.inputs[0], ())
    assert len(found) == (parts if parts > 1 else 0)
    assert not groups(graph, far=False)
    assert all(len(part) == 1 for part in found)
    assert doubtful(graph) == ({graph.inputs[0]} if between == NEAR - 10 else set())


def test_what_gives_a_weight_another_order_for_a_product_uses_it() -> None:
    """As `FlaxConv1D` of Hugging Face's GPT-2 does, in the forward pass and again in the backward pass."""

    def program(w: jax.Array, x: jax.Array) -> jax.Array:
        x = x @ w.T
        for _ in range(NEAR + 10):
            x = jnp.sin(x)
        return x @ w.T.reshape(16, 16)

    graph = build(jax.make_jaxpr(program)(W, W), "tpu")
    turned = [e for e, eqn in enumerate(graph.eqns) if eqn.primitive == "transpose"]
    assert groups(graph, far=True) == {graph.inputs[0]: tuple((e,) for e in turned)}


@pytest.mark.parametrize("prevent_cse", [True, False])
def test_uses_of_a_call_that_runs_again_are_a_group_unless_it_is_merged_with_the_first(*, prevent_cse: bool) -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        layer = jax.checkpoint(lambda x: jnp.tanh(jnp.tanh(x @ w) @ w), prevent_cse=prevent_cse)
        return jnp.sum(layer(layer(x)) @ w)

    graph = build(jax.make_jaxpr(jax.grad(loss))(W, W), "cpu")
    found = groups(graph, far=False)
    assert not doubtful(graph)
    # Two products of each call and the gradient behind them, or with no group of its own what the calls run again and
    # reverse; x has no gradient.
    assert [len(part) for part in found.get(graph.inputs[0], ())] == ([2 + 2 + 1, 2 + 2, 2 + 1] if prevent_cse else [])


def planned(program: Callable[..., Any], out: Any = SPLIT) -> autoshard.SolvedPlan:
    """A plan with all constraints, of a program whose arguments come in split by their rows."""
    return autoshard.plan(
        program,
        *ARGS,
        mesh={"data": 8},
        hardware="tpu-v5e:2x4",
        in_shardings=(SPLIT, SPLIT),
        out_shardings=out,
        constraints="all",
    )


@pytest.mark.parametrize(("between", "gathers"), [(10, 1), (NEAR + 10, 2)])
def test_a_plan_pins_what_is_gathered_for_groups_where_it_is_used(between: int, gathers: int) -> None:
    """One constraint where the weight comes in would be one gather, of which the second use is far."""

    plan = planned(used_twice(between))
    assert [(c.kind, c.nbytes) for c in plan.record.collectives] == gathers * [("all-gather", 2 * 1024 * 1024)]
    assert (0 in plan.record.pins.inputs) == (gathers == 1)


def emitted(plan: autoshard.SolvedPlan, program: Callable[..., Any]) -> tuple[int, int]:
    """How many barriers and constraints of square values a plan emits."""
    closed, mesh = jax.make_jaxpr(program)(*ARGS), devices.abstract(plan.record.mesh)
    found = jax.make_jaxpr(lambda *args: emit_constraints(closed, plan.record.pins, mesh, args))(*ARGS)
    made = [(eqn.primitive.name, eqn.outvars[0].aval.shape) for eqn in found.jaxpr.eqns]
    barriers, pinned = (made.count((name, (1024, 1024))) for name in ("optimization_barrier", "sharding_constraint"))
    return barriers, pinned


@pytest.mark.parametrize(("between", "barriers"), [(10, 0), (NEAR + 10, 1)])
def test_equal_constraints_of_two_groups_are_not_one(between: int, barriers: int, tmp_path: Path) -> None:
    """The second group takes the weight from behind a barrier of its own; both uses of a group are behind one."""

    program = used_thrice(between)
    plan = planned(program, (SPLIT, SPLIT))
    pins = plan.record.pins
    last = between + 1  # the second product's equation
    assert dict(pins.regathered) == ({((last,), 1): 1, ((last + 2,), 1): 1} if barriers else {})
    assert emitted(plan, program) == (barriers, 1 + barriers)
    file = tmp_path / "plan.json"
    plan.save(file)
    assert autoshard.load(file).record.pins == pins
    data = json.loads(file.read_text())
    grouped = [x for x in data["constraints"] if "group" in x]
    assert len(grouped) == 2 * barriers
    for entry in grouped:
        entry["at"] = "made"  # which no group is
        file.write_text(json.dumps(data))
        with pytest.raises(PlanFileError, match="taken"):
            autoshard.load(file)


def test_each_later_group_has_a_barrier_of_its_own() -> None:
    def program(w: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(3):
            x = jnp.sin(x @ w) @ w
            for _ in range(NEAR + 10):
                x = jnp.sin(x)
        return x

    plan = planned(program)
    assert sorted(plan.record.pins.regathered.values()) == [1, 1, 2, 2]
    assert emitted(plan, program) == (2, 3)


def test_what_a_checkpointed_call_gathers_again_has_no_barrier_of_its_own() -> None:
    """It is behind the call's barrier already."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        layer = jax.checkpoint(lambda x: jnp.tanh(jnp.tanh(x @ w) @ w))
        return jnp.sum(layer(layer(x)))

    plan = planned(jax.value_and_grad(loss), (P(), SPLIT))
    assert [c.kind for c in plan.record.collectives].count("all-gather") > 1
    assert not plan.record.pins.regathered


def test_what_is_not_gathered_alone_has_no_barrier() -> None:
    """Whatever a choice moves in groups; an all-to-all is made once by libtpu, however far its uses are."""
    program = Program(fn=used_thrice(NEAR + 10), args=ARGS, names=("w", "x"))
    space, _ = space_of(program, hardware="tpu-v5e:2x4", mesh={"data": 8}, compiler=XLA_TPU)
    w = space.decisions.graph.inputs[0]
    kinds: set[tuple[str, ...]] = set()
    for seed in range(40):
        choice = random_choice(space.decisions, space.resharder, np.random.default_rng(seed))
        assignment = Assignment(decisions=space.decisions, resharder=space.resharder, choice=choice)
        made, kept = assignment.made(w), assignment.kept(w)
        if assignment.moved_in_groups(w) and made is not None and kept is not None:
            kind = tuple(step.kind for step in assignment.path(w, made, kept))
            kinds.add(kind)
            found = {space.decisions.graph.operands[e][i] for e, i in regathered(assignment)}
            assert (w in found) == (kind == ("all-gather",))
    assert {("all-gather",), ("all-to-all",)} <= kinds


def test_a_group_goes_with_its_constraint() -> None:
    key, other = ((3,), 1), ((5,), 1)
    none = Constraints(made={}, taken={}, inputs={}, outputs={})
    pins = replace(none, taken={key: (P(),), other: (P(),)}, regathered={key: 1, other: 1})
    assert dict(chosen(pins, {("taken", key): 0, ("taken", other): 1}, {1}).regathered) == {other: 1}
    with pytest.raises(SpecError, match="is gathered once more, and has no constraint"):
        check(jax.make_jaxpr(used_twice(4))(W, W), replace(none, regathered={key: 1}), MeshAxes(("data",), (8,)))


def test_a_pending_sum_is_finished_once_however_far_its_uses_are() -> None:
    def program(x: jax.Array, w: jax.Array, square: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = x @ w
        y = h @ square
        for _ in range(NEAR + 10):
            y = jnp.sin(y)
        return y, jnp.einsum("ij,ik->jk", h, y)

    x, w, square = (jax.ShapeDtypeStruct((m, n), jnp.bfloat16) for m, n in ((1024, 4096), (4096, 1024), (1024, 1024)))
    plan = autoshard.plan(
        program,
        x,
        w,
        square,
        mesh={"data": 8},
        hardware="tpu-v5e:2x4",
        in_shardings=(P(None, "data"), P("data"), P()),
        out_shardings=(P(), P()),
        constraints="all",
    )
    assert [c.kind for c in plan.record.collectives] == ["all-reduce"]
    assert ((0,), 0) in plan.record.pins.made
    assert not plan.record.pins.taken


@pytest.mark.parametrize(("between", "stays"), [(SURE - 10, False), (NEAR - 10, True)])
def test_a_gathered_weight_stays_pinned_where_libtpu_may_gather_it_twice(between: int, *, stays: bool) -> None:
    x = jax.ShapeDtypeStruct((65_536, 1024), jnp.bfloat16)
    plan = autoshard.plan(
        used_twice(between),
        jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16),
        x,
        mesh={"data": 8},
        hardware="tpu-v5e:2x4",
        in_shardings=(P("data"), P("data")),
        out_shardings=P("data"),
    )
    assert (0 in plan.record.pins.inputs) == stays
