"""The solver's clocks: the time, less what its own compilation took, and the work, which is counted."""

import importlib
import threading
import time

import numba

from autoshard.solver.clock import Compilation, Effort, compilation, mip_s


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


def test_work_is_counted_whatever_the_time() -> None:
    done = Effort()
    time.sleep(0.01)
    assert done.spent_s == 0
    done.spend(steps=1000)
    one = done.spent_s
    done.spend(steps=1000)
    assert done.spent_s == 2 * one > 0
    done.spend(cells=10**9, seconds=mip_s(10_000))
    assert 3 <= done.spent_s <= 4  # about seconds


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
    worked = clock.worked_s()
    sum(range(200_000))
    assert clock.worked_s() > worked
    done.set()
    other.join()
