"""Strides: which arrays XLA:GPU transposes for a collective, and which a contraction takes as they lie."""

import re
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import cost_models
from autoshard.costs.resharding import NO_STRIDES, Resharder, Strides
from autoshard.costs.strategies import SUM, WHOLE, encode
from autoshard.costs.strides import strides
from autoshard.ir.graph import Graph, build
from autoshard.ir.mesh import MeshAxes

MESH = MeshAxes(("x",), (8,))
BF16, F32 = jnp.bfloat16, jnp.float32


def strides_of(graph: Graph) -> list[Strides]:
    found = strides(graph)
    return [found.get(v, NO_STRIDES) for v in range(len(graph.avals))]


def transposed(of: Strides, shape: tuple[int, ...], before: int, after: int) -> int:
    """Bytes that transposes around the collective between two layouts read and write, per device."""
    machine = cost_models.hardware("h100:1x8").place(MESH.shape)
    codes = [int(encode(np.array([d], np.int8), len(shape))) for d in (before, after)]
    aval = build(jax.make_jaxpr(lambda x: x)(jax.ShapeDtypeStruct(shape, BF16)), "cpu").avals[0]
    (step,) = Resharder(MESH, machine, outermost=True).path(aval, *codes, bucket=0, strides=of)
    return step.transposed


CASES = {  # einsum, weight, dimension of it, whether the whole is transposed
    "experts, in": ("ecd,edf->ecf", (8, 1024, 2048), 1, False),
    "experts, out": ("ecd,edf->ecf", (8, 1024, 2048), 2, False),
    "experts, backward": ("ecf,edf->ecd", (8, 1024, 2048), 1, False),
    "heads": ("bd,dhk->bhk", (1024, 16, 256), 1, True),
    "widths of heads": ("bd,dhk->bhk", (1024, 16, 256), 2, True),
    "out of heads": ("bhk,hkd->bd", (16, 256, 1024), 2, False),
    "heads, backward": ("bhk,dhk->bd", (1024, 16, 256), 1, True),
}


def taken_by(equation: str, weight: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
    """The shape of what a weight is multiplied with, and of the whole result by letters."""
    left, right, _ = re.split(r",|->", equation)
    sizes = dict(zip(right, weight, strict=True))
    return tuple(sizes.get(letter, 4096) for letter in left), left


@pytest.mark.parametrize("case", CASES)
def test_a_gathered_weight_is_transposed_where_no_stride_of_its_own_is_left(case: str) -> None:
    """The dimension is by itself, or the first of its group; the piece is transposed by the cast before it."""
    equation, shape, dim, whole = CASES[case]
    x, _ = taken_by(equation, shape)

    def product(x: Any, w: Any) -> Any:
        return jnp.einsum(equation, x, w.astype(BF16))

    args = jax.ShapeDtypeStruct(x, BF16), jax.ShapeDtypeStruct(shape, F32)
    graph = build(jax.make_jaxpr(product)(*args), "cpu")
    (cast,) = (
        results[0] for eqn, results in zip(graph.eqns, graph.results, strict=True) if eqn.results[0].shape == shape
    )
    of = strides_of(graph)[cast]
    assert (dim not in of.read) == whole
    assert of.sent
    assert transposed(of, shape, dim, WHOLE) == (4 * prod(shape) if whole else 0)


@pytest.mark.parametrize(
    ("equation", "dim", "whole"),
    [("ecd,ecf->edf", 1, False), ("ecd,ecf->edf", 2, False), ("bd,bhk->dhk", 1, True), ("bhk,bd->hkd", 2, False)],
)
def test_a_scattered_gradient_is_transposed_where_no_stride_of_its_own_is_left(
    equation: str, dim: int, *, whole: bool
) -> None:
    sizes = dict(zip("ecdfbhk", (8, 512, 1024, 2048, 4096, 16, 256), strict=True))
    left, right, out = re.split(r",|->", equation)
    x, y = (jax.ShapeDtypeStruct(tuple(sizes[letter] for letter in name), BF16) for name in (left, right))
    shape = tuple(sizes[letter] for letter in out)

    def gradient(x: Any, y: Any) -> Any:
        return jnp.sin(jnp.einsum(equation, x, y))

    graph = build(jax.make_jaxpr(gradient)(x, y), "cpu")
    (made,) = (v for v in range(len(graph.avals)) if graph.avals[v].shape == shape and v not in graph.outputs)
    of = strides_of(graph)[made]
    assert (dim not in of.made) == whole
    piece = 4 * prod(shape) // 8
    assert transposed(of, shape, SUM, dim) == piece + (4 * prod(shape) if whole else 0)


def test_casts_slices_and_transposes_pass_strides_on() -> None:
    def program(stack: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return jnp.einsum("ecd,efd->ecf", x, w.astype(BF16).transpose(0, 2, 1)), None

        return lax.scan(layer, x, stack)[0]

    graph = build(
        jax.make_jaxpr(program)(jax.ShapeDtypeStruct((4, 8, 64, 64), F32), jax.ShapeDtypeStruct((8, 16, 64), BF16)),
        "cpu",
    )
    assert strides_of(graph)[graph.inputs[0]].read == {1, 2, 3}


def test_what_others_read_too_has_no_strides() -> None:
    def program(x: Any, w: Any) -> Any:
        return jnp.einsum("ecd,edf->ecf", x, w), w.reshape(8, -1)

    graph = build(jax.make_jaxpr(program)(*(jax.ShapeDtypeStruct((8, 64, 64), BF16),) * 2), "cpu")
    assert strides_of(graph)[graph.inputs[1]].read == set()
    assert strides_of(graph)[graph.inputs[0]].read == {0, 1, 2}
