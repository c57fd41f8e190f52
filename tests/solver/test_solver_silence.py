"""What an engine prints stays off standard output; what others print does not."""

import ctypes
import os

import pytest

from autoshard.solver.silence import silenced

CHATTER = b"HighsMipSolverData::transformNewIntegerFeasibleSolution tmpSolver.run();\n"


def test_the_engine_s_lines_are_dropped_and_others_come_after(capfd: pytest.CaptureFixture[str]) -> None:
    library = ctypes.CDLL(None)
    with silenced():
        library.printf(CHATTER)
        os.write(1, b"said meanwhile\n")
        with silenced():  # of another thread, say
            os.write(1, CHATTER)
        assert capfd.readouterr().out == ""
    os.write(1, b"said after\n")
    assert capfd.readouterr().out == "said meanwhile\nsaid after\n"


def test_standard_output_is_there_again_after_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="broke"), silenced():
        raise ValueError("broke")
    os.write(1, b"said after\n")
    assert capfd.readouterr().out == "said after\n"
