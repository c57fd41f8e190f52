"""A MIP engine in a process of its own: it runs beside the search, and can be stopped.

HiGHS looks at the clock only now and then (a restricted MIP of two million cells overran a limit of 2 s
by 50 s, and the presolve of one of 2,450 cells never ended), so that only killing its process keeps a
time limit. `main` is what that process does: it reads pickled requests from its standard input and
writes pickled answers. Loading the engine takes half a second, so that a process that is idle is kept
for the next solve.
"""

import atexit
import contextlib
import logging
import math
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYetError
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from autoshard import _children
from autoshard.errors import SolverError
from autoshard.solver.clock import effort, mip_s
from autoshard.solver.exact.mip import MipAnswer, solve_program
from autoshard.solver.incumbent import Incumbent
from autoshard.solver.program import Program
from autoshard.solver.tuning import MipProcessTuning

log = logging.getLogger("autoshard")

NOTHING = MipAnswer(choice=None, bound=None, infeasible=False, finished=False)

# The process that waits for another solve, by the one that started it: a fork of that does not use it.
idle_processes: "dict[int, subprocess.Popen[bytes]]" = {}


@atexit.register
def _end_idle() -> None:
    """Ends the process that waits for another solve."""
    idle = idle_processes.pop(os.getpid(), None)
    if idle is not None:
        _end(idle)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ends a process, whatever it does."""
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        with contextlib.suppress(OSError):  # what was not read cannot be flushed
            stream.close()


def never() -> bool:
    """Says that an answer is still wanted, as long as there is time."""
    return False


@dataclass(slots=True)
class Child:
    """Solves one program at a time, in a process that starts with the first `submit`."""

    tuning: MipProcessTuning
    process: "subprocess.Popen[bytes] | None" = None
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    pending: "Future[MipAnswer] | None" = None
    kill_at: float = 0.0

    def start(self) -> None:
        """Starts the process, so that it can load the engine while others work, unless one is idle."""
        if self.process is not None and self.process.poll() is None:
            return
        idle = idle_processes.pop(os.getpid(), None)
        if idle is not None and idle.poll() is None:
            self.process = idle
            return
        self.process = subprocess.Popen(
            _children.command("autoshard.solver.exact.mip_process"), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    @property
    def busy(self) -> bool:
        return self.pending is not None

    def submit(self, program: Program, *, time_limit_s: float, **options: Any) -> None:
        """Begins to solve `program`; the options are those of `solve_program`."""
        assert not self.busy
        effort.spend(seconds=mip_s(program.cells))
        self.start()
        request = (program, {"time_limit_s": time_limit_s, **options})
        self.kill_at = time.perf_counter() + self.tuning.overrun * time_limit_s + self.tuning.overrun_s
        self.pending = self.thread.submit(self._exchange, request)

    def answer(self, wait_s: float) -> MipAnswer | None:
        """Returns the answer; None if it takes more than `wait_s`. An overrun ends without choice or bound.

        Raises:
          SolverError: the process ended by itself.
        """
        assert self.pending is not None
        until = min(time.perf_counter() + wait_s, self.kill_at)
        timeout = None if math.isinf(until) else max(until - time.perf_counter(), 0.0)
        try:
            answer = self.pending.result(timeout=timeout)
        except NotYetError:
            if time.perf_counter() < self.kill_at:
                return None
            self.stop()
            answer = NOTHING
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            code = self._exit_code()
            self.pending = None
            self.stop()
            if code >= 0:
                raise SolverError(
                    f"the process of the MIP engine ended with code {code}; what it wrote to standard error says why"
                ) from error
            log.warning(
                "the process of the MIP engine was killed by signal %d, for want of memory most likely; "
                "the plan is searched without what it would have found",
                -code,
            )
            answer = NOTHING
        self.pending = None
        return answer

    def _exit_code(self) -> int:
        """Returns the exit code of a process whose pipe has closed; -9 if it does not end by itself."""
        assert self.process is not None
        try:
            return self.process.wait(self.tuning.ending_s)
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL

    def stop(self) -> None:
        """Ends the process, whatever it does."""
        if self.process is not None:
            self.process.kill()
            if self.pending is not None:
                self.pending.exception()  # the thread meets the end of the stream
                self.pending = None
            _end(self.process)
            self.process = None

    def close(self) -> None:
        """Ends the thread, and the process if it is busy or another one is idle."""
        if (
            self.process is not None
            and not self.busy
            and idle_processes.setdefault(os.getpid(), self.process) is self.process
        ):
            self.process = None
        self.stop()
        self.thread.shutdown()

    def _exchange(self, request: Any) -> MipAnswer:
        assert self.process is not None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        pickle.dump(request, self.process.stdin, protocol=5)
        self.process.stdin.flush()
        return pickle.load(self.process.stdout)


def solve_in_time(
    program: Program,
    *,
    left_s: float,
    time_limit_s: float,
    tuning: MipProcessTuning,
    enough: Callable[[], bool] = never,
    **options: Any,
) -> MipAnswer:
    """Solves `program` as `solve_program` does, within `left_s` whatever the engine does.

    The engine is asked to stop after `time_limit_s`, and has `overrun_s` more if they are left. It is ended
    without an answer once `enough()` says that none is wanted any more.
    """
    child = Child(tuning)
    try:
        begin = time.perf_counter()
        child.submit(program, time_limit_s=min(time_limit_s, (1 - tuning.margin) * left_s), **options)
        child.kill_at = min(child.kill_at, begin + min(left_s, time_limit_s + tuning.overrun_s))
        while (answer := child.answer(tuning.look_s)) is None:
            if enough():
                answer = NOTHING
                break
        return answer
    finally:
        child.close()


def solve_for(incumbent: Incumbent, program: Program, *, limit_s: float) -> MipAnswer:
    """Solves `program` to the gap that an incumbent is to reach, within `limit_s` and the time that it has left."""
    return solve_in_time(
        program,
        left_s=incumbent.left_s(),
        time_limit_s=limit_s,
        tuning=incumbent.tuning.mip_process,
        enough=incumbent.enough,
        rel_gap=incumbent.rel_gap,
        seed=incumbent.seed,
    )


def main() -> None:
    """Answers requests until the input ends; an interruption is for the process that asks, which then ends this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, answers = sys.stdin.buffer, private_output()
    while True:
        try:
            program, options = pickle.load(requests)
        except EOFError:
            return
        pickle.dump(solve_program(program, **options), answers, protocol=5)
        answers.flush()


def private_output() -> BinaryIO:
    """Returns the standard output for answers alone; what engines print goes to standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answers
