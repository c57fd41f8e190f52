"""What XLA:GPU stores, repeats, overwrites and gathers again; and what every compiler overwrites in a loop."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.backends.known_compilers import named
from autoshard.backends.model import CompilerName
from autoshard.problem import bill
from benchmarks.verification import Case, subject
from benchmarks.zoo.subjects import SUBJECTS
from benchmarks.zoo_steps import planned
from tests.installed import GPU, TPU, needs_gpu_compiler, needs_tpu_compiler

F32 = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
BF16 = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
LAYERS, WIDTH, HIDDEN, ROWS = 8, 2048, 8192, 6144
COLUMNS = P(None, "data")


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
    return h + jax.nn.silu(h @ up) @ down


def linear_block(layer: Any, h: Any) -> Any:
    """Without a cast of the weights, and nothing that XLA:GPU's products may compute of their operands."""
    return h + h @ layer["up"] @ layer["down"]


def turned_block(layer: Any, h: Any) -> Any:
    """The same, of weights as other frameworks keep them."""
    return h + h @ layer["down"].T @ layer["up"].T


def constrained_block(layer: Any, h: Any) -> Any:
    """The same, of weights that the program gathers itself."""
    up, down = (jax.lax.with_sharding_constraint(layer[k], P()) for k in ("up", "down"))
    return h + h @ up @ down


PARAMS = [{"up": F32((WIDTH, HIDDEN)), "down": F32((HIDDEN, WIDTH))} for _ in range(LAYERS)]


def fsdp(
    form: Callable[..., Any], memory: int | None = None, dtype: Any = jnp.bfloat16, weight: P = COLUMNS
) -> tuple[Any, int]:
    """The plan of FSDP (state and batch split over data), and the peak of its compiled program."""
    plan = autoshard.plan(
        partial(mlp_step, form),
        PARAMS,
        jax.ShapeDtypeStruct((ROWS, WIDTH), dtype),
        mesh={"data": 8},
        hardware="h100:1x8",
        donate_argnums=0,
        pins={"params.*.*": weight, "x": P("data")},
        memory=memory,
        remat="written",
    )
    compiled = plan.verify("gpu").memory.compiled
    assert compiled is not None
    return plan, compiled.peak


def gathers(plan: autoshard.SolvedPlan) -> int:
    return sum(c.trips for c in plan.record.collectives if c.kind == "all-gather")


def guarded_step(state: Any, x: Any) -> Any:
    """An update that is left out where a gradient is not finite: two matrices of state, and a third for a while."""
    w, momentum = state
    loss, gradient = jax.value_and_grad(lambda w: jnp.square(jnp.tanh(x @ w)).sum())(w)

    def update() -> Any:
        new = 0.9 * momentum + gradient
        return w - 0.1 * new, new

    return jax.lax.cond(jnp.isfinite(gradient).all(), update, lambda: (w, momentum)), loss


def branched(x: Any, y: Any, w: Any) -> Any:
    """One matrix from either branch, beside the two that they read."""
    h = jax.lax.cond(w.sum() > 0, lambda: jnp.tanh(x) + y, lambda: jnp.cos(y) * 2)
    return h.sum(), (h * x).sum(axis=0)


@pytest.mark.parametrize(
    ("hardware", "compiler"),
    [
        pytest.param("h100:1x1", "gpu", marks=GPU),
        pytest.param("tpu-v5e:1x1", "tpu", marks=TPU),
        ("cpu:1", "cpu"),
    ],
)
@pytest.mark.parametrize("branching", [guarded_step, branched])
def test_a_branch_writes_where_its_result_lies(
    branching: Callable[..., Any], hardware: str, compiler: CompilerName
) -> None:
    """Where the state lay that it replaces, if that is donated: not by XLA:GPU before 0.11."""
    size = 8192 if compiler == "tpu" else 4096  # a matrix is larger than a TPU's vector memory
    square, donated = F32((size, size)), branching is guarded_step
    args = ((square, square), F32((256, size))) if donated else (square, square, F32((size,)))
    plan = autoshard.plan(
        branching, *args, mesh={"data": 1}, hardware=hardware, for_grad=False, donate_argnums=(0,) if donated else ()
    )
    memory = plan.verify(compiler).memory
    assert memory.compiled is not None
    assert memory.predicted.peak == pytest.approx(memory.compiled.peak, rel=0.06)
    matrices = 3 + 2 * (donated and not named(compiler).joins_in_place)
    assert memory.compiled.peak == pytest.approx(matrices * 4 * size**2, rel=0.11)


@needs_gpu_compiler
@pytest.mark.parametrize(
    ("form", "weight"), [(linear_block, COLUMNS), (turned_block, P("data")), (constrained_block, COLUMNS)]
)
def test_what_is_gathered_is_there_until_it_is_multiplied_not_until_its_update(
    form: Callable[..., Any], weight: P
) -> None:
    """Weights that are multiplied as they are, or under another name: of a cast, that would be gathered."""
    plan, peak = fsdp(form, dtype=jnp.float32, weight=weight)
    assert peak == pytest.approx(plan.record.memory.peak_bytes, rel=0.03)


@pytest.mark.slow
@needs_gpu_compiler
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
    assert bill.flops(again.planned.assignment) == bill.flops(plain.planned.assignment)
    remat, third = fsdp(jax.checkpoint(block), memory=short)
    assert bill.flops(remat.planned.assignment) > bill.flops(plain.planned.assignment)
    assert third <= 1.1 * short


@needs_gpu_compiler
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


@needs_gpu_compiler
@pytest.mark.parametrize("activation", [jax.nn.gelu, jax.nn.silu, jax.nn.mish])
def test_the_gpu_compiler_stores_of_an_activation_what_it_is_said_to(activation: Callable[..., Any]) -> None:
    """Without `tanh` and `log1p` a quarter to a third would be missing of gelu and mish."""
    predicted, compiled = peaks(lambda x, _: activation(x))
    assert compiled == pytest.approx(predicted, rel=0.05)


# What multiplies its argument in an activation: its value is read by the backward pass, too.
ONCE = {
    "atan2": lambda x: jnp.arctan2(x, x * x + 1),
    "cos": jnp.cos,
    "erf_inv": jax.lax.erf_inv,
    "erfc": jax.lax.erfc,
    "log1p": lambda x: jnp.log1p(x * x),
    "pow": lambda x: jnp.power(jnp.abs(x) + 1, 1.3),
    "sin": jnp.sin,
    "tanh": jnp.tanh,
}
AGAIN = {
    "cbrt": jnp.cbrt,
    "erf": jax.lax.erf,
    "exp": jnp.exp,
    "exp2": jax.lax.exp2,
    "expm1": jnp.expm1,
    "log": lambda x: jnp.log(x * x + 1),
    "logistic": jax.nn.sigmoid,
    "rsqrt": lambda x: jax.lax.rsqrt(x * x + 1),
    "tan": jnp.tan,
}


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize("function", [*ONCE.values(), *AGAIN.values()], ids=[*ONCE, *AGAIN])
def test_the_gpu_compiler_repeats_what_it_is_said_to(function: Callable[..., Any]) -> None:
    """One value of each hidden unit more or less is an eighth of the peak, at least."""
    predicted, compiled = peaks(lambda x, _: x * function(x))
    assert compiled == pytest.approx(predicted, rel=0.06)


@needs_gpu_compiler
@pytest.mark.parametrize("rows", [(65_536,), (64, 1024)], ids=str)
@pytest.mark.parametrize("of", ["product", "biased", pytest.param("scaled", marks=pytest.mark.slow)])
def test_what_a_gelu_in_bfloat16_takes_is_stored(of: str, rows: tuple[int, ...]) -> None:
    """Where the rows of the matmul are several dimensions: a fifth of the peak."""

    def activation(x: Any, vector: Any) -> Any:
        return jax.nn.gelu({"product": x, "biased": x + vector, "scaled": x * vector}[of], approximate=False)

    predicted, compiled = peaks(activation, rows)
    assert compiled == pytest.approx(predicted, rel=0.03)


def peaks(activation: Callable[..., Any], rows: tuple[int, ...] = (65_536,)) -> tuple[int, int]:
    """Predicted and compiled peak of four perceptrons with many tokens."""

    def form(layer: Any, h: Any) -> Any:
        up, down, vector = (layer[k].astype(jnp.bfloat16) for k in ("up", "down", "vector"))
        return h + activation(h @ up, vector) @ down

    narrow = [{"up": F32((512, 2048)), "down": F32((2048, 512)), "vector": F32((2048,))}] * 4
    plan = autoshard.plan(
        partial(mlp_step, form), narrow, BF16((*rows, 512)), mesh={"data": 8}, hardware="h100:1x8", donate_argnums=0
    )
    memory = plan.verify("gpu").memory
    assert memory.compiled is not None
    return memory.predicted.peak, memory.compiled.peak


@needs_gpu_compiler
def test_the_gpu_compiler_reduces_each_gradient_behind_all_other_contractions() -> None:
    """Whole gradients never lie beside the gathered weights: a quarter too much is predicted if they do."""

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            h = x
            for w in params:
                h = h @ w.astype(jnp.bfloat16)
            return jnp.mean(h.astype(jnp.float32) ** 2)

        value, gradient = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, gradient), value

    wide = [F32((4096, 4096))] * 4
    pins = {"params.*": P("data", None), "x": P("data")}
    common: dict[str, Any] = {"mesh": {"data": 8}, "hardware": "h100:1x8", "donate_argnums": 0, "pins": pins}
    memory = autoshard.plan(step, wide, BF16((8192, 4096)), **common).verify("gpu").memory
    assert memory.compiled is not None
    assert 0.88 <= memory.compiled.peak / memory.predicted.peak <= 1.05


@needs_gpu_compiler
@pytest.mark.parametrize("optimizer", ["sgd", "masked"])
def test_gradients_are_made_last_and_reduced_where_they_are_made_whoever_reads_them(optimizer: str) -> None:
    """A momentum and an update read a gradient that is transposed first: its partial sums do not wait for them.

    Nor does the head's gradient, the largest, lie beside what the first layer's is made of: the product on the way to
    the table's gradient runs before all gradients of weights.
    """
    plan = planned(next(s for s in SUBJECTS if s.name == f"optax-{optimizer}"), "h100:4x8")
    memory = plan.verify("gpu").memory
    assert memory.compiled is not None
    assert memory.compiled.peak == pytest.approx(memory.predicted.peak, rel=0.08)


@needs_gpu_compiler
@pytest.mark.parametrize(
    ("model", "fields"),
    [
        pytest.param("llama3-8b", {"layers": 4, "batch": 8, "sequence": 512, "remat": "full"}, marks=pytest.mark.slow),
        ("mlp-8k", {"layers": 4, "batch": 1024}),
    ],
)
def test_the_gpu_compiler_gathers_all_weights_at_once_where_tokens_are_few(model: str, fields: dict[str, Any]) -> None:
    """FSDP by hand: gathers take longer than the forward pass, and sums are finished by whatever name.

    Without the first llama3-8b needs 1.29 of what is predicted; without the second mlp-8k 0.89.
    """
    mesh = (("data", 2), ("model", 4))
    case = Case(group="", model=model, fields=tuple(fields.items()), hardware="h100:1x8", mesh=mesh, layout="fsdp")
    memory = subject(case).verify().memory
    assert memory.compiled is not None
    assert memory.compiled.peak == pytest.approx(memory.predicted.peak, rel=0.07)


def logsumexp_loss(scores: Any, labels: Any) -> Any:
    """As optax has it: its gradient is a softmax, onto which the labels' part is scattered."""
    taken = jnp.take_along_axis(scores, labels[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(scores, axis=-1) - taken)


def log_softmax_loss(scores: Any, labels: Any) -> Any:
    """Its gradient reads the labels' part twice."""
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(scores), labels[..., None], axis=-1))


@needs_gpu_compiler
@pytest.mark.parametrize("loss", [logsumexp_loss, log_softmax_loss])
@pytest.mark.parametrize(("dtype", "cut"), [("float32", True), pytest.param("bfloat16", False, marks=pytest.mark.slow)])
def test_the_gpu_compiler_holds_of_a_large_vocabulary_s_loss_what_it_is_said_to(
    loss: Callable[..., Any], dtype: str, *, cut: bool
) -> None:
    """Scores of [tokens, vocabulary] are nearly all of the peak: one more or less is a third of it, or a half."""

    def step(head: Any, x: Any, labels: Any) -> Any:
        def mean(head: Any) -> Any:
            scores = (x.astype(dtype) @ head.astype(dtype)).astype(jnp.float32)
            return loss(scores[:, :-1], labels[:, 1:]) if cut else loss(scores, labels)

        value, gradient = jax.value_and_grad(mean)(head)
        return head - 1e-3 * gradient, value

    args = F32((256, 50_000)), F32((32, 512, 256)), jax.ShapeDtypeStruct((32, 512), jnp.int32)
    pins = {"head": P(None, None), "x": P("data"), "labels": P("data")}
    plan = autoshard.plan(
        step, *args, mesh={"data": 8}, hardware="h100:1x8", donate_argnums=0, pins=pins, for_grad=False
    )
    memory = plan.verify().memory
    assert memory.compiled is not None
    assert memory.compiled.peak == pytest.approx(memory.predicted.peak, rel=0.05)


@needs_gpu_compiler
@pytest.mark.parametrize(
    ("vocabulary", "model", "rows"),
    [("model", "model", "data"), (None, None, ("data", "model"))],
    ids=["split", "whole"],
)
def test_the_gpu_compiler_holds_what_a_heads_gradient_is_made_of_as_long_as_it_is_said_to(
    vocabulary: str | None, model: str | None, rows: Any
) -> None:
    """Their gradient lies beside a trip of the layers' backward pass unless their vocabulary is split.

    Where it is, plans that hold it there need 1.36 times the compiled peak.
    """

    def step(params: Any, x: Any, labels: Any) -> Any:
        @jax.checkpoint
        def layer(h: Any, w: Any) -> Any:
            return h + jnp.tanh(h @ w["up"]) @ w["down"], None

        def mean(params: Any) -> Any:
            return logsumexp_loss(jax.lax.scan(layer, x, params["layers"])[0] @ params["head"], labels)

        value, gradient = jax.value_and_grad(mean)(params)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, gradient), value

    layers = {"up": F32((2, 512, 32_768)), "down": F32((2, 32_768, 512))}
    args = (
        {"layers": layers, "head": F32((512, 32_768))},
        F32((16_384, 512)),
        jax.ShapeDtypeStruct((16_384,), jnp.int32),
    )
    pins = {
        "params.layers.up": P(None, None, model),
        "params.layers.down": P(None, model),
        "params.head": P(None, vocabulary),
        "x": P(rows),
        "labels": P(rows),
    }
    plan = autoshard.plan(
        step, *args, mesh={"data": 2, "model": 4}, hardware="h100:1x8", donate_argnums=0, pins=pins, remat="written"
    )
    memory = plan.verify().memory
    assert memory.compiled is not None
    assert memory.predicted.peak == pytest.approx(memory.compiled.peak, rel=0.08)


def sums_of_trips(xs: Any, w: Any) -> Any:
    """Two sums over the trips of a loop, each as large as the weight, whose terms no contraction makes."""

    def trip(carry: Any, x: Any) -> Any:
        one, other = carry
        h = jnp.tanh(x @ w)
        return (one + jnp.sin(h[:, None] - x[None, :]), other + jnp.cos(h[None, :] * x[:, None])), None

    zero = jnp.zeros_like(w)
    (one, other), _ = jax.lax.scan(trip, (zero, zero), xs)
    return (one * w).sum() + (other * w).sum(0)


@pytest.mark.parametrize(
    ("hardware", "compiler"),
    [
        pytest.param("h100:1x1", "gpu", marks=GPU),
        pytest.param("tpu-v5e:1x1", "tpu", marks=TPU),
        ("cpu:1", "cpu"),
    ],
)
def test_compilers_add_onto_what_a_loop_carries_where_it_lies(hardware: str, compiler: Any) -> None:
    """The weight and two sums: neither a new sum beside the old one, nor a result beside the last sum."""
    width = 4096
    plan = autoshard.plan(
        sums_of_trips, F32((4, width)), F32((width, width)), mesh={"data": 1}, hardware=hardware, for_grad=False
    )
    memory = plan.verify(compiler).memory
    assert memory.compiled is not None
    assert memory.predicted.peak == pytest.approx(3 * 4 * width**2, rel=0.01)
    assert memory.compiled.peak == pytest.approx(memory.predicted.peak, rel=0.02)


@needs_gpu_compiler
def test_zeros_to_which_a_loop_adds_gradients_lie_there_in_every_trip() -> None:
    """A sum as large as the weight is a quarter of the peak; no decision makes the zeros with which it begins."""
    rows, width = 2048, 4096

    def step(weight: Any, batch: Any) -> Any:
        def loss(weight: Any, x: Any) -> Any:
            return jnp.mean(jnp.square(x @ weight.astype(x.dtype)).astype(jnp.float32))

        def add(total: Any, x: Any) -> Any:
            return total + jax.grad(loss)(weight, x), None

        total, _ = jax.lax.scan(add, jnp.zeros(weight.shape), batch)
        return weight - 0.1 * total

    plan = autoshard.plan(
        step,
        F32((width, width)),
        BF16((4, 8 * rows, width)),
        mesh={"data": 8},
        hardware="h100:1x8",
        donate_argnums=0,
        for_grad=False,
        pins={"weight": P(), "batch": P(None, "data")},
        out_shardings=P(),
    )
    memory = plan.verify("gpu").memory
    assert memory.compiled is not None
    assert 0.85 <= memory.compiled.peak / memory.predicted.peak <= 1.02


@pytest.mark.parametrize(
    ("hardware", "compiler"), [pytest.param("tpu-v5e:2x4", "tpu", marks=TPU), ("cpu:8", "cpu")], ids=["tpu", "cpu"]
)
def test_what_is_gathered_under_another_name_lies_beside_what_it_renames(hardware: str, compiler: Any) -> None:
    """An input's piece, all of it as one row, and the sums of that row: not all of it in the place of its piece."""
    plan = autoshard.plan(
        lambda w: jnp.cumsum(w.reshape(-1)),
        F32((2048, 2048)),
        mesh={"x": 8},
        hardware=hardware,
        in_shardings=P("x"),
        out_shardings=P("x"),
    )
    memory = plan.verify(compiler).memory
    assert memory.compiled is not None
    assert memory.predicted.peak == pytest.approx(memory.compiled.peak, rel=0.1)


@needs_tpu_compiler
def test_a_stack_that_loops_narrow_is_gathered_and_held_as_they_cast_it() -> None:
    """By XLA:TPU, ahead of a loop around the layers: half the bytes of the stack itself."""

    def trips(stack: Any, x: Any) -> Any:
        def layer(h: Any, w: Any) -> Any:
            return jnp.tanh(h @ w.astype(jnp.bfloat16)), None

        return jax.lax.scan(lambda h, _: (jax.lax.scan(layer, h, stack)[0], None), x, length=4)[0]

    plan = autoshard.plan(
        trips,
        F32((8, 4096, 4096)),
        BF16((16_384, 4096)),
        mesh={"x": 8},
        hardware="tpu-v5e:2x4",
        in_shardings=(P(None, "x"), P("x")),
        out_shardings=P("x"),
    )
    checked = plan.verify("tpu")
    (row,) = checked.rows
    assert (row.kind, row.predicted_bytes, row.emitted_bytes) == ("all-gather", *[2 * 8 * 4096**2] * 2)
    assert checked.memory.compiled is not None
    activations = checked.memory.predicted.peak - checked.memory.compiled.peak  # which the compiler has in VMEM
    assert 0 <= activations < 2**27


@needs_gpu_compiler
def test_what_is_updated_where_it_was_given_has_no_second_place() -> None:
    """A cache that is donated, and read by a product behind its update."""

    def program(cache: Any, queries: Any, new: Any, at: Any) -> Any:
        cache = jax.lax.dynamic_update_slice(cache, new, (0, 0, at, 0))
        return cache, jnp.einsum("bhqd,bhtd->bhqt", queries, cache)

    rows, split = BF16((64, 16, 64, 128)), P("x")
    plan = autoshard.plan(
        program,
        BF16((64, 16, 4096, 128)),
        rows,
        rows,
        jax.ShapeDtypeStruct((), jnp.int32),
        mesh={"x": 8},
        hardware="h100:1x8",
        donate_argnums=0,
        in_shardings=(split, split, split, P()),
        out_shardings=split,
    )
    memory = plan.verify("gpu").memory
    assert memory.compiled is not None
    assert memory.predicted.peak == pytest.approx(memory.compiled.peak, rel=0.01)
