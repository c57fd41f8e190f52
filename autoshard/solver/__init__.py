"""Problem → Solution: the best choice found, a bound on every choice, and their gap."""

from autoshard.solver.evaluate import Evaluation, evaluate, users_at
from autoshard.solver.solution import Solution, Status
from autoshard.solver.solver import solve

__all__ = ["Evaluation", "Solution", "Status", "evaluate", "solve", "users_at"]
