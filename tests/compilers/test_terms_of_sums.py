"""Sums over devices that are added before they are finished: of reductions and scatters as of products."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.backends.known_compilers import named
from autoshard.backends.model import CompilerName
from tests.compilers.test_compiler_models import COMPILERS, F32, collectives, constrained, text_of
from tests.installed import GPU, TPU

Terms = Callable[..., tuple[jax.Array, jax.Array]]

ROWS = jax.ShapeDtypeStruct((4096,), jnp.int32)
UPDATES, SCORES = F32(4096, 512), F32(4096, 1000)


def scattered(rows: jax.Array, updates: jax.Array) -> jax.Array:
    return jnp.zeros((1000, 512)).at[rows].add(updates)


def multiplied(scores: jax.Array, rows: jax.Array) -> jax.Array:
    """As the gradient of a tied head is: made the other way round."""
    return jax.lax.dot_general(rows, scores, (((0,), (0,)), ((), ()))).T


def reductions(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    return constrained(a.sum(0)), constrained(b.sum(0))


def reductions_of_broadcasts(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """As JAX makes them: a dimension of size 1 is summed last."""
    return constrained(a.sum(0)[None]).sum(0), constrained(b.sum(0)[None]).sum(0)


def numbers(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    return constrained(jnp.square(a).sum((0, 1))), constrained(jnp.square(b).sum((0, 1)))


def scatters(i: jax.Array, x: jax.Array, j: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    return constrained(scattered(i, x)), constrained(scattered(j, y))


def a_scatter_and_a_product(i: jax.Array, x: jax.Array, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    return constrained(scattered(i, x)), multiplied(a, b)


@pytest.mark.parametrize(("compiler", "topology"), COMPILERS)
@pytest.mark.parametrize(
    ("terms", "args"),
    [
        pytest.param(reductions, (F32(1024, 64, 64),) * 2, id="reductions"),
        pytest.param(reductions_of_broadcasts, (F32(1024, 64, 64),) * 2, id="reductions of broadcasts"),
        pytest.param(numbers, (F32(1024, 64, 512),) * 2, id="reductions of all but one dimension"),
        pytest.param(scatters, (ROWS, UPDATES) * 2, id="scatters"),
        pytest.param(a_scatter_and_a_product, (ROWS, UPDATES, SCORES, UPDATES), id="a scatter and a product"),
    ],
)
def test_terms_are_added_before_they_are_reduced_or_behind(
    terms: Terms, args: tuple[Any, ...], compiler: CompilerName, topology: str
) -> None:
    def added(*args: jax.Array) -> jax.Array:
        one, other = terms(*args)
        return jnp.sin(constrained(one + other))

    found = collectives(text_of(topology, added, args, (P("x"),) * len(args)))
    assert {c.kind for c in found} == {"all-reduce"}
    assert len(found) == (1 if named(compiler).merges_terms_of_sums else 2)


@pytest.mark.parametrize(("compiler", "topology"), COMPILERS)
def test_so_is_what_is_looked_up_in_parts_of_a_table(compiler: CompilerName, topology: str) -> None:
    def added(table: jax.Array, rows: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.sin(constrained(constrained(table[rows]) + constrained(a @ b)))

    args = F32(8192, 512), ROWS, F32(4096, 1024), F32(1024, 512)
    found = collectives(text_of(topology, added, args, (P("x"), P(), P(None, "x"), P("x"))))
    assert {c.kind for c in found} == {"all-reduce"}
    assert len(found) == (1 if named(compiler).merges_terms_of_sums else 2)


@pytest.mark.parametrize(("compiler", "topology"), COMPILERS[:2])
@pytest.mark.parametrize("pinned", [False, True])
def test_a_scatter_s_sum_is_reduced_by_itself_unless_it_is_constrained(
    compiler: CompilerName, topology: str, *, pinned: bool
) -> None:
    """Before it splits the program XLA scatters onto what it is added to, which is then finished first."""

    def added(rows: jax.Array, updates: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        table = scattered(rows, updates)
        return jnp.sin(constrained((constrained(table) if pinned else table) + multiplied(a, b), "x"))

    found = collectives(text_of(topology, added, (ROWS, UPDATES, SCORES, UPDATES), (P("x"),) * 4))
    assert sum(c.kind == "reduce-scatter" for c in found) == (1 if pinned else 2), compiler


@pytest.mark.parametrize(
    ("hardware", "devices"),
    [pytest.param("h100:1x8", 8, marks=GPU), pytest.param("tpu-v5e:4x4", 16, marks=TPU)],
)
@pytest.mark.parametrize("vocabulary", [4096, 4099])
def test_of_a_tied_table_one_gradient_is_reduced(vocabulary: int, hardware: str, devices: int) -> None:
    """Of its lookup and its product together; with a vocabulary that no axis divides, too."""

    def loss(table: jax.Array, rows: jax.Array, labels: jax.Array) -> jax.Array:
        scores = jnp.tanh(table[rows]) @ table.T
        return -jnp.take_along_axis(jax.nn.log_softmax(scores), labels[..., None], -1).mean()

    def step(table: jax.Array, rows: jax.Array, labels: jax.Array) -> jax.Array:
        return table - 0.1 * jax.grad(loss)(table, rows, labels)

    ids = jax.ShapeDtypeStruct((256, 128), jnp.int32)
    args = F32(vocabulary, 512), ids, ids
    plan = autoshard.plan(step, *args, mesh={"x": devices}, hardware=hardware, for_grad=False)
    emitted = [c for c in plan.verify().emitted if c.kind in {"all-reduce", "reduce-scatter"}]
    assert sum(c.nbytes * c.trips for c in emitted) < 1.5 * vocabulary * 512 * 4
