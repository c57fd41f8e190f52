"""Kernels that no partitioner can split run inside `shard_map` at the planned layout."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.errors import CompileError
from autoshard.ir import graph
from autoshard.ir.op_traits import PALLAS
from autoshard.rules import register_rule, rule_of
from autoshard.rules.rule import unregister
from tests.programs import GPUS, MESH

ROWS, BLOCK, WIDTH = 64, 4, 8


def scaled_rows_kernel(x: Any, scale: Any, out: Any) -> None:
    out[...] = x[...] * scale[...] + x[...].sum(axis=1, keepdims=True)


def scaled_rows(x: jax.Array, scale: jax.Array) -> jax.Array:
    """x[i] · scale + Σ x[i], four rows at a time; interpreted, so that it runs anywhere."""
    return pl.pallas_call(
        scaled_rows_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(ROWS // BLOCK,),
        in_specs=[pl.BlockSpec((BLOCK, WIDTH), lambda i: (i, 0)), pl.BlockSpec((1, WIDTH), lambda i: (0, 0))],
        out_specs=pl.BlockSpec((BLOCK, WIDTH), lambda i: (i, 0)),
        interpret=True,
    )(x, scale)


KERNEL = "pallas_call[scaled_rows_kernel]"


@pytest.fixture
def registered() -> Any:
    register_rule(KERNEL, "i j, 1 j -> i j")
    yield
    unregister(KERNEL)


def equations(fn: Any, *args: Any) -> list[graph.Eqn]:
    return [e for e in graph.build(jax.make_jaxpr(fn)(*args), "cpu").eqns if e.primitive == PALLAS]


def shaped(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.usefixtures("registered")
def test_a_rule_keeps_what_the_grid_walks_over_block_by_block() -> None:
    """Rows are walked over, four in a block; columns are within every block, whatever the rule says."""
    (eqn,) = equations(scaled_rows, shaped(ROWS, WIDTH), shaped(1, WIDTH))
    assert str(rule_of(eqn)) == "([ij,k],[1,k])->([ij,k]) {i=16,j=4,k=8} replicate={j,k}"


def test_flash_attention_splits_by_batch_and_heads() -> None:
    def gradients(*qkv: jax.Array) -> Any:
        return jax.grad(lambda *qkv: flash_attention(*qkv, causal=True).sum(), (0, 1, 2))(*qkv)

    found = equations(gradients, *[shaped(4, 8, 256, 128, dtype=jnp.bfloat16)] * 3)
    assert len(found) == 3
    for eqn in found:
        rule = rule_of(eqn)
        passing = [f.size for f in rule.factors if f.kind == "pass"]
        assert passing == [4, 8]
        assert all(dims[:2] == rule.operands[0][:2] for dims in (*rule.operands, *rule.results))


def test_without_a_rule_the_error_shows_the_line_to_write() -> None:
    x, scale = shaped(ROWS, WIDTH), shaped(8, WIDTH)

    def both_walked(x: jax.Array, y: jax.Array) -> jax.Array:
        spec = pl.BlockSpec((BLOCK, WIDTH), lambda i: (i, 0))
        return pl.pallas_call(
            scaled_rows_kernel, out_shape=x, grid=(16,), in_specs=[spec, spec], out_specs=spec, interpret=True
        )(x, y)

    with pytest.raises(autoshard.MissingRuleError) as error:
        autoshard.plan(both_walked, x, x, mesh=MESH, hardware=GPUS, for_grad=False)
    line = f'autoshard.register_rule("{KERNEL}", "a _, a _ -> a _")'
    assert line in str(error.value)
    assert "test_opaque.py" in str(error.value)
    with pytest.raises(autoshard.MissingRuleError, match='"a _, 1 _ -> a _"'):
        autoshard.plan(scaled_rows, x, shaped(1, WIDTH), mesh=MESH, hardware=GPUS, for_grad=False)
    assert scale.shape == (8, WIDTH)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("spec", [P("data"), P(("data", "model")), P(None, "model"), P()])
def test_a_kernel_computes_on_parts_what_it_does_on_the_whole(spec: P) -> None:
    def program(x: jax.Array, scale: jax.Array) -> jax.Array:
        return scaled_rows(x + 1, scale) * 2

    keys = jax.random.split(jax.random.key(0))
    x, scale = jax.random.normal(keys[0], (ROWS, WIDTH)), jax.random.normal(keys[1], (1, WIDTH))
    plan = autoshard.plan(
        program, x, scale, mesh=MESH, hardware=GPUS, for_grad=False, in_shardings=(spec, P()), out_shardings=spec
    )
    jitted = plan.jit()
    np.testing.assert_allclose(jitted(plan.put(x, "x"), plan.put(scale, "scale")), program(x, scale), rtol=1e-6)
    layouts = [specs[0] for _, specs in sorted(plan.record.pins.kernels.items())]
    assert layouts == ([spec, P(), spec] if spec[:1] != (None,) else [P(), P(), P()])


@pytest.mark.usefixtures("registered")
def test_kernel_layouts_survive_the_plan_file(tmp_path: Any) -> None:
    plan = autoshard.plan(
        scaled_rows,
        shaped(ROWS, WIDTH),
        shaped(1, WIDTH),
        mesh=MESH,
        hardware=GPUS,
        for_grad=False,
        in_shardings=(P("data"), P()),
    )
    plan.save(tmp_path / "plan.json")
    assert autoshard.load(tmp_path / "plan.json").record.pins == plan.record.pins


def wave_kernel(x: Any, out: Any) -> None:
    out[...] = x[...] * jnp.sin(x[...])


def slope_kernel(x: Any, g: Any, out: Any) -> None:
    out[...] = g[...] * (jnp.sin(x[...]) + x[...] * jnp.cos(x[...]))


def by_rows(kernel: Any, *operands: jax.Array) -> jax.Array:
    x = operands[0]
    spec = pl.BlockSpec((BLOCK, WIDTH), lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(ROWS // BLOCK,),
        in_specs=[spec] * len(operands),
        out_specs=spec,
        interpret=True,
    )(*operands)


@jax.custom_vjp
def wave(x: jax.Array) -> jax.Array:
    return by_rows(wave_kernel, x)


wave.defvjp(lambda x: (by_rows(wave_kernel, x), x), lambda x, g: (by_rows(slope_kernel, x, g),))


@pytest.fixture
def waves() -> Any:
    register_rule("pallas_call[wave_kernel]", "i j -> i j")
    register_rule("pallas_call[slope_kernel]", "i j, i j -> i j")
    yield
    unregister("pallas_call[wave_kernel]")
    unregister("pallas_call[slope_kernel]")


@pytest.mark.usefixtures("waves")
@pytest.mark.parametrize("around", [lambda f: f, jax.checkpoint, jax.jit], ids=["plain", "remat", "jit"])
def test_both_rules_of_a_kernel_run_on_parts_when_a_loss_is_differentiated(around: Any, tmp_path: Any) -> None:
    """The plan is of the loss; its kernels are in the forward and the backward rule of a `custom_vjp`."""

    rows = NamedSharding(jax.make_mesh(tuple(MESH.values()), tuple(MESH), axis_types=(AxisType.Auto,) * 2), P("data"))

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(around(wave)(jax.lax.with_sharding_constraint(x @ w, rows)) ** 2)

    keys = jax.random.split(jax.random.key(0))
    w, x = jax.random.normal(keys[0], (16, WIDTH)), jax.random.normal(keys[1], (ROWS, 16))
    f = autoshard.jit(loss, mesh=MESH, hardware=GPUS, pins={"x": P("data")})
    plan = f.plan(w, x)
    assert plan.record.pins.kernels
    assert all(spec[0] is not None for (spec,) in plan.record.pins.kernels.values())
    program = str(jax.make_jaxpr(jax.grad(f))(w, x))
    assert program.count("shard_map") == program.count("pallas_call") > 1
    np.testing.assert_allclose(jax.jit(jax.grad(f))(w, x), jax.grad(loss)(w, x), rtol=1e-5, atol=1e-6)
    alone = str(jax.make_jaxpr(f)(w, x))
    assert alone.count("shard_map") == alone.count("pallas_call") == 1
    np.testing.assert_allclose(f(w, x), loss(w, x), rtol=1e-5)
    plan.save(tmp_path / "plan.json")
    assert autoshard.load(tmp_path / "plan.json").record.pins == plan.record.pins


def test_flash_attention_of_a_loss_is_laid_out_in_both_directions() -> None:
    def loss(*qkv: jax.Array) -> jax.Array:
        return flash_attention(*qkv, causal=True).astype(jnp.float32).sum()

    plan = autoshard.plan(
        loss, *[shaped(4, 8, 256, 128, dtype=jnp.bfloat16)] * 3, mesh=MESH, hardware="tpu-v5e:2x4", for_grad=(0, 1, 2)
    )
    paths = {path for path, _ in plan.record.pins.kernels}
    assert sorted(min(*path, 0) for path in paths) == [-2, -2, -1, 0]  # two backward, one forward, one without either
    for (_, i), (spec,) in plan.record.pins.kernels.items():
        split = set(jax.tree.leaves(tuple(spec)))
        assert split == set(jax.tree.leaves(tuple(spec[:2]))), spec  # batch and heads alone
        assert i > 2 or split == {"data", "model"}


AXES = ("data", "model")


def auto_mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), AXES, axis_types=(jax.sharding.AxisType.Auto,) * 2)


def test_a_shard_map_is_taken_at_its_specs() -> None:
    mesh = auto_mesh()

    def program(x: jax.Array) -> jax.Array:
        summed = jax.shard_map(
            lambda part: jax.lax.psum(part * 2, "model"), mesh=mesh, in_specs=P(*AXES), out_specs=P("data")
        )
        return summed(jnp.sin(x)) + 1

    x = jnp.arange(64.0).reshape(8, 8)
    plan = autoshard.plan(program, x, mesh=mesh, hardware=GPUS, for_grad=False, in_shardings=P(None, "data"))
    np.testing.assert_allclose(plan.jit()(plan.put(x, "x")), program(x), rtol=1e-5)
    assert P(*AXES) in [specs[-1] for specs in plan.record.pins.taken.values()]  # the sine moves to the specs


def test_a_shard_map_over_another_mesh_is_an_error() -> None:
    def over(mesh: Any) -> Any:
        return lambda x: jax.shard_map(lambda part: part * 2, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(x)

    x = shaped(8, 8)
    with pytest.raises(autoshard.SpecError, match="is over the mesh data=2 × model=4, the plan over data=8"):
        autoshard.plan(over(auto_mesh()), x, mesh={"data": 8}, hardware=GPUS, for_grad=False)
    with pytest.raises(autoshard.SpecError, match="Explicit axes, which say what a plan is to decide"):
        autoshard.plan(over(jax.make_mesh((2, 4), AXES)), x, mesh=MESH, hardware=GPUS, for_grad=False)


def test_a_callback_is_planned_and_run_but_not_compiled_without_devices() -> None:
    def program(x: jax.Array) -> jax.Array:
        sine = jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x + 1)
        return sine * 2

    x = jnp.arange(64.0).reshape(8, 8)
    plan = autoshard.plan(program, x, mesh=MESH, hardware=GPUS, for_grad=False, in_shardings=P("data"))
    np.testing.assert_allclose(plan.jit()(plan.put(x, "x")), program(x), rtol=1e-5)
    with pytest.raises(CompileError, match="calls the host"):
        plan.verify("cpu")


def test_cudnn_attention_is_planned_without_cudnn() -> None:
    """Grouped queries: 8 heads on 4 of keys. Batch and heads are split, nothing moves at the kernels."""

    def gradients(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        def loss(*qkv: jax.Array) -> jax.Array:
            return jax.nn.dot_product_attention(*qkv, is_causal=True, implementation="cudnn").sum()

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    q, kv = shaped(4, 256, 8, 128, dtype=jnp.bfloat16), shaped(4, 256, 4, 128, dtype=jnp.bfloat16)
    spec = P("data", None, "model")
    plan = autoshard.plan(
        gradients, q, kv, kv, mesh=MESH, hardware=GPUS, for_grad=False, in_shardings=spec, out_shardings=spec
    )
    eqns = {e.primitive: rule_of(e) for e in plan.planned.space.decisions.graph.eqns if "attention" in e.primitive}
    assert [e.rpartition("_")[0] for e in eqns] == ["dot_product_attention_fwd", "dot_product_attention_bwd"]
    for rule in eqns.values():
        assert [f.size for f in rule.factors if f.kind == "pass"] == [4, 4]
    assert not plan.record.collectives
    with pytest.raises(RuntimeError, match="cuDNN"):  # JAX's own answer is back
        jax.eval_shape(gradients, q, kv, kv)
