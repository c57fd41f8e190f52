"""Executors: candidates planned by processes that somebody else runs, such as the workers of a dask or a Ray cluster.

Every process traces the program once per search. It does not hear of other candidates while it plans one: each is sent
with the least step that is known by then, and with the choices on coarser meshes.
"""

import importlib
import pickle
import threading
import uuid
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from typing import Any

import jax
import numpy as np

from autoshard.errors import AutoshardError, SearchError, SpecError
from autoshard.explore.candidates import Candidate
from autoshard.explore.ranking import LeftOut, RankedPlan
from autoshard.explore.scheduler import Agenda
from autoshard.explore.trial import Hints, Task, Trials, Tried
from autoshard.ir.trace import abstract
from autoshard.problem.warm_start import PortableChoice

CONNECTING_S = 20  # to a cluster that runs; a job that is to start its first worker takes longer than anybody waits

_FORMS = "dask://host:8786, ray://host:10001, or, from Python, any concurrent.futures.Executor"


def _versions() -> tuple[str, ...]:
    return tuple(f"{name} {metadata.version(name)}" for name in ("autoshard", "jax"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Errand:
    """A candidate of a search to plan, with all that a process needs to do so.

    Attributes:
      search: a name that no other search has.
      known: choices on coarser meshes.
      least_s: the least step in the candidate's contest so far.
      versions: of the packages whose results it is compared with.
    """

    search: str
    task: Task
    candidate: Candidate
    known: tuple[PortableChoice, ...]
    least_s: float
    versions: tuple[str, ...] = field(default_factory=_versions)


_trials: dict[str, Trials] = {}  # of the last search of this process
_one_at_a_time = threading.Lock()  # an executor's process may have several threads


def run(errand: Errand) -> Tried | AutoshardError:
    """Plans a candidate, in a process of an executor's."""
    if errand.versions != (here := _versions()):
        return SearchError(
            f"a process of the executor has {', '.join(here)}; the search has {', '.join(errand.versions)}: "
            "install the same versions"
        )
    with _one_at_a_time:
        if errand.search not in _trials:
            _trials.clear()
            _trials[errand.search] = Trials(errand.task)
        hints = Hints(known=errand.known, cutoff_s=lambda: errand.least_s)
        try:
            return _trials[errand.search].run(errand.candidate, hints)
        except AutoshardError as error:
            return error


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An executor, and how many candidates it is given at a time; its workers may come and go."""

    executor: Executor
    places: Callable[[], int]


@contextmanager
def answers(task: Task, agenda: Agenda, engine: Engine) -> Generator[Iterator[RankedPlan | LeftOut]]:
    """Answers as they come from an executor; what is not begun when the context ends is cancelled."""
    sent: dict[Future[Any], Candidate] = {}
    try:
        yield _received(_as_shapes(task), agenda, engine, sent)
    finally:
        agenda.drop()
        for future in sent:
            future.cancel()


def _as_shapes(task: Task) -> Task:
    """The task without the values of its arrays, which need not travel."""

    def shape(leaf: Any) -> Any:
        return abstract(leaf) if isinstance(leaf, np.ndarray | jax.Array) else leaf

    return replace(task, args=jax.tree.map(shape, task.args))


def _received(
    task: Task, agenda: Agenda, engine: Engine, sent: dict[Future[Any], Candidate]
) -> Iterator[RankedPlan | LeftOut]:
    search = uuid.uuid4().hex
    while True:
        while len(sent) < engine.places() and (ready := agenda.ready()) is not None:
            candidate, known = ready
            least_s = agenda.least_s(candidate)
            errand = Errand(search=search, task=task, candidate=candidate, known=known, least_s=least_s)
            sent[_submitted(engine.executor, errand)] = candidate
        if not sent:
            return
        done, _ = wait(sent, return_when=FIRST_COMPLETED)
        for future in done:
            candidate = sent.pop(future)
            tried = _result(future, candidate)
            agenda.learn(candidate, tried)
            yield tried.answer


def _submitted(executor: Executor, errand: Errand) -> Future[Any]:
    try:
        return executor.submit(run, errand)
    except (RuntimeError, TypeError, AttributeError, pickle.PicklingError) as error:
        raise _lost(errand.candidate, error) from error


def _result(future: Future[Any], candidate: Candidate) -> Tried:
    if future.cancelled():
        raise SearchError(f"the executor cancelled {candidate}: it was shut down, or lost the process")
    if (error := future.exception()) is not None:
        raise _lost(candidate, error) from error
    tried = future.result()
    if isinstance(tried, AutoshardError):
        raise tried
    return tried


def _lost(candidate: Candidate, error: BaseException) -> SearchError:
    return SearchError(
        f"the executor could not plan {candidate}: {type(error).__name__}: {error}\n"
        "  its processes must be able to import autoshard and the program: pass a builder, 'package.module:builder'"
    )


@contextmanager
def opened(executor: Executor | str, places: int) -> Generator[Engine]:
    """An executor, or the cluster at an address, which is left as it is found.

    Args:
      executor: any executor, or `"dask://host:8786"`, `"ray://host:10001"`.
      places: the most candidates that it is given at a time; 0: as many as the cluster has processes or cores.

    Raises:
      SpecError: the text is no address of a cluster, or its package is not installed.
      SearchError: nothing answers there.
    """
    if not isinstance(executor, str):
        yield Engine(executor=executor, places=lambda: places)
        return
    scheme, _, host = executor.partition("://")
    if scheme not in _CLUSTERS or not host:
        raise SpecError(f"cannot read the executor {executor}: write {_FORMS}")
    with ExitStack() as stack:
        found = _CLUSTERS[scheme](host, stack)
        yield replace(found, places=lambda: places) if places else found


def _dask(host: str, stack: ExitStack) -> Engine:
    """The workers of a dask scheduler."""
    try:
        distributed: Any = importlib.import_module("distributed")
    except ImportError:
        raise SpecError(f'dask://{host} needs the package distributed: pip install "autoshard[dask]"') from None
    client: Any
    try:
        client = distributed.Client(f"tcp://{host}", timeout=CONNECTING_S, set_as_default=False)
        stack.callback(client.close)
        client.wait_for_workers(1, timeout=CONNECTING_S)
    except (OSError, TimeoutError) as error:
        raise SearchError(f"no dask scheduler with a worker at {host} within {CONNECTING_S} s: {error}") from None
    return Engine(executor=client.get_executor(), places=lambda: max(1, len(client.nthreads())))


def _ray(host: str, stack: ExitStack) -> Engine:
    """The cores of a Ray cluster."""
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        raise SpecError(f'ray://{host} needs the package ray: pip install "autoshard[ray]"') from None
    try:
        stack.enter_context(ray.init(f"ray://{host}", log_to_driver=False))
    except ConnectionError as error:
        raise SearchError(f"no Ray cluster answers at {host}: {error}") from None
    return Engine(executor=_Ray(ray), places=lambda: max(1, int(ray.cluster_resources().get("CPU", 1))))


class _Ray(Executor):
    """Ray's tasks as an executor."""

    def __init__(self, ray: Any) -> None:
        self._remote = partial(ray.remote, num_cpus=1)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._remote()(fn).remote(*args, **kwargs).future()


_CLUSTERS: dict[str, Callable[[str, ExitStack], Engine]] = {"dask": _dask, "ray": _ray}
