"""Workers: processes that plan candidates; each hears of the best plans of the others.

Each process traces the program once. Orders and answers are pickles (`worker_main`).
"""

import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from autoshard import _children
from autoshard.errors import AutoshardError, SearchError
from autoshard.explore.candidates import Candidate
from autoshard.explore.ranking import LeftOut, RankedPlan
from autoshard.explore.scheduler import Agenda
from autoshard.explore.trial import Task, Tried
from autoshard.problem.warm_start import PortableChoice

Answer = RankedPlan | LeftOut

ENDING_S = 5.0  # from the end of a process's output to its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A candidate to plan, and the choices on coarser meshes of its devices."""

    candidate: Candidate
    known: Sequence[PortableChoice]


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """The least step in a contest so far."""

    contest: tuple[object, ...]
    step_s: float


@dataclass(slots=True, kw_only=True)
class Worker:
    """One process, which plans one candidate at a time."""

    process: "subprocess.Popen[bytes]"
    writing: threading.Lock = field(default_factory=threading.Lock)  # orders and news come from several threads

    def tell(self, message: Any) -> None:
        """Sends a message.

        Raises:
          OSError: the process is gone.
        """
        assert self.process.stdin is not None
        with self.writing:
            pickle.dump(message, self.process.stdin)
            self.process.stdin.flush()

    def answer(self) -> Tried | AutoshardError:
        """Waits for the outcome of the order."""
        assert self.process.stdout is not None
        return pickle.load(self.process.stdout)

    def kill(self) -> None:
        """Ends the process and its children, whatever they do."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def exit_code(self) -> int | None:
        """The exit code of a process whose pipes have closed; None if it does not end."""
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(ENDING_S)
        return None

    def close(self) -> None:
        """Frees the pipes of a dead process."""
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # orders that it has not read
                pipe.close()
        self.process.wait()


def start(task: Task) -> Worker:
    """Starts a process for a task."""
    process = subprocess.Popen(
        _children.command("autoshard.explore.worker_main", ["", *sys.path]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # a Ctrl-C reaches the parent alone, which ends the group
    )
    worker = Worker(process=process)
    worker.tell(task)
    return worker


@contextmanager
def answers(task: Task, agenda: Agenda, count: int) -> Generator[Iterator[Answer]]:
    """Answers as they come from `count` processes, which end with the context."""
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()
    workers = [start(task) for _ in range(count)]
    threads = [
        threading.Thread(target=_attend, args=(worker, workers, agenda, found), daemon=True) for worker in workers
    ]
    for thread in threads:
        thread.start()
    try:
        yield _received(found)
    finally:
        agenda.drop()
        for worker in workers:
            worker.kill()
        for thread in threads:
            thread.join()
        for worker in workers:
            worker.close()


def _received(found: "queue.SimpleQueue[Any]") -> Iterator[Answer]:
    while True:
        answer = found.get()
        if isinstance(answer, Exception):
            raise answer
        yield answer


def _attend(worker: Worker, every: Sequence[Worker], agenda: Agenda, found: "queue.SimpleQueue[Any]") -> None:
    """Hands candidates to one process, its answers back, and news of them to all processes."""
    while (taken := agenda.take()) is not None:
        candidate, known = taken
        try:
            worker.tell(Order(candidate=candidate, known=known))
            tried = worker.answer()
        except (EOFError, OSError, pickle.UnpicklingError):
            found.put(SearchError(f"the process that planned {candidate} died with code {worker.exit_code()}"))
            return
        if isinstance(tried, AutoshardError):
            found.put(tried)
            return
        agenda.learn(candidate, tried)
        news = News(contest=candidate.contest, step_s=agenda.least_s(candidate))
        for other in every:
            with suppress(OSError):  # who is gone is missed by its own thread
                other.tell(news)
        found.put(tried.answer)
