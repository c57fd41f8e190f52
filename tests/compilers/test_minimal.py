"""Constraints that are left out change no compiled program."""

from collections import Counter
from dataclasses import replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import autoshard
from autoshard import SolvedPlan
from autoshard.backends import compile
from autoshard.backends.known_compilers import XLA_GPU, XLA_TPU
from autoshard.backends.shardy.propagation import Annotations
from autoshard.ir import graph
from autoshard.ir.constraints import Constraints
from autoshard.ir.mesh import MeshAxes
from autoshard.planner.build_record import program_pins
from autoshard.planner.doubtful_constraints import doubtful
from autoshard.verification.collective_match import agrees
from autoshard.verification.result import Verification
from benchmarks.unseen_models import MODELS
from benchmarks.unseen_steps import REL_GAP
from tests.installed import needs_gpu_compiler, needs_tpu_compiler
from tests.planner.test_minimal import EXPERTS, LOOP, UNROLLED, contractions, of_model, planned

P = PartitionSpec
S = jax.ShapeDtypeStruct
MESH = MeshAxes.of({"x": 4, "y": 4})


@needs_tpu_compiler
def test_a_sum_that_the_compiler_all_reduces_anyway_needs_no_constraint() -> None:
    """XLA:TPU does not scatter a sum over all of a 4x4: it is whole before it is cut, pinned there or not."""

    def loss(w: Any, x: Any) -> Any:
        y = jnp.tanh(jnp.tanh(x @ w["up"].astype(jnp.bfloat16)) @ w["down"].astype(jnp.bfloat16))
        return jnp.sum(y.astype(jnp.float32))

    columns = P(None, "data")
    plan = autoshard.plan(
        jax.grad(loss),
        {name: S((2048, 2048), jnp.float32) for name in ("up", "down")},
        S((65_536, 2048), jnp.bfloat16),
        mesh={"data": 16},
        hardware="tpu-v5e:4x4",
        in_shardings=(columns, P("data")),
        out_shardings=columns,
    )
    assert plan.record.pins.count == 0 < program_pins(plan.planned.assignment).count
    rows = plan.verify(compiler_options=compile.TPU_PLAIN_OPTIONS).rows
    two = 2 * 2048 * 2048 * 2
    assert {row.kind: (row.predicted_bytes, row.emitted_bytes) for row in rows} == {
        "all-gather": (two, two),
        "all-reduce": (two, two),
    }


def everything(plan: SolvedPlan) -> SolvedPlan:
    """The same plan with every constraint."""
    return plan.pinned(program_pins(plan.planned.assignment))


def moved(found: Verification) -> Counter[tuple[str, tuple[str, ...]]]:
    """Bytes of emitted collectives by kind and axes."""
    total: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for row in found.emitted:
        total[row.kind, tuple(sorted(row.axes or ()))] += row.nbytes * row.trips
    return total


@needs_gpu_compiler
@pytest.mark.parametrize(
    ("name", "fields", "other"),
    [
        pytest.param(*LOOP, 65_536, marks=pytest.mark.slow),  # norms' scales, which need no constraint of their own
        pytest.param(*EXPERTS, 0, marks=pytest.mark.slow),
        # A number per token: scattered, divided and gathered with every constraint, all-reduced with few.
        pytest.param("gpt2-small", {"layers": 3, "vocab": 50_304, "batch": 32}, 65_536, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_gpu_compiler_emits_the_same_collectives(name: str, fields: dict[str, Any], other: int) -> None:
    plan = of_model(name, **fields)
    few, all_ = plan.verify("gpu"), everything(plan).verify("gpu")
    emitted, expected = moved(few), moved(all_)
    assert all(abs(emitted[kind] - expected[kind]) <= other for kind in emitted | expected)
    assert sum(emitted.values()) > 1000 * other
    assert few.memory.compiled is not None
    assert all_.memory.compiled is not None
    assert few.memory.compiled.peak <= 1.001 * all_.memory.compiled.peak


@pytest.mark.slow
@needs_gpu_compiler
def test_a_pending_sum_of_a_scatter_stays() -> None:
    """Messages summed at their targets: without the constraint XLA gathers what is added to them, or the updates."""
    nodes, edges, width = 32_768, 131_072, 2048

    def step(weights: Any, x: Any, source: Any, target: Any) -> Any:
        def loss(weights: Any) -> Any:
            y = x
            for sent, kept in weights:
                messages = jax.nn.relu(y[source] @ sent)
                y = jax.nn.relu(y @ kept + jax.ops.segment_sum(messages, target, num_segments=nodes))
            return jnp.mean(y**2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    w, ends = S((width, width), jnp.float32), S((edges,), jnp.int32)
    args = [(w, w)] * 2, S((nodes, width), jnp.float32), ends, ends
    plan = planned(step, *args, donate_argnums=0, rel_gap=1e-2)
    few, all_ = moved(plan.verify("gpu")), moved(everything(plan).verify("gpu"))
    assert plan.record.pins.count < everything(plan).record.pins.count
    assert all(abs(few[kind] - all_[kind]) <= 1e-2 * all_.total() for kind in few | all_)


@pytest.mark.slow
@needs_tpu_compiler
def test_a_norm_s_scale_does_not_split_the_rows_that_were_gathered_for_it() -> None:
    """The scale meets gathered rows, and their gradient in pieces: without the constraint weights are gathered."""
    step, args = replace(MODELS["normed-heads-few"], layers=1).program(16)
    mesh = {"data": 4, "model": 4}
    plan = autoshard.plan(step, *args, mesh=mesh, hardware="tpu-v5e:4x4", donate_argnums=0, rel_gap=1e-2)
    found = plan.honoured("tpu")
    assert found.ok, str(found)


@needs_gpu_compiler
def test_the_result_of_a_branch_is_gathered_behind_it() -> None:
    """A weight that is updated in pieces if its gradient is finite: XLA:GPU gathered it in the branch, too."""

    def step(w: Any, m: Any, x: Any) -> Any:
        gradient = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w).astype(jnp.float32) ** 2))(w)

        def updated(w: Any, m: Any) -> Any:
            m = 0.9 * m + gradient
            return w - 0.1 * m, m

        return lax.cond(jnp.isfinite(gradient).all(), updated, lambda w, m: (w, m), w, m)

    square = S((2048, 2048), jnp.float32)
    plan = autoshard.plan(
        step,
        square,
        square,
        S((65_536, 2048), jnp.float32),
        mesh={"data": 8},
        hardware="h100:1x8",
        donate_argnums=(0, 1),
        in_shardings=(P(), P("data"), P("data")),
        out_shardings=(P(), P("data")),
    )
    assert sum(c.kind == "all-gather" and c.nbytes == 2048 * 2048 * 4 for c in plan.record.collectives) == 1
    found = plan.verify()
    assert found.ok, str(found)


def annotated(inputs: int, made: Any) -> Annotations:
    """Constraints on made values alone, of a program whose inputs are whole."""
    pins = Constraints(made=made, taken={}, inputs={}, outputs={})
    return Annotations(inputs=dict.fromkeys(range(inputs), P()), outputs={}, pins=pins, donated=frozenset())


def test_what_one_broadcast_meets_in_two_layouts_stays() -> None:
    def step(x: Any, y: Any, scale: Any) -> Any:
        return x * scale, y * scale, y * 2.0

    rows = S((16, 128), jnp.float32)
    program = graph.build(jax.make_jaxpr(step)(rows, rows, S((1, 128), jnp.float32)), "cuda")
    gathered, cut, _ = program.outputs
    made = {program.makes[e][0]: (spec,) for e, spec in enumerate((P(), P("x"), P("x")))}
    for merges, expected in ((True, {gathered, cut}), (False, set[int]())):
        compiler = replace(XLA_GPU, merges_broadcasts=merges, merges_casts=False)
        assert doubtful(program, annotated(3, made), set(), MESH, compiler)[0] == expected


def test_casts_of_one_value_in_two_layouts_stay() -> None:
    def step(table: Any, x: Any) -> Any:
        half = jnp.bfloat16
        return table.astype(half), table.T.astype(half), table.astype(jnp.float16), x.astype(half), x.T.astype(half)

    square = S((16, 16), jnp.float32)
    program = graph.build(jax.make_jaxpr(step)(square, square), "tpu")
    made = {
        program.makes[program.producers[v][0]][0]: (spec,)
        for v, spec in zip(program.outputs, (P("x"), P("x"), P(), P("x"), P(None, "x")), strict=True)
    }
    for merges, expected in ((True, set(program.outputs[:2])), (False, set[int]())):
        compiler = replace(XLA_GPU, merges_broadcasts=False, merges_casts=merges)
        assert doubtful(program, annotated(2, made), set(), MESH, compiler)[0] == expected


@pytest.mark.parametrize(("found", "stays"), [(64, True), (4096, False)])
def test_a_table_that_is_gathered_for_few_rows_stays(found: int, *, stays: bool) -> None:
    def step(table: Any, ids: Any) -> Any:
        return jnp.tanh(jnp.tanh(table)[ids])

    program = graph.build(jax.make_jaxpr(step)(S((256, 128), jnp.float32), S((found,), jnp.int32)), "cuda")
    table = next(program.operands[e][0] for e, eqn in enumerate(program.eqns) if eqn.primitive == "gather")
    made = {program.makes[program.producers[table][0]][0]: (P(None, "x"), P())}
    assert doubtful(program, annotated(2, made), set(), MESH, XLA_GPU)[0] == ({table} if stays else set())


@pytest.mark.parametrize(("rows", "stays"), [(3584, True), (3072, False)])
def test_a_product_stays_scattered_in_front_of_its_transpose(rows: int, *, stays: bool) -> None:
    """A quarter of 3,584 rows is seven tiles; XLA:TPU scatters no sum along them where they are columns."""

    def step(dy: Any, x: Any, w: Any) -> Any:
        return w + jnp.einsum("tn,tm->nm", dy, x).T

    shapes = S((64, rows), jnp.float32), S((64, 512), jnp.float32), S((512, rows), jnp.float32)
    program = graph.build(jax.make_jaxpr(step)(*shapes), "tpu")
    product = next(program.results[e][0] for e, eqn in enumerate(program.eqns) if eqn.traits.contraction)
    made = {program.makes[program.producers[product][0]][0]: (P("x"),)}
    for compiler in (XLA_TPU, XLA_GPU):
        stay, _ = doubtful(program, annotated(3, made), set(), MESH, compiler)
        assert (product in stay) is (stays and compiler is XLA_TPU)


@pytest.mark.parametrize("moves", [True, False])
def test_what_one_loop_keeps_and_another_takes_elsewhere_stays(*, moves: bool) -> None:
    def step(x: Any) -> Any:
        _, kept = jax.lax.scan(lambda c, row: (c + row, jnp.tanh(c)), jnp.zeros(64), x)
        return jax.lax.scan(lambda c, row: (c * row, None), jnp.ones(64), kept)[0]

    program = graph.build(jax.make_jaxpr(step)(S((8, 64), jnp.float32)), "cuda")
    (enters,) = (
        e
        for e, eqn in enumerate(program.eqns)
        if eqn.traits.enters_loop and program.avals[program.operands[e][0]].shape == (8, 64)
        if program.operands[e][0] in program.producers
    )
    kept, part = program.operands[enters][0], program.results[enters][0]
    made = {program.makes[program.producers[kept][0]][program.results[program.producers[kept][0]].index(kept)]: ("x",)}
    pins = Constraints(
        made={spot: (P(None, *axes),) for spot, axes in made.items()} | {program.makes[enters][0]: (P(),)},
        taken={program.takes[enters][0]: (P(),)} if moves else {},
        inputs={},
        outputs={},
    )
    annotations = Annotations(inputs={0: P()}, outputs={}, pins=pins, donated=frozenset())
    stay, _ = doubtful(program, annotations, set(), MESH, XLA_GPU)
    assert ({kept, part} <= stay) is moves


@pytest.mark.parametrize(("shares", "columns", "stays"), [(False, "y", True), (True, "y", False), (False, None, False)])
def test_what_one_product_gathers_in_groups_stays_where_others_gather_it(
    columns: str | None, *, shares: bool, stays: bool
) -> None:
    """A product has rows split over x, and columns over y: XLA:GPU gathers its weight in each group of y."""

    def step(x: Any, scores: Any, w: Any) -> Any:
        w = jnp.tanh(w)
        return jnp.tanh(x) @ w, jnp.einsum("rv,dv->rd", jnp.tanh(scores), w)

    shapes = S((64, 16), jnp.float32), S((64, 512), jnp.float32), S((16, 512), jnp.float32)
    program = graph.build(jax.make_jaxpr(step)(*shapes), "cuda")
    rows = "x" if columns else ("x", "y")
    layouts: dict[tuple[int, ...], PartitionSpec] = {
        (16, 512): P("x", "y"),
        (64, 512): P(rows, columns),
        (64, 16): P(rows),
    }
    made = {spots[0]: (layouts[eqn.results[0].shape],) for spots, eqn in zip(program.makes, program.eqns, strict=True)}
    weight = next(v for v in program.consumers if v in program.producers and program.avals[v].shape == (16, 512))
    taken = {program.takes[e][i]: (P(None, columns),) for e, i in program.consumers[weight]}
    assert len(taken) == 2
    pins = Constraints(made=made, taken=taken, inputs={}, outputs={})
    annotations = Annotations(inputs=dict.fromkeys(range(3), P()), outputs={}, pins=pins, donated=frozenset())
    stay, _ = doubtful(program, annotations, set(), MESH, replace(XLA_GPU, shares_grouped_gathers=shares))
    assert (weight in stay) is stays


@pytest.mark.parametrize("again", [True, False])
def test_the_first_gather_of_what_is_gathered_again_stays(*, again: bool) -> None:
    """A product gathers its rows over y, along which its columns are split; XLA:TPU gathered the weight instead."""

    def step(x: Any, w: Any, g: Any) -> Any:
        x = jnp.tanh(x)
        return x @ w, x.T @ g

    shapes = S((64, 16), jnp.float32), S((16, 512), jnp.float32), S((64, 512), jnp.float32)
    program = graph.build(jax.make_jaxpr(step)(*shapes), "tpu")
    layouts: dict[tuple[int, ...], PartitionSpec]
    layouts = {(64, 16): P(("x", "y")), (64, 512): P("x", "y"), (16, 64): P(None, ("x", "y")), (16, 512): P(None, "y")}
    made = {spots[0]: (layouts[eqn.results[0].shape],) for spots, eqn in zip(program.makes, program.eqns, strict=True)}
    rows = next(v for v in program.consumers if v in program.producers and program.avals[v].shape == (64, 16))
    (first, *_), *_ = program.consumers[rows]
    taken = {program.takes[first][0]: (P("x"),)}
    behind = {program.takes[e][0]: (P("x"),) for e, _ in program.consumers[rows] if e != first}
    pins = Constraints(made=made, taken=taken, inputs={}, outputs={}, again=behind if again else {})
    inputs = {0: P(), 1: P(None, "y"), 2: P()}
    annotations = Annotations(inputs=inputs, outputs={}, pins=pins, donated=frozenset())
    stay, moved = doubtful(program, annotations, set(), MESH, XLA_TPU)
    assert rows in moved
    assert (rows in stay) is again


@needs_gpu_compiler
@pytest.mark.slow
def test_a_head_s_weight_is_gathered_once_for_scores_and_their_gradient() -> None:
    """Its scores are split over tokens and vocabulary: XLA:GPU gathered the weight in groups, and once more."""
    step, args = MODELS["scan-norms-after-few"].program(32)
    mesh = {"data": 4, "model": 8}
    plan = autoshard.plan(step, *args, mesh=mesh, hardware="h100:4x8", donate_argnums=0, rel_gap=REL_GAP)
    found = plan.verify()
    assert found.ok, str(found)


@needs_gpu_compiler
def test_a_scattered_sum_over_a_vocabulary_does_not_move_its_scores() -> None:
    """A number per token, split over the batch: XLA:GPU split the scores so, too, and moved 23 times the bytes."""
    vocabulary, width, batch, length = 65_536, 512, 8, 129

    def step(params: Any, tokens: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            x = params["embed"][tokens]
            scores = (x + jnp.tanh(x @ params["w"])) @ params["embed"].T
            hits = jax.nn.one_hot(tokens[:, 1:], vocabulary) * jax.nn.log_softmax(scores[:, :-1])
            return -hits.sum() / tokens.size

        return jax.tree.map(lambda p, g: p - 1e-2 * g, params, jax.grad(loss)(params))

    plan = planned(
        step,
        {"embed": S((vocabulary, width), jnp.float32), "w": S((width, width), jnp.float32)},
        S((batch, length), jnp.int32),
        donate_argnums=0,
        rel_gap=1e-2,
        pins={"**.embed": P(("data", "model"), None)},
    )
    assert plan.record.pins.count < everything(plan).record.pins.count / 3
    found = plan.verify("gpu")
    assert agrees(found.rows, found.tolerance), str(found)


@needs_gpu_compiler
@pytest.mark.parametrize(
    ("name", "fields"),
    [pytest.param(*UNROLLED, marks=pytest.mark.slow), ("mlp-8k", {"layers": 4, "batch": 16_384})],
    ids=str,
)
def test_no_fusion_is_lost(name: str, fields: dict[str, Any]) -> None:
    """As many kernels as with no constraint but the layouts of arguments and results, or one in fifty more."""
    plan = of_model(name, **fields)
    free = plan.pinned(replace(plan.record.pins, made={}, taken={}, again={}))
    assert 0 == free.record.pins.count < plan.record.pins.count
    few, none = (kernels(each.verify("gpu")) for each in (plan, free))
    assert 10 < few <= 1.02 * none


def kernels(found: Verification) -> int:
    assert found.timeline is not None
    return sum(event.stream == "compute" for event in found.timeline.events)


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize(
    ("hardware", "axes", "most"),
    [
        # Attention's batch over all eight, the MLP's columns over four of them: both ends of ways between the two are
        # pinned. Of 42 of such a plan 12 were left when values were freed one by one while XLA:GPU's collectives
        # stayed what they are. One gather of 67 MB is merged with another where it is not pinned.
        ("h100:1x8", (("data", 2), ("model", 4)), 25 / 38),
        ("h100:4x8", (("data", 4), ("model", 8)), 1 / 3),
    ],
)
def test_a_whole_llama_needs_a_constraint_per_twenty_values(
    hardware: str, axes: tuple[tuple[str, int], ...], most: float
) -> None:
    """At most; and so many per contraction, of about 380 that there are. Large batches need less: see `LOOP`."""
    devices = prod(size for _, size in axes)
    plan = of_model("llama3-8b", scan=True, remat="full", batch=devices, sequence=2048, axes=axes, hardware=hardware)
    count, graph = plan.record.pins.count, plan.planned.space.decisions.graph
    assert count <= most * contractions(plan)
    assert 20 * count <= len(graph.avals)
    few, all_ = plan.verify("gpu"), everything(plan).verify("gpu")
    emitted, expected = moved(few), moved(all_)
    assert all(abs(emitted[kind] - expected[kind]) <= 1e-2 * expected.total() for kind in emitted | expected)
    assert few.timeline is not None
    assert all_.timeline is not None
    assert few.timeline.step_s <= 1.005 * all_.timeline.step_s  # 0.992 and 1.0047: the scheduler's order differs
    assert agrees(few.rows, few.tolerance), str(few)
