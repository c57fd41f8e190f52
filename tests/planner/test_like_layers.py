"""Decisions in equal places of equal layers are found, and decided alike where that costs nothing."""

import jax
import numpy as np
import pytest

import autoshard
import models
from autoshard.planner.like_layers import equal_places
from autoshard.problem.decisions import Input
from tests.ir.test_layers import parameters, step

LAYERS = 6


def test_every_layer_has_its_decisions_in_the_same_places() -> None:
    params = jax.eval_shape(lambda: parameters(range(LAYERS), 64))
    x = jax.ShapeDtypeStruct((64, 64), "float32")
    plan = autoshard.plan(step, params, x, mesh={"data": 2, "model": 4}, hardware="h100:1x8", constraints="all")
    formulation, traced = plan.planned.formulation, plan.planned.space.traced
    decisions, folding = formulation.decisions, formulation.folding
    (nodes,) = equal_places(traced, decisions, folding)
    assert len(nodes) == LAYERS
    assert (nodes >= 0).mean() > 0.9
    sizes = np.diff(formulation.problem.start)
    for place in nodes.T:
        there = place[place >= 0]
        assert len(set(sizes[there])) == 1
        assert len({decisions.nodes[folding.members[node][0]].kind for node in there}) == 1
    named = [
        {decisions.nodes[n].name for v in place for n in folding.members[v]} for place in nodes.T if place.min() >= 0
    ]
    inputs = [d for d in decisions.nodes if isinstance(d, Input)]
    of_layers = [names for names in named if names & {d.name for d in inputs}]
    assert len(of_layers) == 2, "one for the weights that go up, one for those that go down"


@pytest.mark.slow
def test_layers_that_could_be_equal_for_nothing_are() -> None:
    """Of eight layers four kinds were planned, two of which differed from others for no price."""
    call = models.build("llama3-8b", layers=8, batch=4, sequence=2048)
    plan = autoshard.plan(
        call[0], *call[1], mesh={"data": 2, "model": 4}, hardware="h100:1x8", donate_argnums=0, constraints="all"
    )
    kinds = {
        tuple(str(leaf.spec) for leaf in plan.record.inputs if f"params['layers'][{layer}]['w_" in leaf.path)
        for layer in range(8)
    }
    assert len(kinds) == 2
