"""What XLA:GPU copies of whole arrays before it multiplies parts of them, and what it adds up without a matmul."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.verification.result import Verification
from tests.installed import needs_gpu_compiler

COLUMNS, ROWS, WHOLE = P(None, "m"), P("m"), P()
Layouts = tuple[tuple[P, ...], P]


def of(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def verified(step: Callable[..., Any], args: tuple[Any, ...], layouts: Layouts) -> Verification:
    inputs, outputs = layouts
    plan = autoshard.plan(step, *args, mesh={"m": 8}, hardware="h100:1x8", in_shardings=inputs, out_shardings=outputs)
    return plan.verify("gpu")


def check(found: Verification, *, rel: float = 0.05) -> None:
    """Compute and peak are as the compiler has them."""
    assert found.predicted is not None
    assert found.timeline is not None
    assert found.memory.compiled is not None
    assert found.predicted.compute_s == pytest.approx(found.timeline.compute_s, rel=rel)
    assert found.memory.predicted.peak == pytest.approx(found.memory.compiled.peak, rel=0.05)


def product(x: Any, w: Any) -> Any:
    return x @ w


def of_transposed(x: Any, w: Any) -> Any:
    return x @ w.T


def per_expert(x: Any, w: Any) -> Any:
    return jnp.einsum("bte,bef->btf", x, w)


def tied(i: Any, w: Any) -> Any:
    return jnp.tanh(w[i]) @ w.T


def scanned(x: Any, ws: Any) -> Any:
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]


SQUARE = of(64, 8192), of(8192, 8192)
EXPERTS = of(16, 64, 1024), of(16, 1024, 1024)


@needs_gpu_compiler
@pytest.mark.parametrize(
    ("step", "args", "layouts"),
    [
        pytest.param(product, SQUARE, ((WHOLE, WHOLE), COLUMNS), id="columns"),
        pytest.param(product, SQUARE, ((COLUMNS, WHOLE), WHOLE), id="contracted"),
        pytest.param(of_transposed, SQUARE, ((WHOLE, WHOLE), COLUMNS), id="columns of a transposed one"),
        pytest.param(of_transposed, SQUARE, ((COLUMNS, WHOLE), WHOLE), id="contracted of a transposed one"),
        pytest.param(per_expert, EXPERTS, ((ROWS, WHOLE), ROWS), id="batch"),
        pytest.param(tied, (of(64, dtype=jnp.int32), of(65_536, 1024)), ((WHOLE, WHOLE), COLUMNS), id="tied"),
        pytest.param(scanned, (of(64, 4096), of(8, 4096, 4096)), ((WHOLE, WHOLE), WHOLE), id="stack before a loop"),
    ],
)
def test_a_part_of_a_whole_weight_is_copied_before_a_matmul(
    step: Callable[..., Any], args: tuple[Any, ...], layouts: Layouts
) -> None:
    """Along any dimension: a third to all of the compute that there is besides."""
    check(verified(step, args, layouts))


@needs_gpu_compiler
@pytest.mark.parametrize("take", [jnp.tanh, lambda w: w.astype(jnp.bfloat16)], ids=["computed", "cast"])
def test_of_what_a_kernel_makes_the_part_is_made(take: Callable[[Any], Any]) -> None:
    weight = of(8192, 8192, dtype=jnp.bfloat16 if take is jnp.tanh else jnp.float32)
    check(verified(lambda x, w: x @ take(w), (SQUARE[0], weight), ((WHOLE, WHOLE), COLUMNS)))


@needs_gpu_compiler
@pytest.mark.parametrize(
    ("equation", "shapes", "layouts"),
    [
        pytest.param("oe,ef->of", ((1, 8192), (8192, 8192)), ((WHOLE, WHOLE), COLUMNS), id="cut"),
        pytest.param("oe,ef->of", ((1, 8192), (8192, 8192)), ((COLUMNS, ROWS), WHOLE), id="contracted"),
        pytest.param("be,bef->bf", ((64, 1024), (64, 1024, 1024)), ((ROWS, ROWS), ROWS), id="batch"),
        pytest.param("be,bef->bf", ((8, 4096), (8, 4096, 4096)), ((ROWS, ROWS), ROWS), id="a batch of one"),
        pytest.param("bhd,bthd->bht", ((64, 32, 128), (64, 1024, 32, 128)), ((ROWS, ROWS), ROWS), id="scores"),
        pytest.param("bht,bthd->bhd", ((64, 32, 1024), (64, 1024, 32, 128)), ((ROWS, ROWS), ROWS), id="values"),
    ],
)
def test_a_product_of_a_single_row_is_a_fusion_that_copies_nothing(
    equation: str, shapes: tuple[tuple[int, ...], ...], layouts: Layouts
) -> None:
    check(verified(lambda x, w: jnp.einsum(equation, x, w), tuple(of(*shape) for shape in shapes), layouts))


@needs_gpu_compiler
def test_what_is_contracted_by_parts_is_added_up() -> None:
    """Few rows and a long contraction: as many products as sums, and a kernel that adds them."""
    check(verified(product, SQUARE, ((WHOLE, COLUMNS), COLUMNS)))
