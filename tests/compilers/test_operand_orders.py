"""Operands of products that XLA:GPU transposes, because they are given in an order that no matmul reads."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.backends.known_compilers import known
from autoshard.verification.result import Verification
from tests.installed import needs_gpu_compiler

S = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
IN_PARTS = known("cuda").reads_rows_in_parts
SIZES = {"b": 8, "h": 8, "t": 512, "s": 512, "d": 128, "e": 64, "f": 32}


def verified(fn: Callable[..., Any], *args: Any, donated: tuple[int, ...] = ()) -> Verification:
    return autoshard.plan(fn, *args, mesh={"x": 1}, hardware="h100:1x1", donate_argnums=donated).verify()


def predicted_and_compiled_s(found: Verification) -> tuple[float, float]:
    assert found.compute is not None
    return found.compute.predicted_s, found.compute.compiled_s


@needs_gpu_compiler
@pytest.mark.parametrize(
    ("equation", "transposed"),
    [
        ("bhtd,bhsd->bhts", False),
        ("tbd,sbd->bts", False),
        ("tdb,bsd->bts", False),  # a batch may have any stride
        ("dbt,bsd->bts", False),
        ("tbhd,bhsd->bhts", False),
        ("bthd,bhsd->bhts", True),  # two dimensions of a batch, and another between them
        ("btdh,bhsd->bhts", True),
        ("tdse,def->tsf", True),  # what is contracted is in two places
        ("tds,df->tsf", False),  # what is left of the left operand, too
        ("df,tds->fts", not IN_PARTS),  # of the right one
        ("btds,bdf->btsf", not IN_PARTS),  # or of that of a batch
        ("dths,de->thse", False),
    ],
)
def test_what_lies_in_another_order_is_transposed(equation: str, *, transposed: bool) -> None:
    shapes = [tuple(SIZES[d] for d in operand) for operand in equation.partition("->")[0].split(",")]
    found = verified(partial(jnp.einsum, equation), *map(S, shapes))
    predicted, compiled = predicted_and_compiled_s(found)
    assert predicted == pytest.approx(compiled, rel=0.01)
    assert found.timeline is not None
    assert any("transpose" in event.instruction for event in found.timeline.events) is transposed


CACHE, QUERY = S((8, 1024, 16, 128)), S((8, 64, 16, 128))


def attended(q: Any, k: Any, v: Any) -> Any:
    shares = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32), -1)
    return jnp.einsum("bhqk,bkhd->bqhd", shares.astype(q.dtype), v)


def layers(q: Any, keys: Any, values: Any) -> Any:
    return lax.scan(lambda q, kv: (attended(q, *kv), None), q, (keys, values))[0]


def trips(q: Any, k: Any, v: Any) -> Any:
    return lax.fori_loop(0, 4, lambda _, q: attended(q, k, v), q)


def grouped(q: Any, k: Any) -> Any:
    return jnp.einsum("bgrd,bkgd->bgrk", q, k)


def turned(q: Any, k: Any) -> Any:
    return jnp.einsum("bgrd,bgkd->bgrk", q, jnp.swapaxes(k, 1, 2))


def updated(q: Any, keys: Any, new: Any, at: Any) -> Any:
    def layer(q: Any, k: Any) -> tuple[Any, Any]:
        k = lax.dynamic_update_slice(k, new, (0, at, 0, 0))
        return attended(q, k, k), k

    return lax.scan(layer, q, keys)


@needs_gpu_compiler
@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        (layers, (QUERY, S((4, *CACHE.shape)), S((4, *CACHE.shape)))),  # the stacks in front of the loop, whole
        (trips, (QUERY, CACHE, CACHE)),  # once for all trips
        (grouped, (S((8, 16, 4, 128)), CACHE)),
        (turned, (S((8, 16, 4, 128)), CACHE)),  # the program's transpose moves nothing, and the dot's does
    ],
)
def test_caches_are_transposed_where_heads_are_a_batch(program: Callable[..., Any], arguments: Any) -> None:
    found = verified(program, *arguments)
    predicted, compiled = predicted_and_compiled_s(found)
    assert predicted == pytest.approx(compiled, rel=0.03)
    assert found.memory.compiled is not None
    assert found.memory.predicted.peak == pytest.approx(found.memory.compiled.peak, rel=0.1)


@needs_gpu_compiler
def test_a_cache_that_is_updated_in_a_loop_is_transposed_there_and_back() -> None:
    arguments = QUERY, S((4, *CACHE.shape)), QUERY, jax.ShapeDtypeStruct((), jnp.int32)
    predicted, compiled = predicted_and_compiled_s(verified(updated, *arguments, donated=(1,)))
    assert predicted == pytest.approx(compiled, rel=0.1)


@needs_gpu_compiler
def test_a_single_row_is_no_matmul_and_reads_a_cache_as_it_lies() -> None:
    scores = partial(jnp.einsum, "bqhd,bkhd->bhqk")
    predicted, compiled = predicted_and_compiled_s(verified(scores, S((16, 1, 16, 128)), S((16, 4096, 16, 128))))
    assert predicted == pytest.approx(compiled, rel=0.05)


def in_loop(equation: str) -> Callable[..., Any]:
    """Products with slices of the last operand; each has its part in a number, so that none is left out."""

    def product(total: Any, x: Any, w: Any) -> Any:
        y = jnp.einsum(equation, x * (1 + total).astype(x.dtype), w)
        return total + y.astype(jnp.float32).max(), None

    def program(x: Any, stack: Any) -> Any:
        return lax.scan(lambda total, w: product(total, x, w), jnp.float32(0), stack)[0]

    return program


@needs_gpu_compiler
@pytest.mark.parametrize(
    ("equation", "transposed"),
    [
        ("bird,bsid->birs", not IN_PARTS),  # a batch of two dimensions, one of which has one element
        ("bird,bisd->birs", False),
        ("birs,bsid->bird", False),
        ("brd,sbd->brs", False),
        ("brd,bsd->brs", False),
    ],
)
def test_loops_merge_a_batch_before_they_know_how_it_lies(equation: str, *, transposed: bool) -> None:
    sizes = {**SIZES, "i": 1, "r": 4, "s": 4096}
    x, w = (tuple(sizes[d] for d in operand) for operand in equation.partition("->")[0].split(","))
    found = verified(in_loop(equation), S(x), S((4, *w)))
    assert found.timeline is not None
    stack = [event for event in found.timeline.events if "transpose" in event.instruction and event.trips == 1]
    assert bool(stack) is transposed
    predicted, compiled = predicted_and_compiled_s(found)
    assert predicted == pytest.approx(compiled, rel=0.03 if "birs," not in equation else 0.2)


@needs_gpu_compiler
def test_a_device_with_one_sequence_transposes_nothing() -> None:
    """A batch of one element lies anywhere: nothing is between its heads."""

    def seconds(batch: int) -> tuple[float, float]:
        plan = autoshard.plan(
            grouped,
            S((batch, 16, 4, 128)),
            S((batch, 1024, 16, 128)),
            mesh={"x": 8},
            hardware="h100:1x8",
            in_shardings=P("x"),
            out_shardings=P("x"),
        )
        return predicted_and_compiled_s(plan.verify())

    for predicted, compiled in (seconds(8), seconds(16)):
        assert predicted == pytest.approx(compiled, rel=0.03)


def decoded(caches: Any, x: Any, weights: Any, at: Any) -> Any:
    """Layers of grouped heads that attend to caches of keys and values, in which new rows are written first."""
    written = []
    for (keys, values), (query, key, value, out) in zip(caches, weights, strict=True):
        q, k, v = (jnp.einsum("bsd,dhk->bshk", x, w) for w in (query, key, value))
        keys, values = (lax.dynamic_update_slice(cache, new, (0, at, 0, 0)) for cache, new in ((keys, k), (values, v)))
        batch, new, heads, width = q.shape
        q = q.reshape(batch, new, keys.shape[2], -1, width)
        shares = jax.nn.softmax(jnp.einsum("bskgd,btkd->bkgst", q, keys).astype(jnp.float32) / width**0.5, -1)
        mixed = jnp.einsum("bkgst,btkd->bskgd", shares.astype(x.dtype), values).reshape(batch, new, heads, width)
        x = x + jnp.einsum("bshk,hkd->bsd", mixed, out)
        written.append((keys, values))
    return written, x


@needs_gpu_compiler
@pytest.mark.parametrize(
    ("groups", "heads", "new"),
    [
        (4, 12, 1),  # one group of heads on a device: values, whose positions are contracted, are transposed
        (8, 8, 8),  # two, and several rows: keys, too
    ],
)
def test_caches_of_a_step_are_copied_and_transposed_there_and_back(groups: int, heads: int, new: int) -> None:
    cache = S((64, 1024, groups, 128))
    weights = [S((512, heads, 128)), S((512, groups, 128)), S((512, groups, 128)), S((heads, 128, 512))]
    arguments = [(cache, cache)] * 3, S((64, new, 512)), [weights] * 3, jax.ShapeDtypeStruct((), jnp.int32)
    mesh = {"data": 2, "model": 4}
    found = autoshard.plan(decoded, *arguments, mesh=mesh, hardware="h100:1x8", donate_argnums=(0,)).verify()
    predicted, compiled = predicted_and_compiled_s(found)
    assert predicted == pytest.approx(compiled, rel=0.05)
    assert found.memory.compiled is not None
    if new == 1:  # what is transposed first lies there to the end; of several rows, some is transposed back before
        assert found.memory.predicted.temporaries == pytest.approx(found.memory.compiled.temporaries, rel=0.1)


@needs_gpu_compiler
@pytest.mark.parametrize(
    ("groups", "split"), [(4, (P(None, "x"), P(None, None, None, "x"))), (1, (P("x"), P(None, "x")))]
)
def test_loops_merge_dimensions_of_a_batch_that_have_one_element_on_a_device(groups: int, split: Any) -> None:
    """Unless they have one in the program."""
    program, x, stack = in_loop("bird,bsid->birs"), S((64, groups, 4, 128)), S((4, 64, 2048, groups, 128))
    found = autoshard.plan(program, x, stack, mesh={"x": 4}, hardware="h100:1x4", in_shardings=split).verify()
    predicted, compiled = predicted_and_compiled_s(found)
    assert predicted == pytest.approx(compiled, rel=0.01)
    assert found.timeline is not None
    assert any("transpose" in event.instruction for event in found.timeline.events) is (groups > 1)
