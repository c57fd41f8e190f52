"""A plan in other people's words says what the plan says."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.planner import exports
from tests.programs import GPUS, MESH

SPECS = {"up": P("data", "model"), "down": P("model", "data"), "scale": P()}


def step(params: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    def loss(params: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] * params["scale"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def arguments() -> tuple[dict[str, jax.Array], jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    params = {"up": jax.random.normal(keys[0], (16, 32)), "down": jax.random.normal(keys[1], (32, 16))}
    return {**params, "scale": jnp.ones(16)}, jax.random.normal(keys[2], (8, 16))


def planned(mesh: dict[str, int] = MESH, specs: Any = SPECS) -> autoshard.SolvedPlan:
    return autoshard.plan(step, *arguments(), mesh=mesh, hardware=GPUS, in_shardings=(specs, P("data")))


def test_partition_spec_code_runs_in_plain_jax() -> None:
    plan = planned()
    module: dict[str, Any] = {}
    exec(exports.partition_specs(plan.record), module)  # what a person would paste
    mesh = jax.make_mesh(module["MESH_SHAPE"], module["MESH_NAMES"])
    params = arguments()[0]
    specs = jax.tree.map(lambda s: s.spec, module["shardings"](mesh, "params", params))
    assert specs == plan.specs[0] == SPECS
    assert module["INPUTS"]["x"] == plan.specs[1]
    assert list(module["OUTPUTS"].values()) == jax.tree.leaves(plan.out_specs, is_leaf=lambda s: isinstance(s, P))


def test_logical_rules_give_the_plan_back() -> None:
    """By Flax's own reading: first rule first, and no mesh axis twice in one value."""
    names = {"params['up']": ("embed", "mlp"), "params['down']": ("mlp", "embed"), "params['scale']": (None,)}
    rules = exports.logical_axis_rules(planned().record, names)
    assert rules == (("embed", ("data",)), ("mlp", ("model",)))
    assert "['embed', ['data']]" in exports.maxtext_rules(rules)


def test_the_rule_that_wins_an_axis_comes_first() -> None:
    """Both dimensions of a square matrix would be split over `model`; the rows give way."""
    specs = {"up": P(None, "model"), "down": P("model"), "scale": P("model")}
    names = {"params['up']": ("rows", "mlp"), "params['scale']": ("rows",)}
    rules = exports.logical_axis_rules(planned(specs=specs).record, names)
    assert rules == (("mlp", ("model",)), ("rows", ("model",)))


def test_plans_that_no_rules_express_say_which_name_is_to_blame() -> None:
    names = {"params['up']": ("embed", "mlp"), "params['down']": ("embed", "mlp")}
    with pytest.raises(autoshard.SpecError, match=r"`embed` is split over data in params\['up'\], over model in"):
        exports.logical_axis_rules(planned().record, names)
    with pytest.raises(autoshard.SpecError, match="has 2 dimensions, and 1 logical names"):
        exports.logical_axis_rules(planned().record, {"params['up']": ("embed",)})
    with pytest.raises(autoshard.SpecError, match="the plan has no input"):
        exports.logical_axis_rules(planned().record, {"params['left']": ("embed",)})


def test_flax_reads_the_rules_as_the_plan() -> None:
    flax = pytest.importorskip("flax.linen")
    names = {"params['up']": ("embed", "mlp"), "params['down']": ("mlp", "embed"), "params['scale']": (None,)}
    plan = planned()
    rules = exports.logical_axis_rules(plan.record, names)
    for path, logical in names.items():
        leaf = next(leaf for leaf in plan.record.inputs if leaf.path == path)
        assert plan.logical_axis_rules(names) == rules
        got = flax.logical_to_mesh_axes(logical, rules)
        assert NamedSharding(plan.mesh(), got).is_equivalent_to(NamedSharding(plan.mesh(), leaf.spec), len(leaf.shape))


def test_local_data_is_placed_as_the_plan_wants_it() -> None:
    """One process holds all of it; with several, each gives its own rows."""
    plan = planned()
    x = np.asarray(arguments()[1])
    got = plan.put_local(x, "x")
    np.testing.assert_array_equal(got, x)
    assert got.sharding.spec == P("data")
    with pytest.raises(autoshard.PlanMismatchError, match="1 leaves given"):
        plan.put_local(x, "params")


def test_a_checkpoint_of_one_plan_is_restored_under_another(tmp_path: Any) -> None:
    """Saved from a mesh of 2 × 4 and restored onto one of 4 × 2, in other layouts; no leaf is whole on the way."""
    checkpoint = pytest.importorskip("orbax.checkpoint")
    first, second = (
        planned(),
        planned({"data": 4, "model": 2}, {"up": P("model"), "down": P("data"), "scale": P("data")}),
    )
    params = arguments()[0]
    with checkpoint.StandardCheckpointer() as saver:
        saver.save(tmp_path / "step", first.put(params, "params"))
        saver.wait_until_finished()
        wanted = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            params,
            second.in_shardings()[0],
        )
        restored = saver.restore(tmp_path / "step", wanted)
    for name, value in restored.items():
        np.testing.assert_array_equal(value, params[name])
        assert value.sharding == second.in_shardings()[0][name]
