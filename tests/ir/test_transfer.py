"""A layout's constraints on the program without them: it lowers as the program that has them."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import models
from autoshard.backends import devices
from autoshard.backends.shardy.propagation import Annotations, annotated
from autoshard.errors import SpecError
from autoshard.ir import constraints, graph, trace
from autoshard.ir.constraints import Constraints
from autoshard.ir.mesh import MeshAxes
from autoshard.ir.trace import Traced
from autoshard.ir.transfer import transferred
from models import layouts

MESH = MeshAxes.of({"data": 2, "model": 4})
X = jax.ShapeDtypeStruct((8, 16), jnp.float32)
W = jax.ShapeDtypeStruct((3, 16, 16), jnp.float32)
FREE = P.UNCONSTRAINED

Pin = Callable[[Any, P], Any]


def constrain(x: Any, spec: P) -> Any:
    on: Any = devices.abstract(MESH)
    return jax.lax.with_sharding_constraint(x, NamedSharding(on, spec))


def leave(x: Any, spec: P) -> Any:
    return x


def looped(pin: Pin) -> Callable[..., Any]:
    """Constraints of arguments and results, in a loop, a rematerialized call and a nested jit, differentiated."""

    def body(x: Any, w: Any) -> tuple[Any, None]:
        h = pin(jax.jit(lambda y: pin(jnp.tanh(pin(y, P("data"))), P("data", "model")) * 2)(x), P(FREE, "model"))
        return pin(jax.checkpoint(lambda y: pin(y @ w, P("data")) + y)(h), P(("data", "model"))), None

    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(jax.lax.scan(body, pin(x, P("model")), w)[0] ** 2)

    def step(w: Any, x: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(w, x)
        return value, pin(w - pin(gradient, P(None, "model")), P(None, None, "data"))

    return step


def branched(pin: Pin) -> Callable[..., Any]:
    """Constraints in a branch and in a loop of open length."""

    def step(w: Any, x: Any) -> Any:
        y = jax.lax.cond(jnp.sum(x) > 0, lambda x: pin(x @ w[0], P("data")), lambda x: pin(x, P("model")), x)
        return jax.lax.while_loop(lambda y: jnp.sum(y) < 5, lambda y: pin(pin(y, P("model")) + 1, P("data")), y), y

    return step


def traced(fn: Callable[..., Any], args: Sequence[Any]) -> Traced:
    return trace.trace(fn, args, [f"a{i}" for i in range(len(args))], MESH)


def lowered(program: Traced, emitted: Constraints) -> str:
    annotations = Annotations(inputs={}, outputs={}, pins=emitted, donated=frozenset())
    return annotated(program, MESH, annotations).lower().as_text()


def check(written: Traced, plain: Traced) -> int:
    """The number of constraints, where both lower to the same operations."""
    own = constraints.own(graph.build(written.jaxpr, "cpu"))
    moved = transferred(own, written.jaxpr, plain.jaxpr)
    assert lowered(written, own) != lowered(plain, Constraints(made={}, taken={}, inputs={}, outputs={}))
    assert operations(lowered(written, own)) == operations(lowered(plain, moved))
    return own.count


def operations(text: str) -> list[str]:
    """Without numbers and order: a constraint may stand before its value's first use instead of behind its maker."""
    return sorted(re.sub(r"%\w+(:\d+)?", "%", line) for line in text.splitlines())


@pytest.mark.parametrize("build", [looped, branched])
def test_the_same_operations_are_lowered(build: Callable[[Pin], Callable[..., Any]]) -> None:
    assert check(traced(build(constrain), (W, X)), traced(build(leave), (W, X))) >= 4


@pytest.mark.parametrize("recipe", ["fsdp_megatron_sequence", "dp_megatron"])
def test_an_experts_layout_of_a_transformer(recipe: str) -> None:
    step, args = models.build("tiny-llama", layers=2, batch=8, scan=True)
    on: Any = devices.abstract(MESH)
    by_hand = layouts.constrained(step, layouts.find("tiny-llama", recipe).activation, on)
    assert check(traced(by_hand, args), traced(step, args)) >= 20


def test_pins_beside_constraints_keep_their_places() -> None:
    def by_hand(w: Any, x: Any) -> Any:
        return constrain(constrain(x, P("data")) @ w[0], P("model")) + 1

    def plain(w: Any, x: Any) -> Any:
        return x @ w[0] + 1

    one, other = traced(by_hand, (W, X)), traced(plain, (W, X))
    own = constraints.own(graph.build(one.jaxpr, "cpu"))
    dot = next(i for i, eqn in enumerate(one.jaxpr.eqns) if eqn.primitive.name == "dot_general")
    more = replace(
        own,
        made={**own.made, ((dot,), 0): (P(None, "data"),)},
        taken={((dot,), 1): (P("model"),)},
        again={((dot,), 0): (P("model", "data"),)},
        inputs={0: (P("data"),)},
        outputs={0: (P(None, "model"),)},
    )
    moved = transferred(more, one.jaxpr, other.jaxpr)
    there = next(i for i, eqn in enumerate(other.jaxpr.eqns) if eqn.primitive.name == "dot_general")
    assert moved.taken == {((there,), 1): (P("model"),)}
    assert moved.made == {((there,), 0): (P(None, "data"), P("model", None))}
    assert moved.again == {((there,), 0): (P("model", "data"),)}
    assert moved.inputs == {0: (P("data"),), 1: (P("data", None),)}
    assert moved.outputs == {0: (P(None, "model"),)}


def test_a_value_with_other_uses_is_constrained_where_it_is_constrained() -> None:
    def by_hand(x: Any) -> Any:
        y = x * 2
        z = constrain(y, P("data"))
        return z + y, z

    one, other = traced(by_hand, (X,)), traced(lambda x: (x * 2 + x * 2, x * 2), (X,))
    with pytest.raises(SpecError, match=r"add at .* there, mul at"):
        transferred(constraints.own(graph.build(one.jaxpr, "cpu")), one.jaxpr, other.jaxpr)
    other = traced(lambda x: ((y := x * 2) + y, y), (X,))
    moved = transferred(constraints.own(graph.build(one.jaxpr, "cpu")), one.jaxpr, other.jaxpr)
    assert moved == Constraints(
        made={}, taken={((1,), 0): (P("data", None),)}, inputs={}, outputs={1: (P("data", None),)}
    )


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda x: x - 2, r"mul at .*test_transfer.py:\d+.* there, sub at"),
        (lambda x: x.astype(jnp.bfloat16) * 2, "mul at .* there, convert_element_type at"),
        (lambda x: x * 2 + 1, "nothing there, add at"),
    ],
)
def test_another_program_is_refused(other: Callable[..., Any], said: str) -> None:
    one = traced(lambda x: constrain(x * 2, P("data")), (X,))
    with pytest.raises(SpecError, match=said):
        transferred(constraints.own(graph.build(one.jaxpr, "cpu")), one.jaxpr, traced(other, (X,)).jaxpr)
