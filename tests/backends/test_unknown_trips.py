"""Loops of compiled programs whose text does not say how often they run."""

import pytest

from autoshard.backends import devices, hlo
from autoshard.backends.timeline import Timeline, timeline

VALUE = "f32[8,8]{1,0}"


def nested(loops: int) -> hlo.Module:
    """Loops inside each other, and a product in the innermost."""
    product = "dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    turns = [product, *(f"while(%x), condition=%more, body=%body.{at}" for at in range(loops))]
    made = f"(x: f32[8,8]) -> f32[8,8] {{\n  %x = {VALUE} parameter(0)\n  ROOT %y = {VALUE} "
    more = f"%more (v: f32[8,8]) -> pred[] {{\n  %v = {VALUE} parameter(0)\n  ROOT %c = pred[] custom-call(%v)\n}}"
    bodies = [f"%body.{at} {made}{turn}\n}}" for at, turn in enumerate(turns[:-1])]
    text = "\n\n".join([more, *bodies, f"ENTRY %main {made}{turns[-1]}\n}}"])
    return hlo.read(f"HloModule m, is_scheduled=true, num_partitions=8\n\n{text}\n")


def priced(module: hlo.Module, trips: hlo.UnknownTrips) -> Timeline:
    target = devices.place({"data": 8}, "h100:1x8")
    return timeline(module, (), target.machine, target.axes, unknown_trips=trips)


@pytest.mark.parametrize(("loops", "trips"), [(1, 100), (2, 100**2), (3, 100**2)])
def test_they_take_as_many_trips_as_plans_guess(loops: int, trips: int) -> None:
    """Where many lie inside each other, the innermost multiply no more."""
    guessed = priced(nested(loops), hlo.UnknownTrips(count=100, depth=2))
    assert (guessed.flops, [event.trips for event in guessed.events]) == (trips * 2 * 8**3, [trips])
    once = priced(nested(loops), hlo.UnknownTrips())
    assert (once.flops, once.step_s) == (2 * 8**3, pytest.approx(guessed.step_s / trips))
