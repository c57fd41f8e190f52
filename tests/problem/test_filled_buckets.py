"""Filled buckets: what small collectives cost, where there is less to merge than a bucket."""

import numpy as np
import pytest

from autoshard.backends.known_compilers import XLA_GPU
from autoshard.costs.buckets import BUCKET_BYTES, Filled, collective_s
from autoshard.costs.windows import EARLY
from autoshard.problem import bill
from autoshard.problem.assignment import Assignment
from autoshard.problem.filled_buckets import refilled, unpaid_s, with_filled
from cost_models import hardware
from tests.assignments import random_choice
from tests.programs import TINY, smallest, space_of

MESH = {"data": 4, "model": 8}
ALL = ("data", "model")


def test_a_bucket_is_as_full_as_what_there_is_of_a_kind_over_its_axes() -> None:
    machine = hardware("h100:4x8").place(MESH)
    bucket = Filled(of=((("all-gather", ALL), 4096),), rest=2**20)
    for kind, axes, nbytes in (("all-gather", ALL, 4096), ("all-gather", ("data",), 2**20), ("all-reduce", ALL, 2**20)):
        assert bucket.nbytes(kind, axes) == nbytes
        filled, priced = (float(collective_s(machine, kind, axes, 512, bucket=b)) for b in (bucket, nbytes))
        assert filled == priced > float(collective_s(machine, kind, axes, 512, bucket=BUCKET_BYTES))
        assert filled < float(collective_s(machine, kind, axes, 512, bucket=0))


@pytest.mark.parametrize("name", TINY)
def test_decisions_are_priced_at_what_an_assignment_merges(name: str) -> None:
    """The seconds of its collectives are then what they were and what was not paid, and nothing is left unpaid."""
    of = space_of(smallest(name, step=True), mesh=MESH, hardware="h100:4x8", compiler=XLA_GPU)[0]
    for seed in range(3):
        choice = random_choice(of.decisions, of.resharder, np.random.default_rng(seed))
        before = Assignment(decisions=of.decisions, resharder=of.resharder, choice=choice)
        after = Assignment(decisions=refilled(before), resharder=of.resharder, choice=choice)
        seconds = [sum(row.seconds * row.trips for _, row in bill.transfers(one)) for one in (before, after)]
        if [row.axes for _, row in bill.transfers(before)] != [row.axes for _, row in bill.transfers(after)]:
            continue  # another way is cheaper at these prices
        assert unpaid_s(before) > 0
        assert seconds[1] == pytest.approx(seconds[0] + unpaid_s(before), rel=1e-9)
        assert unpaid_s(after) == pytest.approx(0.0, abs=1e-12)


def test_buckets_are_known_for_the_windows_that_they_are_found_for_alone() -> None:
    of = space_of(smallest(TINY[0], step=True), mesh=MESH, hardware="h100:4x8", compiler=XLA_GPU)[0]
    bucket = Filled(of=(), rest=4096)
    filled = with_filled(of.decisions, {EARLY: bucket})
    windows = of.decisions.windows
    assert {edge.bucket for edge in filled.edges if windows.of_value[edge.value] == EARLY} == {bucket}
    changed = {a.value for a, b in zip(of.decisions.edges, filled.edges, strict=True) if a.bucket != b.bucket}
    assert {windows.of_value[value] for value in changed} == {EARLY}
