"""Which values lie in memory, and for how long: by hand, and as XLA's GPU compiler has it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.backends.known_compilers import XLA_GPU, XLA_GPU_0_10, XLA_TPU
from autoshard.backends.model import CompilerModel
from autoshard.costs.casts import CastAhead, cast_ahead, multiplied
from autoshard.costs.dimension_orders import DimensionOrders
from autoshard.costs.fusion import fusible, fusion_traits
from autoshard.costs.liveness import LiveRanges, live_ranges
from autoshard.costs.matrices import part_in_lanes
from autoshard.costs.softmaxes import SoftmaxFacts
from autoshard.costs.strategies import WHOLE, decode
from autoshard.ir.graph import Graph, build
from autoshard.problem.decisions import layout_codes
from autoshard.rules import rules_of
from tests.programs import Program, space_of

F32 = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
BF16 = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)


def lived(fn: Callable[..., Any], *args: Any, compiler: CompilerModel = XLA_GPU) -> tuple[Graph, LiveRanges]:
    graph = build(jax.make_jaxpr(fn)(*args), "cpu")
    rules = rules_of(graph.eqns, unknown="error")
    return graph, live_ranges(
        graph,
        rules,
        fusion_traits(graph, rules, (), compiler).fuses,
        compiler,
        orders=DimensionOrders(),
        softmax_facts=SoftmaxFacts(devices=1, stores_quotients=True, stores_gradients=True),
        loss_last=compiler.computes_loss_last,
    )


def attention(q: Any, k: Any, v: Any) -> Any:
    scores = jax.nn.softmax((q @ k.T).astype(jnp.float32))
    return scores.astype(jnp.bfloat16) @ v


def results(graph: Graph, primitive: str) -> list[int]:
    return [graph.results[e][0] for e, eqn in enumerate(graph.eqns) if eqn.primitive == primitive]


def test_scores_are_kept_as_the_product_that_they_are_computed_from() -> None:
    """The f32 softmax of bf16 products is recomputed by each fusion that reads it."""
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


def test_what_a_loop_computes_from_a_slice_is_not_stored_for_the_size_of_the_stack() -> None:
    """A trip reads its slice alone, so it costs no more to compute a value again than to read it."""

    def summed(x: Any, stack: Any) -> Any:
        def body(x: Any, part: Any) -> Any:
            h = part - 1.0
            return x + jnp.sum(h) * jnp.sum(h * h) * jnp.sum(h * h * h), None

        return jax.lax.scan(body, x, stack)[0]

    graph, found = lived(summed, F32(()), F32((64, 16, 16)))
    assert not found.stored[results(graph, "sub")].any()


def test_a_loop_holds_what_it_reads_and_what_it_stacks() -> None:
    def layers(x: Any, stack: Any) -> Any:
        def one(h: Any, w: Any) -> Any:
            h = jnp.tanh(h @ w)
            return h, h

        return jax.lax.scan(one, x, stack + 1.0)

    graph, found = lived(layers, F32((8, 8)), F32((4, 8, 8)))
    inside = [e for e, loop in enumerate(graph.eqn_loop) if loop]
    (weights,) = results(graph, "add")
    assert found.end[weights] == inside[-1] + 1
    (stacked,) = results(graph, "loop_stack")
    assert found.start[stacked] == inside[0]
    graph, found = lived(layers, F32((8, 8)), F32((4, 8, 8)), compiler=XLA_GPU_0_10)
    assert found.start[results(graph, "loop_stack")[0]] == 0  # zeroed as early as it can be


def layers_and_head(weights: Any, x: Any) -> Any:
    """The gradients of a first layer, of scanned ones and of a head."""

    def loss(weights: Any) -> Any:
        first, stack, head = weights
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x @ first, stack)
        return (jnp.tanh(h @ head) ** 2).sum()

    return jax.grad(loss)(weights)


LAYERS_AND_HEAD = (F32((24, 16)), F32((4, 16, 16)), F32((16, 32))), F32((64, 24))


def test_the_gradient_of_a_head_is_made_behind_the_loop_of_the_backward_pass() -> None:
    """XLA:GPU keeps what it is made from; XLA:TPU makes it where the program does."""

    for compiler in (XLA_GPU, XLA_TPU):
        graph, found = lived(layers_and_head, *LAYERS_AND_HEAD, compiler=compiler)
        behind = max(e for e, loop in enumerate(graph.eqn_loop) if loop)
        gradient = next(v for v in results(graph, "dot_general") if graph.avals[v].shape in ((16, 32), (32, 16)))
        assert (found.start[gradient] >= behind) == (compiler is XLA_GPU)


def test_the_gradient_of_a_head_is_early_where_what_enters_the_loop_is_summed() -> None:
    """A split vocabulary leaves a sum that is reduced before the loop: XLA:GPU makes the head's gradient first."""

    graph, found = lived(layers_and_head, *LAYERS_AND_HEAD)
    behind = max(e for e, loop in enumerate(graph.eqn_loop) if loop)
    entered = max(e for e, eqn in enumerate(graph.eqns) if eqn.traits.enters_loop)  # the backward pass, by all it reads
    dots = [e for e in range(len(graph.eqns)) if graph.eqns[e].primitive == "dot_general" and not graph.eqn_loop[e]]
    (gradient,) = (e for e in dots if graph.avals[graph.results[e][0]].shape in ((16, 32), (32, 16)))
    made = graph.results[gradient][0]
    assert gradient <= found.early[made] < behind <= found.start[made]  # right before the loop, or behind it
    assert found.across[made] == {graph.avals[made].shape.index(32)}
    of_scores, states = sorted(graph.operands[gradient], key=lambda v: graph.avals[v].shape[-1], reverse=True)
    assert found.across[of_scores] == {1}  # its vocabulary
    assert found.across[states] == set()  # whole along an axis that splits the vocabulary
    for v in (of_scores, states):
        assert gradient < entered < found.soon[v] < behind <= found.end[v]


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


# --- As XLA:TPU has it --------------------------------------------------------------------


def test_on_tpu_products_make_their_operands() -> None:
    """What comes of two stored values is no value in memory: neither the cast of a weight nor a gated product."""

    def gated(x: Any, gate: Any, up: Any, down: Any) -> Any:
        gate, up, down = (w.astype(jnp.bfloat16) for w in (gate, up, down))
        return (jax.nn.silu(x @ gate) * (x @ up)) @ down

    args = BF16((64, 32)), F32((32, 128)), F32((32, 128)), F32((128, 32))
    graph, found = lived(gated, *args, compiler=XLA_TPU)
    casts = [graph.operands[e][1] for e, eqn in enumerate(graph.eqns) if eqn.traits.contraction]
    gate, up, _ = results(graph, "dot_general")
    (product,) = (graph.operands[e][0] for e in range(len(graph.eqns)) if graph.operands[e][1:] == (casts[2],))
    assert found.absorbed[[*casts, product]].all()
    assert not found.stored[[*casts, product]].any()
    assert found.stored[[gate, up]].all()
    assert found.end[gate] == found.end[up] == len(graph.eqns)  # until the last product has read them
    _, on_gpu = lived(gated, *args)
    assert on_gpu.stored[[*casts, product]].all()
    assert not on_gpu.absorbed.any()


def test_on_tpu_a_state_is_updated_when_its_gradient_is_there() -> None:
    def step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            h = x
            for w in weights:
                h = jnp.tanh(h @ w)
            return jnp.sum(h @ weights[0].T)

        value, gradient = jax.value_and_grad(loss)(weights)
        return [w - 0.1 * g for w, g in zip(weights, gradient, strict=True)], value

    graph, found = lived(step, [F32((16, 16))] * 4, F32((64, 16)), compiler=XLA_TPU)
    made_by, products = graph.producers, [e for e, eqn in enumerate(graph.eqns) if eqn.traits.contraction]
    updates = [v for v in graph.outputs if graph.avals[v].ndim]
    for v in updates:
        begin = int(found.start[v])
        assert begin < made_by[v][0]
        assert begin in products or graph.eqns[begin].primitive in ("add_any", "transpose")


def test_on_tpu_what_the_loss_reads_lives_until_the_end() -> None:
    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            scores = x @ w
            return jnp.sum(jnp.exp(scores))

        value, gradient = jax.value_and_grad(loss)(w)
        h = gradient
        for _ in range(3):
            h = h @ gradient.T @ gradient
        return h, value

    graph, found = lived(step, F32((16, 16)), F32((64, 16)), compiler=XLA_TPU)
    _, on_gpu = lived(step, F32((16, 16)), F32((64, 16)))
    scores = results(graph, "dot_general")[0]
    assert found.end[scores] == len(graph.eqns)
    assert on_gpu.end[scores] < len(graph.eqns)


def test_on_tpu_scores_that_are_split_along_the_vocabulary_die_before_the_backward_pass() -> None:
    """The loss communicates then, and is computed at once: so libtpu 0.0.52 does with llama3-8b as planned for v5e:4x4.

    Its `dp_megatron` and `fsdp_megatron` need 0.97 to 1.00 of the predicted peak so (docs/verification.md), 0.93 to
    0.96 with scores until the end (the same at 8ddab20).
    """
    rows, vocabulary = 64, 32

    def step(w: Any, x: Any, labels: Any) -> Any:
        def loss(w: Any) -> Any:
            scores = jax.nn.log_softmax((x @ w).astype(jnp.float32))
            return -jnp.mean(jnp.take_along_axis(scores, labels[:, None], axis=-1))

        value, gradient = jax.value_and_grad(loss)(w)
        for _ in range(3):
            gradient = gradient @ (gradient.T @ gradient)
        return gradient, value

    args = BF16((16, vocabulary)), BF16((rows, 16)), jax.ShapeDtypeStruct((rows,), jnp.int32)
    graph, found = lived(step, *args, compiler=XLA_TPU)
    scores = results(graph, "dot_general")[0]
    assert found.across[scores] == {1}
    assert found.soon[scores] < found.end[scores] == len(graph.eqns)
    program = Program(fn=step, args=args, names=("w", "x", "labels"))
    setting, _ = space_of(program, mesh={"x": 4}, hardware="tpu-v5e:2x2", compiler=XLA_TPU)
    late = [u for u in setting.decisions.usages if (u.start, u.end) == (found.soon[scores], found.end[scores])]
    assert late
    for use in late:
        codes = layout_codes(setting.decisions.nodes[use.node])
        dims = decode(codes, 2, 1)[:, 0]
        np.testing.assert_array_equal(use.nbytes > 0, (dims == 0) | (dims == WHOLE))


def test_on_tpu_stacked_weights_are_cast_before_the_loops_that_slice_them() -> None:
    def step(stack: Any, x: Any) -> Any:
        def one(h: Any, w: Any) -> Any:
            return jnp.tanh(h @ w["cast"].astype(jnp.bfloat16) + w["read"].astype(jnp.bfloat16) + w["as it is"]), None

        return jax.grad(lambda stack: jnp.sum(jax.lax.scan(jax.checkpoint(one), x, stack)[0]))(stack)

    stack = {"cast": F32((4, 8, 8)), "read": F32((4, 8)), "as it is": BF16((4, 8))}
    graph = build(jax.make_jaxpr(step)(stack, BF16((16, 8))), "cpu")
    names = dict(zip(graph.inputs, sorted(stack), strict=False))
    found = {names[v]: told for v, told in cast_ahead(graph, products=False).items()}
    assert set(found) == {"cast", "read"}
    inside = [e for e, loop in enumerate(graph.eqn_loop) if loop]
    # Read by the forward loop and by the backward one.
    assert found["cast"] == CastAhead(np.dtype(jnp.bfloat16), inside[0], inside[-1], alone=True)


def test_on_tpu_a_stack_is_cast_ahead_under_another_name_and_through_loops() -> None:
    """Not what is read whole, too, nor what a loop casts without taking slices of it."""

    def step(stack: Any, other: Any, whole: Any, x: Any) -> Any:
        def layer(h: Any, w: Any) -> Any:
            return jnp.tanh(h @ w.astype(jnp.bfloat16)), None

        def trip(h: Any, _: Any) -> Any:
            h, _ = jax.lax.scan(layer, h, turned)
            return h @ whole.astype(jnp.bfloat16), None

        turned = stack.reshape(2, 4, 8, 8)[1].swapaxes(1, 2)
        read = jax.lax.scan(layer, x, other)[0]
        return jax.lax.scan(trip, read, None, length=3)[0], jnp.sum(other)

    graph = build(jax.make_jaxpr(step)(F32((8, 8, 8)), F32((4, 8, 8)), F32((8, 8)), BF16((16, 8))), "cpu")
    found = cast_ahead(graph, products=False)
    turned = graph.results[next(e for e, eqn in enumerate(graph.eqns) if eqn.primitive == "transpose")][0]
    assert found[turned].alone
    assert not found[graph.inputs[1]].alone
    assert graph.inputs[2] not in found


def test_on_tpu_products_narrow_their_operands_unless_they_are_asked_for_more() -> None:
    """Also in loops, where they take slices; not rows that are looked up, nor what is multiplied in another dtype."""

    def step(w: Any) -> Any:
        def layer(h: Any, stacked: Any) -> Any:
            return jnp.tanh(h @ stacked) @ w["constant"], None

        h = (
            w["looked up"][jnp.arange(8)] @ w["looked up"]
            + w["reshaped"].reshape(8, 8) @ w["read, too"]
            + w["read, too"]
        )
        h = jax.lax.scan(layer, h + w["bf16"].astype(jnp.float32) @ w["alone"], w["stack"])[0]
        return jnp.dot(h, w["exact"], precision="highest")

    shapes = {"stack": (4, 8, 8), "reshaped": (4, 2, 8)}
    names = ("alone", "bf16", "constant", "exact", "looked up", "read, too", "reshaped", "stack")
    w = {name: (BF16 if name == "bf16" else F32)(shapes.get(name, (8, 8))) for name in names}
    graph = build(jax.make_jaxpr(step)(w), "cpu")
    name = dict(zip(graph.inputs, names, strict=True))
    found = {name[v]: cast.alone for v, cast in multiplied(graph).items() if v in name}
    assert found == {"alone": True, "constant": True, "read, too": False, "reshaped": True, "stack": True}
    ahead = {name[v]: told.dtype for v, told in cast_ahead(graph, products=True).items() if v in name}
    assert ahead == {"stack": jnp.bfloat16}


def test_on_tpu_what_products_take_lies_in_memory_as_they_cast_it() -> None:
    """Gathered weights, and the result of one product that only another one takes; not inputs and results."""

    def kinds(precision: str | None) -> dict[str, int]:
        dot = partial(jnp.dot, precision=precision)
        plan = autoshard.plan(
            lambda x, a, b: dot(dot(x, a), b),
            F32((16_384, 2048)),
            F32((2048, 2048)),
            F32((2048, 2048)),
            mesh={"x": 8},
            hardware="tpu-v5e:2x4",
            in_shardings=(P("x"), P("x"), P("x")),
            out_shardings=P("x"),
        )
        return dict(plan.record.memory.kinds)

    cast, whole = kinds(None), kinds("highest")
    assert whole["copies"] == 2 * 4 * 2048 * 2048
    assert whole["activations"] == 4 * 2048 * 2048
    assert cast == {**whole, "copies": whole["copies"] // 2, "activations": whole["activations"] // 2}


@pytest.mark.parametrize(("axis", "taken", "compared"), [(1, 1, True), (0, 1, True), (1, 2, False), (None, 8, False)])
def test_on_tpu_one_of_each_row_is_taken_back_without_a_scatter(
    axis: int | None, taken: int, *, compared: bool
) -> None:
    """The gradient of the labels' scores compares positions; that of several of a row, or of a vector, does not."""

    def gradient(scores: Any, labels: Any) -> Any:
        if axis is None:
            return jax.grad(lambda s: jnp.sum(s[0][labels[0]]))(scores)
        return jax.grad(lambda s: jnp.sum(jnp.take_along_axis(s, labels, axis=axis)))(scores)

    labels = jax.ShapeDtypeStruct((taken, 128) if axis == 0 else (64, taken), jnp.int32)
    graph = build(jax.make_jaxpr(gradient)(F32((64, 128)), labels), "cpu")
    scatter = next(eqn for eqn in graph.eqns if eqn.primitive == "scatter-add")
    assert fusible(scatter, pointwise=False, compiler=XLA_TPU) == compared
    assert not fusible(scatter, pointwise=False, compiler=XLA_GPU)


def test_what_costs_much_is_computed_once_for_all_fusions_that_read_it() -> None:
    """The tanh of a gate, which the backward pass reads, too; an exponential is computed again."""

    def gated(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, w: jnp.sum((lambda h: h * function(h))(x @ w) @ w.T)

    for name, function, stored in (("tanh", jnp.tanh, True), ("exp", jnp.exp, False)):
        graph, found = lived(jax.value_and_grad(gated(function)), F32((64, 16)), F32((16, 32)))
        assert found.stored[results(graph, name)].all() == stored
        graph, found = lived(gated(function), F32((64, 16)), F32((16, 32)))  # read by one fusion alone
        assert not found.stored[results(graph, name)].any()


def test_a_softmax_is_written_beside_the_scores_unless_its_rows_are_long() -> None:
    """One kernel reads a row twice; of a vocabulary's rows one kernel reduces and another writes."""
    for columns, in_place in ((64, False), (65_536, True)):
        graph, found = lived(lambda x, w: jax.nn.softmax(x @ w) @ w.T, F32((64, 16)), F32((16, columns)))
        scores, last = results(graph, "dot_general")
        softmax = graph.operands[graph.producers[last][0]][0]
        assert found.stored[softmax]
        assert (found.end[scores] <= found.start[softmax]) == in_place


def test_a_fusion_writes_beside_what_it_reads_elsewhere_than_where_it_writes() -> None:
    """What is cut and padded again has as many elements, but not the same ones in the same places."""

    def cut(x: Any, w: Any) -> Any:
        return jnp.pad(jnp.square((x @ w)[:-1]), ((0, 1), (0, 0))) @ w.T

    def turned(x: Any, w: Any) -> Any:
        return (jnp.square(x @ w) * 2)[::-1] @ w.T

    for program in (cut, turned):
        graph, found = lived(program, F32((64, 16)), F32((16, 32)))
        product, last = results(graph, "dot_general")
        taken = graph.operands[graph.producers[last][0]][0]
        assert found.stored[taken]
        assert found.end[product] == found.start[taken] + 1


def labels_score(scores: Any, labels: Any) -> Any:
    """A loss that reads all scores, and one of each row."""
    return jnp.sum(jnp.sin(scores)) - jnp.sum(jnp.take_along_axis(scores, labels, axis=1))


def test_what_is_added_to_scattered_elements_is_scattered_onto() -> None:
    """The other term has the memory of the sum; neither the zeros nor what is scattered onto them has any."""

    def gradient(x: Any, w: Any, labels: Any) -> Any:
        return jax.grad(labels_score)((x @ w).astype(jnp.float32), labels).astype(jnp.bfloat16) @ w.T

    args = BF16((64, 16)), BF16((16, 32)), jax.ShapeDtypeStruct((64, 1), jnp.int32)
    graph, found = lived(gradient, *args)
    (term,) = found.scattered
    (total,), (part,) = graph.results[term.addition], graph.results[term.scatter]
    assert found.stored[term.onto]
    assert found.named[total]
    assert not found.stored[[total, part, graph.operands[term.scatter][0]]].any()
    narrow = graph.operands[graph.producers[results(graph, "dot_general")[-1]][0]][0]
    assert found.stored[narrow]
    assert found.end[term.onto] == found.start[narrow] + 1  # as long as the sum is read


def test_what_is_scattered_and_read_twice_or_returned_is_a_value_of_its_own() -> None:
    """The gradient of log_softmax sums what is scattered over each row, and adds it."""

    def twice(x: Any, labels: Any) -> Any:
        def loss(scores: Any) -> Any:
            return jnp.sum(jnp.take_along_axis(jax.nn.log_softmax(scores), labels, axis=1))

        return jax.grad(loss)(jnp.tanh(x)) * 2

    labels = jax.ShapeDtypeStruct((64, 1), jnp.int32)
    for program in (twice, jax.grad(labels_score)):
        graph, found = lived(program, F32((64, 32)), labels)
        assert found.scattered == ()
        assert found.stored[results(graph, "scatter-add")].all()


def test_a_gather_makes_the_elements_that_it_takes() -> None:
    """On GPU the cast of the scores is written for nobody; on TPU it is, for the gather."""

    def taken(x: Any, w: Any, labels: Any) -> Any:
        return jnp.take_along_axis((x @ w).astype(jnp.float32), labels, axis=1)

    args = BF16((64, 16)), BF16((16, 32)), jax.ShapeDtypeStruct((64, 1), jnp.int32)
    for compiler, written in ((XLA_GPU, False), (XLA_TPU, True)):
        graph, found = lived(taken, *args, compiler=compiler)
        (product,), (gathered,) = results(graph, "dot_general"), results(graph, "gather")
        cast = graph.operands[graph.producers[gathered][0]][0]
        assert graph.avals[cast].itemsize == 4
        assert not found.stored[cast]
        assert (cast in {scores.value for scores in found.gathered.values() if scores.lie}) == written
        assert found.end[product] == graph.producers[gathered][0] + 1


def test_what_several_keys_draw_is_not_stored() -> None:
    """Under `vmap` every row has a key of its own; all that is kept for the backward pass is the keys."""

    def step(x: Any, w: Any, keys: Any) -> Any:
        def loss(w: Any) -> Any:
            kept = jax.vmap(lambda key, row: jnp.where(jax.random.bernoulli(key, 0.9, row.shape), row, 0))(keys, x @ w)
            return jnp.sum(jnp.square(kept @ w.T))

        return jax.grad(loss)(w)

    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 64))
    for compiler in (XLA_GPU, XLA_TPU):
        graph, found = lived(step, F32((64, 16)), F32((16, 32)), keys, compiler=compiler)
        assert not found.stored[results(graph, "random_bits")].any()


@pytest.mark.parametrize("biased", [False, True])
def test_on_tpu_a_gradient_is_written_before_it_is_padded_for_a_product(*, biased: bool) -> None:
    """Of logits but the last; as products cast it, unless it is also summed for the gradient of a bias."""

    def step(w: Any, b: Any, x: Any) -> Any:
        return jax.grad(lambda w, b: jnp.sum(jnp.sin((x @ w + b)[:-1]) ** 3), (0, 1) if biased else 0)(w, b)

    for compiler, written in ((XLA_GPU, False), (XLA_TPU, True)):
        graph, found = lived(step, F32((16, 32)), F32((32,)), F32((64, 16)), compiler=compiler)
        (pad,) = (e for e, eqn in enumerate(graph.eqns) if eqn.primitive == "pad")
        gradient = graph.operands[pad][0]
        assert bool(found.stored[gradient]) == written
        assert multiplied(graph)[gradient].alone == (not biased)


@pytest.mark.parametrize("compiler", [XLA_GPU, XLA_TPU])
def test_what_is_placed_and_what_is_spaced_lies_in_memory_on_tpu(compiler: CompilerModel) -> None:
    """Halves before they are put together; every other row, in front and behind, but of what is the same in all."""

    def program(x: Any, y: Any) -> Any:
        turned = jnp.concatenate([-x[..., 4:], x[..., :4]], axis=-1) * 2
        return (
            jnp.tanh(turned)
            + jnp.repeat(jnp.cos(x[::2] + 1), 2, axis=0) * jnp.broadcast_to(jnp.sin(y), (16, 8))[::2][:1]
        )

    graph, found = lived(program, F32((16, 8)), F32((8,)), compiler=compiler)
    tpu = compiler is XLA_TPU
    (half,), (whole,) = results(graph, "neg"), results(graph, "concatenate")
    assert bool(found.stored[half]) == tpu
    assert not found.stored[whole]
    strided = [e for e, eqn in enumerate(graph.eqns) if eqn.primitive == "slice" and eqn.params["strides"]]
    rows, repeated = (graph.results[e][0] for e in strided)
    assert bool(found.stored[rows]) == tpu
    assert not found.stored[repeated]


def test_what_comes_from_outside_of_a_branch_keeps_its_place() -> None:
    """One branch makes its result, where that lies; the other passes on what is read behind, too."""

    def program(x: Any, y: Any, w: Any) -> Any:
        h = jnp.tanh(x) @ w
        kept = jax.lax.cond(y.sum() > 0, lambda: jnp.sin(h) @ w, lambda: h)
        return jnp.cos(kept @ w) @ h.T

    graph, found = lived(program, F32((8, 8)), F32((8,)), F32((8, 8)), compiler=XLA_GPU)
    outside, inside, *_ = results(graph, "dot_general")
    (joined,) = results(graph, "branch_join")
    assert (bool(found.stored[outside]), bool(found.stored[inside]), bool(found.stored[joined])) == (True, False, True)
    assert found.named[inside]
    assert found.start[joined] == found.start[inside]


def test_halves_of_rows_that_fill_lanes_lie_in_whole_lanes() -> None:
    part, whole = (build(jax.make_jaxpr(lambda x: x)(F32(s)), "cpu").avals[0] for s in ((16, 64), (16, 128)))
    assert part_in_lanes(part, whole) == 2 * part.nbytes
    assert part_in_lanes(part, part) == part.nbytes
    assert part_in_lanes(whole, whole) == whole.nbytes


def test_scores_that_are_gathered_from() -> None:
    """Which lie in memory for a gather alone, and who writes them."""

    def head(scored: Any, w: Any, b: Any, x: Any, labels: Any) -> Any:
        def loss(w: Any, b: Any) -> Any:
            scores = scored(x @ w, b)
            return jnp.sum(jnp.take_along_axis(scores, labels[: len(scores)], axis=1))

        return jax.value_and_grad(loss, (0, 1))(w, b)

    def of(scored: Any, shape: Any) -> tuple[bool, bool, bool, bool]:
        args = shape((16, 32)), shape((32,)), shape((64, 16)), jax.ShapeDtypeStruct((64, 1), jnp.int32)
        _, found = lived(partial(head, scored), *args, compiler=XLA_TPU)
        (scores,) = found.gathered.values()
        return scores.lie, scores.apart, scores.beside is not None, scores.waits

    def wide(x: Any) -> Any:
        return x.astype(jnp.float32)

    assert of(lambda y, b: wide(y) * 1, BF16) == (True, True, False, False)
    assert of(lambda y, b: wide(y), BF16) == (True, False, False, False)
    assert of(lambda y, b: wide(y)[:-1], BF16) == (True, False, False, False)
    assert of(lambda y, b: jax.nn.log_softmax(wide(y)[:-1]), BF16) == (True, True, True, False)
    assert of(lambda y, b: y + b, F32)[0] is False
    assert of(lambda y, b: y + jnp.broadcast_to(b, y.shape), F32)[0] is False
    assert of(lambda y, b: jax.nn.log_softmax(wide(y)), BF16) == (True, True, False, True)
    assert of(lambda y, b: jax.nn.log_softmax(wide(y + b)), BF16) == (True, True, True, False)


def test_a_fusion_writes_where_what_it_reads_for_the_last_time_lies() -> None:
    """On GPU; not where the types differ, nor what is read later on."""

    def squared(x: Any, w: Any) -> Any:
        return jnp.square(x @ w) @ w.T

    def later(x: Any, w: Any) -> Any:
        h = x @ w
        return jnp.square(h) @ w.T, h

    def narrowed(x: Any, w: Any) -> Any:
        return (x @ w).astype(jnp.bfloat16) @ w.T.astype(jnp.bfloat16)

    for program, compiler, in_place in (
        (squared, XLA_GPU, True),
        (later, XLA_GPU, False),
        (narrowed, XLA_GPU, False),
        (squared, XLA_TPU, False),
    ):
        graph, found = lived(program, F32((64, 16)), F32((16, 32)), compiler=compiler)
        product = results(graph, "dot_general")[0]
        taken = graph.operands[next(e for e, eqn in enumerate(graph.eqns) if e and eqn.primitive == "dot_general")][0]
        assert bool(found.stored[taken] and found.end[product] <= found.start[taken]) == in_place
