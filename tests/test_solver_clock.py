"""The solver's clock stands still while the solver itself is compiled."""

import importlib
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
