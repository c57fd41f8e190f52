"""Which constraints are emitted: those that propagation does not reach by itself, and no others."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import autoshard
from autoshard import minimal, shardy
from autoshard.completion import Annotations, annotated
from autoshard.graph import Graph, build
from autoshard.layout import Layout
from autoshard.pins import Pins
from autoshard.plans import Plan
from tests.programs import GPUS, MESH

P = PartitionSpec
S = jax.ShapeDtypeStruct
X, W = S((64, 32), jnp.float32), S((32, 64), jnp.float32)


def planned(fn: Any, *args: Any, **options: Any) -> Plan:
    return autoshard.plan(fn, *args, mesh=MESH, hardware=GPUS, for_grad=False, **options)


def test_what_lowers_to_nothing_lies_as_its_operand_and_needs_no_constraint() -> None:
    def softmax(x: Any, w: Any) -> Any:
        y = x @ w
        return jnp.exp(y - jax.lax.stop_gradient(jnp.max(y, axis=-1, keepdims=True)))

    plan = planned(softmax, X, W, in_shardings=(P("data"), P()), out_shardings=P("data"))
    assert plan.planned is not None
    assert "stop_gradient" in {eqn.primitive for eqn in plan.planned.setting.decisions.graph.eqns}
    assert not plan.record.pins.made


def test_unused_arguments_are_planned_and_evaluated() -> None:
    def product(unused: Any, x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w)

    specs = (P(), P("data"), P(None, "model"))
    plan = planned(product, X, X, W, in_shardings=specs)
    assert plan.specs[1:] == specs[1:]
    found = autoshard.evaluate(product, X, X, W, mesh=MESH, hardware=GPUS, in_specs=specs, for_grad=False)
    assert found.record.outputs[0].spec == P("data", "model")


def test_a_constraint_that_propagation_does_not_reach_stays() -> None:
    def gathered(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w) * 2

    options: dict[str, Any] = {"in_shardings": (P("data"), P(None, "model")), "out_shardings": P(None, "model")}
    assert planned(gathered, X, W, **options).record.pins.count > 0


def chain(count: int) -> Graph:
    """x → sin → sin → …, as a graph whose value i + 1 is made of value i."""

    def run(x: Any) -> Any:
        for _ in range(count):
            x = jnp.sin(x)
        return x

    return build(jax.make_jaxpr(run)(X))


def test_what_is_wrong_behind_something_right_is_wrong_by_itself() -> None:
    graph = chain(5)
    made = [results[0] for results in graph.results]
    wrong = {made[0], made[1], made[3]}
    assert minimal._frontier(graph, wrong, set()) == {made[0]}
    assert minimal._frontier(graph, wrong, {made[2]}) == {made[0], made[3]}


def test_every_probe_of_a_lowering_is_as_the_first() -> None:
    def twice(x: Any, w: Any) -> Any:
        square = jax.jit(lambda y: jnp.tanh(y @ y.T))
        return square(x @ w), square(w @ x)

    plan = planned(twice, X, W, in_shardings=(P("data"), P(None, "model")))
    assert plan.traced is not None
    none = Pins(made={}, taken={}, inputs={}, outputs={})
    bare = Annotations(inputs={0: P("data"), 1: P()}, outputs={}, pins=none, donated=frozenset())
    lowered = annotated(plan.traced, plan.record.mesh, bare).lower(lowering_platforms=("cpu",))
    lowering = shardy.Lowering(lowered)
    first = lowering.propagate()
    dots = [v for v in first.values if v.op == "stablehlo.dot_general" and v.number is not None]
    pins = {v.number: Layout(((), ("model",))) for v in dots[:1] if v.number is not None}
    pinned = lowering.propagate(pins)
    assert pinned != first
    assert pinned == shardy.propagate(lowered, pins)
    assert lowering.propagate() == first
    np.testing.assert_array_equal([v.number for v in first.values], [v.number for v in pinned.values])
