"""Coarser: a choice on one mesh is the same layouts on a finer one, at the same price or less."""

import threading
from typing import Any

import numpy as np
import pytest

from autoshard.explore.candidates import Candidate
from autoshard.explore.scheduler import Agenda
from autoshard.explore.trial import Hints, Task, Trials
from autoshard.problem.warm_start import chosen, refined

TASK = Task(target="models:mlp_tiny", keywords={"compute_dtype": "float32"})


def on(*sizes: int) -> Candidate:
    return Candidate(hardware="h100:1x8", chips=8, mesh=tuple(zip("abc", sizes, strict=False)))


@pytest.mark.parametrize(
    ("coarse", "fine", "parts"),
    [
        ((8, 2), (4, 2, 2), [0, 0, 1]),
        ((8, 2), (8, 2), [0, 1]),
        ((16,), (2, 4, 2), [0, 0, 0]),
        ((4, 4), (8, 2), None),
        ((4, 4), (2, 4, 2), None),
        ((8, 2), (8,), None),
        ((), (2,), None),
        ((), (), []),
    ],
)
def test_an_axis_is_a_part_of_one_coarser_axis(coarse: Any, fine: Any, parts: list[int] | None) -> None:
    assert refined(coarse, fine) == parts


def test_a_choice_is_the_same_layouts_on_a_finer_mesh() -> None:
    trials = Trials(TASK)
    coarse, fine = trials.planned(on(4, 2)), trials.planned(on(2, 2, 2))
    written = chosen(coarse.assignment.decisions, coarse.assignment.choice)
    choice = written.on(fine.assignment.decisions)
    assert choice is not None
    told = chosen(fine.assignment.decisions, choice)
    assert np.array_equal(told.splits, written.splits[:, [0, 0, 1]])
    assert written.on(coarse.assignment.decisions) is not None
    assert told.on(coarse.assignment.decisions) is None  # no finer mesh


def test_a_finer_mesh_is_no_worse_than_what_is_known_of_a_coarser_one() -> None:
    trials = Trials(TASK)
    coarse = trials.planned(on(4, 2))
    known = (chosen(coarse.assignment.decisions, coarse.assignment.choice),)
    fine = trials.planned(on(2, 2, 2), Hints(known=known, cutoff_s=lambda: 0.0))
    assert fine.record.cost.step_s <= coarse.record.cost.step_s * (1 + 1e-9)
    assert fine.record.certificate.bound_s <= fine.record.certificate.objective_s


def test_a_mesh_has_its_turn_after_the_coarser_ones_and_begins_with_their_plans() -> None:
    candidates = [on(2, 2, 2), on(8), on(4, 2)]
    agenda, trials, order = Agenda(candidates), Trials(TASK), list[Candidate]()
    while (taken := agenda.take()) is not None:
        candidate, known = taken
        assert len(known) == len(order)  # each of these refines those before
        agenda.learn(candidate, trials.run(candidate, Hints(known=known)))
        order.append(candidate)
    assert order == [on(8), on(4, 2), on(2, 2, 2)]


def test_a_dropped_agenda_makes_nobody_wait() -> None:
    agenda = Agenda([on(8), on(4, 2)])
    assert agenda.take() is not None
    waiting: list[object] = []
    thread = threading.Thread(target=lambda: waiting.append(agenda.take()))  # until the first is answered
    thread.start()
    agenda.drop()
    thread.join(timeout=30)
    assert waiting == [None]
