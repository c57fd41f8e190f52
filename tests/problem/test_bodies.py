"""The body of a `shard_map` is priced as everything else is, and what is not is named: against compilers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.ir.graph import WHILE_TRIPS
from autoshard.problem import bill
from autoshard.rules.rule import unregister

AXES = ("data", "model")
BOTH = P(AXES)


def auto_mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), AXES, axis_types=(AxisType.Auto,) * 2)


def shaped(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def mapped(body: Any, in_specs: Any, out_specs: Any, **more: Any) -> Any:
    return jax.shard_map(body, mesh=auto_mesh(), in_specs=in_specs, out_specs=out_specs, **more)


def plan_of(fn: Any, *args: Any, hardware: str = "cpu:8", **more: Any) -> autoshard.SolvedPlan:
    return autoshard.plan(fn, *args, mesh=auto_mesh(), hardware=hardware, for_grad=False, **more)


def every_collective(w: Any, x: Any) -> Any:
    summed = lax.psum(jnp.tanh(x @ w) @ w.T, "model")
    gathered = lax.all_gather(x, "model", tiled=True)
    scattered = lax.psum_scatter(gathered * 2, "model", tiled=True)
    turned = lax.all_to_all(x, "model", 0, 1, tiled=True)
    passed = lax.ppermute(x, "data", [(0, 1), (1, 0)])
    largest = lax.pmax(x.max(axis=0), AXES)
    return (summed.sum() + scattered.sum() + turned.sum() + passed.sum() + largest.sum()).reshape(1, 1)


def in_trips(w: Any, x: Any) -> Any:
    """A layer split over `model` in every trip."""

    def layer(h: Any, w: Any) -> Any:
        return jnp.tanh(lax.psum(h @ w, "model"))[:, :16] + h, None

    return lax.scan(layer, x, w)[0]


def tensor_parallel(up: Any, down: Any, x: Any) -> Any:
    return jnp.mean(lax.pmean(lax.psum(jnp.tanh(x @ up) @ down, "model") ** 2, "data"))


def layers(ws: Any, x: Any) -> Any:
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def updated(ws: Any, slopes: Any) -> Any:
    return jax.tree.map(lambda w, slope: w - 0.1 * slope, ws, slopes)


def data_parallel(ws: Any, x: Any) -> Any:
    """A train step of which the loss alone is mapped: its gradients are summed by the transposed body."""
    loss = mapped(lambda ws, x: lax.pmean(layers(ws, x), AXES), (P(), BOTH), P())
    value, slopes = jax.value_and_grad(loss)(ws, x)
    return updated(ws, slopes), value


def data_parallel_by_hand(ws: Any, x: Any) -> Any:
    """The whole step is mapped, with means of gradients written out."""

    def step(ws: Any, x: Any) -> Any:
        value, slopes = jax.value_and_grad(layers)(ws, x)
        return updated(ws, lax.pmean(slopes, AXES)), lax.pmean(value, AXES)

    return mapped(step, (P(), BOTH), (P(), P()), check_vma=False)(ws, x)


def in_outer_trips(w: Any, x: Any) -> Any:
    body = mapped(
        lambda w, x: jnp.tanh(lax.psum(x @ w, "model")) @ w.T, (P("model"), P("data", "model")), P("data", "model")
    )
    return lax.scan(lambda h, _: (body(w, h), None), x, None, length=5)[0]


def sums_of_one_axis(x: Any) -> Any:
    """What follows may be split over both axes; then the sum is all-reduced before it is cut."""
    return mapped(lambda a: lax.psum(a.T @ a, "data"), P("data"), P())(x) * 2 + x


WEIGHTS = [shaped(256, 256)] * 3
PROGRAMS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "every collective": (
        mapped(every_collective, (P(None, "model"), P("data", "model")), P("data", "model")),
        (shaped(64, 64), shaped(64, 256)),
    ),
    "in trips": (
        mapped(in_trips, (P(None, "model"), P("data", "model")), P("data", "model")),
        (shaped(5, 64, 64), shaped(64, 64)),
    ),
    "gradients of tensor parallel": (
        jax.grad(mapped(tensor_parallel, (P(None, "model"), P("model"), P("data")), P()), (0, 1)),
        (shaped(64, 256), shaped(256, 64), shaped(128, 64)),
    ),
    "data parallel": (data_parallel, (WEIGHTS, shaped(512, 256))),
    "data parallel by hand": (data_parallel_by_hand, (WEIGHTS, shaped(512, 256))),
    "sums of one axis": (sums_of_one_axis, (shaped(512, 512),)),
    "in outer trips": (in_outer_trips, (shaped(64, 64), shaped(64, 64))),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_collectives_and_matmuls_are_those_that_are_compiled(name: str) -> None:
    fn, args = PROGRAMS[name]
    plan = plan_of(fn, *args)
    found = plan.verify("cpu")
    assert plan.record.collectives
    for row in found.rows:
        assert row.predicted_bytes == row.emitted_bytes, str(found)
    assert found.timeline is not None
    assert bill.flops(plan.planned.assignment) == found.timeline.flops
    assert plan.cost == pytest.approx(found.timeline.step_s, rel=0.25), str(found)
    assert not [note for note in plan.record.notes if "not priced" in note]


def double(x: Any, out: Any) -> None:
    out[...] = x[...] * 2


def kernel(x: Any, **more: Any) -> Any:
    spec = pl.BlockSpec((8, 128), lambda i: (i, 0))
    return pl.pallas_call(
        double,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // 8,),
        in_specs=[spec],
        out_specs=spec,
        **more,
    )(x)


ESTIMATE = pl.CostEstimate(flops=10**12, transcendentals=0, bytes_accessed=10**9)


def half_in_a_loop(x: Any) -> Any:
    return lax.while_loop(lambda x: x.sum() > 1, lambda x: x / 2, x)


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda x: kernel(x), "the arithmetic of pallas_call[double] at"),
        (half_in_a_loop, "the trips of the while loop at"),
        (lambda x: x @ jnp.linalg.cholesky(x.T @ x), "the arithmetic of cholesky at"),
        (lambda x: jax.pure_callback(np.sin, x, x), "pure_callback at"),
    ],
    ids=["pallas", "while", "cholesky", "callback"],
)
@pytest.mark.parametrize("place", ["in a body", "outside"])
def test_what_is_not_priced_is_named_and_no_part_of_the_proof(fn: Any, words: str, place: str) -> None:
    plan = plan_of(
        mapped(fn, P("data"), P("data"), check_vma=False) if place == "in a body" else fn,
        shaped(256, 128),
        hardware="tpu-v5e:2x4",
        unknown="replicate",
    )
    (note,) = [note for note in plan.record.notes if note.startswith("not priced: ")]
    assert words in note
    assert "test_bodies.py" in note or "cholesky" in note  # JAX's own lines are no user's
    named = note.removeprefix("not priced: ")
    assert f"priced by autoshard's model of tpu-v5e:2x4, without {named}" in plan.record.certificate.space
    assert named[:40] in " ".join(plan.summary().split())


def test_a_kernel_that_estimates_its_costs_is_priced_by_them() -> None:
    """A TFLOP in all: shared by those of its parts that run at once, alone in a body."""
    x = shaped(256, 128)
    inside = plan_of(
        mapped(lambda x: kernel(x, cost_estimate=ESTIMATE), P("data"), P("data"), check_vma=False),
        x,
        hardware="tpu-v5e:2x4",
    )
    autoshard.register_rule("pallas_call[double]", "i _ -> i _")
    try:
        split = plan_of(
            lambda x: kernel(x, cost_estimate=ESTIMATE),
            x,
            hardware="tpu-v5e:2x4",
            in_shardings=P("data"),
            out_shardings=P("data"),
        )
    finally:
        unregister("pallas_call[double]")
    for plan, flops in ((inside, 1e12), (split, 1e12 / 8)):
        assert bill.flops(plan.planned.assignment) == flops
        assert flops / 197e12 < plan.cost < 20 * flops / 197e12
        assert not [note for note in plan.record.notes if "not priced" in note]


def test_of_branches_the_dearest_counts() -> None:
    def times(*counts: int) -> Any:
        def branch(count: int) -> Callable[[Any], Any]:
            return lambda x: lax.fori_loop(0, count, lambda _, h: jnp.tanh(lax.psum(h @ h.T, "model") @ h), x)

        def body(x: Any) -> Any:
            return lax.switch(jnp.int32(x[0, 0]), [branch(n) for n in counts], x)

        return plan_of(mapped(body, P("data"), P("data"), check_vma=False), shaped(1024, 512), hardware="h100:1x8")

    both, several, less = times(3, 3), times(1, 3, 2), times(1, 2)
    assert several.cost == pytest.approx(both.cost, rel=1e-3)
    assert less.cost < 0.8 * both.cost
    for plan in (both, several):
        assert [row.trips for row in plan.record.collectives] == [3]


def test_a_body_that_is_split_in_part_by_its_author_says_so() -> None:
    body = mapped(lambda x: lax.psum(x @ x.T, "data"), P("data"), P(), axis_names={"data"})
    plan = plan_of(body, shaped(256, 128), hardware="h100:1x8")
    assert [note for note in plan.record.notes if "is split over model" in note]


def test_a_collective_in_the_condition_of_a_loop_is_priced() -> None:
    def halved(x: Any) -> Any:
        return lax.while_loop(lambda h: lax.pmax(jnp.abs(h).max(), "model") > 1, lambda h: h * 0.5, x)

    plan = plan_of(mapped(halved, P("data"), P("data"), check_vma=False), shaped(64, 16))
    (row,) = plan.record.collectives
    assert (row.kind, row.axes, row.trips) == ("all-reduce", ("model",), WHILE_TRIPS)


def test_a_collective_of_groups_is_named() -> None:
    body = mapped(
        lambda x: lax.psum(x, "model", axis_index_groups=[[0, 1], [2, 3]]),
        P("data", "model"),
        P("data", "model"),
        check_vma=False,
    )
    plan = plan_of(body, shaped(256, 128), hardware="h100:1x8")
    assert [note for note in plan.record.notes if note.startswith("not priced: psum at")]


def test_what_a_body_needs_counts_in_memory() -> None:
    """Two of the wide products live at once, whatever operands and results take."""

    def body(x: Any, w: Any) -> Any:
        wide = x @ w
        return (jnp.sort(wide, axis=0) @ wide.T)[:, :8]

    plan = plan_of(mapped(body, (P(AXES), P()), P(AXES)), shaped(64, 16), shaped(16, 65536), hardware="h100:1x8")
    assert plan.record.memory.peak_bytes > 2 * (64 // 8) * 65536 * 4


def test_a_body_has_the_peak_of_the_same_program_on_one_device() -> None:
    def block(x: Any, up: Any, down: Any) -> Any:
        y = x - x.mean(-1, keepdims=True)
        y = y / jnp.sqrt((y * y).mean(-1, keepdims=True) + 1)
        return x + jnp.maximum(y @ up, 0) @ down

    shapes = shaped(4096, 1024), shaped(1024, 1024), shaped(1024, 1024)
    whole = shaped(8 * 4096, 1024), *shapes[1:]
    body = plan_of(mapped(block, (P(AXES), P(), P()), P(AXES)), *whole, hardware="h100:1x8")
    alone = autoshard.plan(block, *shapes, mesh={"data": 1}, hardware="h100:1x1")
    assert body.record.memory.peak_bytes == alone.record.memory.peak_bytes


def test_all_but_one_of_the_sums_that_a_body_leaves_hide_behind_its_contractions() -> None:
    """The one that is made last hides behind nothing, as in any program; the others are made before."""
    decisions = plan_of(data_parallel, WEIGHTS, shaped(512, 256), hardware="h100:1x8").planned.space.decisions
    graph, windows = decisions.graph, decisions.windows
    (backward,) = (e for e, eqn in enumerate(graph.eqns) if len(eqn.results) == len(WEIGHTS))
    waiting = [v for v in graph.results[backward] if windows.of_value[v] is None]
    assert len(waiting) == 1
    hiding = {windows.of_value[v] for v in graph.results[backward]} - {None}
    assert hiding <= dict(windows.covers[windows.of_equation[backward]]).keys()
    assert hiding
