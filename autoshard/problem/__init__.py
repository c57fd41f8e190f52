"""The sharding problem as plain integer arrays, and the way to it and back."""

from autoshard.problem.cost_network import Knapsack, cost_network
from autoshard.problem.network import INF, Problem

__all__ = ["INF", "Knapsack", "Problem", "cost_network"]
