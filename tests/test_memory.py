"""Which values lie in memory, and for how long: by hand, and as XLA's GPU compiler has it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard import compilers, costs
from autoshard.graph import Graph, build
from autoshard.memory import Lives, lives
from autoshard.problem.traits import is_pointwise
from autoshard.rules import rules_of

F32 = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
BF16 = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)


def lived(fn: Callable[..., Any], *args: Any) -> tuple[Graph, Lives]:
    graph = build(jax.make_jaxpr(fn)(*args))
    rules = rules_of(graph.eqns, unknown="error")
    return graph, lives(
        graph, [costs.fusible(e, pointwise=is_pointwise(r)) for e, r in zip(graph.eqns, rules, strict=True)]
    )


def results(graph: Graph, primitive: str) -> list[int]:
    return [graph.results[e][0] for e, eqn in enumerate(graph.eqns) if eqn.primitive == primitive]


def test_scores_are_kept_as_the_product_that_they_are_computed_from() -> None:
    """The f32 softmax of bf16 products is recomputed by each fusion that reads it."""

    def attention(q: Any, k: Any, v: Any) -> Any:
        scores = jax.nn.softmax((q @ k.T).astype(jnp.float32))
        return scores.astype(jnp.bfloat16) @ v

    graph, found = lived(attention, BF16((64, 8)), BF16((64, 8)), BF16((64, 8)))
    products = results(graph, "dot_general")
    assert found.stored[products].all()
    assert not found.stored[results(graph, "exp")].any()
    cast = next(v for v in results(graph, "convert_element_type") if graph.avals[v].itemsize == 2)
    assert found.stored[cast]  # a product's operand
    made = {graph.results[e][0]: e for e in range(len(graph.eqns))}
    assert found.end[products[0]] > made[cast]  # read once more when the cast is written


def test_a_sum_of_branches_that_many_read_is_stored() -> None:
    def residual(x: Any, a: Any, b: Any) -> Any:
        h = x + a @ b
        return [jnp.sum(jnp.sin(h)), jnp.sum(jnp.cos(h)), jnp.sum(jnp.tanh(h)), jnp.sum(jnp.exp(h))]

    graph, found = lived(residual, F32((16, 16)), F32((16, 16)), F32((16, 16)))
    assert found.stored[results(graph, "add")].all()
    assert not found.stored[results(graph, "sin")].any()


def test_a_loop_holds_what_it_reads_and_what_it_stacks() -> None:
    def layers(x: Any, stack: Any) -> Any:
        def one(h: Any, w: Any) -> Any:
            h = jnp.tanh(h @ w)
            return h, h

        return jax.lax.scan(one, x, stack + 1.0)

    graph, found = lived(layers, F32((8, 8)), F32((4, 8, 8)))
    inside = [e for e, loop in enumerate(graph.loop_of) if loop]
    (weights,) = results(graph, "add")
    assert found.end[weights] == inside[-1] + 1
    (stacked,) = results(graph, "loop_stack")
    assert found.start[stacked] == inside[0]


def test_another_name_needs_no_memory() -> None:
    def program(x: Any, y: Any) -> Any:
        return (x @ y).reshape(4, 4, 16).transpose(1, 0, 2).reshape(16, 16) @ y

    graph, found = lived(program, F32((16, 16)), F32((16, 16)))
    names = results(graph, "reshape") + results(graph, "transpose")
    assert len(names) == 3
    assert not found.stored[names].any()
    assert found.named[names].all()
    first, _ = results(graph, "dot_general")
    assert found.end[first] == len(graph.eqns)  # as long as its last name


# --- The forms of FSDP, by the GPU compiler -------------------------------------------

LAYERS, WIDTH, HIDDEN, ROWS = 8, 2048, 8192, 6144


def mlp_step(block: Callable[..., Any], params: Any, x: Any) -> Any:
    def loss(params: Any) -> Any:
        h = x
        for layer in params:
            h = block(layer, h)
        return jnp.mean(h.astype(jnp.float32) ** 2)

    value, gradient = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 1e-3 * g, params, gradient), value


def block(layer: Any, h: Any) -> Any:
    up, down = (layer[k].astype(jnp.bfloat16) for k in ("up", "down"))
    return h + jax.nn.relu(h @ up) @ down


PARAMS = [{"up": F32((WIDTH, HIDDEN)), "down": F32((HIDDEN, WIDTH))} for _ in range(LAYERS)]
PINS = {"params.*.up": P(None, "data"), "params.*.down": P(None, "data"), "x": P("data")}


def fsdp(form: Callable[..., Any], memory: int | None = None) -> tuple[Any, int]:
    """The plan of FSDP (state and batch split over data), and the peak of its compiled program."""
    plan = autoshard.plan(
        partial(mlp_step, form),
        PARAMS,
        BF16((ROWS, WIDTH)),
        mesh={"data": 8},
        hardware="h100:1x8",
        donate_argnums=0,
        pins=PINS,
        memory=memory,
    )
    compiled = plan.verify("gpu").memory.compiled
    assert compiled is not None
    return plan, compiled.peak


def gathers(plan: autoshard.Plan) -> int:
    return sum(c.trips for c in plan.record.collectives if c.kind == "all-gather")


@pytest.mark.gpu_compiler
@pytest.mark.skipif(not compilers.available("gpu"), reason="the GPU compiler is not installed")
def test_weights_are_gathered_again_where_memory_is_short() -> None:
    """Plain: each weight is gathered once and stays. Short of memory: twice, as with remat, without recomputing."""
    plain, compiled = fsdp(block)
    assert gathers(plain) == 2 * LAYERS
    assert 0.87 <= compiled / plain.record.memory.peak_bytes <= 1.11
    short = int(plain.record.memory.peak_bytes * 0.7)
    again, smaller = fsdp(block, memory=short)
    assert gathers(again) > 2 * LAYERS
    assert again.record.pins.again
    assert again.record.memory.peak_bytes <= short
    assert smaller <= 1.1 * short
    assert smaller < 0.88 * compiled
    assert again.planned.assignment.flops() == plain.planned.assignment.flops()
    remat, third = fsdp(jax.checkpoint(block), memory=short)
    assert remat.planned.assignment.flops() > plain.planned.assignment.flops()
    assert third <= 1.1 * short


@pytest.mark.gpu_compiler
@pytest.mark.skipif(not compilers.available("gpu"), reason="the GPU compiler is not installed")
@pytest.mark.parametrize("dim", [0, 1])
def test_a_state_gathered_after_its_update_lies_beside_the_old_one(dim: int) -> None:
    """ZeRO-1 of one large weight: along the major dimension the gather writes where the old one was."""

    def step(state: Any, x: Any) -> Any:
        w, m = state
        g = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        m = 0.9 * m + g
        return (w - 1e-3 * m, m), None

    split = P("data", None) if dim == 0 else P(None, "data")
    w = F32((1024, 4096))
    plan = autoshard.plan(
        step,
        (w, w),
        F32((64, 1024)),
        mesh={"data": 8},
        hardware="h100:1x8",
        donate_argnums=0,
        in_shardings=((P(), split), P("data", None)),
    )
    assert ("all-gather", 4 * w.size) in [(row.kind, row.nbytes) for row in plan.record.collectives]
    beside = plan.record.memory.kinds.get("copies", 0) // (4 * w.size)
    assert beside == dim
    memory = plan.verify().memory
    assert memory.compiled is not None
    assert memory.compiled.peak == pytest.approx(memory.predicted.peak, rel=0.1)
