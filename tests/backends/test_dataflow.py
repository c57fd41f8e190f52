"""Uses of a compiled value: what all of them together say of it, through fusions and loops."""

import pytest

from autoshard.backends import hlo
from autoshard.backends.hlo.dataflow import Dataflow

# A gather that a loop carries round, each trip of which casts a layer; with a fusion that squares and sums it.
GATHERED = """\
HloModule gathered, is_scheduled=true, num_partitions=8

%plus (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%cast (stack: f32[4,512,512], at: s32[]) -> bf16[1,512,512] {
  %stack = f32[4,512,512] parameter(0)
  %at = s32[] parameter(1)
  %none = s32[] constant(0)
  %layer = f32[1,512,512] dynamic-slice(%stack, %at, %none, %none), dynamic_slice_sizes={1,512,512}
  ROOT %narrow = bf16[1,512,512] convert(%layer)
}

%norm (value: f32[4,512,512]) -> f32[] {
  %value = f32[4,512,512] parameter(0)
  %zero = f32[] constant(0)
  %square = f32[4,512,512] multiply(%value, %value)
  ROOT %total = f32[] reduce(%square, %zero), dimensions={0,1,2}, to_apply=%plus
}

%body (state: (s32[], f32[4,512,512])) -> (s32[], f32[4,512,512]) {
  %state = (s32[], f32[4,512,512]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %kept = f32[4,512,512] get-tuple-element(%state), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %taken = bf16[1,512,512] fusion(%kept, %i), kind=kLoop, calls=%cast
  ROOT %out = (s32[], f32[4,512,512]) tuple(%next, %kept)
}

%condition (state: (s32[], f32[4,512,512])) -> pred[] {
  %state = (s32[], f32[4,512,512]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %trips = s32[] constant(4)
  ROOT %less = pred[] compare(%i, %trips), direction=LT
}

ENTRY %main (q: f32[4,64,512]) -> f32[] {
  %q = f32[4,64,512] parameter(0)
  %zero = s32[] constant(0)
  %whole = f32[4,512,512] all-gather(%q), dimensions={1}
  %start = (s32[], f32[4,512,512]) tuple(%zero, %whole)
  %loop = (s32[], f32[4,512,512]) while(%start), condition=%condition, body=%body
  ROOT %root = f32[] fusion(%whole), kind=kLoop, calls=%norm
}
"""
WIDE = GATHERED.replace("bf16[1,512,512]", "f32[1,512,512]").replace("convert(%layer)", "negate(%layer)")

# A sum of which a device takes its share, behind an element-wise operation, inside of a fusion.
SUMMED = """\
HloModule summed, is_scheduled=true, num_partitions=8

%cut (value: f32[1024,64], id: u32[]) -> f32[128,64] {
  %value = f32[1024,64] parameter(0)
  %id = u32[] parameter(1)
  %rows = u32[] constant(128)
  %none = u32[] constant(0)
  %at = u32[] multiply(%id, %rows)
  %half = f32[1024,64] tanh(%value)
  ROOT %share = f32[128,64] dynamic-slice(%half, %at, %none), dynamic_slice_sizes={128,64}
}

ENTRY %main (p: f32[1024,64]) -> f32[128,64] {
  %p = f32[1024,64] parameter(0)
  %whole = f32[1024,64] all-reduce(%p)
  %id = u32[] partition-id()
  ROOT %mine = f32[128,64] fusion(%whole, %id), kind=kLoop, calls=%cut
}
"""


# The same cut, in a fusion inside of a fusion, as XLA:TPU writes it: the outer one hands the position on.
NESTED = (
    SUMMED.replace("%cut (value", "%inner (value")
    .replace(
        "ENTRY %main",
        """%outer (of: f32[1024,64], by: u32[]) -> f32[128,64] {
  %of = f32[1024,64] parameter(0)
  %by = u32[] parameter(1)
  ROOT %part = f32[128,64] fusion(%of, %by), kind=kLoop, calls=%inner
}

ENTRY %main""",
    )
    .replace("fusion(%whole, %id), kind=kLoop, calls=%cut", "fusion(%whole, %id), kind=kOutput, calls=%outer")
)


def read(text: str) -> tuple[Dataflow, hlo.Computation, hlo.Instruction]:
    module = hlo.read(text)
    return Dataflow(module), module["main"], module["main"]["whole"]


def test_a_value_is_as_wide_as_its_readers_in_loops_and_fusions_take_it() -> None:
    flow, main, whole = read(GATHERED)
    assert flow.narrowest(main, whole, None) == 2
    flow, main, whole = read(WIDE)
    assert flow.narrowest(main, whole, None) is None


@pytest.mark.parametrize(
    ("text", "ways"),
    [
        (SUMMED, 8),
        (NESTED, 8),
        (SUMMED.replace("f32[128,64]", "f32[512,64]").replace("{128,64}", "{512,64}"), 2),
        (SUMMED.replace("dynamic-slice(%half, %at", "dynamic-slice(%half, %none"), 1),
        (
            SUMMED.replace("ROOT %mine", "%mine").rstrip("}\n")
            + "\n  ROOT %both = (f32[128,64], f32[1024,64]) tuple(%mine, %whole)\n}\n",
            1,
        ),
    ],
    ids=[
        "cut in eighths",
        "cut in a fusion of a fusion",
        "cut in halves",
        "cut alike on all devices",
        "returned whole, too",
    ],
)
def test_a_sum_is_kept_in_as_many_parts_as_its_slices_by_device(text: str, ways: int) -> None:
    flow, main, whole = read(text)
    assert flow.ways_kept(main, whole, None) == ways


def test_uses_are_followed_into_fusions_that_are_started_ahead() -> None:
    start = (
        "%begun = ((f32[1024,64], u32[]), f32[128,64], u32[]) fusion-start(%whole, %id), kind=kLoop, calls=%cut\n  "
        "ROOT %mine = f32[128,64] fusion-done(%begun)"
    )
    flow, main, whole = read(
        SUMMED.replace("ROOT %mine = f32[128,64] fusion(%whole, %id), kind=kLoop, calls=%cut", start)
    )
    assert main.root.opcode == "fusion-done"
    assert flow.ways_kept(main, whole, None) == 8


def test_a_value_has_been_as_narrow_as_any_type_on_its_way() -> None:
    there, back = "%less_wide = bf16[4,64,512] convert(%q)", "%again = f32[4,64,512] convert(%less_wide)"
    flow, main, _ = read(
        GATHERED.replace("%whole =", f"{there}\n  {back}\n  %whole =").replace("all-gather(%q", "all-gather(%again")
    )
    assert flow.least_width(main, main["again"]) == 2
    assert flow.least_width(main, main["q"]) == 4
    assert flow.source(main, main["again"]) is main["q"]


def test_a_value_is_cut_again_in_a_fusion_of_a_fusion() -> None:
    """Behind views alone: what is computed of it is more than moving it."""
    flow, main, whole = read(NESTED.replace("%half = f32[1024,64] tanh", "%half = f32[1024,64] copy"))
    assert flow.is_cut_again(main, whole, None)
    assert flow.is_scattered(main, whole, 0, 8)
    flow, main, whole = read(NESTED)
    assert not flow.is_cut_again(main, whole, None)
