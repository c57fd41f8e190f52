"""How many bytes the kernels of a compiled program read and write: parts of what they slice and update."""

import pytest

from tests.backends.test_timeline import Counter, price


def test_a_fusion_reads_only_its_slice() -> None:
    fused = (
        "%fused (f: f32[8,8], i: s32[]) -> f32[1,8] {\n  %f = f32[8,8]{1,0} parameter(0)\n"
        "  %i = s32[] parameter(1)\n"
        "  ROOT %g = f32[1,8]{1,0} dynamic-slice(%f, %i, %i), dynamic_slice_sizes={1,8}\n}"
    )
    found = price("  %j = s32[] constant(3)\n  ROOT %z = f32[1,8]{1,0} fusion(%x, %j), kind=kLoop, calls=%fused", fused)
    assert found.compute_s == 2 * 8 * 4 + 4  # a row read and written, and its index


@pytest.mark.parametrize(
    ("root", "seconds"),
    [
        ("dynamic-slice(%h, %i, %i), dynamic_slice_sizes={1,8}", 8 * 2 + 4 + 8 * 4),
        ("add(%h, %h)", 8 * 8 * 2 + 8 * 8 * 4),
    ],
)
def test_of_what_a_slice_is_computed_from_its_part_is_read(root: str, seconds: int) -> None:
    """Scores that are cast and scaled, of which some are taken; all of them where the fusion returns all."""
    result = "f32[1,8]" if "slice" in root else "f32[8,8]"
    fused = (
        f"%fused (f: bf16[8,8], i: s32[]) -> {result} {{\n  %f = bf16[8,8]{{1,0}} parameter(0)\n"
        "  %i = s32[] parameter(1)\n  %g = f32[8,8]{1,0} convert(%f)\n  %h = f32[8,8]{1,0} multiply(%g, %g)\n"
        f"  ROOT %r = {result}{{1,0}} {root}\n}}"
    )
    entry = (
        "  %j = s32[] constant(3)\n  %b = bf16[8,8]{1,0} constant({...})\n"
        f"  ROOT %z = {result}{{1,0}} fusion(%b, %j), kind=kLoop, calls=%fused"
    )
    assert price(entry, fused).compute_s == seconds


@pytest.mark.parametrize("shaped", [False, True])
def test_what_a_loop_stacks_is_written_in_place(shaped: bool) -> None:  # noqa: FBT001
    """One of four slices is read and written, also where XLA:GPU sees the stack in another shape."""
    stack, shape = ("%b", "f32[8,4,8]") if shaped else ("%s", "f32[4,8,8]")
    part = "f32[8,1,8]" if shaped else "f32[1,8,8]"
    bitcast = f"  %b = {shape}{{2,1,0}} bitcast(%s)\n" if shaped else ""
    body = (
        f"%write (s: f32[4,8,8], x: f32[8,8], i: s32[]) -> {shape} {{\n"
        "  %s = f32[4,8,8]{2,1,0} parameter(0)\n  %x = f32[8,8]{1,0} parameter(1)\n  %i = s32[] parameter(2)\n"
        f"{bitcast}  %p = {part}{{2,1,0}} bitcast(%x)\n  %zero = s32[] constant(0)\n"
        f"  ROOT %u = {shape}{{2,1,0}} dynamic-update-slice({stack}, %p, %zero, %i, %zero)\n}}"
    )
    entry = (
        "  %w = f32[4,8,8]{2,1,0} broadcast(%x), dimensions={0,1}\n  %n = s32[] constant(1)\n"
        f"  ROOT %z = {shape}{{2,1,0}} fusion(%w, %x, %n), kind=kLoop, calls=%write"
    )
    slice_bytes, made_bytes = 8 * 8 * 4, 5 * 8 * 8 * 4
    assert price(entry, body).compute_s == made_bytes + 2 * slice_bytes + 4  # the index, too


@pytest.mark.parametrize(("order", "whole"), [("2,1,0", True), ("0,2,1", False)])
def test_what_is_turned_after_an_update_is_written_whole(order: str, *, whole: bool) -> None:
    """Unless its elements lie as they did, or a dimension of one element is all that moved."""
    body = (
        "%write (s: f32[4,1,8], x: f32[4,1,1], i: s32[]) -> f32[8,4,1] {\n"
        "  %s = f32[4,1,8]{2,1,0} parameter(0)\n  %x = f32[4,1,1]{2,1,0} parameter(1)\n  %i = s32[] parameter(2)\n"
        "  %zero = s32[] constant(0)\n  %u = f32[4,1,8]{2,1,0} dynamic-update-slice(%s, %x, %zero, %zero, %i)\n"
        f"  ROOT %t = f32[8,4,1]{{{order}}} transpose(%u), dimensions={{2,0,1}}\n}}"
    )
    entry = (
        "  %l = f32[4,1,8]{2,1,0} constant({...})\n  %r = f32[4,1,1]{2,1,0} constant({...})\n"
        f"  %n = s32[] constant(1)\n  ROOT %z = f32[8,4,1]{{{order}}} fusion(%l, %r, %n), kind=kLoop, calls=%write"
    )
    array, row, index = 4 * 8 * 4, 4 * 4, 4
    assert price(entry, body).compute_s == index + row + (2 * array if whole else row)


def test_what_is_updated_within_a_fusion_is_written_whole() -> None:
    """A layer's cache, a slice of all layers': its update is handed on, and then put in its place among them."""
    computations = (
        "%take (s: f32[4,8,8], r: f32[1,8], i: s32[]) -> f32[8,8] {\n  %s = f32[4,8,8]{2,1,0} parameter(0)\n"
        "  %r = f32[1,8]{1,0} parameter(1)\n  %i = s32[] parameter(2)\n  %zero = s32[] constant(0)\n"
        "  %d = f32[1,8,8]{2,1,0} dynamic-slice(%s, %i, %zero, %zero), dynamic_slice_sizes={1,8,8}\n"
        "  %b = f32[8,8]{1,0} bitcast(%d)\n"
        "  ROOT %u = f32[8,8]{1,0} dynamic-update-slice(%b, %r, %i, %zero)\n}",
        "%put (s: f32[4,8,8], c: f32[8,8], r: f32[1,8], i: s32[]) -> f32[4,8,8] {\n"
        "  %s = f32[4,8,8]{2,1,0} parameter(0)\n  %c = f32[8,8]{1,0} parameter(1)\n  %r = f32[1,8]{1,0} parameter(2)\n"
        "  %i = s32[] parameter(3)\n  %zero = s32[] constant(0)\n"
        "  %u = f32[8,8]{1,0} dynamic-update-slice(%c, %r, %i, %zero)\n  %b = f32[1,8,8]{2,1,0} bitcast(%u)\n"
        "  ROOT %p = f32[4,8,8]{2,1,0} dynamic-update-slice(%s, %b, %i, %zero, %zero)\n}",
    )
    cache, row, index = 8 * 8 * 4, 8 * 4, 4
    for call, seconds in (
        ("f32[8,8]{1,0} fusion(%l, %r, %n), kind=kLoop, calls=%take", 2 * cache + row + index),
        ("f32[4,8,8]{2,1,0} fusion(%l, %x, %r, %n), kind=kLoop, calls=%put", 2 * cache + row + index),
    ):
        entry = (
            "  %l = f32[4,8,8]{2,1,0} constant({...})\n  %r = f32[1,8]{1,0} constant({...})\n"
            f"  %n = s32[] constant(1)\n  ROOT %z = {call}"
        )
        assert price(entry, *computations).compute_s == seconds


def test_a_slice_in_a_fusion_in_a_fusion_reads_its_part() -> None:
    """As XLA:TPU fuses the norm of one layer's input, a slice of all layers', with the matmul that takes it."""
    slices = (
        "%slices (f: f32[32,8], i: s32[]) -> f32[1,8] {\n  %f = f32[32,8]{1,0} parameter(0)\n"
        "  %i = s32[] parameter(1)\n"
        "  ROOT %g = f32[1,8]{1,0} dynamic-slice(%f, %i, %i), dynamic_slice_sizes={1,8}\n}"
    )
    outer = (
        "%outer (f: f32[32,8], i: s32[], w: f32[8,8]) -> f32[1,8] {\n  %f = f32[32,8]{1,0} parameter(0)\n"
        "  %i = s32[] parameter(1)\n  %w = f32[8,8]{1,0} parameter(2)\n"
        "  %s = f32[1,8]{1,0} fusion(%f, %i), kind=kLoop, calls=%slices\n"
        "  ROOT %z = f32[1,8]{1,0} dot(%s, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n}"
    )
    entry = (
        "  %all = f32[32,8]{1,0} constant({...})\n  %j = s32[] constant(3)\n"
        "  ROOT %z = f32[1,8]{1,0} fusion(%all, %j, %x), kind=kOutput, calls=%outer"
    )
    machine = Counter(flops_per_s=1e6)
    assert price(entry, slices, outer, machine=machine).compute_s == 8 * 4 + 4 + 8 * 8 * 4 + 8 * 4


def test_an_operand_that_an_inner_fusion_gives_another_shape_is_read() -> None:
    """As XLA:TPU hands a weight to a product."""
    bitcasts = (
        "%bitcasts (f: f32[8,8]) -> f32[8,8,1] {\n  %f = f32[8,8]{1,0} parameter(0)\n"
        "  ROOT %b = f32[8,8,1]{2,1,0} bitcast(%f)\n}"
    )
    outer = (
        "%outer (f: f32[8,8], a: f32[1,8]) -> f32[1,8,1] {\n  %f = f32[8,8]{1,0} parameter(0)\n"
        "  %a = f32[1,8]{1,0} parameter(1)\n  %s = f32[8,8,1]{2,1,0} fusion(%f), kind=kLoop, calls=%bitcasts\n"
        "  ROOT %z = f32[1,8,1]{2,1,0} dot(%a, %s), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n}"
    )
    entry = (
        "  %r = f32[1,8]{1,0} constant({...})\n  ROOT %z = f32[1,8,1]{2,1,0} fusion(%x, %r), kind=kOutput, calls=%outer"
    )
    assert price(entry, bitcasts, outer, machine=Counter(flops_per_s=1e6)).compute_s == (8 * 8 + 8 + 8) * 4


def test_a_product_that_a_fusion_casts_is_written_narrow() -> None:
    fused = (
        "%fused (a: f32[8,8]) -> bf16[8,8] {\n  %a = f32[8,8]{1,0} parameter(0)\n"
        "  %d = f32[8,8]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n"
        "  ROOT %c = bf16[8,8]{1,0} convert(%d)\n}"
    )
    entry = "  ROOT %z = bf16[8,8]{1,0} fusion(%x), kind=kOutput, calls=%fused"
    assert price(entry, fused, machine=Counter(flops_per_s=1e6)).compute_s == 8 * 8 * (4 + 2)
