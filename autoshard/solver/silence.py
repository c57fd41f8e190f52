"""Silence: what an engine prints by itself stays off standard output, which carries results alone.

HiGHS prints a line from within its heuristics whatever its options say (ortools 9.15,
"HighsMipSolverData::transformNewIntegerFeasibleSolution tmpSolver.run();"). So the descriptor itself
points elsewhere while HiGHS works. What others print meanwhile is printed afterwards.
"""

import contextlib
import ctypes
import os
import tempfile
import threading
from collections.abc import Generator

STDOUT = 1  # the descriptor
CHATTER = b"Highs"  # begins the lines of HiGHS's own

_turned = threading.Lock()


@contextlib.contextmanager
def silenced() -> Generator[None]:
    """Drops the engine's own lines from standard output; where several threads ask, only for the first."""
    if not _turned.acquire(blocking=False):
        yield
        return
    try:
        try:
            kept = os.dup(STDOUT)
        except OSError:  # there is no standard output
            yield
            return
        with tempfile.TemporaryFile() as caught:
            _flush()
            os.dup2(caught.fileno(), STDOUT)
            try:
                yield
            finally:
                _flush()
                os.dup2(kept, STDOUT)
                os.close(kept)
                caught.seek(0)
                others = b"".join(line for line in caught if not line.startswith(CHATTER))
                while others:
                    others = others[os.write(STDOUT, others) :]
    finally:
        _turned.release()


def _flush() -> None:
    """Writes what the C library has buffered."""
    with contextlib.suppress(OSError, TypeError, AttributeError):  # Windows has no library of that name
        ctypes.CDLL(None).fflush(None)
