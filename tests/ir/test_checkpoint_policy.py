"""A plan's choice as a policy: a layer under it saves what the plan keeps."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name, print_saved_residuals

import autoshard
from autoshard.errors import PlanMismatchError, SpecError
from autoshard.ir.checkpoint_policy import CheckpointPolicy, checkpoint_policy
from autoshard.ir.recomputation import Recomputation
from autoshard.ir.recomputed import recomputation_of, savable
from autoshard.ir.trace import trace

X = np.ones((8, 16), np.float32)
WS = (np.ones((3, 16, 32), np.float32), np.ones((3, 32, 16), np.float32))
Layer = Callable[[Any, Any], Any]


def mlp(x: Any, w: Any) -> Any:
    return x + jnp.tanh(jnp.sin(x) @ w[0]) @ w[1]


def named(x: Any, w: Any) -> Any:
    h = checkpoint_name(jnp.sin(x) @ w[0], "hidden")
    return x + jnp.tanh(h) @ w[1]


def normed(x: Any, w: Any) -> Any:
    """Two broadcasts that look alike."""
    h = x @ w[0]
    low, high = jnp.min(h, axis=1, keepdims=True), jnp.max(jnp.sin(h), axis=1, keepdims=True)
    return x + ((jnp.tanh(low) * jnp.tanh(high)) * h) @ w[1]


def scanned(ws: Any, x: Any, layer: Layer) -> Any:
    return jnp.square(jax.lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0]).sum()


def unrolled(ws: Any, x: Any, layer: Layer) -> Any:
    for i in range(3):
        x = layer(x, jax.tree.map(lambda w, i=i: w[i], ws))
    return jnp.square(x).sum()


def chosen(loss: Any, keep: Callable[[str], bool]) -> tuple[Any, Recomputation]:
    """The traced gradient, and the choice that keeps the results of some primitives, where that is all it takes."""
    traced = trace(jax.grad(loss), (WS, X), ("ws", "x"))
    saved = savable(traced, "add")
    steps = [step for one in saved.passes for step in one.steps if keep(step.primitive)]
    kept = saved.stacks(at for step in steps for at in step.results)
    kept |= saved.missing(kept).keys()
    return traced, recomputation_of(saved, kept, "add")


def residuals(loss: Any) -> Counter[str]:
    """Types of what a backward pass finds kept, of one trip, in the program as it is."""
    saved = savable(trace(jax.grad(loss), (WS, X), ("ws", "x")), "add")
    values = {v.id: v for one in saved.passes for v in one.values}
    read = [values[at] for at in saved.used(saved.saved) if not at.stacked]
    return Counter(str(v.aval) for v in read if v.trips > 1)


def under(policy: CheckpointPolicy, layer: Layer, loss: Any) -> Any:
    return partial(loss, layer=jax.checkpoint(layer, policy=policy))


@pytest.mark.parametrize("keeps", [("dot_general",), ("tanh",), ("sin",), ("dot_general", "cos"), ()])
def test_a_layer_under_the_policy_saves_what_was_chosen(keeps: tuple[str, ...]) -> None:
    loss = partial(scanned, layer=mlp)
    traced, choice = chosen(loss, keeps.__contains__)
    policy = checkpoint_policy(traced, choice)
    saved = savable(traced, "add")
    values = {str(v.id): v for one in saved.passes for v in one.values}
    ours = Counter(str(values[at].aval) for at in choice.kept if "^" not in at and values[at].trips > 1)
    assert residuals(under(policy, mlp, scanned)) == ours
    assert {where.partition(" ")[0] for _, where in policy.saves} <= set(keeps)
    grads = jax.grad(under(policy, mlp, scanned))(WS, X), jax.grad(loss)(WS, X)
    for a, b in zip(*map(jax.tree.leaves, grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_jax_prints_the_same_residuals(capsys: pytest.CaptureFixture[str]) -> None:
    """`jax.ad_checkpoint.print_saved_residuals` of the layer: its arguments, and the product that is kept."""
    policy = checkpoint_policy(*chosen(partial(scanned, layer=mlp), "tanh".__eq__))
    layer = jax.checkpoint(mlp, policy=policy)
    print_saved_residuals(layer, X, jax.tree.map(lambda w: w[0], WS))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "from the argument" not in line] == ["f32[8,32]"]


def test_names_are_told() -> None:
    loss = partial(scanned, layer=named)
    policy = checkpoint_policy(*chosen(loss, "name".__eq__))
    assert policy.names == ("hidden",)
    by_name = jax.checkpoint_policies.save_only_these_names("hidden")
    assert residuals(under(policy, named, scanned)) == residuals(under(by_name, named, scanned))


def test_layers_that_are_decided_alike_have_a_policy() -> None:
    policy = checkpoint_policy(*chosen(partial(unrolled, layer=mlp), "tanh".__eq__))
    assert "tanh" in repr(policy)


def test_what_looks_alike_and_is_decided_otherwise_has_no_policy() -> None:
    traced, choice = chosen(partial(unrolled, layer=mlp), "tanh".__eq__)
    saved = savable(traced, "add")
    steps = [step for one in saved.passes for step in one.steps if step.primitive == "tanh"]
    known = {str(v.id): v.id for one in saved.passes for v in one.values}
    kept = {known[text] for text in choice.kept} - {*steps[1].results}
    with pytest.raises(SpecError, match=r"tanh at .*mlp.* is kept and tanh at .* repeated.*cannot tell them apart"):
        checkpoint_policy(traced, recomputation_of(saved, {*kept, *saved.missing(kept)}, "add"))


def test_the_same_values_under_another_name_are_saved_where_they_are_made() -> None:
    """One of two broadcasts is kept: the policy saves what it is made of."""
    traced = trace(jax.grad(partial(scanned, layer=normed)), (WS, X), ("ws", "x"))
    saved = savable(traced, "add")
    wide = [s for one in saved.passes for s in one.steps if s.primitive == "broadcast_in_dim" and len(s.results) == 1]
    alike = [s for s in wide if s.operands[0] is not None]
    kept = saved.stacks([alike[0].results[0]])
    kept |= saved.missing(kept).keys()
    policy = checkpoint_policy(traced, recomputation_of(saved, kept, "add"))
    assert any("reduce_min" in where for _, where in policy.saves)
    assert not any("broadcast" in where for _, where in policy.saves)


def test_a_plan_gives_the_policy_of_what_it_chose() -> None:
    args = (
        (jax.ShapeDtypeStruct((4, 256, 1024), jnp.float32), jax.ShapeDtypeStruct((4, 1024, 256), jnp.float32)),
        jax.ShapeDtypeStruct((8192, 256), jnp.float32),
    )
    options: dict[str, Any] = {"mesh": {"data": 4}, "hardware": "cpu:4", "rel_gap": 1e-2}
    step = jax.grad(partial(scanned, layer=mlp))
    written = autoshard.plan(step, *args, **options, remat="written")
    with pytest.raises(SpecError, match="it repeats more only where that pays"):
        written.checkpoint_policy()
    plan = autoshard.plan(step, *args, **options, remat="add", memory=int(0.4 * written.record.memory.peak_bytes))
    policy = plan.checkpoint_policy()
    assert isinstance(policy, CheckpointPolicy)
    saved = savable(trace(jax.grad(under(policy, mlp, scanned)), args, ("ws", "x")), "add")
    values = {v.id: v for one in saved.passes for v in one.values}
    theirs = Counter(str(values[at].aval) for at in saved.used(saved.saved) if not at.stacked and values[at].trips > 1)
    assert theirs == Counter(f"{v.dtype}[{','.join(map(str, v.shape))}]" for v in plan.kept if v.trips > 1)


def test_a_plan_from_a_file_is_bound_first(tmp_path: Any) -> None:
    plan = autoshard.plan(jnp.sin, X, mesh={"data": 4}, hardware="cpu:4")
    plan.save(tmp_path / "plan.json")
    loaded: Any = autoshard.load(tmp_path / "plan.json")
    with pytest.raises(PlanMismatchError, match="bind"):
        loaded.checkpoint_policy()
