"""From a function to a graph and back: traces, equations in place, and evaluation with constraints."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType

from autoshard.ir import graph, rewrite, trace
from autoshard.ir.graph import Graph
from tests.assignments import random_choice, run
from tests.programs import Program, relative_error, space_of

W = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32) / 4
X = np.random.default_rng(1).normal(size=(16, 8)).astype(np.float32)


def graph_of(fn: Callable[..., Any], *args: Any) -> Graph:
    return graph.build(jax.make_jaxpr(fn)(*args), "cpu")


def primitives(fn: Callable[..., Any], *args: Any) -> list[str]:
    return [eqn.primitive for eqn in graph_of(fn, *args).eqns]


# --- Trace -----------------------------------------------------------------------------


def test_paths_name_every_leaf() -> None:
    def fn(state: Any, x: Any) -> Any:
        return {"w": state["w"] @ x, "rest": (x, None)}

    made = trace.trace(fn, ({"w": W, "n": [1, None, 2.0]}, X), ("state", "x"))
    assert made.in_paths == ("state['n'][0]", "state['n'][2]", "state['w']", "x")
    assert made.out_paths == ("['rest'][0]", "['w']")
    assert made.argument_of == (0, 0, 0, 1)
    assert [a.weak_type for a in made.in_avals] == [True, True, False, False]
    assert [str(a.dtype) for a in made.in_avals] == ["int32", "float32", "float32", "float32"]


def test_shardings_do_not_leak_into_a_trace() -> None:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    x = jax.device_put(X, jax.NamedSharding(mesh, jax.P("x")))
    plain, sharded = (trace.trace(lambda x: jnp.tanh(x) @ W, (v,), ("x",)) for v in (X, x))
    assert plain.digest == sharded.digest


# --- Graph -----------------------------------------------------------------------------


def test_calls_are_seen_through() -> None:
    def fn(x: Any) -> Any:
        return jax.jit(lambda y: jax.checkpoint(lambda z: jnp.sin(jax.nn.relu(z)))(y) + 1)(x)

    assert primitives(fn, X) == ["max", "sin", "add"]


def test_dead_equations_are_dropped() -> None:
    def fn(x: Any) -> Any:
        jnp.cos(jnp.tanh(x))
        return jnp.sin(x)

    assert primitives(fn, X) == ["sin"]


def test_what_decides_is_not_dropped() -> None:
    """What a loop goes on by, and which branch is taken, is computed though nothing takes it."""
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    assert primitives(lambda x: lax.while_loop(lambda c: c.max() < 1, lambda c: c + 1, x), x) == [
        *("loop_carry", "reduce_max", "lt", "predicate", "add", "loop_result")
    ]
    assert primitives(lambda x: lax.cond(x.max() < 1, lambda x: x + 1, lambda x: x, x), x) == [
        *("reduce_max", "lt", "convert_element_type", "predicate", "add", "branch_join")
    ]
    batched = jax.vmap(lambda row: lax.while_loop(lambda c: c.max() < 1, lambda c: c + 1, row))
    assert primitives(batched, x) == [
        *("loop_carry", "reduce_max", "lt", "reduce_or", "predicate", "add", "loop_result")
    ]
    assert primitives(lambda x: (lax.cond(x.max() < 1, lambda x: x + 1, lambda x: x, x), x)[1], x) == []


def test_names_and_barriers_are_seen_through() -> None:
    def fn(x: Any) -> Any:
        (y,) = lax.optimization_barrier((jnp.sin(x),))
        return checkpoint_name(y, "y") * 2

    made = graph_of(fn, X)
    assert [eqn.primitive for eqn in made.eqns] == ["sin", "mul"]
    assert made.named["y"] == made.results[0][0]


def test_roundings_that_leave_every_bit_are_seen_through() -> None:
    """`jax.checkpoint` puts one on every value that it saves."""

    def rounded(mantissa_bits: int) -> list[str]:
        return primitives(lambda x: lax.reduce_precision(jnp.sin(x), 8, mantissa_bits) * 2, X)

    assert rounded(23) == ["sin", "mul"]
    assert rounded(22) == ["sin", "reduce_precision", "mul"]
    half = jax.ShapeDtypeStruct((4, 4), jnp.bfloat16)
    assert primitives(lambda x: lax.reduce_precision(x, 8, 7) * 2, half) == ["mul"]
    assert primitives(lambda x: lax.reduce_precision(x, 5, 10) * 2, half) == ["reduce_precision", "mul"]


def test_equations_know_their_users_line() -> None:
    def fn(x: Any) -> Any:
        return jnp.sin(x)

    (eqn,) = graph_of(fn, X).eqns
    assert eqn.where == f"{__file__}:{fn.__code__.co_firstlineno + 1} ({fn.__qualname__})"


def test_equations_of_jaxs_own_functions_have_the_line_of_their_call() -> None:
    def fn(x: Any) -> Any:
        once = jax.nn.log_softmax(x)
        return jax.nn.log_softmax(once)

    first = fn.__code__.co_firstlineno
    lines = [eqn.where for eqn in graph_of(fn, X).eqns]
    each = len(lines) // 2
    assert each > 1
    assert (
        lines
        == [f"{__file__}:{first + 1} ({fn.__qualname__})"] * each
        + [f"{__file__}:{first + 2} ({fn.__qualname__})"] * each
    )


def test_producers_consumers_and_networkx_agree() -> None:
    def fn(x: Any) -> Any:
        y = jnp.sin(x)
        return y @ W + jnp.cos(y) @ W

    made = graph_of(fn, X)
    producers, view = made.producers, made.networkx()
    for value, uses in made.consumers.items():
        for e, i in uses:
            assert made.operands[e][i] == value
            if value in producers:
                assert view.has_edge(producers[value][0], e)
    assert view.number_of_nodes() == len(made.eqns)
    assert len(set(made.paths)) == len(made.eqns)


def scanned(w: Any, x: Any) -> Any:
    """Five layers in a loop: stacked weights, a carry, a stacked output, a constant."""

    def layer(x: Any, w: Any) -> Any:
        x = jnp.tanh(x @ w) @ w.T + x * X
        return x, jnp.sum(x, axis=1)

    return lax.scan(layer, x, w)


def test_loop_bodies_run_once_per_trip() -> None:
    stacked = np.stack([W] * 5)
    made = graph_of(scanned, stacked, X)
    runs = Counter({eqn.primitive: made.runs(e) for e, eqn in enumerate(made.eqns)})
    assert {name: runs[name] for name in ("tanh", "dot_general")} == {"tanh": 5, "dot_general": 5}


def test_what_runs_once_more_is_known() -> None:
    """In a loop's body, and in a loop that is repeated whole."""

    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w) @ w.T

    def through(w: Any, x: Any) -> Any:
        return lax.scan(lambda x, w: (layer(x, w), None), x, w)[0]

    stacked = np.stack([W] * 5)

    def repeated(loss: Callable[..., Any]) -> Counter[str]:
        made = graph_of(jax.grad(loss), stacked, X)
        return Counter(made.eqns[e].primitive for e in made.repeated if not made.eqns[e].traits.link)

    assert not repeated(lambda w, x: through(w, x).sum())
    checkpointed = repeated(lambda w, x: lax.scan(lambda x, w: (jax.checkpoint(layer)(x, w), None), x, w)[0].sum())
    assert checkpointed["dot_general"] == checkpointed["tanh"] == 1
    whole = repeated(lambda w, x: jnp.tanh(jax.checkpoint(through)(w, x)).sum())
    assert (whole["tanh"], whole["dot_general"]) == (1, 1 + 1)


# --- Apply -----------------------------------------------------------------------------


@jax.custom_vjp
def gram(x: Any) -> Any:
    return jnp.sin(x @ x.T)


gram.defvjp(lambda x: (gram(x), x), lambda x, g: (2 * (g * jnp.cos(x @ x.T)) @ x,))


def looped(w: Any, x: Any) -> Any:
    def body(state: Any) -> Any:
        i, x = state
        return i + 1, jnp.tanh(x @ w) @ w.T

    return lax.while_loop(lambda state: state[0] < 3, body, (0, x))[1]


def branched(w: Any, x: Any) -> Any:
    y = lax.cond(jnp.sum(x) > 0, lambda: x @ w, lambda: 2 * (x @ w))
    return lax.switch(1, [jnp.sin, jnp.cos, jnp.tanh], y)


def nested(w: Any, x: Any) -> Any:
    inner = jax.checkpoint(lambda w, x: jax.nn.relu(x @ w) @ w.T)
    return jax.jit(lambda w, x: jax.nn.silu(inner(w, x)) + inner(2 * w, x))(w, x)


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "nested calls": (nested, (W, X)),
    "gradient of nested calls": (jax.grad(lambda w, x: jnp.mean(nested(w, x) ** 2)), (W, X)),
    "custom_vjp": (lambda w, x: gram(0.1 * x @ w), (W, X)),
    "gradient of custom_vjp": (jax.grad(lambda w, x: jnp.mean(gram(0.1 * x @ w))), (W, X)),
    "scan": (scanned, (np.stack([W, W + 1, -W, W * 2, W]) / 4, X)),
    "gradient of scan": (
        jax.grad(lambda w, x: jnp.mean(scanned(w, x)[0] ** 2)),
        (np.stack([W, W + 1, -W, W * 2, W]) / 4, X),
    ),
    "while": (looped, (W, X)),
    "branches": (branched, (W, X)),
    "gather and scatter": (lambda w, x: jnp.zeros((16, 16)).at[jnp.arange(8)].add(w)[jnp.array([3, 1])] @ x, (W, X)),
    "sort and top_k": (lambda w, x: (jnp.sort(w, axis=0), lax.top_k(x @ w, 2)), (W, X)),
    "keys": (lambda w, x: jax.random.normal(jax.random.split(jax.random.key(0), 8)[3], x.shape) @ w + x @ w, (W, X)),
    "reshapes": (
        lambda w, x: (x @ w).reshape(4, 4, 2, 8).transpose(2, 0, 3, 1).reshape(8, 32) @ jnp.ones((32, 8)),
        (W, X),
    ),
    "concatenate and pad": (lambda w, x: jnp.pad(jnp.concatenate([x @ w, x @ w], 0), ((0, 0), (8, 8))), (W, X)),
    "convolution": (
        lambda w, x: lax.conv(x.reshape(2, 8, 8), w.reshape(8, 8, 2), (1,), "SAME"),
        (W, X),
    ),
    "cumulative": (lambda w, x: jnp.cumsum(x @ w, axis=0) + lax.cummax(x @ w, axis=1), (W, X)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_evaluation_without_constraints_is_the_program(name: str) -> None:
    fn, args = PROGRAMS[name]
    closed = jax.make_jaxpr(fn)(*args)
    seen: list[Any] = []

    def hook(value: Any, path: Any, i: int) -> Any:
        seen.append((path, i))
        return value

    got = jax.jit(lambda *xs: rewrite.evaluate(closed, xs, rewrite.Hooks(made=hook, taken=hook)))(*args)
    for g, w in zip(got, jax.tree.leaves(jax.jit(fn)(*args)), strict=True):
        assert relative_error(g, w) <= 1e-6
    assert seen


@pytest.mark.parametrize("name", PROGRAMS)
def test_random_plans_compute_the_program(name: str) -> None:
    fn, args = PROGRAMS[name]
    setting, _ = space_of(Program(fn=fn, args=args, names=("w", "x")))
    want = jax.tree.leaves(jax.jit(fn)(*args))
    for seed in range(6):
        choice = random_choice(setting.decisions, setting.resharder, np.random.default_rng(seed))
        for got, leaf in zip(run(setting, choice, list(args)), want, strict=True):
            assert relative_error(got, leaf) <= 1e-5, f"seed {seed}"
