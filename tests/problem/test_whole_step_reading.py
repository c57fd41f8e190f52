"""What is kept of a flat pass: in terms of what lies in memory."""

import random

import pytest

from autoshard.ir.saved_values import ForwardPass, SavedValues, ValueId, saved_values
from autoshard.problem.whole_step.reading import as_stored
from tests.ir.test_recompute import enough, traced, unrolled


def flat(values: SavedValues) -> ForwardPass:
    (one,) = (one for one in values.passes if one.source.is_flat)
    return one


def products(one: ForwardPass) -> set[ValueId]:
    """The values that lie in memory, in these tests: products, and the stream that they are added to."""
    steps = [(v.id, one.steps[v.step].primitive) for v in one.values if v.step is not None]
    return {at for at, primitive in steps if primitive in ("dot_general", "add")}


def test_what_is_computed_from_memory_where_it_is_read_is_not_repeated() -> None:
    values = saved_values(traced(unrolled()).jaxpr, remat="add")
    one = flat(values)
    held = products(one)
    kept = set(enough(values, held))
    assert values.repeated(kept)  # tanh, of a product that is kept
    assert not one.demand(as_stored(one, kept, held)).first


@pytest.mark.parametrize("seed", range(5))
def test_repeated_steps_begin_at_what_lies_in_memory(seed: int) -> None:
    values = saved_values(traced(unrolled()).jaxpr, remat="add")
    one = flat(values)
    held = products(one)
    kept = held - set(random.Random(seed).sample(sorted(held), len(held) // 2))
    found = as_stored(one, kept, held)
    repeated = one.demand(found).first
    read = {at for k in repeated for at in one.steps[k].operands if at is not None and at in found}
    assert repeated
    assert all(at in held or one.value[at].free for at in read)
    assert as_stored(one, found, held) == found
