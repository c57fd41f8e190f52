"""The solver's clocks: the time, less what its own compilation took, and the work."""

import importlib
import threading
import time

import numba

from autoshard.solver.clock import Compilation, compilation


def test_compilation_takes_no_time() -> None:
    importlib.import_module("autoshard.solver.kernels")  # which listens to numba

    @numba.njit(cache=False)
    def doubled(x: int) -> int:
        return 2 * x

    begin, worked = time.perf_counter(), compilation.worked_s()
    assert doubled(3) == 6  # compiles it
    took, counted = time.perf_counter() - begin, compilation.worked_s() - worked
    assert 0 <= counted < took


def test_compilation_within_compilation_counts_once() -> None:
    clock = Compilation()
    clock.begin()
    still = clock.worked_s()
    clock.begin()
    time.sleep(0.01)
    clock.end()
    assert clock.worked_s() == still
    clock.end()
    assert still <= clock.worked_s() < time.perf_counter()


def test_work_is_what_processors_do_for_the_solver() -> None:
    clock = Compilation()
    cpu = time.thread_time()
    begin = clock.effort_s()
    time.sleep(0.05)  # as when others are busy
    assert clock.effort_s() - begin <= time.thread_time() - cpu
    clock.helped(2.0)
    assert 2.0 <= clock.effort_s() - begin <= 2.0 + time.thread_time() - cpu
    clock.begin()
    still = clock.effort_s()
    sum(range(200_000))
    assert clock.effort_s() == still
    clock.end()


def test_what_other_threads_compile_is_their_own() -> None:
    clock = Compilation()
    begun, done = threading.Event(), threading.Event()

    def compiles() -> None:
        clock.begin()
        begun.set()
        done.wait()
        clock.end()

    other = threading.Thread(target=compiles)
    other.start()
    begun.wait()
    worked, effort = clock.worked_s(), clock.effort_s()
    sum(range(200_000))
    assert clock.worked_s() > worked
    assert clock.effort_s() > effort
    done.set()
    other.join()
