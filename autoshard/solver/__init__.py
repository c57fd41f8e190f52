"""Problem → Solution: the best choice found, a bound on any choice, and their gap."""

from autoshard.solver.solution import Solution, Status

__all__ = ["Solution", "Status"]
