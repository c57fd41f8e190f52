"""Strides: XLA:GPU transposes what is priced as transposed."""

import re
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.backends import compile, devices
from tests.costs.test_strides import CASES, MESH, taken_by
from tests.installed import needs_gpu_compiler

BF16, F32 = jnp.bfloat16, jnp.float32


def compiled(fn: Any, specs: tuple[P, ...], out: P, *args: Any) -> list[int]:
    """The elements that each transposing kernel of XLA:GPU writes."""
    mesh = devices.abstract(MESH)
    jitted = jax.jit(
        fn, in_shardings=tuple(NamedSharding(mesh, s) for s in specs), out_shardings=NamedSharding(mesh, out)
    )
    text = compile.compile(jitted.trace(*args), topology="h100:1x8", mesh=MESH).hlo_text
    entry = text[text.index("\nENTRY") :]
    kernels = re.findall(r"%\w*transpose\w*(?:\.\d+)* = bf16\[([\d,]+)\]\S* fusion", entry)
    return [prod(int(n) for n in kernel.split(",")) for kernel in kernels]


@needs_gpu_compiler
@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="a later XLA:GPU transposes inside of the matmul")
@pytest.mark.parametrize("case", CASES)
def test_xla_gpu_transposes_as_priced(case: str) -> None:
    equation, shape, dim, whole = CASES[case]
    x, left = taken_by(equation, shape)
    rows = P(*("x" if letter in "bc" else None for letter in left))
    out = P(*("x" if letter in "bc" else None for letter in equation.split("->")[1]))
    split = P(*("x" if d == dim else None for d in range(3)))

    def product(x: Any, w: Any) -> Any:
        w = lax.with_sharding_constraint(w.astype(BF16), NamedSharding(devices.abstract(MESH), P()))
        return jnp.einsum(equation, x, w)

    args = jax.ShapeDtypeStruct(x, BF16), jax.ShapeDtypeStruct(shape, F32)
    kernels = compiled(product, (rows, split), out, *args)
    assert (prod(shape) in kernels) == whole
