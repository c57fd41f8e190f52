"""What loops make again: a stack's slices that an inner loop takes, the same in every trip of the loop around it."""

import pytest

from autoshard.backends import hlo
from autoshard.backends.hlo.dataflow import Dataflow
from autoshard.backends.hlo.repeats import Repeat, Repeats

# Three micro-batches, each of which takes four layers of a stack, one after the other.
NESTED = """\
HloModule nested, is_scheduled=true, num_partitions=8

%take (stack: f32[4,64,512], at: s32[]) -> bf16[64,512] {
  %stack = f32[4,64,512] parameter(0)
  %at = s32[] parameter(1)
  %last = s32[] constant(3)
  %from_behind = s32[] subtract(%last, %at)
  %none = s32[] constant(0)
  %layer = f32[1,64,512] dynamic-slice(%stack, %from_behind, %none, %none), dynamic_slice_sizes={1,64,512}
  %flat = f32[64,512] bitcast(%layer)
  ROOT %narrow = bf16[64,512] convert(%flat)
}

%next (at: s32[]) -> s32[] {
  %at = s32[] parameter(0)
  %one = s32[] constant(1)
  ROOT %sum = s32[] add(%at, %one)
}

%inner (state: (s32[], f32[4,64,512], f32[4,64,512])) -> (s32[], f32[4,64,512], f32[4,64,512]) {
  %state = (s32[], f32[4,64,512], f32[4,64,512]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %copied = s32[] copy(%i)
  %w = f32[4,64,512] get-tuple-element(%state), index=1
  %g = f32[4,64,512] get-tuple-element(%state), index=2
  %mine = bf16[64,512] fusion(%w, %copied), kind=kLoop, calls=%take
  %whole = bf16[512,512] all-gather(%mine), dimensions={0}
  %after = s32[] fusion(%copied), kind=kLoop, calls=%next
  ROOT %out = (s32[], f32[4,64,512], f32[4,64,512]) tuple(%after, %w, %g)
}

%layers (state: (s32[], f32[4,64,512], f32[4,64,512])) -> pred[] {
  %state = (s32[], f32[4,64,512], f32[4,64,512]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %trips = s32[] constant(4)
  ROOT %less = pred[] compare(%i, %trips), direction=LT
}

%outer (state: (s32[], f32[4,64,512], f32[4,64,512])) -> (s32[], f32[4,64,512], f32[4,64,512]) {
  %state = (s32[], f32[4,64,512], f32[4,64,512]) parameter(0)
  %j = s32[] get-tuple-element(%state), index=0
  %w = f32[4,64,512] get-tuple-element(%state), index=1
  %g = f32[4,64,512] get-tuple-element(%state), index=2
  %zero = s32[] constant(0)
  %one = s32[] constant(1)
  %start = (s32[], f32[4,64,512], f32[4,64,512]) tuple(%zero, %w, %g)
  %forward = (s32[], f32[4,64,512], f32[4,64,512]) while(%start), condition=%layers, body=%inner, \
backend_config={"known_trip_count":{"n":"4"}}
  %kept = f32[4,64,512] get-tuple-element(%forward), index=1
  %other = f32[4,64,512] add(%g, %g)
  %after = s32[] add(%j, %one)
  ROOT %out = (s32[], f32[4,64,512], f32[4,64,512]) tuple(%after, %kept, %other)
}

%micro (state: (s32[], f32[4,64,512], f32[4,64,512])) -> pred[] {
  %state = (s32[], f32[4,64,512], f32[4,64,512]) parameter(0)
  %j = s32[] get-tuple-element(%state), index=0
  %trips = s32[] constant(3)
  ROOT %less = pred[] compare(%j, %trips), direction=LT
}

ENTRY %main (p: f32[4,64,512]) -> f32[4,64,512] {
  %p = f32[4,64,512] parameter(0)
  %zero = s32[] constant(0)
  %begin = (s32[], f32[4,64,512], f32[4,64,512]) tuple(%zero, %p, %p)
  %loop = (s32[], f32[4,64,512], f32[4,64,512]) while(%begin), condition=%micro, body=%outer
  ROOT %root = f32[4,64,512] get-tuple-element(%loop), index=2
}
"""
OUTER_INDEX = NESTED.replace("tuple(%zero, %w, %g)", "tuple(%j, %w, %g)")  # begins elsewhere in every micro-batch


def repeats(text: str, name: str = "mine") -> tuple[Repeat, ...]:
    module = hlo.read(text)
    return Repeats(Dataflow(module)).of(module["inner"], module["inner"][name])


def test_slices_of_a_stack_are_the_same_in_every_trip_of_the_outer_loop() -> None:
    assert repeats(NESTED) == (Repeat(3, 4, ("main", "p")),)


def test_a_fusion_may_be_started_before_it_is_waited_for() -> None:
    """As XLA:GPU of JAX 0.12 does."""
    start = (
        "%begun = ((f32[4,64,512], s32[]), bf16[64,512], u32[]) fusion-start(%w, %copied), kind=kLoop, calls=%take\n  "
        "%mine = bf16[64,512] fusion-done(%begun)"
    )
    text = NESTED.replace("%mine = bf16[64,512] fusion(%w, %copied), kind=kLoop, calls=%take", start)
    assert "fusion-done" in text
    assert repeats(text) == repeats(NESTED)


def test_what_neither_loop_changes_has_the_trips_of_both() -> None:
    assert repeats(NESTED, "w") == (Repeat(12, 1, ("main", "p")),)
    assert repeats(NESTED, "i") == ()


@pytest.mark.parametrize(
    "text",
    [
        OUTER_INDEX,
        NESTED.replace("tuple(%after, %kept, %other)", "tuple(%after, %other, %other)"),
        NESTED.replace("tuple(%after, %w, %g)", "tuple(%after, %g, %g)"),
        NESTED.replace("%from_behind = s32[] subtract(%last, %at)", "%from_behind = s32[] partition-id()"),
    ],
    ids=["other slices", "another stack", "the loop hands another stack on", "the device's own"],
)
def test_what_changes_is_no_repeat(text: str) -> None:
    assert text != NESTED
    assert repeats(text) == ()


def test_a_stack_of_which_a_loop_in_between_takes_slices_has_both_choices() -> None:
    """Ahead of the innermost loop one slice is kept; ahead of the outermost, all of them."""
    innermost = """\
%innermost (state: (s32[], bf16[64,512])) -> (s32[], bf16[64,512]) {
  %state = (s32[], bf16[64,512]) parameter(0)
  %k = s32[] get-tuple-element(%state), index=0
  %mine = bf16[64,512] get-tuple-element(%state), index=1
  %one = s32[] constant(1)
  %after = s32[] add(%k, %one)
  ROOT %out = (s32[], bf16[64,512]) tuple(%after, %mine)
}

"""
    run = """\
  %begin = s32[] constant(0)
  %start = (s32[], bf16[64,512]) tuple(%begin, %mine)
  %again = (s32[], bf16[64,512]) while(%start), condition=%layers, body=%innermost, \
backend_config={"known_trip_count":{"n":"5"}}
"""
    text = NESTED.replace("%inner (", innermost + "%inner (").replace("  %whole =", run + "  %whole =")
    module = hlo.read(text)
    body = module["innermost"]
    found = Repeats(Dataflow(module)).of(body, body["mine"])
    assert found == (Repeat(5, 1, ("inner", "mine")), Repeat(15, 4, ("main", "p")))
