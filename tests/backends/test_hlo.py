import re
import time
from collections.abc import Callable
from itertools import pairwise
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.backends import hlo
from autoshard.backends.hlo.groups import axes_of_groups, axes_of_pairs, cycles, parse_groups, parse_pairs
from autoshard.backends.hlo.loops import Loops
from autoshard.backends.hlo.text import parse_shapes
from autoshard.errors import HloError
from autoshard.ir.mesh import MeshAxes

MESH = MeshAxes.of({"data": 2, "model": 4})
DATA, MODEL, BOTH = ("data",), ("model",), ("data", "model")
FIXTURES = sorted((Path(__file__).parents[1] / "data" / "hlo").glob("*/*.txt"))
ITEMSIZE = {"f32": 4, "bf16": 2}

# (kind, axes, elements that one device holds of what the kind counts, trips)
Expected = tuple[str, tuple[str, ...], int, int]


def gather(axes: tuple[str, ...], *shape: int, trips: int = 1) -> Expected:
    return "all-gather", axes, prod(shape), trips


def scatter(axes: tuple[str, ...], *shape: int, trips: int = 1) -> Expected:
    return "reduce-scatter", axes, prod(shape), trips


def reduce(axes: tuple[str, ...], *shape: int, trips: int = 1) -> Expected:
    return "all-reduce", axes, prod(shape), trips


def swap(axes: tuple[str, ...], *shape: int) -> Expected:
    return "all-to-all", axes, prod(shape), 1


def permute(axes: tuple[str, ...], *shape: int, trips: int = 1) -> Expected:
    return "collective-permute", axes, prod(shape), trips


# Hand arithmetic on the programs of tests/data/hlo/make.py: what each must emit, by any compiler.
PROGRAMS: dict[str, list[Expected]] = {
    "all_gather_data": [gather(DATA, 1024, 1024 // 4)],
    "all_gather_both": [gather(BOTH, 1024, 1024)],
    "reduce_scatter_model": [scatter(MODEL, 1024 // 2, 1024)],
    "all_reduce_model": [reduce(MODEL, 1024 // 2, 1024)],
    "all_to_all_model": [swap(MODEL, 1024 // 2, 1024 // 4)],
    "permute_model": [permute(MODEL, 1024 // 2, 1024 // 4)],
    # Forward's partial sums over model, and both weights' gradients over data.
    "megatron": [reduce(MODEL, 256 // 2, 512), reduce(DATA, 512, 2048 // 4), reduce(DATA, 2048 // 4, 512)],
    # Both weights forward and again for the recomputation; their gradients once.
    "fsdp_scan": 4 * [gather(DATA, 1024, 4096, trips=4)] + 2 * [scatter(DATA, 1024, 4096, trips=4)],
    # XLA moves each weight shard to where a gather over model, not data, collects it.
    "resharded_scan": 2 * [permute(BOTH, 512 // 4, 512, trips=4), gather(MODEL, 512, 512, trips=4)]
    + [reduce(DATA, 512, 512 // 2, trips=4), permute(BOTH, 512, 512 // 2, trips=4)],
    "nested": [reduce(MODEL, 64, 128, trips=3 * 5), reduce(MODEL, 64, 128, trips=3)],
    "sequence_parallel": [gather(MODEL, 4 // 2, 512, 1024), scatter(MODEL, 4 // 2, 512, 1024)],
    "experts": 2 * [swap(MODEL, 8, 1024 // 4, 256)],
    # Rings: forward and backward gather the weight, its gradient is scattered.
    "windowed_scan": 2 * [gather(BOTH, 4096, 4096, trips=3)] + [scatter(BOTH, 4096, 4096, trips=3)],
    "unrolled_ring": [scatter(MODEL, 4 // 2, 4096, 4096)],
    "sharing_rings": 3 * [scatter(MODEL, 4 // 2, 4096, 4096)],
    # 500 of 2000 rows: XLA pads the scatter to whole tiles and permutes halos to undo it.
    "padded": [gather(MODEL, 2000, 2048), scatter(MODEL, 2000, 2048), reduce(DATA, 2000 // 4, 2048)],
}


def emitted(path: Path, *, fold_slices: bool | None = None) -> tuple[hlo.Collective, ...]:
    fold = ".cpu" in path.name if fold_slices is None else fold_slices
    return hlo.collectives(hlo.read(path.read_text()), MESH, fold_slices=fold)


def fixture(program: str, compiler: str, version: str = "jax-0.10") -> tuple[hlo.Collective, ...]:
    return emitted(Path(__file__).parents[1] / "data" / "hlo" / version / f"{program}.{compiler}.txt")


@pytest.mark.parametrize("path", FIXTURES, ids=[f"{p.parent.name}/{p.stem}" for p in FIXTURES])
def test_what_compilers_emit_is_what_the_arithmetic_says(path: Path) -> None:
    program = path.name.split(".")[0]
    found = [(c.kind, c.axes, c.nbytes // ITEMSIZE[c.dtype], c.trips) for c in emitted(path)]
    assert sorted(found) == sorted(PROGRAMS[program])


@pytest.mark.parametrize("path", FIXTURES, ids=[f"{p.parent.name}/{p.stem}" for p in FIXTURES])
def test_every_collective_has_its_source_line(path: Path) -> None:
    for row in emitted(path):
        found = re.fullmatch(r"make\.py:(\d+) \((.*)\)", row.where)
        assert found is not None, row.where
        assert found[2].split(".")[0] in (path.name.split(".")[0], "pin", "manual")


def test_every_program_is_compiled_by_every_compiler() -> None:
    assert {p.name.split(".")[0] for p in FIXTURES} == set(PROGRAMS)
    assert {p.name.split(".")[1] for p in FIXTURES} == {"cpu", "gpu", "tpu"}


def test_element_types() -> None:
    dtypes = {c.dtype for c in fixture("fsdp_scan", "tpu")}, {c.dtype for c in fixture("fsdp_scan", "cpu")}
    assert dtypes == ({"bf16"}, {"f32"})  # XLA:CPU multiplies bf16 in f32
    gathered, scattered = fixture("sequence_parallel", "tpu")
    assert (gathered.dtype, scattered.dtype) == ("bf16", "f32")


def test_asynchronous_collectives_run_from_start_to_done() -> None:
    forward = fixture("fsdp_scan", "gpu")[0]
    assert (forward.asynchronous, forward.instruction, forward.done) == (True, "all-gather-start", "all-gather-done")
    waited = fixture("all_gather_data", "gpu")[0]
    assert (waited.asynchronous, waited.done) == (False, "all-gather-done")  # `is_sync`: start and wait at once
    plain = fixture("all_gather_data", "cpu")[0]
    assert (plain.asynchronous, plain.done) == (False, plain.instruction)


def test_an_asynchronous_fusion_of_a_tpu_counts_once() -> None:
    module = hlo.read((FIXTURES[0].parent / "fsdp_scan.tpu.txt").read_text())
    written = sum(x.opcode == "all-gather" for computation in module for x in computation)
    rows = [row for row in fixture("fsdp_scan", "tpu") if row.kind == "all-gather"]
    assert written > len(rows) == 4
    assert [(r.instruction, r.done) for r in rows if r.asynchronous] == [
        ("async-collective-start", "async-collective-done"),
        ("async-collective-start.1", "async-collective-done.1"),
    ]


@pytest.mark.parametrize(
    ("program", "compiler", "version", "combined"),
    [
        ("fsdp_scan", "gpu", "jax-0.10", [2] * 6),  # a tuple of operands
        ("megatron", "gpu", "jax-0.10", [1, 2, 2]),  # one concatenation
        ("megatron", "gpu", "jax-0.12", [1, 2, 2]),
        ("megatron", "tpu", "jax-0.10", [1, 2, 2]),
        ("all_to_all_model", "cpu", "jax-0.10", [1]),  # four operands, one array
    ],
)
def test_combined_collectives_are_taken_apart(program: str, compiler: str, version: str, combined: list[int]) -> None:
    assert [row.combined for row in fixture(program, compiler, version)] == combined


def test_a_ring_moves_more_blocks_than_it_replaces() -> None:
    for row in fixture("windowed_scan", "tpu"):
        assert row.group_size == 8
        assert row.moved_bytes == (8 + 1) * row.nbytes // 8
    (row,) = fixture("unrolled_ring", "tpu")
    assert row.moved_bytes == (4 + 1) * row.nbytes // 4
    shared = fixture("sharing_rings", "tpu")
    assert sum(row.moved_bytes for row in shared) == (2 + 3 * (4 - 1)) * shared[0].nbytes // 4


def test_wire_bytes_are_ring_volumes() -> None:
    (gathered,) = fixture("all_gather_both", "gpu")
    assert gathered.wire_bytes == gathered.nbytes * 7 // 8
    (reduced,) = fixture("all_reduce_model", "gpu")
    assert reduced.wire_bytes == 2 * reduced.nbytes * 3 // 4
    (passed,) = fixture("permute_model", "gpu")
    assert passed.wire_bytes == passed.nbytes
    looped = fixture("nested", "gpu")[0]
    assert (looped.total_bytes, looped.wire_bytes) == (15 * looped.nbytes, 15 * looped.moved_bytes)


@pytest.mark.parametrize("compiler", ["cpu", "gpu", "tpu"])
def test_branches_are_marked(compiler: str) -> None:
    always, sometimes = fixture("nested", compiler)
    assert (always.conditional, sometimes.conditional) == (False, True)


def test_slices_are_folded_only_on_request() -> None:
    path = FIXTURES[0].parent / "sequence_parallel.cpu.txt"
    assert [row.kind for row in emitted(path, fold_slices=False)] == ["all-gather", "all-reduce"]
    assert [row.kind for row in emitted(path, fold_slices=True)] == ["all-gather", "reduce-scatter"]


def test_the_text_of_a_row() -> None:
    (row,) = fixture("all_reduce_model", "gpu")
    assert str(row).startswith("all-reduce over model: f32 2097152 B × 1 at make.py:")


# What no fixture holds is written by hand: one module around the lines of a test.


def module(entry: str, *computations: str, partitions: int = 8) -> hlo.Module:
    others = "\n\n".join(computations)
    return hlo.read(
        f"HloModule hand_written, is_scheduled=true, num_partitions={partitions}\n\n"
        "%add (x: f32[], y: f32[]) -> f32[] {\n  %x = f32[] parameter(0)\n  %y = f32[] parameter(1)\n"
        "  ROOT %sum = f32[] add(%x, %y)\n}\n\n"
        f"{others}\n\nENTRY %main (a: f32[64]) -> f32[64] {{\n  %a = f32[64]{{0}} parameter(0)\n{entry}\n}}\n"
    )


def rows(found: hlo.Module, **options: object) -> list[tuple[str, tuple[str, ...] | None, int, int]]:
    collectives: Callable[..., tuple[hlo.Collective, ...]] = hlo.collectives
    return [(c.kind, c.axes, c.nbytes, c.trips) for c in collectives(found, MESH, **options)]


REDUCE = "channel_id=1, use_global_device_ids=true, to_apply=%add"


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", MODEL),
        ("{{0,4},{1,5},{2,6},{3,7}}", DATA),
        ("{{4,0},{5,1},{6,2},{7,3}}", DATA),
        ("{{0,1,2,3,4,5,6,7}}", BOTH),
        ("{}", BOTH),
        ("[1,8]<=[8]", BOTH),
        ("[2,4]<=[8]", MODEL),
        ("[4,2]<=[2,4]T(1,0)", DATA),
        ("mesh['data'=2,'model'=4] {'model'}", MODEL),
        ("mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'a'}", MODEL),
        ("mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'c'}", DATA),
        ("mesh['a'=8] {'a':(1)2}", DATA),
        ("mesh['a'=8] {'a':(2)4}", MODEL),
        ("mesh['a'=2,'b'=4], device_ids=(0,4,1,5,2,6,3,7) {'b'}", ("data", "model:(2)2")),
        ("{{0,2},{1,3},{4,6},{5,7}}", ("model:(1)2",)),
        ("{{0,1},{2,3},{4,5},{6,7}}", ("model:(2)2",)),
        ("{{0,2,4,6},{1,3,5,7}}", ("data", "model:(1)2")),
        ("{{0,1},{2,3},{4,5},{7,6}}", ("model:(2)2",)),
        ("{{0,3},{1,2},{4,7},{5,6}}", None),
        ("{{0,1,2,3},{4,5},{6,7}}", None),
        ("{{0,5},{1,4},{2,7},{3,6}}", None),
    ],
)
def test_groups_become_axes_or_say_that_they_are_none(groups: str, axes: tuple[str, ...] | None) -> None:
    found = module(f"  ROOT %r = f32[64]{{0}} all-reduce(%a), {REDUCE}, replica_groups={groups}")
    assert rows(found) == [("all-reduce", axes, 256, 1)]


@given(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4), st.data())
def test_groups_over_any_axes_are_read_back(sizes: list[int], data: st.DataObject) -> None:
    mesh = MeshAxes(tuple("abcd"[: len(sizes)]), tuple(sizes))
    chosen = sorted(data.draw(st.sets(st.sampled_from(range(len(sizes))), min_size=1)))
    kept = [i for i in range(len(sizes)) if i not in chosen]
    order = kept + chosen
    count = prod(sizes[i] for i in chosen)
    array = np.arange(mesh.size).reshape(sizes).transpose(order).reshape(-1, count)
    explicit = "{" + ",".join("{" + ",".join(map(str, row)) + "}" for row in array) + "}"
    shape, permutation = ",".join(map(str, sizes)), ",".join(map(str, order))
    iota = f"[{mesh.size // count},{count}]<=[{shape}]T({permutation})"
    named = ",".join(f"'{name}'={size}" for name, size in mesh.shape.items())
    meshed = f"mesh[{named}] {{{','.join(repr(mesh.names[i]) for i in chosen)}}}"
    assert parse_groups(explicit, mesh.size) == parse_groups(iota, mesh.size) == parse_groups(meshed, mesh.size)
    varying = tuple(mesh.names[i] for i in chosen if sizes[i] > 1)
    assert axes_of_groups(parse_groups(iota, mesh.size), mesh) == varying


@given(st.permutations(range(8)))
def test_pairs_become_the_axes_that_change(targets: list[int]) -> None:
    text = "{" + ",".join(f"{{{i},{t}}}" for i, t in enumerate(targets)) + "}"
    pairs = parse_pairs(text)
    expected = tuple(
        name
        for name, stride, size in (("data", 4, 2), ("model", 1, 4))
        if any(s // stride % size != t // stride % size for s, t in enumerate(targets))
    )
    assert axes_of_pairs(pairs, MESH) == expected
    assert sorted(x for cycle in cycles(pairs) for x in cycle) == list(range(8))


def test_groups_that_cannot_be_read_are_refused() -> None:
    for text in ("[2,4]", "mesh['a'=8]", "mesh['a'=8], device_ids=([8]T) {'a'}"):
        with pytest.raises(HloError, match="cannot read the"):
            parse_groups(text, 8)


def test_replica_groups_of_one_replica_are_all_partitions() -> None:
    found = module("  ROOT %r = f32[64]{0} all-reduce(%a), channel_id=1, replica_groups={{0}}, to_apply=%add")
    assert rows(found) == [("all-reduce", BOTH, 256, 1)]


def test_groups_of_one_device_move_nothing() -> None:
    found = module(f"  ROOT %r = f32[64]{{0}} all-reduce(%a), {REDUCE}, replica_groups=[8,1]<=[8]")
    assert rows(found) == []


def test_fused_reduce_scatters_of_one_channel_are_all_counted_each_element_for_itself() -> None:
    """As XLA:TPU (libtpu 0.0.51) emits them: two gradients a fusion, and every such fusion on channel 1."""
    scatter = (
        "%all-reduce-scatter.{0} (p.{0}: f32[64], q.{0}: f32[32]) -> (f32[8], f32[4]) {{\n"
        "  %p.{0} = f32[64]{{0}} parameter(0)\n  %q.{0} = f32[32]{{0}} parameter(1)\n"
        "  %r.{0} = (f32[64]{{0}}, f32[32]{{0}}) all-reduce(%p.{0}, %q.{0}), {1}, replica_groups=[1,8]<=[8]\n"
        "  %id.{0} = u32[] partition-id()\n"
        "  %x.{0} = f32[64]{{0}} get-tuple-element(%r.{0}), index=0\n"
        "  %y.{0} = f32[32]{{0}} get-tuple-element(%r.{0}), index=1\n"
        "  %u.{0} = f32[8]{{0}} dynamic-slice(%x.{0}, %id.{0}), dynamic_slice_sizes={{8}}\n"
        "  %v.{0} = f32[4]{{0}} dynamic-slice(%y.{0}, %id.{0}), dynamic_slice_sizes={{4}}\n"
        "  ROOT %t.{0} = (f32[8]{{0}}, f32[4]{{0}}) tuple(%u.{0}, %v.{0})\n}}"
    )
    found = module(
        "  %b = f32[32]{0} slice(%a), slice={[0:32]}\n"
        "  %f.1 = (f32[8]{0}, f32[4]{0}) fusion(%a, %b), kind=kCustom, calls=%all-reduce-scatter.1\n"
        "  %f.2 = (f32[8]{0}, f32[4]{0}) fusion(%a, %b), kind=kCustom, calls=%all-reduce-scatter.2\n"
        "  ROOT %out = f32[64]{0} copy(%a)",
        scatter.format(1, REDUCE),
        scatter.format(2, REDUCE),
    )
    assert rows(found) == [("reduce-scatter", BOTH, 256, 1), ("reduce-scatter", BOTH, 128, 1)] * 2
    assert {row.combined for row in hlo.collectives(found, MESH)} == {2}


def test_an_async_start_is_seen_from_outside() -> None:
    wrapped = (
        "%wrapped (p: f32[64]) -> f32[256] {\n  %p = f32[64]{0} parameter(0)\n"
        "  ROOT %g = f32[256]{0} all-gather(%p), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}, "
        "use_global_device_ids=true\n}"
    )
    found = module(
        "  %s = ((f32[64]{0}), f32[256]{0}, u32[]) async-start(%a), calls=%wrapped\n"
        "  %d = f32[256]{0} async-done(%s)\n  ROOT %out = f32[64]{0} slice(%d), slice={[0:64]}",
        wrapped,
    )
    (row,) = hlo.collectives(found, MESH)
    assert (row.kind, row.nbytes, row.instruction, row.done) == ("all-gather", 1024, "s", "d")
    assert (row.computation, row.asynchronous) == ("main", True)


def test_a_send_is_a_permute_and_its_receive_is_not_another() -> None:
    attributes = 'channel_id=1, frontend_attributes={_xla_send_recv_source_target_pairs="{{0,4},{1,5},{2,6},{3,7}}"}'
    found = module(
        "  %t = token[] after-all()\n"
        f"  %r = (f32[64]{{0}}, u32[], token[]) recv(%t), {attributes}\n"
        f"  %s = (f32[64]{{0}}, u32[], token[]) send(%a, %t), {attributes}\n"
        "  %rd = (f32[64]{0}, token[]) recv-done(%r), channel_id=1\n"
        "  %sd = token[] send-done(%s), channel_id=1\n"
        "  ROOT %out = f32[64]{0} get-tuple-element(%rd), index=0"
    )
    assert rows(found) == [("collective-permute", DATA, 256, 1)]


def test_rarer_kinds_are_read() -> None:
    found = module(
        "  %b = f32[64]{0} collective-broadcast(%a), channel_id=1, replica_groups=[2,4]<=[8]\n"
        "  %n = s64[4]{0} constant({0, 0, 0, 0})\n"
        "  ROOT %r = f32[64]{0} ragged-all-to-all(%b, %a, %n, %n, %n, %n), channel_id=2, replica_groups=[2,4]<=[8]"
    )
    assert rows(found) == [("collective-broadcast", MODEL, 256, 1), ("ragged-all-to-all", MODEL, 256, 1)]


def test_a_ring_that_the_user_wrote_stays_permutes() -> None:
    ring = 'channel_id=1, source_target_pairs={{0,1},{1,2},{2,3},{3,0}}, metadata={op_name="jit(f)/dot_general"}'
    lines = [f"  %p{i} = f32[64]{{0}} collective-permute(%{f'p{i - 1}' if i else 'a'}), {ring}" for i in range(5)]
    found = module("\n".join(lines) + "\n  ROOT %out = f32[64]{0} copy(%p4)")
    assert rows(found) == [("collective-permute", MODEL, 256, 1)] * 5


def test_a_gathers_ring_ends_with_what_somebody_takes() -> None:
    """Of four blocks one is here, one comes from the left, and two from the right, one after the other."""
    around = [(4 * g + i, 4 * g + (i + 1) % 4) for g in range(2) for i in range(4)]
    right, left = (
        "{" + ",".join(f"{{{a},{b}}}" for a, b in pairs) + "}" for pairs in (around, [p[::-1] for p in around])
    )
    lines = [
        f"  %{name} = f32[64]{{0}} collective-permute(%{operand}), channel_id=1, source_target_pairs={pairs}, "
        'frontend_attributes={is_spmd_generated="true"}, metadata={op_name="jit(f)/dot_general"}'
        for name, operand, pairs in (("l", "a", left), ("r", "a", right), ("rr", "r", right))
    ]
    found = module("\n".join(lines) + "\n  %s = f32[64]{0} add(%l, %r)\n  ROOT %out = f32[64]{0} add(%s, %rr)")
    assert rows(found) == [("all-gather", MODEL, 4 * 256, 1)]
    (row,) = hlo.collectives(found, MESH)
    assert row.moved_bytes == 3 * 256


SLICED = (
    f"  %r = f32[64]{{0}} all-reduce(%a), {REDUCE}, replica_groups=[2,4]<=[8]\n"
    "  %i = u32[] partition-id()\n"
    "  %s = f32[16]{0} dynamic-slice(%r, %i), dynamic_slice_sizes={16}\n"
)


@pytest.mark.parametrize(
    ("lines", "kind"),
    [
        (SLICED, "reduce-scatter"),
        (SLICED.replace("(%r, %i)", "(%v, %i)").replace("  %i", "  %v = f32[64]{0} copy(%r)\n  %i"), "reduce-scatter"),
        (SLICED + "  %w = f32[64]{0} negate(%r)\n", "all-reduce"),  # the whole is wanted too
        (SLICED.replace("partition-id()", "constant(0)"), "all-reduce"),  # every device takes the same part
        (SLICED.replace("16", "8"), "all-reduce"),  # less than the group's share
    ],
    ids=["slice", "view", "used whole", "no partition id", "smaller"],
)
def test_when_an_all_reduce_is_a_scatter(lines: str, kind: str) -> None:
    found = module(lines + "  ROOT %out = f32[64]{0} broadcast(%s)")
    assert [row[0] for row in rows(found, fold_slices=True)] == [kind]


def loop(condition: str, step: str, start: str, *, backend: str = "") -> hlo.Module:
    """A loop over (counter, bound 10, value), with an all-reduce in its body."""
    state = "(s32[], s32[], f32[64]{0})"
    return module(
        f"  %start = s32[] constant({start})\n  %ten = s32[] constant(10)\n  %copied = s32[] copy(%start)\n"
        f"  %init = {state} tuple(%copied, %ten, %a)\n"
        f"  %loop = {state} while(%init), condition=%cond, body=%body{backend}\n"
        "  ROOT %out = f32[64]{0} get-tuple-element(%loop), index=2",
        f"%body (p: {state}) -> {state} {{\n  %p = {state} parameter(0)\n"
        "  %i = s32[] get-tuple-element(%p), index=0\n  %n = s32[] get-tuple-element(%p), index=1\n"
        "  %v = f32[64]{0} get-tuple-element(%p), index=2\n  %one = s32[] constant(1)\n  %two = s32[] constant(2)\n"
        f"  %next = s32[] {step}\n"
        f"  %r = f32[64]{{0}} all-reduce(%v), {REDUCE}, replica_groups=[2,4]<=[8]\n"
        f"  ROOT %t = {state} tuple(%next, %n, %r)\n}}",
        f"%cond (q: {state}) -> pred[] {{\n  %q = {state} parameter(0)\n"
        "  %j = s32[] get-tuple-element(%q), index=0\n  %m = s32[] get-tuple-element(%q), index=1\n"
        f"  %five = s32[] constant(5)\n  ROOT %c = pred[] compare({condition}\n}}",
    )


@pytest.mark.parametrize(
    ("condition", "step", "start", "trips"),
    [
        ("%j, %five), direction=LT", "add(%i, %one)", "0", 5),
        ("%j, %five), direction=LE", "add(%i, %one)", "0", 6),
        ("%j, %five), direction=LT", "add(%two, %i)", "0", 3),
        ("%five, %j), direction=GT", "add(%i, %one)", "1", 4),
        ("%j, %m), direction=LT", "add(%i, %one)", "0", 10),  # the bound is carried
        ("%m, %j), direction=GE", "add(%i, %two)", "0", 6),
        ("%j, %five), direction=GT", "subtract(%i, %one)", "9", 4),
        ("%j, %five), direction=GE", "subtract(%i, %two)", "9", 3),
        ("%j, %five), direction=LT", "add(%i, %one)", "7", 0),
        ("%j, %five), direction=NE", "add(%i, %one)", "0", None),
        ("%j, %five), direction=LT", "multiply(%i, %two)", "1", None),
        ("%j, %five), direction=LT", "subtract(%i, %one)", "0", None),  # would never end
    ],
)
def test_trips_are_counted_from_the_comparison(condition: str, step: str, start: str, trips: int | None) -> None:
    found = loop(condition, step, start)
    assert Loops(found).trip_count(found["main"]["loop"]) == trips


def test_known_trips_come_first() -> None:
    found = loop(
        "%j, %five), direction=LT", "add(%i, %one)", "0", backend=', backend_config={"known_trip_count":{"n":"7"}}'
    )
    assert rows(found) == [("all-reduce", MODEL, 256, 7)]


def test_unknown_trips_are_named_and_can_be_given() -> None:
    found = loop("%j, %five), direction=LT", "multiply(%i, %two)", "1")
    (row,) = hlo.collectives(found, MESH)
    assert (row.trips, row.unknown_loops) == (1, ("loop",))
    (row,) = hlo.collectives(found, MESH, unknown_trips=hlo.UnknownTrips(100))
    assert (row.trips, row.unknown_loops) == (100, ("loop",))


def test_cycles_are_those_that_the_tpu_compiler_estimates() -> None:
    module = hlo.read((FIXTURES[0].parent / "fsdp_scan.tpu.txt").read_text())
    written = {
        c.name: sum(int(n) for x in c for n in re.findall(r'"estimated_cycles":"(\d+)"', x.attributes)) for c in module
    }
    bodies = [x.called("body") for x in module[module.entry] if x.opcode == "while"]
    assert len(bodies) == 2
    assert hlo.estimated_cycles(module) == written[module.entry] + 4 * sum(written[body or ""] for body in bodies)
    assert hlo.estimated_cycles(module) > 0
    assert hlo.estimated_cycles(hlo.read((FIXTURES[0].parent / "fsdp_scan.gpu.txt").read_text())) == 0


def test_shapes() -> None:
    text = "(f32[2,4]{1,0:T(8,128)S(1)}, /*index=1*/s4[3]{0}, pred[], token[], bf16[<=8]{0}, f8e4m3fn[5]{0})"
    assert [shape.nbytes for shape in parse_shapes(text)] == [32, 2, 1, 0, 16, 5]
    assert str(parse_shapes(text)[0]) == "f32[2,4]"
    with pytest.raises(HloError, match="unknown element type `f7`"):
        parse_shapes("f7[2]")


def test_an_instruction_is_read_whole() -> None:
    found = module(
        "  %c = s32[2,2]{1,0} constant({ { 1, 2 }, { 3, 4 } }), "
        'metadata={op_name="a/b" source_file="x.py" source_line=3}\n'
        "  ROOT %f = f32[64]{0} fusion(%a, /*index=1*/%c), kind=kLoop, calls=%add, "
        'metadata={op_name="say \\"hi\\"),"}, backend_config={"debug":"channel_id=9 %nobody"}'
    )
    constant, fusion = found["main"]["c"], found["main"].root
    assert (constant.literal, constant.operands) == ("{ { 1, 2 }, { 3, 4 } }", ())
    assert (constant.op_name, found.where(constant)) == ("a/b", "x.py:3")
    assert (fusion.operands, fusion.calls, fusion.attribute("kind")) == (("a", "c"), ("add",), "kLoop")
    assert (fusion.op_name, fusion.attribute("channel_id")) == ('say \\"hi\\"),', None)
    assert found["main"].users["a"] == (fusion,)
    assert found.where(fusion) == "<unknown>"


def test_a_stack_frame_is_its_innermost_line() -> None:
    found = hlo.read(
        'HloModule m\n\nFileNames\n1 "main.py"\n2 "model.py"\n\nFunctionNames\n1 "<module>"\n2 "layer"\n\n'
        "FileLocations\n1 {file_name_id=1 function_name_id=1 line=9 end_line=9 column=1 end_column=5}\n"
        "2 {file_name_id=2 function_name_id=2 line=31 end_line=31 column=4 end_column=8}\n\n"
        "StackFrames\n1 {file_location_id=1 parent_frame_id=1}\n2 {file_location_id=2 parent_frame_id=1}\n\n\n"
        "ENTRY %e (a: f32[]) -> f32[] {\n"
        '  ROOT %a = f32[] parameter(0), metadata={op_name="x" stack_frame_id=2}\n}\n'
    )
    assert found.where(found["e"].root) == "model.py:31 (layer)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("module @jit_f {}", "not HLO text: it begins with 'module @jit_f"),
        ("HloModule m\n\nHloModule n\n", "more than one HLO module"),
        ("HloModule m\n\n", "no computation"),
        ("HloModule m\n\nENTRY %e (a: f32[]) -> f32[] {\n  %a = f32[] parameter(0)\n", "computation e has no closing"),
        ("HloModule m\n\nENTRY %e () -> f32[] {\n  what is this\n}\n", "cannot read this line of HLO, in e"),
        ("HloModule m\n\nsomething else\n", "cannot read this line of HLO: 'something else'"),
        ("HloModule m\n\n%e (a: f32[]) -> f32[] {\n  %a = f32[] parameter(0\n}\n", "parentheses do not match"),
    ],
)
def test_what_is_not_hlo_is_refused(text: str, message: str) -> None:
    with pytest.raises(HloError, match=message):
        hlo.read(text)


def test_a_mesh_of_another_size_is_refused() -> None:
    with pytest.raises(HloError, match="the program is for 4 devices; the mesh data=2 × model=4 has 8"):
        hlo.collectives(module("  ROOT %c = f32[64]{0} copy(%a)", partitions=4), MESH)


def test_ten_megabytes_are_read_in_seconds() -> None:
    reduced = 'all-reduce(%{}), {}, replica_groups=[2,4]<=[8], metadata={{op_name="{}"}}'
    names = ["a", *(f"r{i}" for i in range(20_000))]
    lines = [
        f"  %{name} = f32[64]{{0}} " + reduced.format(before, REDUCE, "x" * 380) for before, name in pairwise(names)
    ]
    text = "\n".join(lines)
    assert len(text) > 10e6
    start = time.process_time()
    found = rows(module(f"{text}\n  ROOT %out = f32[64]{{0}} copy(%r19999)"))
    assert len(found) == 20_000
    assert time.process_time() - start < 10  # one second here; quadratic would be minutes
