"""Facts of `CompilerModel` that the text of one small compiled program shows: on XLA:TPU, and otherwise on XLA:GPU."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.backends import compile
from autoshard.backends.devices import abstract
from autoshard.backends.known_compilers import named
from autoshard.backends.model import CompilerName
from autoshard.ir import graph
from autoshard.ir.mesh import MeshAxes
from tests.installed import GPU, TPU

MESH = MeshAxes(("x",), (8,))
COMPILERS = [pytest.param("gpu", "h100:1x8", marks=GPU), pytest.param("tpu", "tpu-v5e:2x4", marks=TPU)]
F32, BF16 = (lambda *shape, of=dtype: jax.ShapeDtypeStruct(shape, of) for dtype in (jnp.float32, jnp.bfloat16))


def entry(topology: str, fn: Callable[..., Any], args: tuple[Any, ...], specs: tuple[P, ...]) -> tuple[str, str]:
    """The whole text of a compiled program, and that of its entry."""
    shardings = tuple(NamedSharding(abstract(MESH), spec) for spec in specs)
    traced = jax.jit(fn, in_shardings=shardings).trace(*args)
    text = compile.compile(traced, topology=topology, mesh=MESH).hlo_text
    return text, text[text.index("\nENTRY") :]


@pytest.mark.parametrize(("compiler", "topology"), COMPILERS)
def test_what_contractions_make_themselves(compiler: CompilerName, topology: str) -> None:
    """The gated product is computed in the contraction that takes it, or a kernel of its own writes it."""

    def gated(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        gate, up, down = (w.astype(jnp.bfloat16) for w in (gate, up, down))
        return (jax.nn.silu(x @ gate) * (x @ up)) @ down

    args = BF16(4096, 1024), F32(1024, 4096), F32(1024, 4096), F32(4096, 1024)
    _, found = entry(topology, gated, args, (P("x"), P(), P(), P()))
    kernels = [line for line in found.splitlines() if "= bf16[512,4096]" in line and "kind=kLoop" in line]
    assert (not kernels) == named(compiler).contractions_make_their_operands


@pytest.mark.parametrize(("compiler", "topology"), COMPILERS)
def test_stacked_weights_are_cast(compiler: CompilerName, topology: str) -> None:
    """All of them before the loop, or each layer's in it."""

    def layers(stack: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w.astype(jnp.bfloat16)), None), x, stack)[0]

    _, found = entry(topology, layers, (F32(4, 1024, 1024), BF16(4096, 1024)), (P(), P("x")))
    assert ("= bf16[4,1024,1024]" in found) == named(compiler).casts_stacked_inputs_ahead


@pytest.mark.parametrize(("compiler", "topology"), COMPILERS)
def test_one_of_each_row_is_taken_back(compiler: CompilerName, topology: str) -> None:
    """Its gradient has no scatter, or one."""

    def gradient(scores: jax.Array, labels: jax.Array) -> jax.Array:
        def loss(scores: jax.Array) -> jax.Array:
            return jnp.sum(jnp.sin(jnp.take_along_axis(scores, labels, axis=1)))

        return jax.grad(loss)(scores * 2)

    text, _ = entry(topology, gradient, (F32(4096, 1024), jax.ShapeDtypeStruct((4096, 1), jnp.int32)), (P("x"), P("x")))
    assert (" scatter(" not in text) == named(compiler).compares_positions_for_scatters


@pytest.mark.parametrize(("compiler", "topology"), COMPILERS)
@pytest.mark.parametrize(
    ("equation", "left", "right"),
    [
        ("bhqk,h->bhqk", BF16(8, 4, 64, 64), jax.ShapeDtypeStruct((4,), jnp.int32)),
        ("bi,bj->bij", F32(16, 256), F32(16, 128)),
        ("ik,kj->ij", BF16(2048, 1), BF16(1, 2048)),
        ("bk,bk->b", BF16(4096, 1024), BF16(4096, 1024)),
    ],
)
def test_dots_without_matrices_fuse(
    compiler: CompilerName, topology: str, equation: str, left: Any, right: Any
) -> None:
    """Nothing is left of a dot that contracts nothing, nor of one whose operands have no dimension of their own."""

    def multiplied(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.einsum(equation, jnp.exp(x), y))

    (dot,) = (
        eqn for eqn in graph.build(jax.make_jaxpr(multiplied)(left, right), "cuda").eqns if "dot" in eqn.primitive
    )
    assert dot.traits.fusible
    assert not dot.traits.contraction
    text, _ = entry(topology, multiplied, (left, right), (P(), P()))
    assert " dot(" not in text
    assert " convolution(" not in text
