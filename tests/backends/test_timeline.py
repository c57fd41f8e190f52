import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from autoshard.backends import hlo
from autoshard.backends.hlo.matmuls import matmuls
from autoshard.backends.timeline import Timeline, timeline
from autoshard.errors import HloError
from autoshard.ir.mesh import MeshAxes
from cost_models.machines.dtypes import itemsize, matmul_rates

MESH = MeshAxes.of({"data": 2, "model": 4})
FIXTURES = Path(__file__).parents[1] / "data" / "hlo" / "jax-0.10"


@dataclass(frozen=True, slots=True)
class Counter:
    """A machine that makes one FLOP a second, or moves one byte; a matmul that is in no fusion moves none."""

    latency_s: float = 0.0
    flops_per_s: float = 1.0
    host_bytes_per_s: float = 1.0

    def matmul_s(self, batch: int, m: int, n: int, k: int, dtype: str, *, beside_bytes: float = -float("inf")) -> float:
        moved = batch * (m * k + k * n + m * n) * (2 if dtype == "bfloat16" else 4) + beside_bytes
        return max(2 * batch * m * n * k / self.flops_per_s, moved)

    def hbm_s(self, nbytes: int) -> float:
        return nbytes

    def collective_s(self, kind: str, axes: Sequence[str], nbytes: int) -> float:
        return self.latency_s + nbytes


HEADER = "HloModule m, is_scheduled=true, num_partitions=8\n\n"
GATHER = (
    "  %s = (f32[2,8]{1,0}, f32[8,8]{1,0}) all-gather-start(%w), channel_id=1, replica_groups=[2,4]<=[8], "
    "dimensions={0}, use_global_device_ids=true"
)
DOT = "dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}"


def price(entry: str, *computations: str, machine: Counter | None = None) -> Timeline:
    text = HEADER + "\n\n".join(
        [
            *computations,
            "ENTRY %main (w: f32[2,8], x: f32[8,8]) -> f32[8,8] {\n  %w = f32[2,8]{1,0} parameter(0)\n"
            f"  %x = f32[8,8]{{1,0}} parameter(1)\n{entry}\n}}\n",
        ]
    )
    module = hlo.read(text)
    return timeline(module, hlo.collectives(module, MESH), machine or Counter(), MESH)


def test_a_lookup_on_a_sparse_core_takes_what_it_looks_up() -> None:
    """XLA:TPU of v5p starts it, hands it on and wraps it: none of that reads the table (8,192 bytes)."""
    looked_up = (
        "%fused (t: f32[256,8], i: s32[8]) -> f32[8,8] {\n  %t = f32[256,8]{1,0} parameter(0)\n"
        "  %i = s32[8]{0} parameter(1)\n  ROOT %g = f32[8,8]{1,0} gather(%t, %i), offset_dims={1}, "
        "collapsed_slice_dims={0}, start_index_map={0}, index_vector_dim=1, slice_sizes={1,8}\n}"
    )
    inner = (
        "%inner (t: f32[256,8], i: s32[8]) -> f32[8,8] {\n  %t = f32[256,8]{1,0} parameter(0)\n"
        "  %i = s32[8]{0} parameter(1)\n  ROOT %f = f32[8,8]{1,0} fusion(%t, %i), kind=kCustom, calls=%fused\n}"
    )
    outer = (
        "%outer (t: f32[256,8], i: s32[8]) -> f32[8,8] {\n  %t = f32[256,8]{1,0} parameter(0)\n"
        "  %i = s32[8]{0} parameter(1)\n  ROOT %c = f32[8,8]{1,0} custom-call(%t, %i), "
        'custom_call_target="wrapper", called_computations={%inner}\n}'
    )
    begun = "((f32[256,8]{1,0}, s32[8]{0}), f32[8,8]{1,0}, (s32[4]{0}))"
    entry = (
        "  %t = f32[256,8]{1,0} get-tuple-element(%w), index=0\n  %i = s32[8]{0} get-tuple-element(%w), index=1\n"
        '  %s = ((), (), (s32[4]{0})) async-start(), async_execution_thread="sparsecore", calls=%outer\n'
        f"  %u = {begun} async-update(%s, %t, %i)\n  ROOT %d = f32[8,8]{{1,0}} async-done(%u)"
    )
    assert price(entry, looked_up, inner, outer).step_s == 256 + 32 + 256  # rows, their numbers, the result


def test_a_custom_call_that_only_compares_by_a_computation_reads_its_operands() -> None:
    greater = (
        "%greater (a: f32[], b: f32[]) -> pred[] {\n  %a = f32[] parameter(0)\n  %b = f32[] parameter(1)\n"
        "  ROOT %g = pred[] compare(%a, %b), direction=GT\n}"
    )
    entry = '  ROOT %c = f32[8,8]{1,0} custom-call(%x, %x), custom_call_target="TopK", called_computations={%greater}'
    assert price(entry, greater).step_s == 3 * 256


def test_a_gather_hides_behind_the_matmul_beside_it() -> None:
    found = price(
        f"{GATHER}\n  %y = f32[8,8]{{1,0}} {DOT}\n"
        "  %d = f32[8,8]{1,0} all-gather-done(%s)\n  ROOT %z = f32[8,8]{1,0} add(%y, %d)"
    )
    matmul_s, gather_s, add_s = 2 * 8 * 8 * 8, 8 * 8 * 4, 3 * 8 * 8 * 4
    assert (found.compute_s, found.communication_s) == (matmul_s + add_s, gather_s)
    assert (found.exposed_s, found.hidden_s, found.step_s) == (0, gather_s, matmul_s + add_s)


def test_what_is_longer_than_its_cover_is_exposed() -> None:
    found = price(
        f"{GATHER}\n  %y = f32[8,8]{{1,0}} {DOT}\n"
        "  %d = f32[8,8]{1,0} all-gather-done(%s)\n  ROOT %z = f32[8,8]{1,0} bitcast(%d)",
        machine=Counter(latency_s=1000),
    )
    assert found.exposed_s == 1000 + 256 - 1024
    assert found.step_s == found.compute_s + found.exposed_s == 1256


def test_a_synchronous_collective_stops_compute() -> None:
    entry = (
        GATHER.replace("%s = (f32[2,8]{1,0}, f32[8,8]{1,0}) all-gather-start", "%d = f32[8,8]{1,0} all-gather")
        + f"\n  %y = f32[8,8]{{1,0}} {DOT}\n  ROOT %z = f32[8,8]{{1,0}} bitcast(%y)"
    )
    found = price(entry)
    assert (found.exposed_s, found.hidden_s, found.step_s) == (256, 0, 256 + 1024)


def loop(*lines: str) -> Timeline:
    """Five trips of a loop whose body makes `%r` of `%x.1`, which it carries round with the counter `%i`."""
    state = "(s32[], f32[8,8]{1,0})"
    body = (
        f"%body (p: {state}) -> {state} {{\n  %p = {state} parameter(0)\n"
        "  %i = s32[] get-tuple-element(%p), index=0\n  %x.1 = f32[8,8]{1,0} get-tuple-element(%p), index=1\n"
        + "".join(f"  {line}\n" for line in lines)
        + f"  ROOT %t = {state} tuple(%i, %r)\n}}"
    )
    condition = f"%cond (q: {state}) -> pred[] {{\n  %q = {state} parameter(0)\n  ROOT %c = pred[] constant(true)\n}}"
    return price(
        f"  %n = s32[] constant(0)\n  %init = {state} tuple(%n, %x)\n"
        f"  %loop = {state} while(%init), condition=%cond, body=%body, "
        'backend_config={"known_trip_count":{"n":"5"}}\n  ROOT %z = f32[8,8]{1,0} get-tuple-element(%loop), index=1',
        body,
        condition,
    )


def test_a_loop_takes_its_body_every_trip() -> None:
    found = loop(
        "%y = f32[8,8]{1,0} dot(%x.1, %x.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        "%r = f32[8,8]{1,0} all-reduce(%y), channel_id=1, replica_groups=[2,4]<=[8], use_global_device_ids=true",
    )
    assert (found.compute_s, found.communication_s, found.exposed_s) == (5 * 1024, 5 * 256, 5 * 256)
    assert found.step_s == 5 * (1024 + 256)
    assert [event.trips for event in found.events] == [5, 5]


def test_a_slice_that_goes_to_the_host_is_no_work_of_the_device() -> None:
    """As XLA:TPU copies what a loop puts into the host's memory; the whole stack is an operand."""
    found = sent()
    assert found.step_s == found.compute_s == 1024
    assert [(event.name, event.duration_s) for event in found.events if event.stream == "communication"] == [
        ("copy to the host's memory", 256)
    ]


def test_a_copy_to_the_host_is_waited_for_at_its_end() -> None:
    slow = sent(Counter(host_bytes_per_s=0.125))
    assert (slow.step_s, slow.compute_s, slow.exposed_s) == (8 * 256, 1024, 8 * 256 - 1024)


def sent(machine: Counter | None = None) -> Timeline:
    """A slice goes to the host's memory beside a matmul."""
    stack, part = "f32[64,8]{1,0:S(5)}", "f32[8,8]{1,0}"
    return price(
        f'  %i = s32[] constant(0)\n  %h = {stack} custom-call(), custom_call_target="AllocateBuffer"\n'
        f"  %s = ({stack}, {part}, u32[]) dynamic-update-slice-start(%h, %x, %i, %i)\n"
        f"  %y = {part} {DOT}\n  %d = {stack} dynamic-update-slice-done(%s)\n"
        f"  ROOT %z = {part} bitcast(%y)",
        machine=machine,
    )


def test_copies_from_the_host_go_one_after_the_other_beside_those_to_it() -> None:
    stack, part = "f32[64,8]{1,0:S(5)}", "f32[8,8]{1,0}"
    found = price(
        f'  %i = s32[] constant(0)\n  %h = {stack} custom-call(), custom_call_target="AllocateBuffer"\n'
        f"  %a = (({stack}, s32[]), {part}, u32[]) dynamic-slice-start(%h, %i)\n"
        f"  %b = (({stack}, s32[]), {part}, u32[]) dynamic-slice-start(%h, %i)\n"
        f"  %s = ({stack}, {part}, u32[]) dynamic-update-slice-start(%h, %x, %i, %i)\n"
        f"  %c = {part} dynamic-slice-done(%a)\n  %d = {part} dynamic-slice-done(%b)\n"
        f"  %e = {stack} dynamic-update-slice-done(%s)\n  ROOT %z = {part} bitcast(%d)"
    )
    assert (found.step_s, found.communication_s, found.compute_s) == (2 * 256, 3 * 256, 0)


REMATTED = 'metadata={op_name="jit(f)/transpose(jvp())/checkpoint/rematted_computation/dot_general" source_line=1}'


def test_a_matmul_that_is_named_so_runs_once_more_every_trip() -> None:
    product = "dot(%x.1, %x.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    found = loop(f"%y = f32[8,8]{{1,0}} {product}, {REMATTED}", f"%r = f32[8,8]{{1,0}} {product}")
    assert (found.flops, found.repeated_flops, found.repeated_s) == (10 * 1024, 5 * 1024, 5 * 1024)
    drawn = [event for event in found.trace()["traceEvents"] if event["ph"] == "X"]
    assert [event.get("cat") for event in drawn] == ["repeated", None]
    assert [event["args"].get("repeated", False) for event in drawn] == [True, False]


@pytest.mark.parametrize(
    ("outer", "inner", "name", "repeats"),
    [
        ("", REMATTED, "y", True),
        (REMATTED, "", "y", True),
        (REMATTED, 'metadata={op_name="jit(f)/transpose(jvp())/dot_general"}', "y", False),
        ("", 'metadata={op_name="jit(f)/jvp()/dot_general"}', "y.remat", True),
        ("", "", "y.rematerialized", False),
    ],
    ids=["fused", "by the fusion alone", "beside what is repeated", "by XLA itself", "another name"],
)
def test_what_runs_once_more_in_a_fusion_is_named_inside(outer: str, inner: str, name: str, *, repeats: bool) -> None:
    fused = (
        "%fused (x: f32[8,8]) -> f32[8,8] {\n  %x = f32[8,8]{1,0} parameter(0)\n"
        f"  ROOT %d = f32[8,8]{{1,0}} {DOT}{', ' * bool(inner)}{inner}\n}}"
    )
    call = f"fusion(%x), kind=kOutput, calls=%fused{', ' * bool(outer)}{outer}"
    found = price(f"  ROOT %{name} = f32[8,8]{{1,0}} {call}", fused)
    assert found.flops == 1024
    assert found.repeated_flops == (1024 if repeats else 0)


def test_of_branches_the_longest_is_taken() -> None:
    short = "%short (a: f32[8,8]) -> f32[8,8] {\n  ROOT %a = f32[8,8]{1,0} parameter(0)\n}"
    long = "%long (x.2: f32[8,8]) -> f32[8,8] {\n  %x.2 = f32[8,8]{1,0} parameter(0)\n" + (
        "  ROOT %y.2 = f32[8,8]{1,0} dot(%x.2, %x.2), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n}"
    )
    found = price(
        "  %p = pred[] constant(true)\n  ROOT %z = f32[8,8]{1,0} conditional(%p, %x, %x), "
        "true_computation=%short, false_computation=%long",
        short,
        long,
    )
    assert found.step_s == found.compute_s == 1024


@pytest.mark.parametrize(
    ("attributes", "image", "kernel", "result", "flops"),
    [
        ("dim_labels=bf_io->bf", "16,32", "32,64", "16,64", 2 * 16 * 32 * 64),
        # A batch of 4 matmuls, as XLA:TPU writes it: each output position has one tap that is data.
        ("window={size=4 stride=3 pad=0_0 lhs_dilate=4}, dim_labels=0bf_0io->0bf", "4,16,32", "4,32,64", "4,16,64", 0),
        ("window={size=3}, dim_labels=b0f_0io->b0f", "1,8,2", "3,2,5", "1,6,5", 2 * 5 * 2 * 6 * 3),
        (
            "window={size=2 pad=1_1 rhs_reversal=1}, dim_labels=bf0_0oi->b0f",
            "6,4,1",
            "2,5,4",
            "6,2,5",
            2 * 6 * 4 * 2 * 5,
        ),
    ],
)
def test_convolutions_count_taps_on_data(attributes: str, image: str, kernel: str, result: str, flops: int) -> None:
    found = price(
        f"  %a = f32[{image}] constant({{...}})\n  %b = f32[{kernel}] constant({{...}})\n"
        f"  ROOT %c = f32[{result}] convolution(%a, %b), {attributes}"
    )
    assert found.compute_s == (flops or 2 * 4 * 16 * 32 * 64)


GEMM = (
    'custom_call_target="{target}", backend_config={{"operation_queue_id":"0","gemm_backend_config":{{"alpha_real":1,'
    '"dot_dimension_numbers":{{"lhs_contracting_dimensions":{k},"rhs_contracting_dimensions":["0"],'
    '"lhs_batch_dimensions":{batch},"rhs_batch_dimensions":{batch}}},"epilogue":"BIAS_GELU"}}}}'
)


def test_slices_that_came_beside_each_other_are_one_array_for_nothing() -> None:
    """libtpu brings an array into its own memory in slices; the kernel that takes it is priced as what reads it."""
    part = "f32[4,8]{1,0:S(1)}"
    slices = "".join(
        f"  %s{k} = ((f32[8,8]{{1,0}}), {part}, s32[]) slice-start(%x), slice={{[{4 * k}:{4 * k + 4}], [0:8]}}\n"
        f"  %d{k} = {part} slice-done(%s{k})\n"
        for k in range(2)
    )
    whole = '  %c = f32[8,8]{1,0:S(1)} custom-call(%d0, %d1), custom_call_target="ConcatBitcast"\n'
    found = price(f"{slices}{whole}  ROOT %y = f32[8,8]{{1,0}} negate(%c)")
    assert found.compute_s == price("  ROOT %y = f32[8,8]{1,0} negate(%x)").compute_s


def made(line: str, *operands: str) -> list[tuple[int, int, int, int, str]]:
    """The matmuls of one line, of operands of these shapes."""
    given = "".join(f"  %p{i} = {shape} parameter({i})\n" for i, shape in enumerate(operands))
    module = hlo.read(f"{HEADER}ENTRY %main () -> f32[1] {{\n{given}  ROOT %c = {line}\n}}\n")
    return matmuls(module, module["main"], module["main"]["c"])


@pytest.mark.parametrize("target", ["__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8"])
def test_a_library_multiplies_what_its_configuration_says(target: str) -> None:
    """With its bias, its scales and its workspace, which are no operands of the product."""
    one = GEMM.format(target=target, k='["1"]', batch="[]")
    of_bias = f"(bf16[520,2560]{{1,0}}, s8[33554432]{{0}}) custom-call(%p0, %p1, %p2), {one}"
    assert made(of_bias, "bf16[520,640]", "bf16[640,2560]", "bf16[2560]") == [(1, 520, 2560, 640, "bfloat16")]
    batched = GEMM.format(target=target, k='["2"]', batch='["0"]')
    product = f"f32[4,16,32]{{2,1,0}} custom-call(%p0, %p1), {batched}"
    assert made(product, "f32[4,16,8]", "f32[4,8,32]") == [(4, 16, 32, 8, "float32")]


def test_a_library_call_that_does_not_say_what_it_multiplies_is_named() -> None:
    with pytest.raises(HloError, match="says no dot_dimension_numbers"):
        made('f32[8,8] custom-call(%p0, %p0), custom_call_target="__cublas$gemm", backend_config={}', "f32[8,8]")
    found = price(
        '  ROOT %c = f32[8,8] custom-call(%x, %x), custom_call_target="__cudnn$fmhaSoftmax", backend_config={}'
    )
    assert (found.flops, found.uncounted) == (0, ("__cudnn$fmhaSoftmax",))
    assert price('  ROOT %c = f32[8,8] custom-call(%x, %x), custom_call_target="__cub$RadixSort"').uncounted == ()


@pytest.mark.parametrize(
    ("what", "operands", "result", "expected"),
    [
        ("Forward", ("f32[2,224,224,3]", "f32[64,14,14,3]"), "f32[2,16,16,64]", (2 * 16 * 16, 64, 14 * 14 * 3)),
        (
            "BiasActivationForward",
            ("f32[2,224,224,3]", "f32[64,14,14,3]", "f32[64]"),
            "f32[2,16,16,64]",
            (2 * 16 * 16, 64, 14 * 14 * 3),
        ),
        ("BackwardInput", ("f32[2,16,16,64]", "f32[64,14,14,3]"), "f32[2,224,224,3]", (2 * 16 * 16, 14 * 14 * 3, 64)),
        ("BackwardFilter", ("f32[2,224,224,3]", "f32[2,16,16,64]"), "f32[64,14,14,3]", (14 * 14 * 3, 64, 2 * 16 * 16)),
    ],
)
def test_a_convolution_of_cudnn_multiplies_as_the_forward_one_says(
    what: str, operands: tuple[str, ...], result: str, expected: tuple[int, int, int]
) -> None:
    names = ", ".join(f"%p{i}" for i in range(len(operands)))
    line = (
        f"({result}, u8[0]{{0}}) custom-call({names}), window={{size=14x14 stride=14x14}}, "
        f'dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$conv{what}", backend_config={{}}'
    )
    assert made(line, *operands) == [(1, *expected, "float32")]


LOOP = (
    "%body (t: (s32[], f32[2,8], f32[8,8])) -> (s32[], f32[2,8], f32[8,8]) {\n"
    "  %t = (s32[], f32[2,8]{1,0}, f32[8,8]{1,0}) parameter(0)\n"
    "  %i = s32[] get-tuple-element(%t), index=0\n  %w = f32[2,8]{1,0} get-tuple-element(%t), index=1\n"
    "  %one = s32[] constant(1)\n  %next = s32[] add(%i, %one)\n"
    f"{GATHER}\n  %d = f32[8,8]{{1,0}} all-gather-done(%s)\n"
    "  ROOT %r = (s32[], f32[2,8]{1,0}, f32[8,8]{1,0}) tuple(%next, %w, %d)\n}"
)
CONDITION = (
    "%condition (t: (s32[], f32[2,8], f32[8,8])) -> pred[] {\n"
    "  %t = (s32[], f32[2,8]{1,0}, f32[8,8]{1,0}) parameter(0)\n  %i = s32[] get-tuple-element(%t), index=0\n"
    "  %n = s32[] constant(5)\n  ROOT %l = pred[] compare(%i, %n), direction=LT\n}"
)


def test_only_the_first_trip_of_a_loop_waits_for_what_was_sent_before_it() -> None:
    early = GATHER.replace("%s", "%before").replace("channel_id=1", "channel_id=2")
    found = price(
        f"{early}\n  %zero = s32[] constant(0)\n  %start = (s32[], f32[2,8]{{1,0}}, f32[8,8]{{1,0}}) "
        "tuple(%zero, %w, %x)\n  %loop = (s32[], f32[2,8]{1,0}, f32[8,8]{1,0}) while(%start), condition=%condition, "
        "body=%body\n  %made = f32[8,8]{1,0} get-tuple-element(%loop), index=2\n"
        "  %e = f32[8,8]{1,0} all-gather-done(%before)\n  ROOT %z = f32[8,8]{1,0} add(%made, %e)",
        LOOP,
        CONDITION,
    )
    gather_s = 8 * 8 * 4
    assert found.communication_s == 6 * gather_s
    assert found.exposed_s <= found.communication_s
    assert found.hidden_s >= 0
    assert found.step_s == found.compute_s + found.exposed_s


def test_matmuls_of_integers_have_the_types_that_prices_know() -> None:
    """XLA:TPU writes cumulative sums of integers as such."""
    entry = (
        "ENTRY %main () -> s32[16,64] {\n  %a = s32[16,32] constant({...})\n  %b = s32[32,64] constant({...})\n"
        "  ROOT %c = s32[16,64] convolution(%a, %b), dim_labels=bf_io->bf\n}\n"
    )
    module = hlo.read(HEADER + entry)
    computation = module[module.entry]
    (found,) = matmuls(module, computation, computation["c"])
    assert found == (1, 16, 64, 32, "int32")
    assert itemsize(found[-1]) == 4
    assert matmul_rates(found[-1])[-1] == "vector_flops_per_s"


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("*.txt")), ids=lambda path: path.stem)
def test_a_step_is_compute_and_what_is_exposed(path: Path) -> None:
    module = hlo.read(path.read_text())
    found = timeline(module, hlo.collectives(module, MESH), Counter(flops_per_s=1e3), MESH)
    assert found.step_s == pytest.approx(found.compute_s + found.exposed_s)
    assert found.communication_s >= found.exposed_s >= 0
    rows = hlo.collectives(module, MESH)
    always = sum(row.total_bytes for row in rows if not row.conditional)
    assert always <= found.communication_s <= sum(row.total_bytes for row in rows)


def test_matmul_flops_are_those_of_the_model() -> None:
    """Four layers of two matmuls: forward, recomputed, and twice backward, on 4096 of 8192 tokens."""
    layer = 2 * 4096 * 1024 * 4096
    for compiler, again in (("gpu", 2), ("tpu", 2)):
        module = hlo.read((FIXTURES / f"fsdp_scan.{compiler}.txt").read_text())
        found = timeline(module, (), Counter(flops_per_s=1.0), MESH)
        matmuls_s = sum(e.duration_s * e.trips for e in found.events if e.duration_s >= layer)
        # The second matmul of a layer is not needed for the gradient: it is not recomputed.
        assert matmuls_s == 4 * (again * 1 + 1 + 4) * layer


def test_a_ring_hides_behind_its_loop() -> None:
    module = hlo.read((FIXTURES / "windowed_scan.tpu.txt").read_text())
    found = timeline(module, hlo.collectives(module, MESH), Counter(flops_per_s=1.0), MESH)
    assert found.exposed_s == 0 < found.hidden_s


def test_the_trace_is_what_perfetto_reads() -> None:
    module = hlo.read((FIXTURES / "fsdp_scan.gpu.txt").read_text())
    found = timeline(module, hlo.collectives(module, MESH), Counter(), MESH)
    events = json.loads(json.dumps(found.trace()))["traceEvents"]
    drawn = [event for event in events if event["ph"] == "X"]
    assert len(drawn) == len(found.events)
    assert {event["tid"] for event in drawn} == {0, 1}
    assert drawn[0]["dur"] == found.events[0].duration_s * 1e6


def test_what_is_fused_behind_a_matmul_moves_its_bytes() -> None:
    """An optimizer's update in the fusion of its gradient: three more arrays read, and one written."""
    body = (
        "%update (a: f32[8,8], b: f32[8,8], p: f32[8,8], m: f32[8,8], v: f32[8,8]) -> f32[8,8] {\n"
        + "".join(f"  %{name} = f32[8,8]{{1,0}} parameter({i})\n" for i, name in enumerate("abpmv"))
        + "  %g = f32[8,8]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n"
        "  %s = f32[8,8]{1,0} add(%p, %m)\n  %t = f32[8,8]{1,0} add(%s, %v)\n"
        "  ROOT %u = f32[8,8]{1,0} add(%t, %g)\n}"
    )
    entry = "  ROOT %z = f32[8,8]{1,0} fusion(%x, %x, %x, %x, %x), kind=kOutput, calls=%update"
    assert price(entry, body).compute_s == max(2 * 8**3, 6 * 8 * 8 * 4) == 1536
    assert price(entry, body, machine=Counter(flops_per_s=0.5)).compute_s == 2 * 2 * 8**3
    assert price(entry, body).flops == 2 * 8**3


def test_a_mask_is_multiplied_as_what_it_masks() -> None:
    """XLA:TPU fuses the conversion of a one-hot mask into the matmul that takes it."""
    found = hlo.read(
        HEADER + "ENTRY %main (m: pred[8,8], x: bf16[8,8]) -> bf16[8,8] {\n  %m = pred[8,8]{1,0} parameter(0)\n"
        "  %x = bf16[8,8]{1,0} parameter(1)\n"
        "  ROOT %z = bf16[8,8]{1,0} dot(%m, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n}\n"
    )
    assert matmuls(found, found["main"], found["main"].root) == [(1, 8, 8, 8, "bfloat16")]


def test_a_gather_goes_on_in_fusions_of_a_loop_that_do_not_pay_for_it() -> None:
    """XLA:TPU begins the head's gather before the layers, and lets it go on while they run: once, not every trip."""
    gather = (
        "  %w = f32[2,8]{1,0} parameter(0)\n  %b = f32[8,8]{1,0} parameter(1)\n"
        "  %g = f32[8,8]{1,0} all-gather(%w), channel_id=7, replica_groups=[2,4]<=[8], dimensions={0}, "
        "use_global_device_ids=true\n"
    )
    pair, state = "(f32[2,8]{1,0}, f32[8,8]{1,0})", "(s32[], f32[4,4]{1,0}, f32[2,8]{1,0}, f32[8,8]{1,0})"
    begin = (
        f"%begin (w: f32[2,8], b: f32[8,8]) -> (f32[2,8], f32[8,8]) {{\n{gather}"
        f'  ROOT %c = {pair} custom-call(%g), custom_call_target="AsyncCollectiveStart"\n}}'
    )
    goes_on = (
        f"%goes_on (w: f32[2,8], b: f32[8,8], y: f32[4,4]) -> (f32[4,4], f32[2,8], f32[8,8]) {{\n{gather}"
        "  %y = f32[4,4]{1,0} parameter(2)\n  %n = f32[4,4]{1,0} negate(%y)\n"
        "  ROOT %t = (f32[4,4]{1,0}, f32[2,8]{1,0}, f32[8,8]{1,0}) tuple(%n, %w, %g)\n}"
    )
    end = (
        f"%end (w: f32[2,8], b: f32[8,8]) -> f32[8,8] {{\n{gather}"
        '  ROOT %c = f32[8,8]{1,0} custom-call(%w, %b, %g), custom_call_target="AsyncCollectiveDone"\n}'
    )
    body = (
        f"%body (s: (s32[], f32[4,4], f32[2,8], f32[8,8])) -> {state} {{\n  %s = {state} parameter(0)\n"
        "  %i = s32[] get-tuple-element(%s), index=0\n  %y = f32[4,4]{1,0} get-tuple-element(%s), index=1\n"
        "  %w = f32[2,8]{1,0} get-tuple-element(%s), index=2\n  %b = f32[8,8]{1,0} get-tuple-element(%s), index=3\n"
        "  %f = (f32[4,4]{1,0}, f32[2,8]{1,0}, f32[8,8]{1,0}) fusion(%w, %b, %y), kind=kCustom, calls=%goes_on\n"
        "  %y2 = f32[4,4]{1,0} get-tuple-element(%f), index=0\n"
        "  %w2 = f32[2,8]{1,0} get-tuple-element(%f), index=1\n"
        "  %b2 = f32[8,8]{1,0} get-tuple-element(%f), index=2\n"
        f"  ROOT %t = {state} tuple(%i, %y2, %w2, %b2)\n}}"
    )
    condition = (
        f"%cond (s: (s32[], f32[4,4], f32[2,8], f32[8,8])) -> pred[] {{\n  %s = {state} parameter(0)\n"
        "  ROOT %p = pred[] constant(true)\n}"
    )
    entry = (
        "  %y = f32[4,4]{1,0} constant({...})\n  %i = s32[] constant(0)\n"
        f"  %a = {pair} fusion(%w, %x), kind=kCustom, calls=%begin\n"
        "  %w1 = f32[2,8]{1,0} get-tuple-element(%a), index=0\n  %b1 = f32[8,8]{1,0} get-tuple-element(%a), index=1\n"
        f"  %s = {state} tuple(%i, %y, %w1, %b1)\n"
        f'  %l = {state} while(%s), condition=%cond, body=%body, backend_config={{"known_trip_count":{{"n":"5"}}}}\n'
        "  %w3 = f32[2,8]{1,0} get-tuple-element(%l), index=2\n  %b3 = f32[8,8]{1,0} get-tuple-element(%l), index=3\n"
        "  ROOT %d = f32[8,8]{1,0} fusion(%w3, %b3), kind=kCustom, calls=%end"
    )
    found = price(entry, begin, goes_on, end, body, condition)
    gather_s, negate_s = 8 * 8 * 4, 2 * 4 * 4 * 4
    assert (found.communication_s, found.compute_s) == (gather_s, 5 * negate_s)
    assert found.exposed_s == 0


def test_what_a_ring_sends_is_no_work_of_the_device() -> None:
    module = hlo.read((FIXTURES / "windowed_scan.tpu.txt").read_text())
    moved: list[int] = []

    class Recorder(Counter):
        def hbm_s(self, nbytes: int) -> float:
            moved.append(nbytes)
            return nbytes

    timeline(module, hlo.collectives(module, MESH), Recorder(), MESH)
    sent = {
        x.nbytes + sum(computation[name].nbytes for name in x.operands)
        for computation in module
        for x in computation
        if x.opcode == "collective-permute-start"
    }
    assert sent
    assert sent.isdisjoint(moved)


def test_heads_of_a_kernel_are_columns() -> None:
    """A projection to 8 heads as XLA:TPU writes it: the kernel slides over the one point of each row."""
    entry = (
        "ENTRY %main () -> f32[64,8,16] {\n  %a = f32[64,32,1] constant({...})\n  %b = f32[8,32,16] constant({...})\n"
        "  ROOT %c = f32[64,8,16] convolution(%a, %b), window={size=8 pad=7_7 rhs_reversal=1}, "
        "dim_labels=bf0_0io->b0f\n}\n"
    )
    module = hlo.read(HEADER + entry)
    computation = module[module.entry]
    assert matmuls(module, computation, computation["c"]) == [(1, 64, 8 * 16, 32, "float32")]
