"""Reduction: all that the presolve does to a problem before the search."""

from autoshard.problem.network import Problem
from autoshard.solver.clock import Clock
from autoshard.solver.presolve.consistency import presolve
from autoshard.solver.presolve.dominance import without_dominated
from autoshard.solver.presolve.memory_rows import within_memory
from autoshard.solver.presolve.trees import without_leaves
from autoshard.solver.program import Network
from autoshard.solver.tuning import PresolveTuning


def reduced(problem: Problem, tuning: PresolveTuning, left_s: Clock) -> Network | None:
    """Returns a network that holds an optimum of `problem`, as small as the steps make it in time.

    None if they find that no choice is allowed and fits.
    """
    network = presolve(problem, left_s)
    if network is not None and problem.usage_limit is not None:
        network = within_memory(problem, network, left_s)
    if network is not None:
        network = without_dominated(problem, network, tuning, left_s)
    if network is not None and left_s() > 0:
        network = without_leaves(problem, network, left_s)
    return network
