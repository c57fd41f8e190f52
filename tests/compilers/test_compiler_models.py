"""Facts of `CompilerModel` that the text of one small program shows, compiled by every compiler."""

import re
from collections.abc import Callable
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.backends import compile, hlo
from autoshard.backends.devices import abstract
from autoshard.backends.devices import place as place_of
from autoshard.backends.known_compilers import named
from autoshard.backends.model import CompilerName
from autoshard.ir import graph
from autoshard.ir.mesh import MeshAxes
from autoshard.problem.decision_builders import Requirements
from autoshard.problem.decision_builders.facts import facts_of
from tests.installed import GPU, TPU

MESH = MeshAxes(("x",), (8,))
PLANES = MeshAxes(("a", "b"), (4, 2))
COMPILERS = [
    pytest.param("gpu", "h100:1x8", marks=GPU),
    pytest.param("tpu", "tpu-v5e:2x4", marks=TPU),
    pytest.param("cpu", "cpu:8"),
]
F32, BF16 = (lambda *shape, of=dtype: jax.ShapeDtypeStruct(shape, of) for dtype in (jnp.float32, jnp.bfloat16))


def constrained(x: jax.Array, *spec: Any, mesh: MeshAxes = MESH) -> jax.Array:
    """`x` with a sharding constraint."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(abstract(mesh), P(*spec)))


def text_of(
    topology: str, fn: Callable[..., Any], args: tuple[Any, ...], specs: tuple[P, ...], mesh: MeshAxes = MESH
) -> str:
    """The whole text of a compiled program."""
    shardings = tuple(NamedSharding(abstract(mesh), spec) for spec in specs)
    traced = jax.jit(fn, in_shardings=shardings).trace(*args)
    options = named(compile.CompileTarget.parse(topology).compiler).ring_free_flags
    return compile.compile(traced, topology=topology, mesh=mesh, compiler_options=options).hlo_text


def collectives(text: str, mesh: MeshAxes = MESH) -> list[hlo.Collective]:
    """Those of a program that move more than a scalar."""
    return [c for c in hlo.collectives(hlo.read(text), mesh) if c.nbytes > 1024]


def entry(topology: str, fn: Callable[..., Any], args: tuple[Any, ...], specs: tuple[P, ...]) -> tuple[str, str]:
    """The whole text of a compiled program, and that of its entry."""
    text = text_of(topology, fn, args, specs)
    return text, text[text.index("\nENTRY") :]


def on_host(layer: Any) -> Any:
    """A layer whose value named `h` goes to the host's memory and back."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["h"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    return jax.checkpoint(layer, policy=policy)


def offloaded(ws: jax.Array, x: jax.Array) -> jax.Array:
    layer = on_host(lambda x, w: jnp.tanh(checkpoint_name(x @ w, "h")) @ w.T)
    return jnp.square(jax.lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0]).sum()


@pytest.mark.parametrize(("compiler", "topology"), COMPILERS)
def test_a_stack_lies_in_the_host_s_memory_or_in_the_device_s(compiler: CompilerName, topology: str) -> None:
    """Each device's rows, for every trip; the copies of a slice have a beginning and an end."""
    text = text_of(topology, jax.grad(offloaded), (F32(4, 512, 1024), F32(8192, 512)), (P(), P("x")))
    stacks = re.findall(r"f32\[4,1024,1024\]\{[^}]*S\(5\)\} custom-call\(\), custom_call_target=\"AllocateBuffer", text)
    starts = re.findall(r"%dynamic-(?:update-)?slice-start[\w.]* = .*S\(5\)", text)
    assert bool(stacks) is bool(starts) is named(compiler).keeps_host_values_apart


@pytest.mark.parametrize(("compiler", "topology"), COMPILERS)
def test_a_value_is_moved_before_or_behind_the_cast_that_widens_it(compiler: CompilerName, topology: str) -> None:
    """It is asked for behind it, on both ends."""

    def moved(x: jax.Array) -> jax.Array:
        return jnp.sin(constrained(constrained(x.astype(jnp.float32), "x")))

    (gather,) = collectives(text_of(topology, moved, (BF16(1024, 512),), (P("x"),)))
    narrow = named(compiler).moves_collectives_past_casts
    assert (gather.kind, gather.nbytes) == ("all-gather", 1024 * 512 * (2 if narrow else 4))


PRODUCTS, SPLIT = (BF16(512, 1024), BF16(1024, 512)) * 2, (P(None, "x"), P("x")) * 2


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("compiler", "topology"), COMPILERS)
def test_terms_of_a_sum_are_added_before_they_are_reduced_or_behind(
    compiler: CompilerName, topology: str, *, turned: bool
) -> None:
    """Constraints finish each by itself, before it is transposed, too. XLA:CPU reduces in float32."""

    def added(a: jax.Array, b: jax.Array, c: jax.Array, d: jax.Array) -> jax.Array:
        terms = constrained(a @ b), constrained(c @ d)
        return jnp.sin(terms[0].T + terms[1].T if turned else terms[0] + terms[1])

    found = collectives(text_of(topology, added, PRODUCTS, SPLIT))
    assert {c.kind for c in found} == {"all-reduce"}
    assert len(found) == (1 if named(compiler).merges_terms_of_sums else 2)


@pytest.mark.parametrize(("compiler", "topology"), COMPILERS)
def test_terms_of_a_sum_over_two_axes_are_added_before_they_are_scattered_or_behind(
    compiler: CompilerName, topology: str
) -> None:
    """Over one of them; over the other they are reduced."""

    def added(a: jax.Array, b: jax.Array, c: jax.Array, d: jax.Array) -> jax.Array:
        return jnp.sin(constrained(a @ b + c @ d, "a", mesh=PLANES))

    both = ("a", "b")
    found = collectives(text_of(topology, added, PRODUCTS, (P(None, both), P(both)) * 2, PLANES), PLANES)
    assert len([c for c in found if c.axes == ("a",)]) == (1 if named(compiler).scatters_added_sums else 2)


@pytest.mark.parametrize(("compiler", "topology"), COMPILERS)
def test_a_sum_over_trips_is_reduced_in_the_loop_or_behind_it(compiler: CompilerName, topology: str) -> None:
    def summed(x: jax.Array, y: jax.Array) -> jax.Array:
        def trip(total: jax.Array, xy: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            return total + jnp.einsum("ba,bc->ac", *xy, preferred_element_type=jnp.float32), None

        return constrained(jax.lax.scan(trip, jnp.zeros((256, 512)), (x, y))[0])

    args, specs = (BF16(4, 1024, 256), BF16(4, 1024, 512)), (P(None, "x"), P(None, "x"))
    (reduced,) = collectives(text_of(topology, summed, args, specs))
    assert (reduced.kind, reduced.trips) == ("all-reduce", 1 if named(compiler).reduces_loop_sums_once else 4)


def line_of(text: str, kind: str) -> str:
    """The line of a program's only collective of a kind."""
    (line,) = (line for line in text.splitlines() if re.search(rf" = .*\b{kind}(-start)?\(", line))
    return line


@pytest.mark.parametrize(("compiler", "topology"), COMPILERS[:2])
def test_a_gather_along_an_inner_dimension_is_transposed_or_not(compiler: CompilerName, topology: str) -> None:
    text = text_of(topology, lambda x: jnp.sin(constrained(x)), (F32(1024, 1024),), (P(None, "x"),))
    transposed = "f32[1024,1024]{0,1" in line_of(text, "all-gather")
    assert transposed == named(compiler).collectives_along_outermost_only


def test_xla_cpu_transposes_what_it_gathers_alone() -> None:
    """What it scatters along an inner dimension it reduces as it lies; no copy of either is priced."""
    gathered = text_of("cpu:8", lambda x: jnp.sin(constrained(x)), (F32(1024, 1024),), (P(None, "x"),))
    assert "f32[1024,1024]{0,1}" in line_of(gathered, "all-gather")
    args, specs = PRODUCTS[:2], SPLIT[:2]
    scattered = text_of("cpu:8", lambda a, b: jnp.sin(constrained(a @ b, None, "x")), args, specs)
    assert "f32[512,512]{1,0}" in line_of(scattered, "all-reduce")
    assert not named("cpu").collectives_along_outermost_only


@pytest.mark.parametrize(("compiler", "topology"), COMPILERS)
def test_what_a_trip_gathers_is_merged_or_not(compiler: CompilerName, topology: str) -> None:
    """Two small weights of a layer."""

    def layers(a: jax.Array, b: jax.Array, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            a, b = (constrained(v.astype(jnp.bfloat16)) for v in w)
            return jnp.tanh((x @ a) @ b), None

        return jax.lax.scan(layer, x, (a, b))[0]

    args, specs = (F32(4, 256, 256), F32(4, 256, 256), BF16(4096, 256)), (P(None, "x"), P(None, "x"), P("x"))
    found = collectives(text_of(topology, layers, args, specs))
    assert [(c.kind, c.trips) for c in found] == [("all-gather", 4)] * 2
    assert len({c.instruction for c in found}) == (1 if named(compiler).merges_collectives_in_loops else 2)


def test_where_no_collective_is_started_ahead_none_hides() -> None:
    """XLA:CPU's are synchronous: whatever is fetched ahead or hides behind contractions is a fact about others."""

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)

    text = text_of("cpu:8", step, (F32(1024, 1024), F32(64, 1024)), (P("x"), P("x")))
    assert {c.kind for c in collectives(text)} >= {"all-gather"}
    assert "-start(" not in text
    model = named("cpu")
    assert not any([model.prefetches_forward_weights, model.waits_at_both_ends, model.hides_behind_late_work])


@pytest.mark.parametrize(("compiler", "topology"), COMPILERS)
def test_one_broadcast_draws_all_that_it_meets_into_its_layout(compiler: CompilerName, topology: str) -> None:
    """A scale meets whole rows, of which a product is split along its columns, and cut ones."""

    def step(x: jax.Array, y: jax.Array, scale: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        return (constrained(x) * scale) @ w, constrained(constrained(y, "x") * scale, "x")

    args = (BF16(16, 128, 256), BF16(16, 128, 256), BF16(256), BF16(256, 1024))
    emitted = collectives(text_of(topology, step, args, (P("x"), P("x"), P(), P(None, "x"))))
    weights = [c for c in emitted if c.kind == "all-gather" and c.nbytes in (256 * 1024 * 2, 256 * 1024 * 4)]
    assert bool(weights) == named(compiler).merges_broadcasts


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("compiler", "topology"), COMPILERS)
def test_equal_casts_are_one_before_they_are_moved(compiler: CompilerName, topology: str, *, turned: bool) -> None:
    """A table whose rows are looked up in pieces, and multiplied in rows: it sums over the pieces if casts are one."""

    def step(table: jax.Array, ids: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = constrained(table.astype(jnp.bfloat16), None, "x")[ids]
        head = table.T.astype(jnp.bfloat16) if turned else table.astype(jnp.bfloat16)
        scores = x @ head if turned else jnp.einsum("bd,vd->bv", x, head)
        return rows, scores.astype(jnp.float32).max(-1)

    args = (F32(8192, 256), jax.ShapeDtypeStruct((64,), jnp.int32), BF16(64, 256))
    emitted = collectives(text_of(topology, step, args, (P("x"), P(), P())))
    assert any(c.kind == "all-reduce" for c in emitted) == named(compiler).merges_casts


@pytest.mark.parametrize(("found", "gathers"), [(2**12, False), (2**16, True)])
@pytest.mark.parametrize(("_", "topology"), COMPILERS)
def test_few_rows_of_a_table_are_looked_up_in_its_columns(
    _: CompilerName, topology: str, found: int, *, gathers: bool
) -> None:
    """What is found is moved, where that is less than the table on each device; `doubtful_constraints` counts on it."""

    def step(table: jax.Array, ids: jax.Array) -> jax.Array:
        return constrained(table.astype(jnp.bfloat16)[ids], "x")

    args = (F32(4096, 256), jax.ShapeDtypeStruct((found,), jnp.int32))
    emitted = collectives(text_of(topology, step, args, (P(None, "x"), P("x"))))
    tables = (4096 * 256 * 2, 4096 * 256 * 4)
    assert any(c.nbytes in tables for c in emitted if c.kind == "all-gather") == gathers


@pytest.mark.parametrize(("compiler", "topology"), COMPILERS[:2])
def test_what_a_rotation_splits_is_written_or_read_where_it_lies(compiler: CompilerName, topology: str) -> None:
    """Of a product in bfloat16 halves are rotated in float32."""

    def rotated(x: jax.Array, w: jax.Array) -> jax.Array:
        heads = (x @ w).reshape(-1, 1024, 8, 128).astype(jnp.float32)
        one, other = jnp.split(heads, 2, -1)
        turn = jnp.cos(jnp.arange(1024.0))[:, None, None]
        both = jnp.concatenate([one * turn - other * turn, other * turn + one * turn], -1)
        return both.astype(jnp.bfloat16).transpose(0, 2, 1, 3)

    _, found = entry(topology, rotated, (BF16(8192, 1024), BF16(1024, 1024)), (P("x"), P()))
    assert ("= f32[1,1024,8,128]" in found) == named(compiler).writes_rotations
    assert "= f32[1,1024,8,64]" not in found


@pytest.mark.parametrize("width", [21_504, 65_536])
@pytest.mark.parametrize(("compiler", "topology"), COMPILERS)
def test_small_products_that_share_an_operand_are_one(compiler: CompilerName, topology: str, width: int) -> None:
    """Of two products of 64 MiB one is made, both results side by side; of two of 200 MB none."""

    def both(x: jax.Array, one: jax.Array, other: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.tanh(x @ one), jnp.sin(x @ other)

    args = BF16(8192, 512), BF16(512, width), BF16(512, width)
    text = text_of(topology, both, args, (P("x"), P(), P()))
    sides = (1024 * 512 + 512 * width + 1024 * width) * 2
    assert (f"bf16[1024,{2 * width}]" in text) == (sides <= named(compiler).merged_product_bytes)


@pytest.mark.parametrize(("compiler", "topology"), COMPILERS)
def test_ragged_products_are_dense_ones_or_not(compiler: CompilerName, topology: str) -> None:
    """A copy of 1,024 rows for each of eight groups lies in memory, or a kernel goes over each group's."""
    args = BF16(1024, 512), BF16(8, 512, 256), jax.ShapeDtypeStruct((8,), jnp.int32)
    _, found = entry(topology, jax.lax.ragged_dot, args, (P(), P(None, None, "x"), P()))
    copied = re.search(r"%(?!param)[\w.-]+ = \w+\[(8,1024,512|1024,8,512|1024,4096)\]", found) is not None
    assert copied == named(compiler).multiplies_ragged_as_dense
    assert ('"is_ragged_dot":true' in found) == (not copied)


@pytest.mark.parametrize(("compiler", "topology"), COMPILERS)
def test_what_contractions_make_themselves(compiler: CompilerName, topology: str) -> None:
    """The gated product is computed in the contraction that takes it, or a kernel of its own writes it."""

    def gated(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        gate, up, down = (w.astype(jnp.bfloat16) for w in (gate, up, down))
        return (jax.nn.silu(x @ gate) * (x @ up)) @ down

    args = BF16(4096, 1024), F32(1024, 4096), F32(1024, 4096), F32(4096, 1024)
    _, found = entry(topology, gated, args, (P("x"), P(), P(), P()))
    kernels = [line for line in found.splitlines() if re.search(r"= (bf16|f32)\[512,4096\].* kind=kLoop", line)]
    assert (not kernels) == named(compiler).contractions_make_their_operands


@pytest.mark.parametrize(("compiler", "topology"), COMPILERS)
def test_stacked_weights_are_cast(compiler: CompilerName, topology: str) -> None:
    """All of them before the loop, or each layer's in it."""

    def layers(stack: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w.astype(jnp.bfloat16)), None), x, stack)[0]

    _, found = entry(topology, layers, (F32(4, 1024, 1024), BF16(4096, 1024)), (P(), P("x")))
    assert ("= bf16[4,1024,1024]" in found) == named(compiler).casts_stacked_inputs_ahead


@pytest.mark.parametrize(("compiler", "topology"), COMPILERS)
def test_a_stack_is_gathered_as_it_is_cast_ahead(compiler: CompilerName, topology: str) -> None:
    """Asked for before the loops, under another name than the one that they slice, through a loop around them."""

    def trips(stack: jax.Array, x: jax.Array) -> jax.Array:
        whole = constrained(stack.reshape(4, 2, 1024, 1024)[:, 0]).swapaxes(1, 2)

        def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(h @ w.astype(jnp.bfloat16)), None

        return jax.lax.scan(lambda h, _: (jax.lax.scan(layer, h, whole)[0], None), x, length=3)[0]

    (gather,) = collectives(text_of(topology, trips, (F32(8, 1024, 1024), BF16(64, 1024)), (P(None, "x"), P())))
    size = 2 if named(compiler).casts_stacked_inputs_ahead else 4
    assert (gather.kind, gather.nbytes) == ("all-gather", 4 * 1024 * 1024 * size)


@pytest.mark.parametrize("precision", [None, "highest"])
@pytest.mark.parametrize(("compiler", "topology"), COMPILERS)
def test_operands_of_products_are_cast(compiler: CompilerName, topology: str, precision: str | None) -> None:
    """As they are gathered, unless they are to be multiplied as they are."""

    def program(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.dot(x, constrained(w), precision=precision))

    (gather,) = collectives(text_of(topology, program, (F32(4096, 1024), F32(1024, 1024)), (P("x"), P("x"))))
    size = 2 if named(compiler).multiplies_in_bfloat16 and precision is None else 4
    assert (gather.kind, gather.nbytes) == ("all-gather", 1024 * 1024 * size)


@pytest.mark.parametrize("repeated", ["a number", "a row", "a mask"])
@pytest.mark.parametrize(("compiler", "topology"), COMPILERS)
def test_what_a_loop_repeats_itself(compiler: CompilerName, topology: str, repeated: str) -> None:
    """One number always; what is repeated along some dimensions is handed in as it is, or as an array of its own."""

    def layers(stack: jax.Array, x: jax.Array) -> jax.Array:
        places = [jax.lax.broadcasted_iota(jnp.float32, x.shape, d) for d in (1, 2)]
        lowest = jnp.full(x.shape, -1e9, jnp.float32)
        added = {"a number": lowest, "a row": 2 * places[1], "a mask": jnp.where(places[0] < places[1], lowest, 0)}

        def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(h @ w + added[repeated]), None

        return jax.lax.scan(layer, x, stack)[0]

    text = text_of(topology, layers, (F32(4, 512, 512), F32(64, 512, 512)), (P(), P("x")))
    loops = [line.partition(" while(")[0] for line in text.splitlines() if " while(" in line]
    taken = max(carried.count("f32[8,512,512]") for carried in loops)
    assert (taken == 1) == (repeated == "a number" or named(compiler).loops_repeat_constants)


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
def test_what_is_added_to_scattered_rows_is_scattered_onto(compiler: CompilerName, topology: str) -> None:
    """By every compiler: no addition is left."""

    def gradient(table: jax.Array, rows: jax.Array, x: jax.Array) -> jax.Array:
        def loss(table: jax.Array) -> jax.Array:
            return jnp.sum(jnp.sin(table)) + jnp.sum(table[rows] * x)

        return jax.grad(loss)(table) * 2

    args = F32(4096, 1024), jax.ShapeDtypeStruct((512,), jnp.int32), F32(512, 1024)
    text, _ = entry(topology, gradient, args, (P(None, "x"), P(), P(None, "x")))
    assert " scatter(" in text
    assert not re.search(r"= f32\[4096,128\]\S* add\(", text), compiler


@pytest.mark.parametrize(("compiler", "topology"), COMPILERS)
def test_what_gathers_make_themselves(compiler: CompilerName, topology: str) -> None:
    """The scores of which some are taken are cast in the gather, or a kernel of their own writes them."""

    def taken(x: jax.Array, labels: jax.Array) -> jax.Array:
        return jnp.take_along_axis(jnp.cos(x), labels, axis=1)

    _, found = entry(topology, taken, (F32(4096, 8192), jax.ShapeDtypeStruct((4096, 1), jnp.int32)), (P("x"), P("x")))
    cosines = [line for line in found.splitlines() if re.search(r"= f32\[512,8192\]\S* (fusion|cosine)\(", line)]
    assert (not cosines) == named(compiler).gathers_make_their_operands


@pytest.mark.parametrize(("compiler", "topology"), COMPILERS)
def test_what_several_keys_draw_is_not_stored(compiler: CompilerName, topology: str) -> None:
    """Dropout under `vmap`: the kernels that take the bits draw them, on GPUs and TPUs."""

    def dropped(keys: jax.Array, x: jax.Array) -> jax.Array:
        def row(key: jax.Array, x: jax.Array) -> jax.Array:
            return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x, 0)

        return jax.vmap(row)(keys, x)

    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 512))
    _, found = entry(topology, dropped, (keys, F32(512, 8192)), (P("x"), P("x")))
    written = re.search(r"u32\[(64,8192|524288)\]", found) is not None
    assert written != named(compiler).draws_where_taken


@pytest.mark.parametrize(("compiler", "topology"), COMPILERS)
@pytest.mark.parametrize(
    "place",
    [
        lambda x: jnp.pad(x, ((0, 0), (0, 512), (0, 0))),
        lambda x: jnp.concatenate([x, jax.lax.broadcasted_iota(jnp.float32, x.shape, 2)], axis=1),
        lambda x: x[:, ::-1],
        lambda x: jax.lax.pad(x, jnp.float32(0), [(0, 0, 0), (0, 1, 1), (0, 0, 0)]),
    ],
    ids=["padded", "put together", "turned round", "put apart"],
)
def test_what_is_placed_is_written(
    compiler: CompilerName, topology: str, place: Callable[[jax.Array], jax.Array]
) -> None:
    """Of TPUs, before it is placed; the kernels that take the result place it."""
    _, found = entry(topology, lambda x: jnp.tanh(place(jnp.cos(x)) + 1), (F32(512, 512, 128),), (P("x"),))
    kernels = re.findall(r"= f32\S* (?:fusion|cosine|pad)\(", found)
    assert (len(kernels) > 1) == named(compiler).writes_what_is_placed


@pytest.mark.parametrize(("compiler", "topology"), COMPILERS)
@pytest.mark.parametrize(
    "space",
    [
        lambda x: x[:, ::2],
        lambda x: x[..., ::2],
        lambda x: jax.lax.pad(x, jnp.float32(0), [(0, 0, 0), (0, 1, 1), (0, 0, 0)]),
    ],
    ids=["rows", "elements", "put apart"],
)
def test_what_is_spaced_is_written(
    compiler: CompilerName, topology: str, space: Callable[[jax.Array], jax.Array]
) -> None:
    """By TPUs: a kernel for the operand, one for what is spaced, and one that reads it."""
    _, found = entry(topology, lambda x: jnp.tanh(space(x) + 1), (F32(512, 2048, 2048),), (P("x"),))
    kernels = [line for line in found.splitlines() if re.search(r" (fusion|slice|pad)\(", line)]
    assert len(kernels) == 1 + named(compiler).spaces_in_kernels_of_their_own


@pytest.mark.parametrize(("compiler", "topology"), COMPILERS)
@pytest.mark.parametrize(
    ("take", "rows", "part"),
    [
        (lambda y: y[:, -1], 16, True),
        (lambda y: y[..., :256], 16, True),
        (lambda y: y[:, -1], 8, False),
        (lambda y: (y[:, -1], y[:, 0]), 16, False),
        (lambda y: y.astype(jnp.bfloat16)[:, -1], 16, False),
    ],
    ids=["a row", "columns", "of one sequence", "two rows", "of a cast"],
)
def test_of_a_product_the_part_that_is_taken_is_computed(
    compiler: CompilerName, topology: str, take: Callable[[jax.Array], Any], rows: int, *, part: bool
) -> None:
    """By TPUs, if it is a part of the product itself, nothing else takes that, and a device has several sequences."""
    text, _ = entry(topology, lambda x, w: take(x @ w), (F32(rows, 512, 256), F32(256, 4096)), (P("x"), P()))
    products = re.findall(r"\w+\[([\d,]+)\]\S* (?:dot|convolution|custom-call|fusion)\(", text)
    whole = any(prod(map(int, dims.split(","))) >= 512 * 4096 for dims in products)
    assert whole != (part and named(compiler).multiplies_what_is_taken)


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


@pytest.mark.parametrize("again", [pytest.param(again, marks=GPU) for again in (False, True)])
def test_a_reduction_that_two_expressions_take_is_a_kernel_of_its_own(*, again: bool) -> None:
    """Of a norm nothing but its result is written, or sums of its rows, too, if the backward pass scales by them.

    The forward one reads what is normalized, the backward one its cotangent, too.
    """

    def forward(x: jax.Array, w: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)
        return (wide * scale).astype(jnp.bfloat16) @ w

    def both(x: jax.Array, w: jax.Array) -> Any:
        out, back = jax.vjp(forward, x, w)
        return out, back(jnp.tanh(out))

    args, fn = (BF16(4096, 2048), BF16(2048, 512)), both if again else forward
    _, found = entry("h100:1x8", fn, args, (P("x"), P()))
    sums = found.count("= f32[512]{0} fusion(")  # three by jax-cuda12-pjrt 0.12.0.1, two by 0.10.2
    assert (sums >= 2) == again
    assert again or sums == 0
    program = graph.build(jax.make_jaxpr(fn)(*args), "cuda")
    machine = place_of({"x": 8}, "h100:1x8").machine
    reread = facts_of(program, MESH, machine, named("gpu"), Requirements(), unknown="replicate").reread
    assert list(reread.values()) == ([2.0, 4.0] if again else [])  # bytes per element, before they are cast


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Of heads in groups, or by themselves if a group has one: the equations of `jax.nn.dot_product_attention`."""
    if q.ndim == k.ndim:
        scores, back = "bshd,bthd->bhst", "bhst,bthd->bshd"
    else:
        scores, back = "bskgd,btkd->bkgst", "bkgst,btkd->bskgd"
    weights = jax.nn.softmax(jnp.einsum(scores, q, k).astype(jnp.float32)).astype(jnp.bfloat16)
    return jnp.einsum(back, weights, v)


@pytest.mark.parametrize("grouped", [pytest.param(grouped, marks=GPU) for grouped in (False, True)])
def test_products_that_meet_in_different_orders_are_transposed(*, grouped: bool) -> None:
    """A kernel writes the gradient of grouped heads' scores in their order, as float32; of others none does."""
    queries = BF16(8, 512, 4, 3, 128) if grouped else BF16(8, 512, 12, 128)
    keys = BF16(8, 256, 4, 128) if grouped else BF16(8, 256, 12, 128)

    def fn(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        out, back = jax.vjp(attention, q, k, v)
        return back(jnp.tanh(out))

    _, found = entry("h100:1x8", fn, (queries, keys, keys), (P("x"), P("x"), P("x")))
    written = [m[1].split(",") for m in re.finditer(r"= f32\[([\d,]+)\]\S* fusion\(", found)]
    scores = 12 * 512 * 256
    assert any(prod(map(int, shape)) == scores for shape in written) == grouped


CUT = [(rows, columns, depth) for rows in (128, 1024) for columns in (64, 768) for depth in (512, 3000, 32768)]


@pytest.mark.parametrize(
    ("topology", "dtype"),
    [
        pytest.param("h100:1x8", jnp.float32, marks=GPU),
        pytest.param("a100:1x8", jnp.bfloat16, marks=[*GPU, pytest.mark.slow]),
        pytest.param("b200:1x8", jnp.bfloat16, marks=[*GPU, pytest.mark.slow]),
        pytest.param("tpu-v5e:2x4", jnp.bfloat16, marks=[*TPU, pytest.mark.slow]),
        ("cpu:8", jnp.float32),
    ],
)
def test_a_long_contraction_with_a_small_result_is_cut_into_sums(topology: str, dtype: Any) -> None:
    """Into as many as the chip's model says, each as large as the result; else into none."""

    def fn(*operands: jax.Array) -> list[jax.Array]:
        found = []
        for i, (left, right) in enumerate(zip(operands[::2], operands[1::2], strict=True)):
            with jax.named_scope(f"product{i}."):
                found.append(jnp.tanh(left @ right))
        return found

    args = [jax.ShapeDtypeStruct(s, dtype) for m, n, k in CUT for s in ((m, k), (k, n))]
    text = text_of(topology, fn, tuple(args), tuple(P() for _ in args))
    sums: dict[int, int] = {}
    for line in text.splitlines():
        if made := re.search(r" = \w+\[([\d,]+)\]\S* (?:dot|convolution)\(.*/product(\d+)\./", line):
            i = int(made[2])
            sums[i] = prod(map(int, made[1].split(","))) // (CUT[i][0] * CUT[i][1])
    place = place_of(MESH.shape, topology)
    name = jnp.dtype(dtype).name
    counts = [int(place.machine.contraction_sums(1, m, n, k, name, name)) for m, n, k in CUT]
    cuts = place.compiler.cuts_contractions
    assert [sums.get(i, 1) for i in range(len(CUT))] == (counts if cuts else [1] * len(CUT))
    assert (max(counts) > 1) == cuts
