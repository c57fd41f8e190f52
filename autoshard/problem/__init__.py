"""The sharding problem as plain integer arrays, and the way to it and back."""

from autoshard.problem.network import Problem

__all__ = ["Problem"]
