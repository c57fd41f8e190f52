"""Tuning: one frozen value, every number of which says what it is; no function of the solver takes many parameters."""

import ast
from dataclasses import FrozenInstanceError, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import autoshard.solver
from autoshard.solver import solve
from autoshard.solver.tuning import (
    NOT_TUNED,
    TUNED,
    EngineTuning,
    SearchTuning,
    SolverTuning,
    knobs,
)
from tests.random_problems import random_problem

ROOMS = sorted(Path(autoshard.solver.__file__).parent.rglob("*.py"))
MOST_PARAMETERS = 8


@pytest.mark.parametrize("name", [name for name, _, _ in knobs()])
def test_every_number_says_its_unit_its_meaning_and_what_it_was_tuned_on(name: str) -> None:
    _, value, knob = next(each for each in knobs() if each[0] == name)
    assert all(isinstance(part, int | float) for part in (value if isinstance(value, tuple) else (value,)))
    assert knob.unit
    assert len(knob.meaning) > 10
    if knob.tuned_on != NOT_TUNED:
        python, option, module, *_ = knob.tuned_on.split()
        assert (python, option) == ("python", "-m")
        assert module.startswith("benchmarks.")
        assert find_spec(module) is not None


def test_every_number_is_read_somewhere() -> None:
    """A field that no room reads tunes nothing."""
    text = "".join(room.read_text() for room in ROOMS if room.name != "tuning.py")
    unread = [name for name, _, _ in knobs() if f".{name.split('.')[1]}" not in text]
    assert unread == []


def test_tuning_is_a_frozen_value() -> None:
    assert SolverTuning() == TUNED
    assert hash(SolverTuning()) == hash(TUNED)
    assert SolverTuning(search=SearchTuning(first_passes=5)) != TUNED
    with pytest.raises(FrozenInstanceError):
        TUNED.dual.moving_passes = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_the_tuning_decides_which_engine_solves() -> None:
    problem = replace(random_problem(np.random.default_rng(1), nodes=8), usage_limit=None)
    small = solve(problem)
    large = solve(problem, tuning=SolverTuning(engines=EngineTuning(direct_cells=-1)))
    assert (small.solver, large.solver) == ("elimination", "search")
    assert small.objective == large.objective


def test_no_function_takes_more_than_eight_parameters() -> None:
    """But for the public verb: its options are documented once."""
    many: list[str] = []
    for room in ROOMS:
        for node in ast.walk(ast.parse(room.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                taken = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                own = [each.arg for each in taken if each.arg not in ("self", "cls")]
                if len(own) > MOST_PARAMETERS:
                    many.append(f"{room.stem}.{node.name}")
    assert many == ["solver.solve"]


def test_no_room_but_the_tuning_holds_tuned_numbers() -> None:
    """Module constants are sentinels, tolerances and units: this list is all of them."""
    held: set[str] = set()
    for room in ROOMS:
        for node in ast.parse(room.read_text()).body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            names = [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
            numbers = [part for part in ast.walk(node) if isinstance(part, ast.Constant) and part.value is not None]
            if numbers and not any(isinstance(part.value, str) for part in numbers):
                held |= {f"{room.stem}.{name}" for name in names if name.isupper()}
    assert held == {
        "clock.CELL_S", "clock.MIP_S", "clock.STEP_S", "kernels.LONG_S",
        "block_moves.NEVER", "incumbent.NO_BOUND", "local_search.ANY", "program.FORBIDDEN",
        "dual.BITS", "dual.PENALTY_BITS", "dual.ROUNDING", "scaling.BITS", "hinges.MULTIPLIER_BITS", "hinges.ROW_BITS",
        "hinges.EMPTY", "hinges.ROUNDED_OFF", "mip_process.NOTHING", "smallest_peak.PARTS", "silence.CHATTER",
        "silence.STDOUT", "mip.DUAL_TOLERANCE", "mip.SUM_TOLERANCE", "mip.SCALED_LARGEST", "mip.SCALED_PLANE",
        "mip.SCALED_USAGE", "mip.SMALLEST_SLOPE", "mip.DOUBLETON_EQUATIONS",
    }  # fmt: skip
