"""What `_jax/` relies on, in the JAX that is installed: when one of these fails, JAX has moved."""

import inspect
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from autoshard import _jax
from autoshard.ir.graph import CALLS
from autoshard.ir.rewrite import WITHOUT_CONSTANTS

W = np.ones((4, 8), np.float32)


def equation(fn: Any, *args: Any, primitive: str) -> Any:
    """The first equation of a primitive at the top of a jaxpr."""
    closed = jax.make_jaxpr(fn)(*args)
    return next(eqn for eqn in _jax.open_jaxpr(closed).eqns if eqn.primitive.name == primitive)


def test_the_version_is_one_that_is_supported() -> None:
    assert (0, 10) <= _jax.JAX_VERSION[:2] < (0, 13)


def test_opening_a_jaxpr_ends() -> None:
    closed = jax.make_jaxpr(lambda w: w * 2 + np.arange(8.0))(W)
    opened = _jax.open_jaxpr(closed)
    assert _jax.open_jaxpr(opened) is opened
    assert len(opened.eqns) >= 2
    assert len(_jax.consts_of(closed)) == len(opened.constvars)
    assert _jax.is_jaxpr(closed)
    assert _jax.is_jaxpr(opened)
    assert not _jax.is_jaxpr(None)


def test_literals_and_variables_are_told_apart() -> None:
    (eqn,) = _jax.open_jaxpr(jax.make_jaxpr(lambda x: x * 2.0)(1.0)).eqns
    assert [_jax.is_literal(atom) for atom in eqn.invars] == [False, True]
    assert eqn.invars[1].val == 2.0


def test_source_lines_are_the_users() -> None:
    def product(x: Any) -> Any:
        return jnp.sin(x)

    where = _jax.SourceLines()(equation(product, 1.0, primitive="sin"))
    line = product.__code__.co_firstlineno + 1
    assert where == f"{__file__}:{line} (test_source_lines_are_the_users.<locals>.product)"


@jax.custom_vjp
def doubled(x: Any) -> Any:
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))

BODIES = {
    "jit": (jax.jit(lambda x: x * 2), "jit"),
    "remat": (jax.checkpoint(lambda x: x * 2), "checkpoint"),
    "custom_jvp": (jax.nn.relu, "custom_jvp_call"),
    "custom_vjp": (doubled, "custom_vjp_call"),
}


@pytest.mark.parametrize("name", BODIES)
def test_calls_keep_their_bodies_where_we_look(name: str) -> None:
    fn, primitive = BODIES[name]
    names = {eqn.primitive.name for eqn in _jax.open_jaxpr(jax.make_jaxpr(fn)(W)).eqns}
    found = next(n for n in names if n == primitive or (primitive == "checkpoint" and n in ("remat", "remat2")))
    eqn = equation(fn, W, primitive=found)
    body = eqn.params[CALLS[found]]
    assert _jax.is_jaxpr(body)
    assert list(_jax.sub_jaxprs(eqn.params))[0] is body  # noqa: RUF015  a generator


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("closes_over", [False, True])
def test_bodies_are_exchanged(name: str, closes_over: bool) -> None:  # noqa: FBT001
    """A call bound again with another body, also one that closes over values of the outer trace."""
    fn, _ = BODIES[name]
    five = np.full(W.shape, 5, np.float32)

    def outer(x: Any) -> Any:
        offset = x + 1 if closes_over else 0.0

        def exchanged(eqn: Any) -> Any:
            found = eqn.primitive.name
            body = eqn.params[CALLS[found]]
            inner: Any = _jax.with_body(body, lambda *xs: [xs[0] * 3 + (five if closes_over else 0.0)])
            inner, constants = _jax.without_constants(inner) if found in WITHOUT_CONSTANTS else (inner, ())
            return _jax.bind(eqn, {**eqn.params, CALLS[found]: inner}, [*constants, x])[0]

        (eqn,) = [e for e in _jax.open_jaxpr(jax.make_jaxpr(fn)(W)).eqns if e.primitive.name in CALLS]
        return exchanged(eqn) + offset

    want = 3 * W + (5 + W + 1 if closes_over else 0)
    np.testing.assert_allclose(jax.jit(outer)(W), want)


def test_equations_are_bound_again_under_their_own_lines() -> None:
    def product(x: Any) -> Any:
        with jax.named_scope("inside"):
            return jnp.sin(x)

    eqn = equation(product, 1.0, primitive="sin")

    def again(x: Any) -> Any:
        with _jax.as_written(eqn):
            return _jax.bind(eqn, eqn.params, [x])[0]

    other = equation(again, 1.0, primitive="sin")
    assert _jax.SourceLines()(other) == _jax.SourceLines()(eqn)
    assert str(other.source_info.name_stack) == "inside"


def test_extended_dtypes_have_sizes() -> None:
    assert _jax.itemsize(jax.random.key(0).dtype) == 8
    assert _jax.itemsize(jax.random.key(0, impl="rbg").dtype) == 16
    assert _jax.itemsize(jnp.bfloat16) == 2
    assert _jax.itemsize(np.dtype(bool)) == 1


def test_tracing_under_an_auto_mesh_leaves_no_sharding() -> None:
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh), _jax.auto_mesh(("x", "y"), (2, 4)):
        closed = jax.make_jaxpr(lambda w: w * 2)(jax.ShapeDtypeStruct((4, 8), jnp.float32))
    (aval,) = [var.aval for var in _jax.open_jaxpr(closed).outvars]
    assert all(entry is None for entry in aval.sharding.spec)


def test_texts_of_programs_hold_no_addresses() -> None:
    closed = jax.make_jaxpr(jax.nn.relu)(W)
    assert " at 0x" not in _jax.former_text(closed, color=False)
    assert _jax.former_text(closed, color=False) == _jax.former_text(jax.make_jaxpr(jax.nn.relu)(W), color=False)
    assert "\x1b" in _jax.former_text(closed, color=True)


def test_constants_are_found_and_keys_are_read() -> None:
    table = np.arange(32.0).reshape(4, 8)
    key = jax.random.key(5)
    closed = jax.make_jaxpr(lambda w: jax.random.normal(key, (4, 8)) + w + jnp.asarray(table))(W)
    consts = _jax.array_consts(closed)
    assert all(np.asarray(c).dtype.kind in "uif" for c in consts)


def test_the_mesh_in_context_is_found_inside_transformations() -> None:
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    assert _jax.context_mesh() is None
    found: list[Any] = []

    def look(x: Any) -> Any:
        found.append(_jax.context_mesh())
        return x

    with jax.set_mesh(mesh):
        assert _jax.context_mesh() == mesh
        jax.jit(look)(1.0)
        jax.grad(look)(1.0)
    jax.jit(look)(2)
    assert found == [mesh, mesh, None]
    abstract = AbstractMesh((2, 4), ("x", "y"))
    with jax.sharding.use_abstract_mesh(abstract):
        assert _jax.context_mesh() == abstract


def test_tracers_are_recognised() -> None:
    seen: list[bool] = []
    jax.jit(lambda x: seen.append(_jax.is_tracer(x)))(1.0)
    assert seen == [True]
    assert not _jax.is_tracer(jnp.ones(3))
    assert not _jax.is_tracer(1.0)


def test_constraints_carry_their_spec() -> None:
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)

    def constrained(w: Any) -> Any:
        return jax.lax.with_sharding_constraint(w, NamedSharding(mesh, PartitionSpec("x", PartitionSpec.UNCONSTRAINED)))

    eqn = equation(constrained, W, primitive="sharding_constraint")
    assert eqn.params["sharding"].spec[0] == "x"
    assert set(eqn.params["unconstrained_dims"]) == {1}


def test_lowerings_reach_mlir() -> None:
    lowered = jax.jit(lambda w: w @ w.T).lower(W)
    module = _jax.stablehlo(lowered)
    assert "stablehlo.dot_general" in str(module)
    _jax.run_passes(module, "func.func(sdy-populate-op-sharding-rules)")
    assert re.search(r"sdy.op_sharding_rule<\(\[i, k\]", str(module))
    assert _jax.bytecode(lowered)[:2] == b"ML"
    with pytest.raises(_jax.MLIRError):
        _jax.parse_attribute("#sdy.nonsense", module)


def test_public_things_that_are_used() -> None:
    assert {"in_shardings", "out_shardings", "compiler_options"} <= set(inspect.signature(jax.jit).parameters)
    assert "out_sharding" in inspect.signature(jax.sharding.auto_axes).parameters


def test_importing_starts_no_backend() -> None:
    """`jax.distributed.initialize` and settings of devices come after imports."""
    rooms = "autoshard.api.planning, autoshard.api.jit, autoshard.api.compare, autoshard.cli"
    text = f"import {rooms}; from jax._src import xla_bridge; assert not xla_bridge.backends_are_initialized()"
    subprocess.run([sys.executable, "-c", text], check=True, timeout=120)
