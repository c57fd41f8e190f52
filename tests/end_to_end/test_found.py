"""What the planner must find from costs alone, on catalogue hardware.

No layout is suggested anywhere: the textbook's answers appear because they are cheapest.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import autoshard
import models
from autoshard import SolvedPlan
from autoshard.costs.strategies import layout_of
from autoshard.problem.decisions import Decision, Equation
from benchmarks import phase_diagram

MESH = {"data": 2, "model": 4}


def planned(name: str, hardware: str, **fields: Any) -> SolvedPlan:
    step, (state, batch) = models.build(name, **fields)
    return autoshard.plan(
        step, state, batch, mesh=MESH, hardware=hardware, donate_argnums=0, memory=10**12, rel_gap=1e-2, time_limit_s=60
    )


def spec(plan: SolvedPlan, leaf: str) -> list[tuple[str, ...]]:
    """Mesh axes per dimension of the parameter whose path ends so."""
    (found,) = [x for x in plan.record.inputs if x.path.startswith("state.params") and x.path.endswith(leaf)]
    entries = list(found.spec) + [None] * (len(found.shape) - len(found.spec))
    return [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries]


def contractions(plan: SolvedPlan) -> Iterator[tuple[Decision, int]]:
    """Contraction decisions and their choices."""
    assignment = plan.planned.assignment
    for node, pick in zip(assignment.decisions.nodes, assignment.choice, strict=True):
        if node.flops.any():
            yield node, int(pick)


def moved(plan: SolvedPlan, *, hideable: bool) -> int:
    """Bytes of collectives off the critical path (weights, gradients), or on it (activations)."""
    return sum(c.nbytes * c.trips for c in plan.record.collectives if (c.window is not None) == hideable)


def result_layouts(plan: SolvedPlan, primitive: str, last: int) -> list[str]:
    """Layouts in which equations of a primitive leave results whose last dimension has this size."""
    d = plan.planned.assignment.decisions
    found: list[str] = []
    for node, pick in zip(d.nodes, plan.planned.assignment.choice, strict=True):
        if not isinstance(node, Equation) or node.name != primitive:
            continue
        (aval,) = d.graph.eqns[node.equation].results
        if aval.shape[-1] == last and aval.ndim == 3:
            found.append(str(layout_of(int(node.strategies.results[0][pick]), aval.ndim, d.mesh)))
    return found


@pytest.fixture(scope="module")
def small() -> SolvedPlan:
    return planned("llama3-8b", "tpu-v5e:2x4", layers=1, batch=1, sequence=128)


@pytest.fixture(scope="module")
def large() -> SolvedPlan:
    return planned("llama3-8b", "h100:1x8", layers=4, scan=True, batch=32, sequence=1024)


def test_megatron_by_heads_at_small_batch(small: SolvedPlan) -> None:
    """Column-parallel q, k, v by heads, column-parallel gate and up, row-parallel down; no weight moves."""
    for leaf in ("['wq']", "['wk']", "['wv']"):
        width, heads, _ = spec(small, leaf)
        assert heads, leaf
        assert not width, leaf
    for leaf in ("['w_gate']", "['w_up']"):
        assert spec(small, leaf) == [(), ("data", "model")], leaf
    assert spec(small, "['w_down']") == [("data", "model"), ()]
    parameter_bytes = sum(2 * int(np.prod(x.shape)) for x in small.record.inputs if "params" in x.path)
    assert moved(small, hideable=True) < 0.02 * parameter_bytes


def test_the_loss_is_vocabulary_parallel_at_small_batch(small: SolvedPlan) -> None:
    """Logits stay split by vocabulary, from the projection through the loss."""
    assert spec(small, "['lm_head']") == [(), ("data", "model")]
    assert "[-,-,data·model]" in result_layouts(small, "dot_general", 128_256)


def test_vocabulary_parallel_embedding_where_it_pays() -> None:
    """A tied embedding is split by vocabulary: the lookup leaves partial sums, the logits are split."""
    plan = planned("gpt2-small", "tpu-v5e:2x4", layers=1, vocab=50_304, batch=1, sequence=128)
    assert spec(plan, "['embed']") == [("data", "model"), ()]
    assert result_layouts(plan, "gather", 768) == ["[-,-,-] Σ{data,model}"]


def test_fully_sharded_data_parallel_at_large_batch(large: SolvedPlan) -> None:
    """Every large contraction is split over all devices; weights and gradients move, activations at the ends alone.

    The weight that a layer begins with is not split: nothing would hide its gather (see `problem.windows`).
    """
    whole = max(float(node.flops.max()) for node, _ in contractions(large))
    for node, pick in contractions(large):
        if node.flops.max() > 0.01 * whole:
            assert node.flops[pick] == node.flops.min()
    activations = [c for c in large.record.collectives if "[32,1024" in c.value]
    assert {c.trips for c in activations} == {1}  # none in the four layers
    total = sum(c.nbytes * c.trips for c in large.record.collectives)
    assert sum(c.nbytes for c in activations) < 0.06 * total
    kinds = {c.kind for c in large.record.collectives if c.nbytes > 1e6}
    assert {"all-gather", "reduce-scatter"} <= kinds
    for leaf in ("['wo']", "['w_gate']", "['w_down']"):
        assert any(spec(large, leaf)), leaf


@pytest.mark.parametrize("hardware", ["h100:1x8", "tpu-v5e:2x4"])
def test_the_phase_diagram_meets_the_closed_forms(hardware: str) -> None:
    """Regions of the solver's families lie within one grid step of the closed forms', on the chain of matmuls."""
    batches = [3 * 2**k for k in range(8, 16)]
    cells = phase_diagram.grid("linear", hardware, batches, [16384, 32768])
    assert phase_diagram.off_by_more_than_one_step(cells) == []
    assert {cell.found for cell in cells.values()} == {"D", "T", "m"}
