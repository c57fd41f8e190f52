"""Executors: a search on somebody else's processes finds what one on processes of our own does."""

import multiprocessing
import pickle
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.errors import SearchError, SpecError, TargetError
from autoshard.explore import executors
from autoshard.explore.candidates import Candidate
from autoshard.explore.ranking import Progress
from autoshard.explore.search import Search, search
from autoshard.explore.trial import Task

SMALL: dict[str, Any] = {"compute_dtype": "float32", "width": 8, "layers": 2}
CANDIDATE = Candidate(hardware="cpu:8", chips=8, mesh=(("data", 8),))


def found(executor: Executor | str | None, **options: Any) -> Search:
    given: dict[str, Any] = {"hardware": "cpu", "chips": (4, 8), "keywords": SMALL, "axes": 2, **options}
    return search("models:linear_tiny", executor=executor, **given)


def plans(search: Search) -> dict[Candidate, Any]:
    return {row.candidate: row.record.inputs for row in search.rows}


class Sending(ThreadPoolExecutor):
    """Threads, whose errands are pickled as if they were processes elsewhere."""

    sent: list[int]

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        pickled = pickle.dumps((fn, args))
        self.sent = [*getattr(self, "sent", []), len(pickled)]

        def work() -> Any:
            run, given = pickle.loads(pickled)
            return pickle.loads(pickle.dumps(run(*given)))

        return super().submit(work)


@pytest.fixture(scope="module")
def here() -> Search:
    return found(None, processes=1)


def test_an_executor_answers_as_this_process_does(here: Search) -> None:
    with Sending(2) as executor:
        there = found(executor, processes=2)
        assert len(executor.sent) == len(there.rows) + len(there.left_out) == 4
    assert plans(there) == plans(here)
    assert str(there).splitlines()[0] == str(here).splitlines()[0]


@pytest.mark.slow
def test_processes_of_an_executor_answer_as_this_process_does(here: Search) -> None:
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as executor:
        assert plans(found(executor)) == plans(here)
        assert executor.submit(int, "3").result() == 3  # it is left running


def test_values_of_arrays_do_not_travel() -> None:
    def product(x: jax.Array) -> jax.Array:
        return x @ x

    with ThreadPoolExecutor(1) as executor:  # shares this process's memory: a closure may be sent
        there = search(product, np.ones((64, 64), np.float32), hardware="cpu:8", axes=1, executor=executor)
    assert there.best.flops == 2 * 64**3
    task = executors._as_shapes(Task(fn=plans, args=({"w": np.ones((1024, 1024)), "n": 3},)))
    assert len(pickle.dumps(task)) < 2000
    assert task.args[0]["n"] == 3


def test_a_closure_that_cannot_be_sent_is_refused_with_the_way_out() -> None:
    with Sending(1) as executor, pytest.raises(SearchError, match=r"could not plan data=8.*\n.*pass a builder"):
        search(lambda x: x + 1, jnp.ones((8, 8)), hardware="cpu:8", axes=1, executor=executor)


def test_an_error_of_the_task_reaches_the_caller() -> None:
    with Sending(1) as executor, pytest.raises(TargetError, match="has no `linear_tine`"):
        search("models:linear_tine", hardware="cpu:8", executor=executor)


class Dying(ThreadPoolExecutor):
    """Its processes die at the second errand."""

    errands = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.errands += 1
        if self.errands == 1:
            return super().submit(fn, *args, **kwargs)
        failed: Future[Any] = Future()
        failed.set_exception(BrokenPipeError("its process is gone"))
        return failed


def test_a_process_that_dies_is_an_error_that_names_the_candidate() -> None:
    with Dying(1) as executor, pytest.raises(SearchError, match=r"could not plan data=.* BrokenPipeError: its process"):
        found(executor, processes=1)


def test_an_executor_that_is_shut_down_is_an_error() -> None:
    executor = ThreadPoolExecutor(1)
    executor.shutdown()
    with pytest.raises(SearchError, match=r"could not plan data=.*cannot schedule new futures"):
        found(executor)


def test_an_interruption_keeps_what_was_found_and_cancels_the_rest() -> None:
    def stop(progress: Progress) -> None:
        if progress.done == 1:
            raise KeyboardInterrupt

    with Sending(1) as executor:
        kept = found(executor, processes=4, on_progress=stop)
        assert executor.submit(int, "3").result() == 3
    assert len(kept.rows) == 1
    assert kept.missing == 3
    assert "interrupted: 1 of 4" in str(kept)


def test_other_versions_are_refused() -> None:
    errand = executors.Errand(search="a", task=Task(), candidate=CANDIDATE, known=(), least_s=0.0)
    answer = executors.run(replace(errand, versions=("autoshard 0.0.1", "jax 0.10.2")))
    assert isinstance(answer, SearchError)
    assert "the search has autoshard 0.0.1, jax 0.10.2: install the same versions" in str(answer)


@pytest.mark.parametrize("written", ["slurm://host", "dask", "dask://", "host:8786"])
def test_what_is_no_address_is_refused(written: str) -> None:
    with pytest.raises(SpecError, match="write dask://host:8786, ray://host:10001, or, from Python"):
        found(written)


@pytest.fixture
def nothing_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "CONNECTING_S", 0.3)


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_listens")
def test_a_cluster_that_does_not_answer_is_an_error() -> None:
    pytest.importorskip("distributed", reason="distributed is one of the dev extras")
    with pytest.raises(SearchError, match=r"no dask scheduler with a worker at 127\.0\.0\.1:9 within"):
        found("dask://127.0.0.1:9")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of dask's own
def test_a_dask_cluster_of_two_workers_answers_as_this_process_does(here: Search) -> None:
    distributed: Any = pytest.importorskip("distributed", reason="distributed is one of the dev extras")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=2, processes=True, dashboard_address=None, host="127.0.0.1"
    ) as cluster:
        there = found(cluster.scheduler_address.replace("tcp", "dask"))
        assert plans(there) == plans(here)
        assert len(cluster.scheduler_info["workers"]) == 2
