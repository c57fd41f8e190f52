"""Which constraints are emitted: those that propagation does not reach by itself, and no others."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import autoshard
import models
from autoshard import SolvedPlan
from autoshard.backends.shardy import passes
from autoshard.backends.shardy.probe import Answer, Probe
from autoshard.backends.shardy.probe import _drop as drop
from autoshard.backends.shardy.propagation import Annotations, annotated, layout_in, ops_of
from autoshard.ir.constraints import Constraints
from autoshard.ir.graph import Graph, build
from autoshard.ir.layout import Layout
from autoshard.planner import minimal_constraints
from autoshard.planner.build_record import program_pins
from tests.programs import GPUS, MESH

P = PartitionSpec
S = jax.ShapeDtypeStruct
X, W = S((64, 32), jnp.float32), S((32, 64), jnp.float32)


def planned(fn: Any, *args: Any, **options: Any) -> SolvedPlan:
    return autoshard.plan(fn, *args, mesh=MESH, hardware=GPUS, for_grad=False, **options)


def test_what_lowers_to_nothing_lies_as_its_operand_and_needs_no_constraint() -> None:
    def softmax(x: Any, w: Any) -> Any:
        y = x @ w
        return jnp.exp(y - jax.lax.stop_gradient(jnp.max(y, axis=-1, keepdims=True)))

    plan = planned(softmax, X, W, in_shardings=(P("data"), P()), out_shardings=P("data"))
    assert "stop_gradient" in {eqn.primitive for eqn in plan.planned.space.decisions.graph.eqns}
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
    def split(x: Any, w: Any) -> Any:
        return jax.lax.with_sharding_constraint(jnp.tanh(x @ w), P("data", "model")) * 2

    plan = planned(split, X, W, in_shardings=(P(), P()), out_shardings=P())
    specs = [spec for group in (plan.record.pins.made, plan.record.pins.taken) for s in group.values() for spec in s]
    assert P("data", "model") in specs
    assert plan.verify("cpu").ok


def scaled(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w) * 2


def test_both_ends_of_a_move_between_split_layouts_stay() -> None:
    plan = planned(scaled, X, W, in_shardings=(P("data"), P()), out_shardings=P(None, "data"))
    pins = plan.record.pins
    assert [specs[-1] for specs in pins.made.values()] == [P("data")]
    assert [specs[-1] for specs in pins.outputs.values()] == [P(None, "data")]
    assert plan.verify("cpu").ok


def test_a_gather_that_its_reader_cannot_avoid_needs_no_constraint() -> None:
    plan = planned(scaled, X, W, in_shardings=(P("data"), P(None, "model")), out_shardings=P(None, "model"))
    assert [c.kind for c in plan.record.collectives] == ["all-gather"]
    assert plan.record.pins.count == 0
    assert plan.verify("cpu").ok


def test_what_a_contraction_takes_cut_stays() -> None:
    """A whole weight, cut as the activations are: without the constraint XLA gathers the activations instead."""

    def mlp(x: Any, up: Any, down: Any) -> Any:
        return jnp.tanh(x @ up) @ down

    args = (S((1024, 256), jnp.float32), S((256, 16384), jnp.float32), S((16384, 256), jnp.float32))
    columns, rows = P(None, ("data", "model")), P(("data", "model"))
    plan = planned(mlp, *args, in_shardings=(columns, P(), P()), out_shardings=columns)
    kinds = {c.kind: c.nbytes for c in plan.record.collectives}
    assert kinds == {"all-gather": 1024 * 256 * 4, "reduce-scatter": 1024 * 256 * 4}
    pins = plan.record.pins
    assert rows in [spec for specs in (*pins.taken.values(), *pins.inputs.values()) for spec in specs]
    assert plan.verify("cpu").ok


@cache
def of_model(
    name: str, hardware: str = GPUS, axes: tuple[tuple[str, int], ...] = tuple(MESH.items()), **fields: Any
) -> SolvedPlan:
    step, (state, batch) = models.build(name, **fields)
    return autoshard.plan(step, state, batch, mesh=dict(axes), hardware=hardware, donate_argnums=0, rel_gap=1e-2)


def contractions(plan: SolvedPlan) -> int:
    eqns = plan.planned.space.decisions.graph.eqns
    return sum(eqn.primitive == "dot_general" for eqn in eqns)


# Weights gathered in a loop, and again for its recomputation; unrolled layers, in batches that split all they can:
# of 512, each optimizer state that lies whole at the same price is one more constraint.
LOOP = ("llama3-8b", {"scan": True, "remat": "full", "batch": 32, "sequence": 4096})
UNROLLED = ("tiny-llama", {"layers": 2, "batch": 1024})
# Experts behind two all-to-alls.
EXPERTS = ("mixtral-8x7b", {"layers": 1, "batch": 8, "sequence": 1024})


@pytest.mark.parametrize(
    ("name", "fields", "least"),
    [
        (*LOOP, 3),
        (*UNROLLED, 4),
        pytest.param(*EXPERTS, 2, marks=pytest.mark.slow),
    ],  # gathered and cut again: more stay
    ids=str,
)
def test_few_constraints_do_what_all_do(name: str, fields: dict[str, Any], least: float) -> None:
    plan = of_model(name, **fields)
    assert least * plan.record.pins.count <= contractions(plan)
    d, record = plan.planned.space.decisions, plan.record
    annotations = Annotations(
        inputs={i: leaf.spec for i, leaf in enumerate(record.inputs)},
        outputs={i: leaf.spec for i, leaf in enumerate(record.outputs)},
        pins=program_pins(plan.planned.assignment),
        donated=frozenset(),
    )
    probe = Probe(plan.planned.traced, d.graph, record.mesh, annotations, "cuda")
    kept = {probe.of["made", key] for key in record.pins.made} | {probe.of["taken", key] for key in record.pins.taken}
    few, none, all_ = probe.ask(kept), probe.ask(set()), probe.ask(probe.values)
    allowed = minimal_constraints.SMALL * sum(all_.moved.values())

    def other(answer: Answer) -> int:
        kinds = answer.moved.keys() | all_.moved.keys()
        return sum(abs(answer.moved.get(kind, 0) - all_.moved.get(kind, 0)) for kind in kinds)

    assert other(few) <= allowed < other(none)
    assert sum(max(0, count - all_.casts.get(cast, 0)) for cast, count in few.casts.items()) <= allowed


def test_a_probe_reads_what_the_whole_module_says() -> None:
    """Layouts are read by the numbers of op results; here by the name of each, as without any earlier probe."""

    def softmaxes(x: Any, w: Any) -> Any:
        square = jax.jit(lambda y: jnp.tanh(y @ y.T))

        def trip(y: Any, _: Any) -> Any:
            scores = y @ w
            return square(jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))) @ x, None

        return jax.lax.scan(trip, square(x) @ x, None, length=3)[0]

    plan = planned(softmaxes, X, S((32, 32), jnp.float32), in_shardings=(P("data"), P(None, "model")))
    graph, record = plan.planned.space.decisions.graph, plan.record
    annotations = Annotations(
        inputs={i: leaf.spec for i, leaf in enumerate(record.inputs)},
        outputs={i: leaf.spec for i, leaf in enumerate(record.outputs)},
        pins=program_pins(plan.planned.assignment),
        donated=frozenset(),
    )
    probe = Probe(plan.planned.traced, graph, record.mesh, annotations, "cuda")
    assert len(probe.values) > 8
    for kept in (probe.values, set(), set(sorted(probe.values)[::2]), set(sorted(probe.values)[::3]), probe.values):
        module = probe._lowering.propagated(lambda module, kept=kept: drop(module, kept))
        said = ops_of(graph, tuple(probe._lowering.values(module)))
        answer = probe.ask(kept)
        assert said
        assert {v: layout_in(op, graph.avals[v]) for v, op in said.items()} == {v: answer.layouts[v] for v in said}


def chain(count: int) -> Graph:
    """x → sin → sin → …, as a graph whose value i + 1 is made of value i."""

    def run(x: Any) -> Any:
        for _ in range(count):
            x = jnp.sin(x)
        return x

    return build(jax.make_jaxpr(run)(X), "cpu")


def test_what_is_wrong_behind_something_right_is_wrong_by_itself() -> None:
    graph = chain(5)
    made = [results[0] for results in graph.results]
    wrong = {made[0], made[1], made[3]}
    assert minimal_constraints._frontier(graph, wrong, set()) == {made[0]}
    assert minimal_constraints._frontier(graph, wrong, {made[2]}) == {made[0], made[3]}


def test_every_probe_of_a_lowering_is_as_the_first() -> None:
    def twice(x: Any, w: Any) -> Any:
        square = jax.jit(lambda y: jnp.tanh(y @ y.T))
        return square(x @ w), square(w @ x)

    plan = planned(twice, X, W, in_shardings=(P("data"), P(None, "model")))
    assert plan.traced is not None
    none = Constraints(made={}, taken={}, inputs={}, outputs={})
    bare = Annotations(inputs={0: P("data"), 1: P()}, outputs={}, pins=none, donated=frozenset())
    lowered = annotated(plan.traced, plan.record.mesh, bare).lower(lowering_platforms=("cpu",))
    lowering = passes.Lowering(lowered)
    first = lowering.propagate()
    dots = [v for v in first.values if v.op == "stablehlo.dot_general" and v.number is not None]
    pins = {v.number: Layout(((), ("model",))) for v in dots[:1] if v.number is not None}
    pinned = lowering.propagate(pins)
    assert pinned != first
    assert pinned == passes.propagate(lowered, pins)
    assert lowering.propagate() == first
    np.testing.assert_array_equal([v.number for v in first.values], [v.number for v in pinned.values])
