"""What XLA:TPU does in the kernels of products besides multiplying, and how long plans say that it takes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.backends import compile
from tests.installed import needs_tpu_compiler

F32 = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
BF16 = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
ROWS, WIDTH, WIDE = 131_072, 1024, 4096
ROWS_SPLIT, WHOLE = P("x"), P()
X, W, UP, DOWN = BF16((ROWS, WIDTH)), BF16((WIDTH, WIDTH)), BF16((WIDTH, WIDE)), BF16((WIDE, WIDTH))
HIDDEN = BF16((ROWS, WIDE))


def biased(x: Any, w: Any, b: Any) -> Any:
    return jax.nn.gelu(x @ w + b)


def summed_over_rows(x: Any, w: Any) -> Any:
    h = jax.nn.gelu(x @ w)
    return h, jnp.sum(h.astype(jnp.float32), 0)


def summed(x: Any, w: Any, y: Any) -> Any:
    return jnp.sum((x @ w - y).astype(jnp.float32) ** 2)


def read_twice(x: Any, w: Any) -> Any:
    h = x @ w
    return jax.nn.gelu(h), h


def gated(x: Any, a: Any, b: Any, c: Any) -> Any:
    """Both products' readers are in the kernel of the later one, or make an operand of the last."""
    return (jax.nn.silu(x @ a) * (x @ b)) @ c


def differentiated(x: Any, w: Any, y: Any) -> Any:
    return jax.grad(lambda x, w: jnp.sum(jax.nn.gelu(x @ w) * y), argnums=(0, 1))(x, w)


def added(x: Any, a: Any, b: Any) -> Any:
    return jnp.tanh(x @ a + jnp.tanh(x) @ b) + x


def updated(x: Any, y: Any, w: Any, m: Any) -> Any:
    m = 0.9 * m + (x.T @ y).astype(jnp.float32)
    return w - m / (jnp.abs(m) + 1), m


def attended(q: Any, k: Any, v: Any) -> Any:
    """The maxima of rows are found in the first kernel, their sums in one apart, and the last divides."""
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k).astype(jnp.float32)
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores).astype(jnp.bfloat16), v)


def scored(w: Any, b: Any, x: Any) -> Any:
    """The bias's gradient has a kernel of its own: the weight's makes the scores' gradient, and reads them as well."""

    def loss(w: Any, b: Any) -> Any:
        scores = (x @ w).astype(jnp.float32) + b
        return jnp.mean(jax.nn.logsumexp(scores, -1))

    return jax.grad(loss, (0, 1))(w, b)


@needs_tpu_compiler
@pytest.mark.parametrize(
    ("program", "arguments", "come", "leave"),
    [
        (biased, (X, UP, BF16((WIDE,))), (ROWS_SPLIT, WHOLE, WHOLE), ROWS_SPLIT),
        (summed_over_rows, (X, UP), (ROWS_SPLIT, WHOLE), (ROWS_SPLIT, WHOLE)),
        (summed, (X, UP, HIDDEN), (ROWS_SPLIT, WHOLE, ROWS_SPLIT), WHOLE),
        (read_twice, (X, UP), (ROWS_SPLIT, WHOLE), (ROWS_SPLIT, ROWS_SPLIT)),
        (gated, (X, UP, UP, DOWN), (ROWS_SPLIT, WHOLE, WHOLE, WHOLE), ROWS_SPLIT),
        (differentiated, (X, UP, HIDDEN), (ROWS_SPLIT, WHOLE, ROWS_SPLIT), (ROWS_SPLIT, WHOLE)),
        (added, (X, W, W), (ROWS_SPLIT, WHOLE, WHOLE), ROWS_SPLIT),
        (
            updated,
            (X, HIDDEN, F32((WIDTH, WIDE)), F32((WIDTH, WIDE))),
            (P(None, "x"), WHOLE, P("x"), P("x")),
            (P("x"), P("x")),
        ),
        (scored, (UP, F32((WIDE,)), X), (WHOLE, WHOLE, ROWS_SPLIT), (WHOLE, WHOLE)),
        (attended, (BF16((8, 64, 2048, 128)),) * 3, (ROWS_SPLIT,) * 3, ROWS_SPLIT),
    ],
)
def test_what_follows_a_product_takes_no_time_of_its_own(
    program: Callable[..., Any], arguments: Any, come: Any, leave: Any
) -> None:
    """The schedule's kernels take as long as planned; all but one as long as their multiplications or their bytes."""
    plan = autoshard.plan(
        program, *arguments, mesh={"x": 8}, hardware="tpu-v5e:2x4", in_shardings=come, out_shardings=leave
    )
    compute = plan.verify(compiler_options=compile.TPU_PLAIN_OPTIONS).compute
    assert compute is not None
    assert compute.predicted_s == pytest.approx(compute.compiled_s, rel=0.03)


@needs_tpu_compiler
def test_what_follows_a_product_that_moves_needs_a_kernel_of_its_own() -> None:
    """A sum that is scattered is squashed behind; what is gathered moves as it lies, and is squashed by its product."""

    def block(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.tanh(jnp.tanh(x) @ up) @ down)

    plan = autoshard.plan(
        block,
        BF16((16_384, 2048)),
        BF16((2048, 65_536)),
        BF16((65_536, 2048)),
        mesh={"x": 8},
        hardware="tpu-v5e:2x4",
        in_shardings=(P("x"), P(None, "x"), P("x")),
        out_shardings=P("x"),
    )
    verified = plan.verify(compiler_options=compile.TPU_PLAIN_OPTIONS)
    assert verified.compute is not None
    assert {row.kind for row in verified.rows} == {"all-gather", "reduce-scatter"}
    assert [row.kind for row in plan.record.collectives if row.work_s] == ["reduce-scatter"]
    assert verified.compute.predicted_s == pytest.approx(verified.compute.compiled_s, rel=0.1)


@pytest.mark.slow
@needs_tpu_compiler
def test_weights_are_cast_before_they_are_gathered_also_where_they_are_gathered_twice() -> None:
    """Whole weights in float32 would move once, in as many bytes, if they were not cast first."""
    layers = 8

    def step(weights: Any, x: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            h = x
            for w in weights:
                z = h @ w.astype(jnp.bfloat16)
                for _ in range(6):
                    z = jnp.sin(z) * jnp.cos(z) + z
                h = h + z
            return jnp.mean(h.astype(jnp.float32) ** 2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    weights = [F32((2048, 2048))] * layers
    plan = autoshard.plan(
        step,
        weights,
        BF16((65_536, 2048)),
        mesh={"x": 8},
        hardware="tpu-v5e:2x4",
        in_shardings=([P("x")] * layers, P("x")),
        out_shardings=[P("x")] * layers,
        donate_argnums=0,
    )
    rows = {row.kind: row for row in plan.verify(compiler_options=compile.TPU_PLAIN_OPTIONS).rows}
    once = 2 * layers * 2048 * 2048
    assert rows["all-gather"].predicted_bytes > once
    assert rows["all-gather"].predicted_bytes == rows["all-gather"].emitted_bytes
    kernels_s = [row.work_s for row in plan.record.collectives if row.kind == "all-gather"]
    assert sum(kernels_s) == pytest.approx(layers * max(kernels_s))  # each is cast once, however often it is gathered


def test_what_is_handed_through_is_planned() -> None:
    """An input that nothing reads, and one that is cast to a narrower type alone, leave as they came."""

    def through(x: jax.Array, y: jax.Array, z: jax.Array) -> Any:
        return x, y.astype(jnp.bfloat16), y, z.astype(jnp.bfloat16) @ z.astype(jnp.bfloat16)

    wide = F32((64, 64))
    assert autoshard.plan(through, wide, wide, wide, mesh={"x": 4}, hardware="tpu-v5e:2x2").cost >= 0
