"""Which products are one, what they cost together, and what is read where one product lies."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.costs.merged_products import merged_products
from autoshard.ir.graph import build


def half(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


X, W = half(64, 32), half(32, 32)
MIB64 = 64 << 20


def shares(program: Callable[..., Any], *arguments: Any) -> list[tuple[int, float, float]]:
    """Of every product that is one with others: the operand that they share, its part of the whole, and the least."""
    found = merged_products(build(jax.make_jaxpr(program)(*arguments), "cuda"), MIB64)
    return [(one.shared, one.times, one.smallest) for _, one in sorted(found.items())]


def test_products_of_one_array_are_one_and_pay_by_their_size() -> None:
    wide = half(32, 4, 16)
    found = shares(lambda x, q, k, v: (jnp.einsum("sd,dhk->shk", x, q), x @ k, x @ v), X, wide, W, W)
    assert found == [(0, 2.0, 0.5), (0, 4.0, 1.0), (0, 4.0, 1.0)]


def test_what_other_products_multiply_is_copied_out_first() -> None:
    def attention(x: Any, q: Any, k: Any, v: Any) -> Any:
        return ((x @ q) @ (jnp.sin(x @ k)).T) @ (x @ v)

    found = merged_products(build(jax.make_jaxpr(attention)(X, W, W, W), "cuda"), MIB64)
    assert [one.copied for _, one in sorted(found.items())] == [True, False, True]


def test_products_with_one_weight_are_one() -> None:
    assert shares(lambda x, y, w: (x @ w, y @ w), X, half(192, 32), W) == [(1, 4.0, 1.0), (1, 4 / 3, 1 / 3)]


@pytest.mark.parametrize(
    "program",
    [
        lambda x, v, w: (x @ v, jnp.einsum("sd,fd->sf", x, w)),
        lambda x, v, w: (x @ v, jnp.einsum("fd,sd->fs", w.T, x)),
        lambda x, v, w: (x @ v, jnp.einsum("sd,df->sf", x, w, preferred_element_type=jnp.float32)),
        lambda x, v, w: x @ (x.T @ (x @ v) @ w),
        lambda x, v, w: (x @ v, jax.lax.scan(lambda y, _: (y @ v, None), x + 1, length=2)[0] @ w),
        lambda x, v, w: x.T @ x + v + w,
    ],
    ids=[
        "contracts another dimension",
        "on the other side",
        "of another type",
        "one of the other",
        "in a loop",
        "alone",
    ],
)
def test_other_products_are_not(program: Callable[..., Any]) -> None:
    assert shares(program, X, W, W) == []


def cost(program: Callable[..., Any], *arguments: Any, hardware: str = "h100:1x1") -> float:
    """Seconds of a program on one chip."""
    return autoshard.plan(program, *arguments, mesh={"x": 1}, hardware=hardware, for_grad=False).cost


@pytest.mark.parametrize(("width", "one"), [(1024, True), (16_384, False)])
def test_small_ones_cost_what_one_does(width: int, *, one: bool) -> None:
    x, w = half(4096, 2048), half(2048, width)
    apart = cost(lambda x, u, v, w: (x @ u, x @ v, x @ w), x, w, w, w)
    together = cost(lambda x, w: x @ w, x, half(2048, 3 * width))
    assert (apart == pytest.approx(together, rel=1e-6)) is one
    assert apart >= together * (1 - 1e-6)


def test_what_is_copied_out_is_read_and_written() -> None:
    rows, width, peak = 4096, 1024, 3.35e12  # bytes per second of the chip's memory, at most
    x, w = half(rows, 2048), half(2048, width)
    apart = cost(lambda x, u, v: (x @ u) @ (x @ v).T, x, w, w)
    kernels = cost(lambda x, w, y: (x @ w, y @ y.T), x, half(2048, 2 * width), half(rows, width))
    copied = 2 * 2 * 2 * rows * width  # two results of two bytes per element, each read and written
    assert copied / peak <= apart - kernels <= 1.3 * copied / peak


@pytest.mark.parametrize("hardware", ["h100:1x1", "tpu-v5e:1x1", "cpu:1"])
def test_what_is_split_is_read_where_it_lies(hardware: str) -> None:
    """By the kernel that takes both parts: it reads what the product wrote, and writes as much as one of them."""

    def gated(gate: Any, up: Any) -> Any:
        return jax.nn.silu(gate) * up

    x, w, part = half(4096, 1024), half(1024, 4096), half(4096, 2048)
    split = cost(lambda x, w: gated(*jnp.split(x @ w, 2, -1)), x, w, hardware=hardware)
    apart = cost(lambda x, w: x @ w, x, w, hardware=hardware) + cost(gated, part, part, hardware=hardware)
    assert split == pytest.approx(apart, rel=1e-6)
