"""What many layers keep: first chosen alike in layers that are alike, and from there on one by one."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import autoshard
from autoshard.planner import alike_layers, pipeline
from autoshard.planner.alike_layers import AlikeLayers
from autoshard.planner.budget import Budget
from autoshard.planner.recomputation_space import RecomputationSpace
from autoshard.planner.search_space import build_search_space
from autoshard.problem.formulation import Formulation, edge_cells
from autoshard.problem.network import Int
from autoshard.problem.symmetry import Folding, fold, foldings
from autoshard.solver import Solution, Status, evaluate
from tests.programs import QUICKLY, train_step

BUDGET = Budget(rel_gap=0.05)


@pytest.fixture(scope="module")
def choices() -> RecomputationSpace:
    """What six layers may keep, in three quarters of the memory that they take as they are written."""
    fn, *args = train_step("mlp-1k", layers=6)
    written = autoshard.plan(fn, *args, **QUICKLY, remat="written").planned
    assert written is not None
    limit = int(0.75 * written.record.memory.peak_bytes)
    found = RecomputationSpace.of(build_search_space(replace(written.space.request, remat="add", memory_bytes=limit)))
    assert found is not None
    return found


def layers_of(choices: RecomputationSpace) -> AlikeLayers:
    kept = alike_layers.MANY_KEPT
    return AlikeLayers.of(choices.decisions, choices.resharder, choices.repeating, kept=kept)


def test_the_fewer_steps_the_more_decisions_share_a_choice(choices: RecomputationSpace) -> None:
    found = list(foldings(choices.decisions, (1, 3, 6)))
    assert [one.within for one in found] == [1, 3, 6, None]
    sizes = [one.classes for one in found]
    assert sizes == sorted(set(sizes))
    assert np.array_equal(found[-1].class_of, fold(choices.decisions).class_of)
    for coarse, fine in pairwise(found):
        pairs = {*zip(fine.class_of.tolist(), coarse.class_of.tolist(), strict=True)}
        assert len(pairs) == fine.classes  # each finer class lies in one coarser class


def test_edges_inside_of_a_class_have_no_table(choices: RecomputationSpace) -> None:
    count = len(choices.decisions.nodes)
    together = Folding(np.zeros(count, np.int64), (tuple(range(count)),))
    assert choices.decisions.edges
    assert edge_cells(choices.decisions, together) == 0


def test_a_choice_of_alike_layers_is_a_choice_of_all(choices: RecomputationSpace) -> None:
    """It costs the same in the problem of all decisions, and takes as much memory."""
    *alike, whole = layers_of(choices).problems
    assert whole.folding.within is None
    for one in alike:
        assert len(one.problem.edge_cost) == edge_cells(choices.decisions, one.folding)
        found = pipeline._run(one, BUDGET, ())
        here, there = evaluate(one.problem, found.choice), evaluate(whole.problem, whole.write(one.read(found.choice)))
        assert here.objective is not None
        assert there.objective == pytest.approx(here.objective, rel=1e-7)  # picoseconds are rounded
        assert here.peak_bytes == there.peak_bytes


@pytest.mark.parametrize("fit", [True, False])
def test_each_search_begins_with_what_the_one_before_found(*, fit: bool, choices: RecomputationSpace) -> None:
    """Where nothing that is alike fits, the last one begins with a choice that repeats all that it may."""
    asked: list[tuple[Formulation, Sequence[Int], Solution]] = []

    def solved(formulation: Formulation, budget: Budget, known: Sequence[Int], **options: Any) -> Solution:
        found = pipeline._run(formulation, budget, known, **options)
        found = found if fit or formulation.folding.within is None else replace(found, status=Status.UNKNOWN)
        asked.append((formulation, known, found))
        return found

    limit = choices.request.memory_bytes
    last, solution = layers_of(choices).solved(limit, BUDGET, solved, last=BUDGET, settle_s=1.0)
    assert last.folding.within is None
    for (of, _, before), (_, known, _) in pairwise(asked):
        if before.status is Status.UNKNOWN:
            assert not known
        else:
            assert np.array_equal(known[0], of.read(before.choice))
    begun = evaluate(last.problem, last.write(asked[-1][1][0]))
    assert begun.objective is not None
    assert begun.peak_bytes <= limit
    assert solution.objective <= begun.objective
    if not fit:
        assert choices.read(asked[-1][1][0]) == choices.little[-1]
        assert solution.objective < begun.objective
    assert evaluate(last.problem, solution.choice).peak_bytes <= limit


def test_where_few_values_may_be_kept_there_is_one_problem(choices: RecomputationSpace) -> None:
    few = alike_layers.MANY_KEPT - 1
    one = AlikeLayers.of(choices.decisions, choices.resharder, choices.repeating, kept=few)
    counts: list[int] = []

    def solved(formulation: Formulation, budget: Budget, known: Sequence[Int], **options: Any) -> Solution:
        counts.append(len(known))
        return pipeline._run(formulation, budget, known, **options)

    last, _ = one.solved(choices.request.memory_bytes, BUDGET, solved, last=BUDGET, settle_s=1.0)
    assert not one.unrolled
    assert last.folding.within is None
    assert counts == [0]


def test_where_too_much_were_to_be_priced_layers_stay_alike_and_the_plan_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(alike_layers, "MANY_KEPT", 1)
    monkeypatch.setattr(alike_layers, "MOST_CELLS", 1)
    monkeypatch.setattr(alike_layers, "LATER", (7,))
    fn, *args = train_step("mlp-1k", layers=6)
    written = autoshard.plan(fn, *args, **QUICKLY, remat="written")
    plan = autoshard.plan(fn, *args, **QUICKLY, memory=int(0.75 * written.record.memory.peak_bytes))
    assert plan.record.recomputation is not None
    assert "decisions that are alike within 6 steps share one there" in plan.record.certificate.space
