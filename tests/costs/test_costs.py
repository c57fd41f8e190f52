"""Costs of one equation: the FLOPs of contractions against XLA's own count."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from numpy.typing import ArrayLike, NDArray

import autoshard
from autoshard.backends.known_compilers import XLA_CPU
from autoshard.costs import compute
from autoshard.costs.prices import PS_PER_S
from autoshard.costs.strategies import enumerate_strategies
from autoshard.ir import graph
from autoshard.ir.mesh import MeshAxes
from autoshard.problem.decision_builders import Requirements, decide
from autoshard.rules import rule_of

ONE = MeshAxes(("one",), (1,))


class Free:
    """A machine of which nothing is asked but FLOPs."""

    overlap, gathers_ahead, tiled, stores_quotients, stores_score_gradients = 0.0, True, False, True, True
    unscattered_axes = slice_axes = frozenset[str]()
    host_bytes_per_s = 1.0

    def matmul_s(
        self, batch: ArrayLike, m: ArrayLike, n: ArrayLike, k: ArrayLike, dtype: str, *, beside_bytes: ArrayLike = 0.0
    ) -> NDArray[np.float64]:
        return np.zeros(())

    def contraction_sums(
        self, batch: ArrayLike, m: ArrayLike, n: ArrayLike, k: ArrayLike, dtype: str, result_dtype: str
    ) -> NDArray[np.int64]:
        raise AssertionError(dtype)

    def vector_s(self, operations: ArrayLike) -> NDArray[np.float64]:
        return np.zeros(np.shape(operations))

    def hbm_s(self, nbytes: ArrayLike) -> NDArray[np.float64]:
        raise AssertionError(nbytes)

    def collective_s(self, kind: str, axes: tuple[str, ...], nbytes: ArrayLike) -> NDArray[np.float64]:
        raise AssertionError(kind)


def flops(fn: Callable[..., Any], *args: Any) -> float:
    """FLOPs of a program's contractions."""
    eqns = [eqn for eqn in graph.build(jax.make_jaxpr(fn)(*args), "cpu").eqns if eqn.traits.contraction]
    assert eqns
    total = 0.0
    for eqn in eqns:
        rule = rule_of(eqn)
        total += compute.contraction_s(eqn, rule, enumerate_strategies(rule, ONE), ONE, Free())[1][0]
    return total


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize(("stride", "dilation"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("taps", [1, 3, 7])
def test_convolutions_and_their_gradients_are_counted_as_xla_does(
    taps: int, stride: int, dilation: int, groups: int
) -> None:
    def gradients(image: jax.Array, kernel: jax.Array, cotangent: jax.Array) -> Any:
        out, back = jax.vjp(convolved, image, kernel)
        return out, back(cotangent)

    def convolved(image: jax.Array, kernel: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            image, kernel, (stride,) * 2, "SAME", rhs_dilation=(dilation,) * 2, feature_group_count=groups
        )

    image = jax.ShapeDtypeStruct((2, 4, 12, 8), jnp.float32)
    kernel = jax.ShapeDtypeStruct((8, 4 // groups, taps, taps), jnp.float32)
    cotangent = jax.eval_shape(convolved, image, kernel)
    found: Any = jax.jit(gradients).lower(image, kernel, cotangent).cost_analysis()
    assert flops(gradients, image, kernel, cotangent) == pytest.approx(found["flops"])


def test_a_row_of_a_ragged_dot_meets_one_group() -> None:
    rows, groups = jax.ShapeDtypeStruct((32, 8), jnp.float32), jax.ShapeDtypeStruct((4, 8, 16), jnp.float32)
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)

    def both(x: jax.Array, w: jax.Array, sizes: jax.Array) -> Any:
        return jax.vjp(lambda x, w: lax.ragged_dot(x, w, sizes), x, w)[1](jnp.ones((32, 16)))

    assert flops(lax.ragged_dot, rows, groups, sizes) == 2 * 32 * 8 * 16
    assert flops(both, rows, groups, sizes) == 2 * 2 * 32 * 8 * 16


class OneByteAPicosecond(Free):
    """A machine on which bytes of memory traffic can be read off the price."""

    def hbm_s(self, nbytes: ArrayLike) -> NDArray[np.float64]:
        return np.asarray(nbytes) / PS_PER_S


def traffic(fn: Callable[..., Any], *args: Any, tied: dict[int, int]) -> int:
    """HBM bytes of a program on one device; `tied` outputs lie in donated inputs."""
    decisions = decide(
        graph.build(jax.make_jaxpr(fn)(*args), "cpu"),
        ONE,
        OneByteAPicosecond(),
        XLA_CPU,
        Requirements(tied=tied, donated=frozenset(tied.values())),
        unknown="error",
    )
    return sum(int(node.cost_ps[0]) for node in decisions.nodes)


def test_a_fused_update_reads_and_writes_every_value_once() -> None:
    """Adam: three values of float32 each way and a gradient of bfloat16, 26 bytes a parameter in XLA's one kernel."""

    def update(p: jax.Array, m: jax.Array, v: jax.Array, g: jax.Array) -> Any:
        gradient = g.astype(jnp.float32)
        m = 0.9 * m + 0.1 * gradient
        v = 0.95 * v + 0.05 * gradient * gradient
        return p - 1e-3 * (m / (jnp.sqrt(v) + 1e-8) + 0.1 * p), m, v

    state = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    gradient = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    assert traffic(update, state, state, state, gradient, tied={0: 0, 1: 1, 2: 2}) == 26 * 64 * 64


def test_what_waits_for_a_reduction_reads_its_value_again() -> None:
    """A sum that leaves the program is written, read by its mean, and read once more beside it: 4 bytes each time."""

    def centred(a: jax.Array, b: jax.Array) -> Any:
        x = a + b
        return x, x - x.mean(axis=1, keepdims=True)

    a = jax.ShapeDtypeStruct((64, 1024), jnp.float32)
    row = 64 * 4  # bytes of the means
    assert traffic(centred, a, a, tied={}) == pytest.approx((2 + 1 + 1 + 1 + 1) * 64 * 1024 * 4, abs=8 * row)


SLICE = 8 * 4  # bytes of what a trip of the loop below takes of one stack, and adds to another
TABLE, UPDATES = 8 * 2 * 4, 3 * 2 * 4


@pytest.mark.parametrize(
    ("primitive", "read", "written", "readers", "nbytes"),
    [
        ("loop_stack", False, True, 1, 2 * SLICE),  # zeroed, and written by what makes it
        ("loop_stack", True, True, 1, 3 * SLICE),
        ("loop_slice", True, False, 1, SLICE),  # read by the kernel that takes it
        ("loop_slice", True, False, 2, 2 * SLICE),
        ("loop_slice", True, False, 5, 2 * SLICE),
        ("loop_slice", True, True, 1, 2 * SLICE),
        ("scatter-add", True, False, 1, 2 * UPDATES),  # where the table lies
        ("scatter-add", True, True, 1, 2 * TABLE + 2 * UPDATES),  # someone else reads the table as it was
        ("scatter-add", False, False, 1, TABLE + 2 * UPDATES),  # zeros are written first
    ],
)
def test_a_loop_and_a_scatter_touch_what_they_move(
    primitive: str,
    read: bool,  # noqa: FBT001
    written: bool,  # noqa: FBT001
    readers: int,
    nbytes: int,
) -> None:
    def program(xs: jax.Array, table: jax.Array, rows: jax.Array, updates: jax.Array) -> Any:
        return lax.scan(lambda c, x: (c, jnp.sin(x)), 0.0, xs)[1], table.at[rows].add(updates)

    shapes = jnp.zeros((4, 8)), jnp.zeros((8, 2)), jnp.zeros(3, int), jnp.zeros((3, 2))
    (eqn,) = (x for x in graph.build(jax.make_jaxpr(program)(*shapes), "cpu").eqns if x.primitive == primitive)
    reads = [read] + [x.dtype == jnp.float32 for x in eqn.operands[1:]]  # what is not float32 is an index
    one = enumerate_strategies(rule_of(eqn), ONE)
    assert compute.touched_bytes(eqn, one, ONE, reads, [written], readers)[0] == nbytes


def einsum(equation: str, *operands: tuple[tuple[int, ...], Any]) -> graph.Eqn:
    """The dot of an einsum."""
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in operands]
    eqns = graph.build(jax.make_jaxpr(lambda *xs: jnp.einsum(equation, *xs))(*args), "cuda").eqns
    (dot,) = (eqn for eqn in eqns if eqn.primitive == "dot_general")
    return dot


@pytest.mark.parametrize(
    ("equation", "left", "right", "kind"),
    [
        ("bhqk,h->bhqk", (2, 4, 8, 8), (4,), "product"),
        ("i,j->ij", (8,), (16,), "product"),
        ("ik,kj->ij", (8, 1), (1, 16), "product"),
        ("bk,bk->b", (8, 4), (8, 4), "inner product"),
        ("k,k->", (8,), (8,), "inner product"),
        ("ik,k->i", (8, 4), (4,), "contraction"),
        ("ik,kj->ij", (8, 2), (2, 16), "contraction"),
    ],
)
def test_only_dots_of_matrices_are_contractions(equation: str, left: Any, right: Any, kind: str) -> None:
    traits = einsum(equation, (left, jnp.float32), (right, jnp.float32)).traits
    assert traits.contraction == (kind == "contraction")
    assert traits.fusible == (kind != "contraction")
    assert traits.ends_fusion == (kind == "inner product")


def test_a_mask_of_integers_is_cast_before_it_is_multiplied() -> None:
    """A matmul of integers would run on the vector units."""

    class Told(Free):
        def matmul_s(
            self, batch: Any, m: Any, n: Any, k: Any, dtype: str, *, beside_bytes: Any = 0.0
        ) -> NDArray[np.float64]:
            self.dtype = dtype
            return np.zeros(())

    machine = Told()
    for operands in (((8, 4), jnp.int32), ((4, 8), jnp.bfloat16)), (((8, 4), jnp.float32), ((4, 8), jnp.bfloat16)):
        eqn = einsum("ik,kj->ij", *operands)
        wanted = max(
            (dtype for _, dtype in operands if dtype != jnp.int32), key=lambda dtype: jnp.dtype(dtype).itemsize
        )
        compute.contraction_s(eqn, rule_of(eqn), enumerate_strategies(rule_of(eqn), ONE), ONE, machine)
        assert machine.dtype == jnp.dtype(wanted).name


def test_a_head_mask_costs_the_bytes_that_it_moves() -> None:
    """Between a softmax and its product with the values, that is: nothing but what the fusion around it moves."""

    def attention(scores: jax.Array, mask: jax.Array, values: jax.Array, *, masked: bool) -> jax.Array:
        weights = jax.nn.softmax(scores)
        weights = jnp.einsum("bhqk,h->bhqk", weights, mask) if masked else weights
        return jnp.einsum("bhqk,bkhd->bqhd", weights, values)

    shapes = ((8, 16, 512, 512), jnp.bfloat16), ((16,), jnp.int32), ((8, 512, 16, 64), jnp.bfloat16)
    args = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    steps = [
        autoshard.evaluate(
            partial(attention, masked=masked), *args, mesh={"x": 8}, hardware="h100:1x8", in_specs=(P("x"), P(), P("x"))
        ).record.cost.step_s
        for masked in (True, False)
    ]
    assert steps[0] == pytest.approx(steps[1], rel=0.02)


def test_what_a_loop_carries_is_read_in_every_trip() -> None:
    """An update of two carried arrays reads and writes both, as one that no loop runs."""

    def update(w: jax.Array, m: jax.Array) -> tuple[jax.Array, jax.Array]:
        m = 0.9 * m + w
        return w - 0.1 * m, m

    def thrice(w: jax.Array, m: jax.Array) -> tuple[jax.Array, jax.Array]:
        return lax.scan(lambda state, _: (update(*state), None), (w, m), length=3)[0]

    w = jax.ShapeDtypeStruct((1024, 64), jnp.float32)
    once = traffic(update, w, w, tied={0: 0, 1: 1})
    assert once == 4 * 1024 * 64 * 4
    assert traffic(thrice, w, w, tied={0: 0, 1: 1}) == 3 * once


@pytest.mark.parametrize("hardware", ["h100:1x1", "tpu-v5e:1x1"])
def test_updates_in_a_loop_take_what_they_take_outside(hardware: str) -> None:
    """By a kernel of their own, or by that of their gradient's product; the batch is the same in every trip."""

    def update(w: jax.Array, m: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        m = 0.9 * m + jax.grad(lambda w: ((x @ w) ** 2).sum())(w)
        return w - 0.1 * m, m

    def often(w: jax.Array, m: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return lax.scan(lambda state, _: (update(*state, x), None), (w, m), length=4)[0]

    w, x = jax.ShapeDtypeStruct((2048, 2048), jnp.float32), jax.ShapeDtypeStruct((256, 2048), jnp.float32)
    once, loop = (
        autoshard.plan(fn, w, w, x, mesh={"x": 1}, hardware=hardware, donate_argnums=(0, 1)).cost
        for fn in (update, often)
    )
    assert loop == pytest.approx(4 * once, rel=0.02)


@pytest.mark.parametrize("hardware", ["h100:1x1", "tpu-v5e:1x1"])
def test_of_what_is_sliced_its_part_is_read(hardware: str) -> None:
    """The last row's best of scores that are given; the halves of rotations, each once."""

    def last(scores: jax.Array) -> jax.Array:
        return jnp.argmax(scores[:, -1], -1)

    def best(scores: jax.Array) -> jax.Array:
        return jnp.argmax(scores, -1)

    def halves(x: jax.Array) -> jax.Array:
        one, other = jnp.split(x, 2, -1)
        return one * other

    def seconds(fn: Callable[..., Any], *shape: int) -> float:
        x = jax.ShapeDtypeStruct(shape, jnp.float32)
        return autoshard.plan(fn, x, mesh={"x": 1}, hardware=hardware).cost

    assert seconds(last, 16, 64, 65_536) == pytest.approx(seconds(best, 16, 65_536), rel=0.01)
    assert seconds(halves, 1024, 8192) == pytest.approx(seconds(jnp.sin, 1024, 8192) * 3 / 4, rel=0.01)
