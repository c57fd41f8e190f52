"""The union's optimum is the best pair of choices that agree, counted part by part."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from autoshard.problem.joint import Part, ResidentBytes, Tie, union
from autoshard.problem.network import Int, Problem
from autoshard.solver import solve
from autoshard.solver.evaluate import evaluate
from tests.random_problems import random_problem

WEIGHTS = (2, 3)


def choices(problem: Problem) -> list[Int]:
    return [np.array(c, np.int64) for c in product(*(range(n) for n in np.diff(problem.start)))]


def used(held: Int | None, choice: Int) -> int:
    return 0 if held is None else int(held[choice[0]])


@pytest.mark.parametrize("seed", range(40))
def test_the_optimum_is_that_of_all_pairs_that_agree(seed: int) -> None:
    rng = np.random.default_rng(seed)
    parts = [random_problem(rng, nodes=4, strategies=3, hinges=seed % 3) for _ in range(2)]
    sizes = [int(np.diff(p.start)[0]) for p in parts]
    codes = [rng.permutation(4)[:n] for n in sizes]
    keeps = rng.integers(0, 20, sizes[0])  # of the first part's first node, while the second runs
    limit = int(rng.integers(15, 60))
    joint = union(
        [Part(problem=p, weight=w) for p, w in zip(parts, WEIGHTS, strict=True)],
        [Tie(left=(0, 0), right=(1, 0), left_codes=codes[0], right_codes=codes[1])],
        [ResidentBytes(node=(0, 0), during=1, usage=keeps)],
        usage_limit=limit,
    )
    priced = [[(c, evaluate(replace(p, usage_limit=None), c)) for c in choices(p)] for p in parts]
    second_runs = bool(parts[1].use_interval.size)
    best: int | None = None
    for (a, left), (b, right) in product(*priced):
        if codes[0][a[0]] != codes[1][b[0]] or left.objective is None or right.objective is None:
            continue
        beside = used(keeps, a) if second_runs else 0
        if left.peak_bytes > limit or right.peak_bytes + beside > limit:
            continue
        total = WEIGHTS[0] * left.objective + WEIGHTS[1] * right.objective
        best = total if best is None else min(best, total)
    solution = solve(joint.problem)
    assert solution.found == (best is not None)
    if best is not None:
        assert solution.objective == best
        left, right = joint.split(solution.choice)
        assert [len(left), len(right)] == [p.nodes for p in parts]
        assert codes[0][left[0]] == codes[1][right[0]]
