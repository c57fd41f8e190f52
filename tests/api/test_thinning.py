"""Constraints that the compiler does not need are left out; it alone says which."""

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
import models
from autoshard import SolvedPlan
from autoshard.api import compiler_minimal_constraints
from autoshard.api.compiler_minimal_constraints import compiler_minimal
from autoshard.errors import CompileError
from autoshard.verification.result import Verification

OPTIONS: dict[str, Any] = {"mesh": {"data": 2, "model": 4}, "donate_argnums": 0, "rel_gap": 1e-2}
LAYERS = 3

Step = tuple[str, Any, int]


def planned(**more: Any) -> SolvedPlan:
    step, args = models.build("tiny-llama", layers=LAYERS, batch=64)
    options: dict[str, Any] = {**OPTIONS, "hardware": "cpu:8", "constraints": "all", **more}
    return autoshard.plan(step, *args, **options)


@pytest.fixture(scope="module")
def plan() -> SolvedPlan:
    return planned()


@pytest.fixture(scope="module")
def found(plan: SolvedPlan) -> Verification:
    return plan.verify("cpu")


def steps(plan: SolvedPlan) -> set[Step]:
    pins = plan.record.pins
    groups = {"made": pins.made, "taken": pins.taken, "input": pins.inputs, "output": pins.outputs}
    return {(name, k, i) for name, group in groups.items() for k, specs in group.items() for i in range(len(specs))}


def needing(
    monkeypatch: pytest.MonkeyPatch, found: Verification, worse: Callable[[SolvedPlan], Verification | None]
) -> list[int]:
    """A compiler for which a plan is as good as `found` unless `worse`; the constraints of every plan compiled."""
    asked: list[int] = []

    def verify(self: SolvedPlan, **_: Any) -> Verification:
        asked.append(self.record.pins.count)
        return worse(self) or found

    monkeypatch.setattr(SolvedPlan, "verify", verify)
    return asked


def test_constraints_without_which_the_compiler_emits_the_same_are_left_out(
    plan: SolvedPlan, found: Verification, monkeypatch: pytest.MonkeyPatch
) -> None:
    pins = plan.record.pins
    needed = set(list(pins.made)[:40:10])
    first = found.rows[0]
    more = replace(found, rows=(replace(first, emitted_bytes=2 * first.emitted_bytes), *found.rows[1:]))
    asked = needing(monkeypatch, found, lambda p: more if needed - p.record.pins.made.keys() else None)
    few = compiler_minimal(plan)
    equal = [set(c) for c in compiler_minimal_constraints.classes(plan)]
    kept = set[Step]().union(*(c for c in equal if any(k in needed for _, k, _ in c)))
    assert needed <= few.record.pins.made.keys()  # one of those there
    assert steps(few) <= kept
    assert len(asked) < len(equal)
    assert f"{few.record.pins.count} of {pins.count} constraints are left" in few.record.notes[-1]
    assert f"({len(asked)} compiles)" in few.record.notes[-1]
    assert few.record.inputs == plan.record.inputs


def test_constraints_without_which_numbers_are_wrong_are_not_asked_for() -> None:
    """A value that is split where a part is cut out is gathered first: XLA's partitioner may confuse both, unseen."""
    options: dict[str, Any] = {"mesh": {"data": 2}, "hardware": "cpu:2", "for_grad": False, "constraints": "all"}
    cut = autoshard.plan(
        lambda x: x[3] + x[0], jax.ShapeDtypeStruct((8, 64), "float32"), pins={"**": P("data")}, **options
    )
    asked = {(name, key) for steps in compiler_minimal_constraints.classes(cut) for name, key, _ in steps}
    assert cut.record.pins.inputs  # where it is gathered
    assert asked.isdisjoint(("input", key) for key in cut.record.pins.inputs)


def test_both_ends_of_a_move_are_left_out_together(
    plan: SolvedPlan, found: Verification, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where either alone would make a difference, and all others are needed."""
    made = plan.record.pins.made
    moved = {k for k, specs in made.items() if len(specs) == 2}
    assert moved
    assert found.timeline is not None
    longer = replace(found, timeline=replace(found.timeline, step_s=2 * found.timeline.step_s))

    def worse(other: SolvedPlan) -> Verification | None:
        left = other.record.pins.made
        one_end = any(len(left.get(k, ())) == 1 for k in moved)
        return longer if one_end or made.keys() - moved - left.keys() else None

    needing(monkeypatch, found, worse)
    assert compiler_minimal(plan).record.pins.made.keys() == made.keys() - moved


def test_nothing_is_compiled_twice(plan: SolvedPlan, found: Verification, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found.timeline is not None
    longer = replace(found, timeline=replace(found.timeline, step_s=2 * found.timeline.step_s))
    needed = set(list(plan.record.pins.made)[:40:3])
    compiled: list[str] = []

    def worse(other: SolvedPlan) -> Verification | None:
        compiled.append(str(other.record.pins))
        return longer if needed - other.record.pins.made.keys() else None

    needing(monkeypatch, found, worse)
    compiler_minimal(plan)
    assert len(compiled) == len(set(compiled))


@pytest.mark.parametrize("what", ["peak", "schedule", "bytes in all", "error"])
def test_what_needs_more_memory_or_takes_longer_is_not_the_same(
    plan: SolvedPlan, found: Verification, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    compiled, timeline = found.memory.compiled, found.timeline
    assert compiled is not None
    assert timeline is not None
    count = plan.record.pins.count

    def worse(asked: SolvedPlan) -> Verification | None:
        if asked.record.pins.count == count:
            return None
        if what == "error":
            raise CompileError("compiling failed: RESOURCE_EXHAUSTED")
        if what == "bytes in all":  # of several collectives, each by less than may differ
            rows, total = len(found.rows), sum(row.emitted_bytes for row in found.rows)
            more = round(1.1 * compiler_minimal_constraints.SAME_BYTES * total / rows)
            assert more < compiler_minimal_constraints.SAME_BYTES * total
            return replace(found, rows=tuple(replace(r, emitted_bytes=r.emitted_bytes + more) for r in found.rows))
        if what == "peak":
            return replace(found, memory=replace(found.memory, compiled=replace(compiled, peak=2 * compiled.peak)))
        return replace(found, timeline=replace(timeline, step_s=1.01 * timeline.step_s))

    needing(monkeypatch, found, worse)
    assert compiler_minimal(plan).record.pins == plan.record.pins


def test_constraints_in_equal_places_go_together(plan: SolvedPlan) -> None:
    equal = list(compiler_minimal_constraints.classes(plan))
    assert set[Step]().union(*equal) == steps(plan)
    assert len(equal) < 0.7 * plan.record.pins.count
    assert max(map(len, equal)) >= LAYERS


def test_a_thinned_plan_is_kept_in_the_cache(
    found: Verification, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = needing(monkeypatch, found, lambda p: None)
    first = planned(constraints="compiled", cache=tmp_path)
    assert first.record.pins.count == 0
    count = len(asked)
    assert count
    again = planned(constraints="compiled", cache=tmp_path)
    assert again.record == first.record
    assert len(asked) == count
    assert planned(constraints="needed", cache=tmp_path).record.pins.count > 0


def test_what_is_planned_for_its_gradient_is_compiled_with_it() -> None:
    """Of which Shardy is not asked; the gradient stays what it was."""

    def loss(w: Any, x: jax.Array) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ w["up"]) @ w["down"]) ** 2)

    rng = np.random.default_rng(0)
    w = {"up": 0.1 * rng.normal(size=(128, 512)), "down": 0.1 * rng.normal(size=(512, 128))}
    args = jax.tree.map(jnp.float32, w), jnp.ones((256, 128), jnp.float32)
    options: dict[str, Any] = {"mesh": OPTIONS["mesh"], "hardware": "cpu:8", "for_grad": True}
    few = autoshard.plan(loss, *args, constraints="compiled", **options)
    assert few.record.gradient_of
    assert few.record.pins.count < autoshard.plan(loss, *args, **options).record.pins.count
    found, expected = jax.grad(few.jit())(*args), jax.grad(loss)(*args)
    for name in w:
        np.testing.assert_allclose(found[name], expected[name], atol=1e-6)
