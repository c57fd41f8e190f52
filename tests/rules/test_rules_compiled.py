"""Every split that a rule allows gives the numbers of the unsharded equation when XLA compiles it."""

import zlib
from collections.abc import Sequence

import numpy as np
import pytest

from autoshard.ir.mesh import MeshAxes
from tests import random_indexing
from tests.rules_cases import CASES, Case
from tests.rules_compiled import MESHES, Split, hostile, splits_of, wrong
from tests.rules_hostile import HOSTILE, Hostile
from tests.rules_oracle import equations, executions

MOST = 6  # splits of a case
BATCH = 20  # cases compiled together


def splits(case: Case, mesh: MeshAxes, most: int | None) -> list[Split]:
    """Splits of a case's equation, on data that the function gives it, made hostile."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    ran = executions(case.fn, *(arg.draw(rng) for arg in case.args))
    one, values = next((one, values) for one, values in ran if one.eqn.primitive == case.primitive)
    return list(splits_of(case.name, one, hostile(one, values, rng), mesh, rng, most))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("first", range(0, len(CASES), BATCH))
def test_cases(first: int, mesh: MeshAxes) -> None:
    found = [split for case in CASES[first : first + BATCH] for split in splits(case, mesh, MOST)]
    assert wrong(found, mesh) == []


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_split_of_a_case(case: Case, mesh: MeshAxes) -> None:
    assert wrong(splits(case, mesh, 300), mesh) == []


def hostile_splits(rows: Sequence[Hostile], mesh: MeshAxes, most: int) -> list[Split]:
    """Splits of every equation of these functions."""
    rng = np.random.default_rng(0)
    found: list[Split] = []
    for name, fn, args in rows:
        for one, values in executions(fn, *args):
            found += splits_of(name, one, values, mesh, rng, most)
    return found


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("first", range(0, len(HOSTILE), BATCH))
def test_hostile(first: int, mesh: MeshAxes) -> None:
    assert wrong(hostile_splits(HOSTILE[first : first + BATCH], mesh, 2), mesh) == []


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("row", HOSTILE, ids=lambda row: row[0])
def test_all_of_what_is_hostile(row: Hostile, mesh: MeshAxes) -> None:
    assert wrong(hostile_splits([row], mesh, 50), mesh) == []


def indexing(seeds: range, mesh: MeshAxes, most: int) -> list[str]:
    """What is wrong of random gathers, scatters and dynamic slices."""
    found: list[Split] = []
    for seed in seeds:
        name, fn, operands = random_indexing.drawn(seed)
        one = next(equations(fn, *operands))
        found += splits_of(name, one, operands, mesh, np.random.default_rng(seed), most)
    return wrong(found, mesh)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_indexing_out_of_range(mesh: MeshAxes) -> None:
    assert indexing(range(60), mesh, 2) == []


@pytest.mark.slow
@pytest.mark.parametrize("first", range(60, 6_060, 60))
def test_much_indexing_out_of_range(first: int) -> None:
    assert indexing(range(first, first + 60), MESHES[0], 4) == []
