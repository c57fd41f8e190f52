"""The schedule: every micro-batch meets every chunk of layers once, in order, one trip after the other."""

import pytest

from autoshard import SpecError
from autoshard.pipeline_parallel.schedule import Schedule

SCHEDULES = [(1, 1, 3), (2, 1, 4), (4, 1, 4), (4, 1, 3), (4, 1, 9), (2, 2, 4), (4, 3, 8), (3, 2, 6)]


@pytest.mark.parametrize(("stages", "repeats", "steps"), SCHEDULES)
def test_every_microbatch_meets_every_chunk_in_order(stages: int, repeats: int, steps: int) -> None:
    plan = Schedule(stages=stages, repeats=repeats, steps=steps)
    buffer: list[int | None] = [None] * stages
    met: dict[int, list[int]] = {j: [] for j in range(steps)}
    for trip in range(plan.trips):
        coming, buffer = buffer[-1], [None, *buffer[:-1]]
        fresh = plan.starts(trip) and trip < repeats * steps
        buffer[0] = plan.enters(trip) if fresh else coming
        assert not fresh or not met[plan.enters(trip)]  # who comes round does not begin again
        for stage, j in enumerate(buffer):
            if j is not None and len(met[j]) < stages * repeats:
                met[j].append(plan.repeat(trip, stage) * stages + stage)
                if len(met[j]) == stages * repeats:
                    assert (plan.leaves(j), stage) == (trip, stages - 1)
    assert met == {j: list(range(stages * repeats)) for j in range(steps)}


def test_repeats_shorten_the_bubble() -> None:
    plain, circular = (Schedule(stages=4, repeats=r, steps=8) for r in (1, 4))
    assert (plain.trips, circular.trips) == (11, 35)
    assert (plain.bubble, circular.bubble) == (3 / 11, 3 / 35)


def test_what_does_not_go_round_is_an_error() -> None:
    with pytest.raises(SpecError, match="groups of as many as there are stages"):
        Schedule(stages=4, repeats=2, steps=6)
    with pytest.raises(SpecError, match="stages=0: there is at least one"):
        Schedule(stages=0, repeats=1, steps=6)
