"""Programs in groups of trips: they compute the same, and keep one carry of every few."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard import _jax
from autoshard.errors import PlanFileError, SpecError
from autoshard.ir.flops import flops
from autoshard.ir.grouping import grouped, lengths
from autoshard.ir.recompute import rewritten
from autoshard.ir.recomputed import kept_values_of, recomputation_of, recomputed, savable
from autoshard.ir.saved_values import saved_values
from tests.ir.test_recompute import PROGRAMS, Program, drawn, enough, run, stack, step, traced, weights

DEPTH = 6
DEEP = ("scanned", "accumulated", "nested", "checkpointed", "shared_towers")


def deep(name: str) -> Program:
    """A program of one page with more layers."""
    fn, (_, *rest) = PROGRAMS[name]()
    return fn, (stack(DEPTH), *rest)


def backwards() -> Program:
    """Layers from the last to the first, with masks, an integer that is carried and a value that all share."""

    def loss(params: Any, x: Any, key: Any) -> Any:
        def body(carry: Any, given: Any) -> Any:
            x, i = carry
            w, key = given
            y = jnp.where(jax.random.bernoulli(key, 0.5, x.shape), jnp.tanh(x @ w["up"]) @ w["down"] * scale, x)
            return (x + y * i.astype(x.dtype), i + 1), (y.sum(), i)

        scale = jnp.cos(x).mean()
        (y, _), (sums, _) = jax.lax.scan(body, (x, jnp.int32(0)), (params, jax.random.split(key, DEPTH)), reverse=True)
        return jnp.mean(y**2) + sums[2]

    return step(loss), (stack(DEPTH), weights(4, 6), jax.random.key(0))


@pytest.mark.parametrize("group", [3, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [*DEEP, "backwards"])
def test_groups_compute_the_same(name: str, group: int) -> None:
    program = backwards() if name == "backwards" else deep(name)
    closed = traced(program).jaxpr
    assert DEPTH in lengths(closed)
    values, expected = saved_values(closed), run(closed, program[1])
    for kept in (values.saved, drawn(values, random.Random(name)), enough(values, values.stacks(enough(values, [])))):
        new = grouped(rewritten(values, kept), group)
        _jax.check(_jax.open_jaxpr(new))
        for a, b in zip(expected, run(new, program[1]), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_one_carry_of_a_group_is_kept_and_the_group_runs_again() -> None:
    closed = traced(deep("scanned")).jaxpr
    values = saved_values(closed)
    last = {v.id for one in values.flat for v in one.values if v.read and not v.free and not v.id.stacked}
    full = rewritten(values, enough(values, values.stacks(enough(values, last))))
    new = grouped(full, 3)
    outer = [e for e in _jax.open_jaxpr(new).eqns if e.primitive.name == "scan"]
    assert [e.params["length"] for e in outer] == [2, 2]
    stacks = [v.aval.shape for v in outer[0].outvars if not _jax.is_unnamed(v)]
    assert stacks == [(4, 6), (2, 4, 6)]  # the last carry, and each group's first
    inner = [e for e in _jax.open_jaxpr(outer[1].params["jaxpr"]).eqns if e.primitive.name == "scan"]
    assert [e.params["length"] for e in inner] == [3, 3]
    assert _jax.is_repeated(inner[0])
    assert flops(closed) == flops(new)  # what is repeated is no work of the program


def test_what_has_no_groups_is_refused() -> None:
    closed = traced(deep("scanned")).jaxpr
    for group in (4, DEPTH, 7):
        with pytest.raises(SpecError, match=f"groups of {group} trips"):
            grouped(closed, group)

    def loss(params: Any, x: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            jax.debug.callback(lambda _: None, x.sum())
            return jnp.tanh(x @ w["up"]) @ w["down"], None

        return jnp.mean(jax.lax.scan(body, x, params)[0] ** 2)

    effects = traced((step(loss), (stack(DEPTH), weights(4, 6)))).jaxpr
    assert lengths(effects) == ()
    with pytest.raises(SpecError, match="may run again"):
        grouped(effects, 2)


# --- Plans ------------------------------------------------------------------------------------

LAYERS, WIDTH, ROWS = 64, 16, 4096
WIDE = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
SMALL = np.random.default_rng(1).normal(0, 0.3, (LAYERS, WIDTH, WIDTH)).astype(np.float32)
TIGHT = 1_000_000  # bytes per device: a carry of every layer takes 2,097,152


def narrow_loss(params: Any, x: Any) -> Any:
    return jnp.mean(jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, params)[0] ** 2)


NARROW = step(narrow_loss)


def narrow(**options: Any) -> autoshard.SolvedPlan:
    given: dict[str, Any] = {"mesh": {"data": 8}, "hardware": "cpu:8", "remat": "add", "memory": TIGHT, **options}
    return autoshard.plan(NARROW, SMALL, WIDE, donate_argnums=0, **given)


def test_a_deep_stack_fits_in_groups_alone(tmp_path: Path) -> None:
    plan = narrow()
    assert plan.recomputation is not None
    assert plan.recomputation.group > 1
    assert plan.record.memory.peak_bytes <= TIGHT
    assert f"once for every {plan.recomputation.group} trips" in plan.summary()
    got, want = plan.jit()(jnp.asarray(SMALL), WIDE), jax.jit(NARROW)(SMALL, WIDE)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    ample = narrow(memory=None)
    assert ample.recomputation is None or ample.recomputation.group == 1
    plan.save(tmp_path / "plan.json")
    loaded = autoshard.load(tmp_path / "plan.json").bind(NARROW, SMALL, WIDE)
    assert loaded.record == plan.record
    assert str(loaded.traced.jaxpr) == str(plan.traced.jaxpr)


def test_the_compiled_peak_is_the_predicted_one() -> None:
    plan = narrow()
    found = plan.verify(compiler="cpu")
    compiled = found.memory.compiled
    assert compiled is not None
    assert compiled.peak == pytest.approx(plan.record.memory.peak_bytes, rel=0.15)
    assert found.compute is not None
    assert found.compute.compiled_flops == pytest.approx(found.compute.predicted_flops, rel=0.02)


def test_kept_values_say_how_many_are_there_at_once() -> None:
    traced_ = traced(deep("scanned"))
    values = savable(traced_, "add")
    every = recomputation_of(values, values.saved, "add")
    whole, groups = (
        {v.place: v.trips for v in kept_values_of(recomputed(traced_, one), one)}
        for one in (every, replace(every, group=2))
    )
    assert {*whole.values()} == {1, DEPTH}  # the last carry; of every trip
    assert {*groups.values()} == {1, 2, 2 + DEPTH // 2}  # a trip's values; the carry, once per group besides


def test_damaged_groups_are_refused(tmp_path: Path) -> None:
    path, text = tmp_path / "plan.json", narrow().record.dumps()
    for group in (1, 0, 5, LAYERS, "8"):
        data = json.loads(text)
        data["recomputation"]["group"] = group
        path.write_text(json.dumps(data))
        with pytest.raises(PlanFileError):
            autoshard.load(path).bind(NARROW, SMALL, WIDE)
