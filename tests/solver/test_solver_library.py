"""The solver as a library of its own: without jax, stopped by its caller, begun with what is known."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autoshard.problem import cost_network
from autoshard.solver import Status, evaluate, solve
from autoshard.solver.scaling import coarsening
from autoshard.solver.tuning import EngineTuning, SolverTuning
from tests.end_to_end.code_blocks import program
from tests.solver.test_solver import SEARCH, chain, dense

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "solver.md"
ALONE = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent!r}:
            raise ImportError(f"{{name}} is not installed here")

sys.meta_path.insert(0, Absent())
"""

SEARCHED = """
from autoshard.solver.tuning import EngineTuning, SolverTuning

tuning = SolverTuning(engines=EngineTuning(direct_cells=-1))  # to the search, with its compiled loops
assert solve(problem, tuning=tuning).objective == solution.objective
assert "numba" in sys.modules and "jax" not in sys.modules
"""


def dependencies() -> set[str]:
    """Returns the packages that the project depends on."""
    text = (PAGE.parents[2] / "pyproject.toml").read_text()
    listed = re.search(r"^dependencies = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert listed is not None
    return set(re.findall(r'"([\w-]+)', listed[1]))


def test_the_page_runs_with_the_packages_that_it_names_and_no_other_dependency(tmp_path: Path) -> None:
    named = re.search(r"^pip install ((?:[\w-]+ ?)+)$", PAGE.read_text(), re.MULTILINE)
    assert named is not None
    needed = set(named[1].split())
    absent = {"jaxlib", *dependencies()} - needed
    assert needed < dependencies()
    assert {"jax", "networkx", "rich"} < absent
    script = tmp_path / "page.py"
    script.write_text(ALONE.format(absent=absent) + program(PAGE.read_text()) + SEARCHED)
    command = [sys.executable, script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("engine", ["direct", "search", "hinged", "huge costs", "parts"])
def test_a_callback_ends_a_solve_with_the_best_so_far(engine: str) -> None:
    problem = chain(40) if engine == "hinged" else replace(chain(40), hinges=())
    if engine == "huge costs":
        problem = replace(problem, cost=problem.cost * 10**5)
        assert coarsening(problem) > 0
    if engine == "parts":
        keep = ~((problem.edge_nodes < 20).any(axis=1) & (problem.edge_nodes >= 20).any(axis=1))
        sizes = np.diff(problem.edge_start)
        problem = replace(
            problem,
            edge_nodes=problem.edge_nodes[keep],
            edge_start=np.concatenate([[0], np.cumsum(sizes[keep])]),
            edge_cost=problem.edge_cost[np.repeat(keep, sizes)],
            usage_limit=None,
        )
    tuning = {"direct": SolverTuning(), "hinged": SolverTuning(engines=EngineTuning(hinged_cells=0))}.get(
        engine, SEARCH
    )
    calls: list[tuple[int | None, int | None]] = []

    def stop(best: int | None, bound: int | None, elapsed_s: float) -> bool:
        assert elapsed_s >= 0
        calls.append((best, bound))
        return best is not None

    solution = solve(problem, tuning=tuning, on_progress=stop)
    told = [best for best, _ in calls if best is not None]
    assert solution.found
    assert solution.objective == evaluate(problem, solution.choice).objective
    assert told[0] >= solution.objective >= solution.bound
    assert len(told) <= 3, "little is found between a stop and the end"


def test_a_stop_is_no_proof() -> None:
    """Stopped at once there is neither a choice nor a word that there is none."""
    solution = solve(dense(30, 10), tuning=SEARCH, on_progress=lambda *_: True)
    assert solution.status is Status.UNKNOWN
    assert solution.bound < 10**9


def test_what_a_callback_returns_by_chance_stops_nothing() -> None:
    assert solve(chain(8), on_progress=lambda *_: None).status is Status.OPTIMAL


@pytest.mark.parametrize("known", [np.array([0, 1]), [[0.5, 0.0]], ["best"], [None], [[[0, 1]]]])
def test_what_is_known_must_be_choices(known: Any) -> None:
    problem = cost_network([[1, 2], [3, 1]], {})
    with pytest.raises(ValueError, match=r"known=\[choice\]"):
        solve(problem, known=known)
    assert solve(problem, known=[[0, 1]]).objective == 2  # pyright: ignore[reportArgumentType]
