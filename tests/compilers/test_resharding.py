"""Reshardings as XLA:GPU makes them."""

import re
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import cost_models
from autoshard.backends import compile, hlo
from autoshard.backends import devices as meshes
from autoshard.costs.resharding import Resharder
from autoshard.costs.strategies import SUM, WHOLE, encode, layout_of
from autoshard.ir.graph import Aval
from autoshard.ir.mesh import MeshAxes
from tests.installed import needs_gpu_compiler


@needs_gpu_compiler
@pytest.mark.parametrize("ends", ["a,-", "-,a", "b,-", "-,b", "-,-", "ab,-", "-,ab", "a,b", "b,a"])
def test_a_sum_is_finished_as_the_compiler_does(ends: str) -> None:
    """Scattered over the axes that it is split along in the end, and summed over the others (XLA:GPU, JAX 0.10.2)."""
    mesh = MeshAxes(("a", "b"), (4, 2))
    spec = P(*(tuple(dim) if dim != "-" else None for dim in ends.split(",")))
    wide, tall, out = (
        NamedSharding(meshes.abstract(mesh), s) for s in (P(None, ("a", "b")), P(("a", "b"), None), spec)
    )

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sin(lax.with_sharding_constraint(x @ w, out))

    x = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    traced = jax.jit(product, in_shardings=(wide, tall), out_shardings=out).trace(x, x)
    compiled = compile.compile(traced, topology="h100:1x8", mesh=mesh)
    emitted = [(c.kind, c.axes, c.nbytes) for c in hlo.collectives(hlo.read(compiled.hlo_text), mesh)]

    left = Resharder(mesh, cost_models.hardware("h100:1x8").place(mesh.shape), pinned=False, outermost=True)
    target = [next((d for d, dim in enumerate(ends.split(",")) if a in dim), WHOLE) for a in "ab"]
    source, to = (int(encode(np.array(row, np.int8), 2)) for row in ([SUM, SUM], target))
    steps = left.path(Aval(x.shape, np.dtype(x.dtype)), source, to, bucket=0)
    assert [(s.kind, s.axes, s.nbytes) for s in steps if s.kind != "slice"] == emitted


@needs_gpu_compiler
@pytest.mark.parametrize(
    ("shape", "before", "after"),
    [
        ((1024, 4096), 0, WHOLE),
        ((1024, 4096), 1, WHOLE),
        ((1024, 16, 256), 0, WHOLE),
        ((1024, 16, 256), 1, WHOLE),
        ((1024, 16, 256), 2, WHOLE),
        ((1, 1024, 256), 1, WHOLE),
        ((64, 512, 1024), 0, 1),
        ((64, 512, 1024), 1, 2),
        ((64, 512, 1024), 2, 1),
    ],
)
def test_a_gpu_transposes_what_it_moves_along_inner_dimensions(shape: tuple[int, ...], before: int, after: int) -> None:
    """What XLA:GPU emits around a collective: nothing where the dimension is the outermost, else these kernels.

    Of JAX 0.12 it reads what is gathered of three dimensions inside of the matmul; the price is of 0.10.
    """
    mesh, aval = MeshAxes(("x",), (8,)), Aval(shape, np.dtype(jnp.bfloat16))
    machine = cost_models.hardware("h100:1x8").place(mesh.shape)
    codes = [int(encode(np.array([d], np.int8), aval.ndim)) for d in (before, after)]
    (step,) = Resharder(mesh, machine, outermost=True).path(aval, codes[0], codes[1], bucket=0)
    layouts_ = [NamedSharding(meshes.abstract(mesh), layout_of(code, aval.ndim, mesh).spec()) for code in codes]

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        w = lax.with_sharding_constraint(w, layouts_[1])
        return x @ w.reshape(1024, -1)

    def moved(x: jax.Array, w: jax.Array) -> jax.Array:
        w = lax.with_sharding_constraint(jnp.sin(w), layouts_[0])
        return jnp.sin(lax.with_sharding_constraint(w, layouts_[1]))

    x = jax.ShapeDtypeStruct((2048, 1024), jnp.bfloat16)
    rows = NamedSharding(meshes.abstract(mesh), jax.sharding.PartitionSpec("x"))
    step_of, out = (product, rows) if after == WHOLE else (moved, layouts_[1])
    jitted = jax.jit(step_of, in_shardings=(rows, layouts_[0]), out_shardings=out)
    traced = jitted.trace(x, jax.ShapeDtypeStruct(shape, jnp.bfloat16))
    text = compile.compile(traced, topology="h100:1x8", mesh=mesh).hlo_text
    entry = text[text.index("\nENTRY") :]
    kernels = re.findall(r"%\w*transpose\w*(?:\.\d+)* = bf16\[([\d,]+)\]\S* fusion", entry)
    written = sum(2 * prod(int(n) for n in kernel.split(",")) for kernel in kernels)
    assert (written > 0) == (step.transposed > 0)
    assert 2 * written == step.transposed or (jax.__version_info__ >= (0, 11) and 2 * written < step.transposed)
