"""Of many equal layers a few are probed, and tell which constraints of all are needed."""

from functools import cache
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard import SolvedPlan
from autoshard.backends.shardy.probe import Probe, values_at
from autoshard.backends.shardy.propagation import Annotations
from autoshard.costs.shared_gathers import NEAR
from autoshard.ir.bodies import opened
from autoshard.planner import fewer_layers
from autoshard.planner.build_record import program_pins
from tests.costs.test_sharing import used_twice
from tests.ir.test_layers import loss, parameters

LAYERS, WIDTH = 8, 1024


@cache
def plan_and_annotations() -> tuple[SolvedPlan, Annotations]:
    params = jax.eval_shape(lambda: parameters(range(LAYERS), WIDTH))
    x = jax.ShapeDtypeStruct((512, WIDTH), "float32")
    pins = {"params.layers.*.up": P(None, "model"), "params.layers.*.down": P("model"), "x": P("data")}
    plan = autoshard.plan(loss, params, x, mesh={"data": 2, "model": 4}, hardware="h100:1x8", pins=pins, rel_gap=0.2)
    record = plan.record
    return plan, Annotations(
        inputs={i: leaf.spec for i, leaf in enumerate(record.inputs)},
        outputs={i: leaf.spec for i, leaf in enumerate(record.outputs)},
        pins=program_pins(plan.planned.assignment),
        donated=frozenset(),
    )


def test_the_probed_program_has_a_few_layers_and_every_constraint_has_one_that_stands_for_it() -> None:
    plan, annotations = plan_and_annotations()
    traced = plan.planned.traced
    probed = fewer_layers.probed(traced, annotations)
    assert len(opened(probed.traced.jaxpr).steps) < 0.6 * len(opened(traced.jaxpr).steps)
    every, there = set(fewer_layers.sites_of(annotations.pins)), set(probed.origin.values())
    assert there | probed.like.keys() == every
    assert set(fewer_layers.sites_of(probed.annotations.pins)) == probed.origin.keys()
    for site in every - there:
        other = site
        while other in probed.like:
            other = probed.like[other]
        assert other in there


def test_what_few_layers_need_is_all_that_the_whole_program_needs() -> None:
    plan, annotations = plan_and_annotations()
    record, graph = plan.record, plan.planned.space.decisions.graph
    probe = Probe(plan.planned.traced, graph, record.mesh, annotations, "cuda")
    values = values_at(graph)
    kept = {values[site] for site in fewer_layers.sites_of(record.pins)}
    few, none, every = probe.ask(kept), probe.ask(set()), probe.ask(probe.values)
    assert few.moved == every.moved != none.moved
    assert few.casts == every.casts
    assert 2 * len(kept) < len(probe.values)


def test_a_program_that_is_shorter_is_probed_as_it_is_though_nothing_stands_for_its_constraints() -> None:
    """What is left out between the two uses of a weight has no constraints; the second use is elsewhere then."""

    def program(w: Any, x: Any) -> Any:
        return used_twice(NEAR + 10)(w.astype("bfloat16"), x).reshape(len(x), 8, 128)

    plan = autoshard.plan(
        program,
        jax.ShapeDtypeStruct((1024, 1024), "float32"),
        jax.ShapeDtypeStruct((65_536, 1024), "bfloat16"),
        mesh={"data": 8},
        hardware="tpu-v5e:2x4",
        in_shardings=(P("data"), P("data")),
        out_shardings=P("data"),
    )
    annotations = Annotations(pins=program_pins(plan.planned.assignment), inputs={}, outputs={}, donated=frozenset())
    probed = fewer_layers.probed(plan.planned.traced, annotations)
    assert probed.traced is not plan.planned.traced
    assert not probed.like
    assert [c.kind for c in plan.record.collectives] == ["all-gather"] * 2  # test_sharing compiles it


def test_the_links_of_a_chain_are_no_layers_if_what_they_sum_is_constrained() -> None:
    """The norm over all gradients, one link for every weight; no weight's shape is another's."""
    widths = [256 * i for i in range(1, 8)]

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            h = x
            for one in w:
                h = jnp.tanh(h @ one)
            return jnp.mean(h**2)

        clip = optax.clip_by_global_norm(1.0)
        gradients, _ = clip.update(jax.grad(loss)(w), clip.init(w))
        return jax.tree.map(lambda one, gradient: one - 0.1 * gradient, w, gradients)

    w = [jax.ShapeDtypeStruct(shape, "float32") for shape in pairwise(widths)]
    x = jax.ShapeDtypeStruct((512, widths[0]), "float32")
    plan = autoshard.plan(step, w, x, mesh={"data": 2, "model": 4}, hardware="h100:1x8", rel_gap=0.2, donate_argnums=0)
    assert plan.record.pins.made
    assert max(layers.count for layers in plan.planned.traced.layers) > fewer_layers.KEPT
