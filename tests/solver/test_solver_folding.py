"""What folding gives up: nothing that a local search of the unfolded problem finds."""

import numpy as np
import pytest

from autoshard.problem.formulation import formulate
from autoshard.problem.network import Int, Problem
from autoshard.problem.symmetry import fold, unfolded
from autoshard.solver import evaluate, solve
from autoshard.solver.memory import memory_of
from autoshard.solver.presolve.consistency import presolve
from autoshard.solver.presolve.memory_rows import rows_of
from autoshard.solver.primal.local_search import LocalSearch
from autoshard.solver.search import linearised
from autoshard.solver.tuning import TUNED
from tests.programs import TINY, smallest, space_of

TURNS = 20
GAP = 1e-6  # of the folded solution
ROUNDING = 1e-9  # of an objective: folded sums round once where unfolded ones round for every layer


def improved(problem: Problem, choice: Int) -> int:
    """Returns the least objective that local search meets on its way from `choice`."""
    network = presolve(problem)
    assert network is not None
    plain = linearised(network, np.full(len(problem.hinges), 0.5))
    local = LocalSearch(plain, rows_of(memory_of(problem, network)), seed=0, tuning=TUNED.local_search)
    local.go_on_from(np.maximum(network.positions(choice), 0))
    met: list[int] = []
    for _ in range(TURNS):
        local.turn()
        assert local.choice is not None
        objective = evaluate(problem, network.expand(local.choice)).objective
        met += [] if objective is None else [objective]
    return min(met)


@pytest.mark.parametrize("name", TINY)
def test_unfolded_local_search_finds_nothing_better(name: str) -> None:
    of = space_of(smallest(name, step=True))[0]
    foldings = fold(of.decisions), unfolded(of.decisions)
    folded, flat = (formulate(of.decisions, of.resharder, memory_bytes=None, folding=f) for f in foldings)
    assert folded.problem.nodes < flat.problem.nodes
    choice = folded.read(solve(folded.problem, time_limit_s=60.0, rel_gap=GAP).choice)
    objective = evaluate(flat.problem, choice).objective
    assert objective is not None
    assert improved(flat.problem, choice) >= objective * (1 - GAP - ROUNDING)
    worst = improved(flat.problem, np.zeros_like(choice))  # the search does move: all replicated is far off
    assert worst <= objective * 2
