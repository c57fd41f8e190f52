"""Filled buckets: what small collectives cost, where there is less to merge than a bucket."""

import numpy as np
import pytest

from autoshard.backends.known_compilers import XLA_GPU
from autoshard.costs.buckets import BUCKET_BYTES, COMBINED, MEMBER_S, Filled, collective_s
from autoshard.costs.windows import EARLY
from autoshard.problem import bill
from autoshard.problem.assignment import Assignment
from autoshard.problem.collective import Collective
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
def test_what_is_not_paid_is_what_one_collective_of_each_kind_takes_more(name: str) -> None:
    """In every window all of a kind and over the same axes are one, and each member adds its own kernel."""
    of = space_of(smallest(name, step=True), mesh=MESH, hardware="h100:4x8", compiler=XLA_GPU)[0]
    windows, machine = of.decisions.windows, of.resharder.machine
    for seed in range(3):
        choice = random_choice(of.decisions, of.resharder, np.random.default_rng(seed))
        chosen = Assignment(decisions=of.decisions, resharder=of.resharder, choice=choice)
        merged: dict[tuple[int, str, tuple[str, ...]], list[Collective]] = {}
        for edge, row in bill.transfers(chosen):
            if (window := windows.of_value[edge.value]) is not None and edge.bucket and row.kind in COMBINED:
                merged.setdefault((windows.whole[window], row.kind, row.axes), []).append(row)
        assert len(merged) > 1
        paid_s = sum(row.seconds * row.trips for rows in merged.values() for row in rows)
        whole_s = 0.0
        for (window, kind, axes), rows in merged.items():
            assert {row.trips for row in rows} == {1}
            nbytes = sum(row.nbytes for row in rows)
            assert nbytes < BUCKET_BYTES
            whole_s += float(machine.collective_s(kind, axes, nbytes))
            whole_s += len(rows) * MEMBER_S * (2 if kind == "all-reduce" else 1)
            again = refilled(chosen).windows.filled[window]
            assert again.nbytes(kind, axes) == nbytes
            assert again.rest == sum(row.nbytes for key, of_key in merged.items() if key[0] == window for row in of_key)
        assert unpaid_s(chosen) == pytest.approx(whole_s - paid_s, rel=1e-9)
        assert unpaid_s(chosen) > 0


def test_buckets_are_known_for_the_windows_that_they_are_found_for_alone() -> None:
    of = space_of(smallest(TINY[0], step=True), mesh=MESH, hardware="h100:4x8", compiler=XLA_GPU)[0]
    bucket = Filled(of=(), rest=4096)
    filled = with_filled(of.decisions, {EARLY: bucket})
    windows = of.decisions.windows
    assert {edge.bucket for edge in filled.edges if windows.of_value[edge.value] == EARLY} == {bucket}
    changed = {a.value for a, b in zip(of.decisions.edges, filled.edges, strict=True) if a.bucket != b.bucket}
    assert {windows.of_value[value] for value in changed} == {EARLY}
