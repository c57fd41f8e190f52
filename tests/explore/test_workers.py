"""Workers: a process answers orders as one does here, with news before and in between."""

from contextlib import suppress

import pytest

from autoshard.errors import SearchError
from autoshard.explore import workers
from autoshard.explore.candidates import Candidate
from autoshard.explore.ranking import RankedPlan
from autoshard.explore.scheduler import Agenda
from autoshard.explore.trial import Task, Trials
from autoshard.explore.workers import News, Order, Worker

TASK = Task(target="models:linear_tiny", keywords={"compute_dtype": "float32", "width": 8, "layers": 2})


def on(*sizes: int) -> Candidate:
    return Candidate(hardware="cpu:8", chips=8, mesh=tuple(zip("abc", sizes, strict=False)))


def test_a_worker_answers_orders_and_hears_news() -> None:
    worker, candidate = workers.start(TASK), on(8)
    try:
        worker.tell(News(contest=candidate.contest, step_s=0.0))
        for _ in range(2):
            worker.tell(Order(candidate=candidate, known=()))
        worker.tell(News(contest=candidate.contest, step_s=0.0))
        first, second = worker.answer(), worker.answer()
    finally:
        worker.kill()
        worker.close()
    here = Trials(TASK).run(candidate).answer
    assert isinstance(here, RankedPlan)
    for tried in (first, second):
        assert not isinstance(tried, Exception)
        assert isinstance(tried.answer, RankedPlan)
        assert tried.answer.record.inputs == here.record.inputs


def test_a_worker_that_dies_is_an_error_which_names_the_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    start = workers.start

    def stillborn(task: Task) -> Worker:
        worker = start(task)
        worker.kill()
        return worker

    monkeypatch.setattr(workers, "start", stillborn)
    with (
        workers.answers(TASK, Agenda([on(8), on(4, 2)]), 2) as answers,
        pytest.raises(SearchError, match=r"the process that planned a=8 on cpu:8 died with code -9"),
    ):
        next(answers)


def test_what_a_dead_worker_has_not_read_is_dropped() -> None:
    worker = workers.start(TASK)
    worker.kill()
    worker.process.wait()
    with suppress(OSError):
        worker.tell(News(contest=(), step_s=0.0))
    worker.close()
