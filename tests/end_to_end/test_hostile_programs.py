"""A thousand hostile programs are right, or refused for a reason that is known; and the generator is what it says.

Four of five are slow ones. More of them: `python -m benchmarks.hostile_programs`.
"""

import collections
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

from autoshard.errors import SpecError
from benchmarks.hostile_programs import GROUP as ASKED_AT_ONCE
from tests import hostile_oracle, hostile_shrink
from tests.hostile_oracle import FOREIGN, REFUSED, RIGHT, ROUNDED, VOID, WRONG, alike, judge, primitives
from tests.hostile_programs import GROUP, MODES, Program, setting_of

FIRST = 500_000  # seeds that nothing was mended on
PROGRAMS = 1000
PER_TEST = 50


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=[pytest.mark.slow] if first >= FIRST + PROGRAMS // 5 else [])
        for first in range(FIRST, FIRST + PROGRAMS, PER_TEST)
    ],
)
def test_hostile_programs_are_right(first: int) -> None:
    verdicts = judge(range(first, first + PER_TEST))
    bad = [f"{v.seed} ({v.setting}) {v.kind}: {v.why}" for v in verdicts if v.kind in (WRONG, FOREIGN)]
    assert not bad, "\n".join(bad)
    refused = [v for v in verdicts if v.kind in (REFUSED, ROUNDED, VOID)]
    assert len(refused) <= PER_TEST // 10, refused


def test_a_program_is_its_seed() -> None:
    for seed in range(0, 40 * GROUP, GROUP):
        one, other = Program(seed), Program(seed)
        assert all(np.array_equal(a, b) for a, b in zip(one.arguments, other.arguments, strict=True))
        assert str(jax.make_jaxpr(one)(one.arguments)) == str(jax.make_jaxpr(other)(other.arguments))


def test_programs_have_many_primitives_and_every_mode() -> None:
    found: collections.Counter[str] = collections.Counter()
    for seed in range(300):
        found.update(primitives(Program(seed)))
    assert len(found) >= 100, sorted(found)
    assert {setting_of(seed).mode for seed in range(0, 100 * GROUP, GROUP)} == set(MODES)


def test_programs_that_fail_are_told_from_their_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """One has a result of another shape, one raises another's exception, one ours."""
    off, foreign, refused = 3, 5, 6

    def sharded(programs: Sequence[Program]) -> list[list[Any]]:
        seeds = [p.seed for p in programs]
        if foreign in seeds:
            raise ValueError("foreign")
        if refused in seeds:
            raise SpecError("refused")
        made = [[np.array(x) for x in results] for results in hostile_oracle.plain(programs)]
        if off in seeds:
            made[seeds.index(off)][-1] = made[seeds.index(off)][-1][..., None]
        return made

    monkeypatch.setattr(hostile_oracle, "sharded", sharded)
    found = {v.seed: v.kind for v in judge(range(8))}
    assert found == {**dict.fromkeys(range(8), RIGHT), off: WRONG, foreign: FOREIGN, refused: REFUSED}


def test_what_fails_is_shrunk_to_the_operation_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that adds wrongly, as far as it goes."""

    def divides(program: Any) -> bool:
        return any(eqn.primitive.name == "rem" for eqn in program.live)

    def sharded(programs: Sequence[Any]) -> list[list[Any]]:
        wrong = [divides(p) for p in programs]
        return [[x + w for x in results] for results, w in zip(hostile_oracle.plain(programs), wrong, strict=True)]

    monkeypatch.setattr(hostile_oracle, "sharded", sharded)
    piece_of = hostile_shrink.piece_of
    pieces = {s: piece_of(Program(s)) for s in range(100) if setting_of(s).mode == "optimum"}
    seed = min((s for s in pieces if divides(pieces[s])), key=lambda s: len(pieces[s].live))  # few pieces are tried
    piece, how = hostile_shrink.shrunk(seed)
    assert how.startswith(WRONG)
    assert [eqn.primitive.name for eqn in piece.live] == ["rem"]


def test_what_is_asked_at_once_is_a_group() -> None:
    assert ASKED_AT_ONCE == GROUP


def test_a_difference_of_one_is_not_alike_where_sums_are_exact() -> None:
    want = np.arange(8, dtype=np.float32) * 1e6
    got = want.copy()
    got[-1] += 1
    assert alike(want, want, exact=True)
    assert not alike(got, want, exact=True)
    assert alike(got, want, exact=False)
    got[0] = np.nan
    assert not alike(got, want, exact=False)
