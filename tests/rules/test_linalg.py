"""Linear algebra, contractions, transforms and orders: split, compiled and run, they are the whole ones."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import autoshard
from autoshard.errors import CompileError
from autoshard.ir.mesh import MeshAxes
from autoshard.rules.pointwise import NONLINEAR
from tests.rules_compiled import Split, splits_of, wrong
from tests.rules_oracle import equations, executions

MESH = MeshAxes.of({"a": 2, "b": 2})
SHAPES = ((4, 2, 6), (2, 4, 5, 3), (4, 7), (8,))


def transforms(rng: np.random.Generator) -> Iterator[Split]:
    """Every kind, of one and of two dimensions, of odd lengths, with batches of any rank."""
    for shape in SHAPES:
        for kind in ("FFT", "IFFT", "RFFT", "IRFFT"):
            for rank in (1, 2)[: len(shape)]:
                x = rng.normal(size=shape).astype(np.float32)
                operand = x if kind == "RFFT" else x.astype(np.complex64)
                lengths = (*shape[len(shape) - rank : -1], 2 * shape[-1] - 1 if kind == "IRFFT" else shape[-1])
                (one,) = equations(lambda x, kind=kind, lengths=lengths: lax.fft(x, kind, lengths), operand)
                yield from splits_of(f"{kind} {shape} {lengths}", one, [operand], MESH, rng, 6)


def test_transforms_are_split_by_their_batch() -> None:
    found = list(transforms(np.random.default_rng(0)))
    assert len(found) > 60
    assert wrong(found, MESH) == []


def test_a_transform_between_other_orders_of_memory_is_run() -> None:
    """What is made in another order of memory before a transform, and taken so, ends no program."""

    def program(x: Any, w: Any) -> Any:
        h = lax.dot_general(w, x, (((1,), (1,)), ((), ())))
        spectrum = abs(jnp.fft.fft(jnp.fft.fft2(h.transpose(2, 1, 0)), axis=0))
        return lax.dot_general(w, spectrum.transpose(1, 2, 0), (((1,), (2,)), ((), ())))

    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in ((8, 8, 8), (8, 8)))
    for ends in (PartitionSpec(None, None, ("a", "b")), PartitionSpec("b", "a"), PartitionSpec("a")):
        f = autoshard.jit(
            program,
            mesh=MESH.shape,
            hardware="cpu:4",
            in_shardings=(ends, PartitionSpec()),
            out_shardings=ends,
            for_grad=False,
        )
        np.testing.assert_allclose(f(x, w), program(x, w), rtol=1e-3, atol=1e-2)


def test_a_loss_of_a_spectrum_is_differentiated_batch_by_batch() -> None:
    def loss(w: Any, x: Any) -> Any:
        return (abs(jnp.fft.rfft(x @ w, axis=-1)) ** 2).mean()

    keys = jax.random.split(jax.random.key(0))
    w, x = jax.random.normal(keys[0], (32, 255)), jax.random.normal(keys[1], (4096, 32))
    f = autoshard.jit(loss, mesh=MESH.shape, hardware="cpu:4", pins={"x": PartitionSpec(("a", "b"))})
    np.testing.assert_allclose(jax.jit(jax.grad(f))(w, x), jax.grad(loss)(w, x), rtol=1e-3, atol=1e-2)
    assert (PartitionSpec(("a", "b")),) in f.plan(w, x).record.pins.kernels.values()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32"])
def test_upper_halves_of_products_are_exact(dtype: str) -> None:
    """XLA refuses `mulhi` in every program for several devices; so it is emitted as products of halves."""
    limits, rng = np.iinfo(dtype), np.random.default_rng(0)
    edges = np.array([limits.min, limits.max, 0, 1, limits.max // 2, limits.min // 2 + 1], dtype)
    x = np.concatenate([np.repeat(edges, 6), rng.integers(limits.min, limits.max, 60, dtype)])
    y = np.concatenate([np.tile(edges, 6), rng.integers(limits.min, limits.max, 60, dtype)])
    f = autoshard.jit(
        lambda x, y: (lax.mulhi(x, y), lax.mulhi(x, jnp.full_like(x, 7))),
        mesh=MESH.shape,
        hardware="cpu:4",
        in_shardings=PartitionSpec("a"),
    )
    got, seven = f(x, y)
    shift = 8 * np.dtype(dtype).itemsize
    np.testing.assert_array_equal(got, ((x.astype(np.int64) * y.astype(np.int64)) >> shift).astype(dtype))
    np.testing.assert_array_equal(seven, ((x.astype(np.int64) * 7) >> shift).astype(dtype))


def test_what_a_platform_lacks_is_an_error_that_says_where() -> None:
    with pytest.raises(CompileError, match=r"for tpu, at .*test_linalg\.py.*'eig'.*plan for hardware"):
        autoshard.plan(
            lambda x: jnp.linalg.eig(x)[0], jnp.ones((4, 8, 8)), mesh={"a": 4}, hardware="tpu-v5e:2x2", for_grad=False
        )


def test_a_function_with_its_own_batching_rule_is_seen_through() -> None:
    @jax.custom_batching.custom_vmap
    def double(x: Any) -> Any:
        return jnp.sin(x) * 2

    @double.def_vmap
    def _(size: int, batched: Any, x: Any) -> Any:
        return jnp.sin(x) * 2, batched[0]

    x = jnp.arange(32.0).reshape(8, 4)
    f = autoshard.jit(lambda x: double(x).sum(0), mesh={"a": 4}, hardware="cpu:4", for_grad=False)
    np.testing.assert_allclose(f(x), (jnp.sin(x) * 2).sum(0), rtol=1e-5)


def draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Any:
    if np.dtype(dtype).kind in "iu":
        return rng.integers(0, 5, shape).astype(dtype)
    x = rng.normal(size=shape)
    return (x + 1j * rng.normal(size=shape)).astype(dtype) if np.dtype(dtype).kind == "c" else jnp.asarray(x, dtype)


def solves(rng: np.random.Generator) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """One matrix at a time, in batches; what does not say which of several answers it gives is left out."""
    for dtype in (np.float32, np.complex64):
        tall, square, sides = (draw(rng, shape, dtype) for shape in ((4, 2, 6, 4), (4, 2, 6, 6), (4, 2, 6, 2)))
        positive = square @ np.conj(np.swapaxes(square, -1, -2)) + 8 * np.eye(6, dtype=dtype)
        yield jnp.linalg.cholesky, (positive,)
        yield lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True), (positive, sides)
        yield lambda a: jnp.linalg.qr(a, mode="complete"), (tall,)
        yield lambda a: lax.linalg.svd(a, compute_uv=False), (tall,)
        yield lambda a: lax.linalg.eigh(a)[1], (positive,)
        yield lax.linalg.lu, (square,)
        yield jnp.linalg.solve, (positive, sides)


DOTS = (
    (((1, 3), (0, 2)), ((0,), (1,)), (4, 2, 8, 6), (2, 4, 6, 8)),
    (((2,), (1,)), ((3, 0), (0, 2)), (4, 8, 2, 6), (6, 2, 4)),
    (((), ()), ((1,), (0,)), (8, 4), (4, 2)),
    (((0, 1), (1, 0)), ((), ()), (4, 8), (8, 4)),
)


def contractions(rng: np.random.Generator) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Batch dimensions in any place, every kind of number, wider results; groups of no rows and rows of no group."""
    for contracted, batch, left, right in DOTS:
        for dtype, wider in ((np.float32, None), (np.complex64, None), (np.int8, np.int32), (jnp.bfloat16, np.float32)):
            yield (
                lambda a, b, numbers=(contracted, batch), wider=wider: lax.dot_general(
                    a, b, numbers, preferred_element_type=wider
                ),
                (draw(rng, left, dtype), draw(rng, right, dtype)),
            )
    for sizes in ((3, 0, 4, 1), (3, 0, 2, 1)):
        rows, matrices = draw(rng, (8, 6), np.float32), draw(rng, (4, 6, 4), np.float32)
        yield lax.ragged_dot, (rows, matrices, np.array(sizes, np.int32))


def orders(rng: np.random.Generator) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """What runs along a dimension, with ties: sorts by several keys, the largest, running sums, parity."""
    ties = [rng.integers(0, 3, (8, 4)).astype(dtype) for dtype in (np.int32, np.float32, jnp.bfloat16)]
    yield lambda a, b, c: lax.sort((a, b, c), dimension=0, num_keys=2), tuple(ties)
    for x in ties:
        yield lambda x: lax.top_k(x, 2), (x,)
        yield lambda x: lax.cumsum(x, 0, reverse=True), (x,)
        yield lambda x: lax.cummax(x, 1), (x,)
    yield lambda x: lax.reduce_xor(x, (0,)), (ties[0],)


@pytest.mark.parametrize("family", [solves, contractions, orders], ids=lambda family: family.__name__)
def test_every_split_of_a_family_is_right(family: Any) -> None:
    rng = np.random.default_rng(0)
    found: list[Split] = []
    for fn, args in family(rng):
        for one, values in executions(fn, *args):
            if one.eqn.primitive not in NONLINEAR and any(value.ndim > 1 for value in values):
                found.extend(splits_of(one.eqn.primitive, one, values, MESH, rng, 2))
    assert len(found) > 20
    assert wrong(found, MESH) == []
